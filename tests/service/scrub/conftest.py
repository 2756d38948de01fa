"""A service with two stores whose copies are read again every 30 days, and checkpoints that rot there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast_service.scrub import controller as rescrub
from holdfast_service.scrub import repair
from holdfast_service.settings import ServiceSettings
from tests.service.conftest import Clock
from tests.support.rank import Job
from tests.support.repairing import CONTENT, DAY
from tests.support.rot import copy_to_second, flip, key_of
from tests.support.service import RunningService


@pytest.fixture
def settings(settings: ServiceSettings, tmp_path: Path) -> ServiceSettings:
    changes = {
        "second_store": f"posix://{tmp_path / 'second'}",
        "scrub_days": 30.0,
        "controller_interval_seconds": 60.0,  # a pass reads for so long; what a test expects of it takes far less
    }
    return settings.model_copy(update=changes)


@pytest.fixture
def job(service: RunningService) -> Job:
    return Job(service.http())


@pytest.fixture
def damaged(service: RunningService, job: Job, clock: Clock) -> dict[str, Any]:
    """A checkpoint whose chunk is rotten in the first store, which was found, and good in the second."""
    saved = job.save(100, content=CONTENT)
    copy_to_second(service)
    flip(service.context.store, key_of(service, CONTENT))
    clock.advance(31 * DAY)
    assert rescrub.reconcile(service.context).bad == 1
    return saved


@pytest.fixture
def lost(service: RunningService, job: Job, clock: Clock) -> dict[str, Any]:
    """The same, and no other store has it."""
    saved = job.save(100, content=CONTENT)
    flip(service.context.store, key_of(service, CONTENT))
    clock.advance(31 * DAY)
    assert rescrub.reconcile(service.context).corrupt_checkpoints == (saved["id"],)
    assert repair.reconcile(service.context).lost_copies == 1
    clock.advance(61)  # what could not be repaired is due again
    return saved
