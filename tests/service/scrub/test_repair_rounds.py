"""What a pass of repairing takes on: for how long it repairs, and at which marks it looks."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import update
from sqlalchemy.orm import Session

from holdfast_protocol.states import CopyState
from holdfast_service.db.tables.core import Copy
from holdfast_service.scrub import controller as rescrub
from holdfast_service.scrub import repair
from holdfast_service.settings import ServiceSettings
from tests.service.conftest import Clock
from tests.support.rank import Job, answer, digest_of
from tests.support.repairing import DAY
from tests.support.rot import flip, key_of
from tests.support.service import RunningService

pytestmark = [pytest.mark.rule("random-generation"), pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)]


@pytest.fixture
def settings(settings: ServiceSettings) -> ServiceSettings:
    """What is lost is lost: there is no other store."""
    return settings.model_copy(update={"second_store": None, "controller_interval_seconds": 5.0})


def content(step: int) -> bytes:
    return b"weights of step %d" % step * 100


@pytest.fixture
def lost(service: RunningService, clock: Clock) -> list[str]:
    """Six checkpoints that have lost a chunk each, in the only store."""
    job = Job(service.http())
    saved = [job.save(step, content=content(step))["id"] for step in range(1, 7)]
    for step in range(1, 7):
        flip(service.context.store, key_of(service, content(step)))
    clock.advance(31 * DAY)
    assert rescrub.reconcile(service.context).corrupt_checkpoints == tuple(sorted(saved))
    return saved


def test_a_round_mends_until_the_next_one_is_due(
    service: RunningService, lost: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look at the watch takes 2 s here, and the controllers' pause is 5 s."""
    assert service.context.settings.controller_interval_seconds == 5
    watch = itertools.count(0.0, 2.0)
    monkeypatch.setattr(repair, "time", SimpleNamespace(monotonic=lambda: next(watch)))
    assert repair.reconcile(service.context).lost_copies == len(lost)


def test_a_mark_is_looked_at_again_only_once_its_chunk_may_be_whole(
    service: RunningService, lost: list[str], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repair, "_PORTION", 2)
    looked_at: list[str] = []
    real = repair.repair_if_whole

    def looking(session: Session, checkpoint_id: str, **how: Any) -> bool:
        looked_at.append(checkpoint_id)
        return real(session, checkpoint_id, **how)

    monkeypatch.setattr(repair, "repair_if_whole", looking)
    repair.reconcile(service.context)
    assert sorted(looked_at) == sorted(lost), "portion by portion"
    looked_at.clear()
    repair.reconcile(service.context)
    assert looked_at == [], "another process, or the next pass"
    Job(service.http(), "demo/other").save(9, content=content(4))
    clock.advance(61)
    assert repair.reconcile(service.context).repaired_checkpoints == (lost[3],)
    assert looked_at == [lost[3]]
    with service.context.database.transaction() as session:  # a person fixed the disk
        session.execute(
            update(Copy)
            .where(Copy.stored_digest == digest_of(content(2)))
            .values(state=CopyState.VERIFIED, proof="read", bad_at=None)
        )
    assert repair.reconcile(service.context).repaired_checkpoints == (lost[1],)
    assert answer(service.http().get(f"/v1/checkpoints/{lost[1]}"))["health"] == "ok"
