"""The service that the state machine drives, and how far it goes: see the profiles in tests/conftest.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import Phase, settings

from holdfast_service.settings import ServiceSettings
from tests.support.service import RunningService, running_service

# An example here is a conversation of many calls, and there are two databases.
PROFILE = settings(max_examples=settings().max_examples // 10)
assert Phase.shrink in PROFILE.phases


@pytest.fixture(params=["sqlite", "postgres"])
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunningService]:
    """One service for all examples of a test; each example has a run of its own."""
    if request.param == "sqlite":
        url = request.getfixturevalue("sqlite_catalogs").new(tmp_path)
    else:
        url = request.getfixturevalue("postgres_catalogs").new()
    with running_service(
        ServiceSettings(
            database_url=url,
            store=f"posix://{tmp_path / 'store'}",
            data_dir=tmp_path / "data",
            port=0,
            # Relaunched without an end three times in a row, a job would be offered an older point: the model's jobs
            # always die so. What is quarantined, and when, has tests of its own (test_crash_loop.py).
            crash_loop_attempts=0,
        )
    ) as running:
        yield running
