"""What is taken back is told beside the data at once, and nobody waits for that for long."""

from __future__ import annotations

import pytest

from holdfast_service.records import controller
from tests.support.rank import Job, answer
from tests.support.rebuilt import record_all
from tests.support.retention import RUN
from tests.support.service import RunningService

PROJECT = RUN.partition("/runs/")[0]


def delete(service: RunningService, path: str) -> None:
    answer(service.http().request("DELETE", path, headers={"If-Match": "*"}, json={}))


def is_behind(service: RunningService) -> bool:
    with service.context.database.read() as session:
        return bool(controller.due_subjects(session, controller.writable(service.context.stores), 1))


@pytest.mark.parametrize(("seconds", "is_left"), [(60.0, False), (0.0, True)])
def test_a_run_is_told_for_as_long_as_somebody_waits(
    service: RunningService, monkeypatch: pytest.MonkeyPatch, seconds: float, is_left: bool
) -> None:
    job = Job(service.http(), create=True)
    job.save(1)
    job.end()
    delete(service, RUN)
    record_all(service.context)
    monkeypatch.setattr(controller, "_AT_ONCE_SECONDS", seconds)
    assert answer(service.http().post(f"{RUN}/undelete"))["checkpoints"] == 1
    assert is_behind(service) is is_left


def test_a_project_is_told_too(service: RunningService) -> None:
    Job(service.http(), create=True).end()
    for path in (RUN, PROJECT):
        delete(service, path)
    record_all(service.context)
    answer(service.http().post(f"{PROJECT}/undelete"))
    assert not is_behind(service)
