"""What was found bad or missing is looked at again, and its marks go when its bytes are good (rule
marks-are-rechecked)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update

import holdfast_service.collect.controller
import holdfast_service.operations.controller
from holdfast_protocol.states import CopyState, StoreRole
from holdfast_service.audit.record import Actor
from holdfast_service.background.registry import OPERATION_KINDS
from holdfast_service.collect.orphans import sweep_store
from holdfast_service.copies.read_back import is_emptied, pause_before_look
from holdfast_service.db.tables.core import Copy
from holdfast_service.db.tables.operations import AuditEvent
from holdfast_service.scrub import controller as rescrub
from holdfast_service.scrub import repair, verify
from holdfast_service.settings import ServiceSettings
from holdfast_service.stores.base import ObjectKey, ObjectMissing, StoreUnavailable
from holdfast_service.stores.posix.posix_store import PosixStore
from tests.service.conftest import Clock
from tests.support.rank import Job, answer, digest_of
from tests.support.rebuilt import check_all
from tests.support.repairing import CONTENT, DAY, health_of
from tests.support.rot import attached, copies_of, copy_to_second, flip, key_of, remove, states_of
from tests.support.service import RunningService

pytestmark = pytest.mark.rule("marks-are-rechecked")
sqlite_only = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
MANY = 20


@pytest.fixture
def settings(settings: ServiceSettings) -> ServiceSettings:
    """One store: what it lacks is lost."""
    return settings.model_copy(update={"second_store": None})


def chunks_of(service: RunningService) -> list[Path]:
    store = service.context.store
    assert isinstance(store, PosixStore)
    return sorted(store.root.glob("*/chunks"))


@contextmanager
def all_unavailable(service: RunningService) -> Iterator[None]:
    """A mount that went stale: the folder is there with its marker, and what was in it is not."""
    folders = chunks_of(service)
    for folder in folders:
        folder.rename(folder.with_name("elsewhere"))
        folder.mkdir()
    yield
    for folder in folders:
        if any(folder.iterdir()):
            continue
        folder.rmdir()
        folder.with_name("elsewhere").rename(folder)


@contextmanager
def unavailable(service: RunningService, content: bytes) -> Iterator[None]:
    """One object."""
    store = service.context.store
    assert isinstance(store, PosixStore)
    path = store.object_path(key_of(service, content))
    path.rename(path.with_name("elsewhere"))
    yield
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name("elsewhere").rename(path)


def scrub(service: RunningService, clock: Clock) -> rescrub.ScrubReport:
    clock.advance(31 * DAY)
    return rescrub.reconcile(service.context)


def actions(service: RunningService) -> list[str]:
    """Of the audit trail, what concerns copies and marks."""
    told = ("copy.bad", "copy.return", "copy.repair", "checkpoint.mark_corrupt", "checkpoint.repair")
    query = select(AuditEvent.action).where(AuditEvent.action.in_(told)).order_by(AuditEvent.id)
    with service.context.database.read() as session:
        return list(session.scalars(query))


def scrub_on_demand(service: RunningService, checkpoint_id: str) -> Any:
    http = service.http()
    started = answer(http.post(f"/v1/checkpoints/{checkpoint_id}/scrubs", json={"mode": "read"}))
    holdfast_service.operations.controller.reconcile(service.context, kinds=OPERATION_KINDS)
    ended = answer(http.get(f"/v1/operations/{started['id']}"))
    assert ended["error"] is None
    return ended["result"]


def report(service: RunningService, checkpoint_id: str) -> Any:
    body = {"digest": digest_of(CONTENT), "problem": "missing"}
    return answer(service.http().post(f"/v1/checkpoints/{checkpoint_id}/chunk-reports", json=body))


def by_repairing(service: RunningService, _saved: str, clock: Clock) -> None:
    clock.advance(61)


def by_check(service: RunningService, _saved: str, _clock: Clock) -> None:
    (store,) = check_all(service.context).stores
    assert store.read_copies == 1


def by_scrub(service: RunningService, saved: str, _clock: Clock) -> None:
    found = scrub_on_demand(service, saved)
    assert (found["good"], found["missing"], found["bad"], found["marked"]) == (2, 0, 0, [])


def by_scrub_after_a_clock_was_ahead(service: RunningService, saved: str, clock: Clock) -> None:
    clock.advance(-DAY)
    by_scrub(service, saved, clock)


def by_reader(service: RunningService, saved: str, _clock: Clock) -> None:
    verdict = report(service, saved)
    assert (verdict["readable"], verdict["corrupt_checkpoints"]) == (True, [])


@pytest.mark.parametrize("look", [by_repairing, by_check, by_scrub, by_scrub_after_a_clock_was_ahead, by_reader])
def test_an_object_that_was_away_for_a_moment_is_seen_back_and_the_mark_goes(
    service: RunningService, clock: Clock, look: Callable[[RunningService, str, Clock], None]
) -> None:
    saved = Job(service.http()).save(7, content=CONTENT)["id"]
    with unavailable(service, CONTENT):
        assert scrub(service, clock).corrupt_checkpoints == (saved,)
        assert repair.reconcile(service.context).lost_copies == 1
    look(service, saved, clock)
    assert repair.reconcile(service.context).repaired_checkpoints == (
        (saved,) if look in (by_repairing, by_check, by_reader) else ()
    )
    assert health_of(service, saved) == ("ok", None)
    assert states_of(service, CONTENT) == [CopyState.VERIFIED]
    assert actions(service) == ["copy.bad", "checkpoint.mark_corrupt", "copy.return", "checkpoint.repair"]


@sqlite_only
def test_what_a_clock_that_was_ahead_has_read_is_read_again_on_demand(service: RunningService, clock: Clock) -> None:
    saved = Job(service.http()).save(7, content=CONTENT)["id"]
    scrub(service, clock)
    clock.advance(-DAY)
    remove(service.context.store, key_of(service, CONTENT))
    found = scrub_on_demand(service, saved)
    assert (found["good"], found["missing"]) == (1, 1)


@sqlite_only
def test_a_quarantine_comes_back_with_the_bytes(service: RunningService, clock: Clock) -> None:
    saved = Job(service.http()).save(7, content=CONTENT)["id"]
    edit = {"health": "quarantined", "health_reason": "crashed from it"}
    answer(service.http().patch(f"/v1/checkpoints/{saved}", json=edit, headers={"If-Match": "*"}))
    with unavailable(service, CONTENT):
        assert scrub(service, clock).corrupt_checkpoints == (saved,)
    clock.advance(61)
    repair.reconcile(service.context)
    assert health_of(service, saved) == ("quarantined", "crashed from it")


@sqlite_only
def test_what_is_lost_for_good_costs_ever_fewer_reads_and_is_told_once(service: RunningService, clock: Clock) -> None:
    Job(service.http()).save(7, content=CONTENT)
    remove(service.context.store, key_of(service, CONTENT))
    scrub(service, clock)
    for _ in range(90):
        clock.advance(DAY)
        assert repair.reconcile(service.context).lost_copies == 1
    (lost,) = copies_of(service, CONTENT)
    assert 5 <= lost.looks <= 10, "the first ones within a day, then once a month"
    assert actions(service) == ["copy.bad", "checkpoint.mark_corrupt"]
    clock.let_tickets_expire(service.context.settings)
    holdfast_service.collect.controller.reconcile(service.context)
    assert states_of(service, CONTENT) == [CopyState.BAD], "it is all that its checkpoint has"


def test_the_pauses_grow_up_to_a_month() -> None:
    seconds = [pause_before_look(looks).total_seconds() for looks in range(10)]
    assert seconds[:4] == [60, 240, 960, 3840]
    assert seconds[-1] == 28 * DAY


@sqlite_only
def test_where_most_of_a_store_is_missing_nothing_is_marked(service: RunningService, clock: Clock) -> None:
    job = Job(service.http())
    ids = [job.save(step)["id"] for step in range(1, MANY)]
    with all_unavailable(service):
        found = scrub(service, clock)
        assert (found.missing, found.corrupt_checkpoints, found.failed) == (0, (), 1)
        assert "is its disk or bucket mounted?" in str(found.error)
        with pytest.raises(StoreUnavailable, match="--confirm-missing"):
            check_all(service.context)
    assert actions(service) == []
    assert {health_of(service, checkpoint_id)[0] for checkpoint_id in ids} == {"ok"}
    clock.advance(31)
    assert rescrub.reconcile(service.context).good > 0


def by_sweep(service: RunningService) -> None:
    sweep_store(service.context, service.context.stores[0], dry_run=False, force=False, actor=Actor.at_the_database())


def by_raised_epoch(service: RunningService) -> None:
    """What raise_epoch() does to the copies; the rest of it concerns a service that begins anew."""
    with service.context.database.transaction() as session:
        session.execute(update(Copy).values(state=CopyState.SUSPECT))


@sqlite_only
@pytest.mark.parametrize("suspect", [by_sweep, by_raised_epoch])
def test_where_most_of_a_store_is_missing_what_is_suspected_is_not_marked_either(
    service: RunningService, suspect: Callable[[RunningService], None]
) -> None:
    job = Job(service.http())
    ids = [job.save(step)["id"] for step in range(1, MANY)]
    with all_unavailable(service):
        suspect(service)
        found = verify.reconcile(service.context)
        assert (found.bad, found.corrupt_checkpoints) == (0, ())
        assert "is its disk or bucket mounted?" in str(found.error)
    assert {health_of(service, checkpoint_id)[0] for checkpoint_id in ids} == {"ok"}
    assert verify.reconcile(service.context).bad == 0


@sqlite_only
def test_a_person_says_that_it_is_gone_and_may_have_been_wrong(service: RunningService, clock: Clock) -> None:
    job = Job(service.http())
    ids = [job.save(step)["id"] for step in range(1, MANY)]
    with all_unavailable(service):
        (store,) = check_all(service.context, confirm_missing=True).stores
        assert [(each.kind, each.count) for each in store.findings] == [("missing_objects", 2 * len(ids))]
        assert {health_of(service, checkpoint_id)[0] for checkpoint_id in ids} == {"corrupt"}
    clock.advance(61)
    assert sorted(repair.reconcile(service.context).repaired_checkpoints) == sorted(ids)


@pytest.mark.parametrize(
    ("asked", "missing", "emptied"), [(24, 24, True), (24, 13, True), (24, 12, False), (8, 8, True), (7, 7, False)]
)
def test_a_few_that_are_missing_say_nothing_of_a_store(asked: int, missing: int, emptied: bool) -> None:
    assert is_emptied(asked, missing) is emptied


@sqlite_only
def test_a_miss_counts_only_when_it_is_a_miss_twice(
    service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    Job(service.http()).save(7, content=CONTENT)
    store, missed = service.context.store, key_of(service, CONTENT)
    real, told = store.open_read, []

    def once_missing(key: ObjectKey) -> Iterator[bytes]:
        if key == missed and not told:
            told.append(key)
            raise ObjectMissing("a stale entry of the mount's cache")
        return real(key)

    monkeypatch.setattr(store, "open_read", once_missing)
    found = scrub(service, clock)
    assert told
    assert (found.good, found.missing) == (2, 0)
    assert actions(service) == []


class TestWithASecondStore:
    @pytest.fixture
    def settings(self, settings: ServiceSettings, tmp_path: Path) -> ServiceSettings:
        return settings.model_copy(update={"second_store": f"posix://{tmp_path / 'second'}"})

    @sqlite_only
    def test_before_a_checkpoint_is_called_lost_what_was_bad_is_read_again(
        self, service: RunningService, clock: Clock
    ) -> None:
        saved = Job(service.http()).save(7, content=CONTENT)["id"]
        copy_to_second(service)
        with unavailable(service, CONTENT):
            assert scrub(service, clock).missing == 1
        flip(attached(service, StoreRole.SECOND).store, key_of(service, CONTENT, StoreRole.SECOND))
        assert scrub(service, clock).corrupt_checkpoints == ()
        assert "checkpoint.mark_corrupt" not in actions(service)
        assert health_of(service, saved) == ("ok", None)
        assert states_of(service, CONTENT) == [CopyState.VERIFIED]
        assert states_of(service, CONTENT, StoreRole.SECOND) == [CopyState.BAD]

    @pytest.mark.parametrize("ahead", [DAY, 30 * 60])
    def test_a_repair_counts_when_the_damage_was_found_by_a_clock_that_was_ahead(
        self, service: RunningService, clock: Clock, ahead: float
    ) -> None:
        """Which came first is counted, and no clock is asked: neither the mark nor a lease lasts until tomorrow."""
        saved = Job(service.http()).save(7, content=CONTENT)["id"]
        store = service.context.store
        flip(store, key_of(service, CONTENT))
        clock.advance(ahead)
        assert report(service, saved)["corrupt_checkpoints"] == [saved]
        assert repair.reconcile(service.context).lost_copies == 1
        clock.advance(-ahead)
        Job(service.http(), "demo/other").save(1, content=CONTENT)  # sends the same bytes anew
        clock.advance(61 if ahead == DAY else ahead + 61)
        found = repair.reconcile(service.context)
        assert (found.repaired_copies, found.repaired_checkpoints) == (1, (saved,))
        assert health_of(service, saved) == ("ok", None)
