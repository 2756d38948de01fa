"""A service with two stores, and a checkpoint that is to be in both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast_service.settings import ServiceSettings
from tests.support.rank import Job
from tests.support.replicated import CONTENT, put_policy
from tests.support.service import RunningService


@pytest.fixture
def settings(settings: ServiceSettings, tmp_path: Path) -> ServiceSettings:
    changes = {
        "second_store": f"posix://{tmp_path / 'second'}",
        "store_unavailable_seconds": 0,
        "controller_interval_seconds": 60.0,  # a pass copies for so long; what a test expects of it takes far less
    }
    return settings.model_copy(update=changes)


@pytest.fixture
def saved(service: RunningService) -> dict[str, Any]:
    """A checkpoint of two chunks, in a project whose policy asks for copies of everything."""
    view = Job(service.http()).save(100, content=CONTENT)
    put_policy(service)
    return view
