"""How long Hypothesis looks: HYPOTHESIS_PROFILE=ci looks much longer than the default."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

from holdfast_service.settings import ServiceSettings
from tests.support.service import RunningService, running_service

_COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
settings.register_profile("quick", max_examples=25, stateful_step_count=40, **_COMMON)
settings.register_profile("ci", max_examples=150, stateful_step_count=60, **_COMMON)
PROFILE = settings.get_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
assert Phase.shrink in PROFILE.phases


@pytest.fixture(params=["sqlite", "postgres"])
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunningService]:
    """One service for all examples of a test; each example has a run of its own."""
    if request.param == "sqlite":
        url = request.getfixturevalue("sqlite_catalogs").new(tmp_path)
    else:
        url = request.getfixturevalue("postgres_catalogs").new()
    with running_service(
        ServiceSettings(database_url=url, store=f"posix://{tmp_path / 'store'}", data_dir=tmp_path / "data", port=0)
    ) as running:
        yield running
