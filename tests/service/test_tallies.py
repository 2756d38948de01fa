"""The sums that are kept: what counts when, what differs is put right and said, and nobody waits for them."""

from __future__ import annotations

import threading
from contextlib import suppress
from datetime import timedelta

import pytest
from sqlalchemy import delete, func, select, text, update

import holdfast_service.tallies.compare
from holdfast_protocol.states import CheckpointState
from holdfast_service.collect import controller as collect
from holdfast_service.collect.references import drop_past_references
from holdfast_service.db.dialect import database_now
from holdfast_service.db.migrate import exclusive_connection
from holdfast_service.db.tables.core import Checkpoint, Chunk, ChunkList, ChunkListEntry, Copy, Project
from holdfast_service.db.tables.tallies import (
    ByteDelta,
    ByteTally,
    CheckpointDelta,
    CheckpointTally,
    ListTally,
    RecountMark,
    TallyComparison,
)
from holdfast_service.db.triggers import create_triggers, drop_triggers
from holdfast_service.tallies import fold, recount
from holdfast_service.tallies.compare import EVERY
from holdfast_service.tallies.sums import list_entries
from tests.service.conftest import Clock
from tests.service.test_statements_of_a_save import statements_of
from tests.support.rank import Job, answer
from tests.support.service import RunningService
from tests.support.tallies import check_exact_sums, drifted, kept, take_up, true


def usage(service: RunningService) -> dict[str, int]:
    return answer(service.http().get("/v1/projects/demo/usage"))  # type: ignore[no-any-return]


def set_state(service: RunningService, checkpoint_id: str, state: CheckpointState) -> None:
    with service.context.database.transaction() as session:
        session.execute(update(Checkpoint).where(Checkpoint.id == checkpoint_id).values(state=state))


def count(service: RunningService, table: type) -> int:
    with service.context.database.read() as session:
        return len(session.execute(select(table)).all())


def test_all_bytes_are_known_at_once_and_what_they_are_for_when_it_is_taken_up(service: RunningService) -> None:
    take_up(service)
    saved = Job(service.http()).save(100, content=b"x" * 1000)
    before = usage(service)
    assert (before["stored_bytes"], before["committed_bytes"], before["arriving_bytes"]) == (2006, 0, 2006)
    assert before["logical_bytes"] == 2006, "what is committed is no question of what a byte is kept for"
    assert before["counted_until"] < before["at"]  # type: ignore[operator]
    take_up(service)
    after = usage(service)
    assert (after["stored_bytes"], after["committed_bytes"], after["arriving_bytes"]) == (2006, 2006, 0)
    set_state(service, saved["id"], CheckpointState.TRASHED)
    assert usage(service)["logical_bytes"] == 0
    take_up(service)
    assert usage(service)["trashed_bytes"] == 2006


def test_a_pin_and_a_hold_that_end_count_no_more_without_a_word(service: RunningService, clock: Clock) -> None:
    saved = Job(service.http()).save(100, content=b"x" * 1000)
    with service.context.database.read() as session:
        later = (database_now(session) + timedelta(minutes=10)).isoformat()
    path = f"/v1/checkpoints/{saved['id']}"
    answer(service.http().put(f"{path}/pin", json={"reason": "paper", "expires_in_seconds": 600}))
    answer(service.http().post(f"{path}/holds", json={"reason": "evidence", "retain_until": later}))
    take_up(service)
    assert (usage(service)["pinned_bytes"], usage(service)["held_bytes"]) == (2006, 2006)
    clock.advance(601)
    take_up(service)
    assert (usage(service)["pinned_bytes"], usage(service)["held_bytes"]) == (0, 0)
    assert kept(service) == true(service)


def test_what_changed_while_the_clock_was_ahead_is_taken_up_and_has_not_drifted(
    service: RunningService, clock: Clock
) -> None:
    job = Job(service.http())
    clock.advance(-2 * 86400)  # the triggers go by the clock itself
    saved = job.save(100, content=b"x" * 1000)
    path = f"/v1/checkpoints/{saved['id']}"
    answer(service.http().put(f"{path}/pin", json={"reason": "paper", "expires_in_seconds": 3 * 86400}))
    take_up(service)
    assert (usage(service)["committed_bytes"], usage(service)["pinned_bytes"]) == (2006, 2006)
    set_state(service, saved["id"], CheckpointState.TRASHED)
    take_up(service, whole=True)
    assert (usage(service)["trashed_bytes"], usage(service)["pinned_bytes"]) == (2006, 2006)
    clock.advance(3 * 86400 + 1)
    take_up(service, whole=True)
    assert usage(service)["pinned_bytes"] == 0, "its end was waited for"
    assert kept(service) == true(service)
    assert drifted(service) == 0


def test_pins_and_holds_that_end_for_a_clock_that_is_ahead_count_again_once_it_is_right_and_have_not_drifted(
    service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holdfast_service.tallies.compare, "BATCH", 1)  # the chunks of one checkpoint in several slices
    saved = Job(service.http()).save(100, content=b"x" * 1000)
    with service.context.database.read() as session:
        later = (database_now(session) + timedelta(days=10)).isoformat()
    path = f"/v1/checkpoints/{saved['id']}"
    answer(service.http().put(f"{path}/pin", json={"reason": "paper", "expires_in_seconds": 9 * 86400}))
    answer(service.http().post(f"{path}/holds", json={"reason": "evidence", "retain_until": later}))
    kept_bytes = []
    for moved in (0, 40 * 86400, -40 * 86400, 9 * 86400 + 1, 86400):
        clock.advance(moved)
        take_up(service, whole=True)
        assert kept(service) == true(service)
        kept_bytes.append((usage(service)["pinned_bytes"], usage(service)["held_bytes"]))
        assert drifted(service) == 0
    assert kept_bytes == [(2006, 2006), (0, 0), (2006, 2006), (0, 2006), (0, 0)], "each end is waited for again"


def test_the_end_of_what_counts_again_is_waited_for_though_another_change_was_counted_first(
    service: RunningService, clock: Clock
) -> None:
    """A pin, which has no end, has the chunks counted anew before a comparison finds them."""
    saved = Job(service.http()).save(100, content=b"x" * 1000)
    path = f"/v1/checkpoints/{saved['id']}"
    with service.context.database.read() as session:
        later = (database_now(session) + timedelta(days=10)).isoformat()
    answer(service.http().post(f"{path}/holds", json={"reason": "evidence", "retain_until": later}))
    take_up(service)
    clock.advance(40 * 86400)
    take_up(service)
    clock.advance(-40 * 86400)
    answer(service.http().put(f"{path}/pin", json={"reason": "paper"}))
    with service.context.database.transaction() as session:  # as right after a comparison
        session.execute(update(TallyComparison).values(began_at=database_now(session)))
    take_up(service)
    assert usage(service)["held_bytes"] == 2006
    clock.advance(10 * 86400 + 1)
    take_up(service, whole=True)
    assert (usage(service)["held_bytes"], drifted(service)) == (0, 0)


def test_a_chunk_that_comes_back_into_use_from_the_trash_or_from_nothing_arrives(service: RunningService) -> None:
    job = Job(service.http())
    trashed = job.begin(100).write(0, [b"shared" * 100, b"index"])
    set_state(service, trashed["id"], CheckpointState.TRASHED)
    take_up(service)
    save = job.begin(200)
    save.upload(0, [b"shared" * 100, b"index 2"])
    take_up(service)
    assert kept(service) == true(service)
    assert usage(service)["arriving_bytes"] == len(b"shared" * 100 + b"index 2")
    save.abort()
    take_up(service)
    assert kept(service) == true(service)


def test_what_is_negotiated_and_not_sealed_is_free_to_be_collected(service: RunningService) -> None:
    save = Job(service.http()).begin(100)
    save.upload(0, [b"left out" * 10])
    save.write(0, [b"state", b"index"])
    take_up(service)
    assert usage(service)["pending_collection_bytes"] == 80
    assert kept(service) == true(service)


def test_what_the_collector_forgets_before_anybody_has_taken_it_up_is_taken_up(
    service: RunningService, clock: Clock
) -> None:
    job = Job(service.http())
    save = job.begin(100)
    save.upload(0, [b"given up" * 10])
    sealed = job.begin(150)
    sealed.write(0, [b"kept" * 10, b"index"])
    take_up(service)
    save.abort()
    set_state(service, sealed.id, CheckpointState.ABORTED)
    drop_past_references(service.context)
    take_up(service)
    assert kept(service) == true(service)
    assert usage(service)["pending_collection_bytes"] == len(b"given up" * 10 + b"kept" * 10 + b"index")
    clock.let_tickets_expire(service.context.settings)
    collect.reconcile(service.context)
    take_up(service)
    assert usage(service)["stored_bytes"] == 0
    assert count(service, ByteDelta) == count(service, CheckpointDelta) == count(service, RecountMark) == 0


def test_a_checkpoint_of_many_ranks_is_taken_up_some_shards_at_a_time(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recount, "_SHARDS", 2)
    monkeypatch.setattr(recount, "_MARKS", 3)
    save = Job(service.http(), world_size=5).begin(100)
    for rank in range(5):
        save.write(rank, [f"state of {rank}".encode(), f"index of {rank}".encode()])
    take_up(service)
    assert usage(service)["arriving_bytes"] == 0
    assert kept(service) == true(service)


def spoil(service: RunningService) -> None:
    """As a trigger that is missing, or a hand at the database, would."""
    with service.context.database.transaction() as session:
        session.execute(update(Copy).where(Copy.stored_bytes == 1000).values(counted=3))
        session.execute(update(ByteTally).where(ByteTally.bytes > 0).values(bytes=ByteTally.bytes + 5))
        session.execute(update(CheckpointTally).where(CheckpointTally.run_id != "").values(committed=77))


def test_drift_is_found_put_right_and_told(service: RunningService, clock: Clock) -> None:
    Job(service.http()).save(100, content=b"x" * 1000)
    take_up(service)
    assert drifted(service) == 0
    spoil(service)
    assert kept(service) != true(service)
    take_up(service)
    assert drifted(service) == 0, "the last whole comparison was a moment ago"
    clock.advance(EVERY.total_seconds() + 1)
    report = take_up(service)
    assert report.drifted == drifted(service) > 0
    assert "drifted" in str(report.error)
    assert kept(service) == true(service)
    check_exact_sums(service, "demo")
    found = drifted(service)
    assert f"holdfast_tally_drift_total {found}.0" in service.http().get("/metrics").text
    take_up(service, whole=True)
    assert drifted(service) == found


def test_drift_is_found_though_a_comparison_was_dated_by_a_clock_that_was_ahead(
    service: RunningService, clock: Clock
) -> None:
    Job(service.http()).save(100, content=b"x" * 1000)
    ahead = 400 * 86400
    clock.advance(ahead)
    take_up(service)
    clock.advance(-ahead)
    take_up(service)  # what was marked meanwhile
    spoil(service)
    take_up(service)
    assert drifted(service) == 0, "the last whole comparison was a moment ago"
    clock.advance(EVERY.total_seconds() + 1)
    take_up(service)
    assert drifted(service) > 0
    assert kept(service) == true(service)


def test_what_is_only_not_taken_up_yet_has_not_drifted(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = Job(service.http()).save(100, content=b"x" * 1000)
    take_up(service)
    set_state(service, saved["id"], CheckpointState.TRASHED)
    monkeypatch.setattr("holdfast_service.tallies.controller.take_up_marks", lambda *_: True)
    take_up(service, whole=True)
    assert drifted(service) == 0


def test_without_its_triggers_the_sums_drift(service: RunningService) -> None:
    """So the other tests see what the triggers do."""
    with exclusive_connection(service.context.database) as connection:
        drop_triggers(connection)
    Job(service.http()).save(100, content=b"x" * 1000)
    assert usage(service)["stored_bytes"] == 0
    take_up(service, whole=True)
    assert drifted(service) > 0
    assert kept(service) == true(service)
    with exclusive_connection(service.context.database) as connection:
        create_triggers(connection)


def test_a_migrated_catalog_is_counted_by_and_by_and_says_so_until_then(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast_service.tallies.compare.BATCH", 2)
    monkeypatch.setattr("holdfast_service.tallies.controller._SLICES_TO_FILL", 2)
    job = Job(service.http())
    for step in range(1, 5):
        job.save(step, content=f"{step}".encode() * 1000)
    take_up(service)
    with service.context.database.transaction() as session:
        session.execute(delete(TallyComparison))
        session.execute(update(Copy).values(counted=0))
        session.execute(delete(ByteTally))
        session.execute(
            text(
                "INSERT INTO byte_tallies (project_id, store_id, storage_class, counted, copies, bytes) "
                "SELECT project_id, store_id, '', 0, count(*), sum(stored_bytes) FROM copies GROUP BY 1, 2"
            )
        )
    assert usage(service)["counted_until"] is None
    assert "\nholdfast_tally_lag_seconds" not in service.http().get("/metrics").text
    take_up(service)
    assert usage(service)["counted_until"] is None
    for _ in range(5):
        take_up(service)
    assert usage(service)["counted_until"] is not None
    assert kept(service) == true(service)
    assert drifted(service) == 0


def test_entries_of_lists_that_an_older_version_made_are_counted_and_drift_is_put_right(
    service: RunningService, clock: Clock
) -> None:
    Job(service.http()).save(100, content=b"x" * 1000)
    take_up(service)
    with service.context.database.read() as session:
        (project_id,) = session.scalars(select(Project.id))
        there = session.scalar(select(func.count()).select_from(ChunkListEntry))
        assert list_entries(session, [project_id]) == {project_id: there}
    for spoiled, counted_wrongly in (
        (update(ChunkList).values(entries=None), 0),
        (update(ListTally).values(entries=77), 1),
    ):
        with service.context.database.transaction() as session:
            session.execute(spoiled)
        with service.context.database.read() as session:
            assert list_entries(session, [project_id]) != {project_id: there}
        take_up(service, whole=True)
        with service.context.database.read() as session:
            assert list_entries(session, [project_id]) == {project_id: there}
        assert drifted(service) == counted_wrongly


_PORTIONS = [
    fold._fold_bytes,
    fold._fold_checkpoints,
    fold._fold_lists,
    recount._expand,
    recount._recount_marked,
]


@pytest.mark.parametrize("work", _PORTIONS)
def test_a_controller_that_dies_before_its_commit_has_done_nothing(service: RunningService, work: object) -> None:
    Job(service.http()).save(100, content=b"x" * 1000)
    with suppress(ZeroDivisionError), service.context.database.transaction() as session:
        work(session)  # type: ignore[operator]
        raise ZeroDivisionError
    check_exact_sums(service, "demo")
    take_up(service)
    take_up(service, whole=True)
    assert kept(service) == true(service)
    assert drifted(service) == 0


@pytest.mark.races
def test_controllers_at_once_and_saves_beside_them_leave_no_drift(service: RunningService) -> None:
    """Two runs that share their chunks save, trash and take back, while three controllers count."""
    done = threading.Event()
    problems: list[BaseException] = []

    def control() -> None:
        while not done.is_set():
            try:
                take_up(service)
            except Exception as error:
                problems.append(error)
                return

    def train(name: str) -> None:
        job = Job(service.http(), f"demo/{name}")
        for step in range(1, 13):
            save = job.begin(step)
            view = save.write(0, [f"shared {step % 3}".encode() * 50, f"index {name} {step}".encode()])
            if step % 3:
                set_state(service, view["id"], CheckpointState.TRASHED)
            if step % 3 == 1:
                set_state(service, view["id"], CheckpointState.COMMITTED)

    controllers = [threading.Thread(target=control) for _ in range(3)]
    jobs = [threading.Thread(target=train, args=(name,)) for name in ("gpt", "tuned")]
    for thread in (*controllers, *jobs):
        thread.start()
    for thread in jobs:
        thread.join()
    done.set()
    for thread in controllers:
        thread.join()
    assert problems == []
    take_up(service)
    assert kept(service) == true(service)
    check_exact_sums(service, "demo")
    take_up(service, whole=True)
    assert drifted(service) == 0


@pytest.mark.races
@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)  # SQLite has one writer
def test_a_recount_waits_for_nobody_and_leaves_a_locked_chunk_marked(service: RunningService) -> None:
    job = Job(service.http())
    saved = job.begin(100).write(0, [b"shared" * 100, b"index"])
    take_up(service)
    set_state(service, saved["id"], CheckpointState.TRASHED)
    with service.context.database.transaction() as session:
        # As a negotiation that relies on them.
        session.execute(select(Chunk.id).with_for_update(read=True, key_share=True)).all()
        take_up(service)
        assert usage(service)["committed_bytes"] == len(b"shared" * 100 + b"index")
        assert count(service, RecountMark) == 2
    take_up(service)
    assert usage(service)["trashed_bytes"] == len(b"shared" * 100 + b"index")


def test_a_page_of_runs_makes_the_same_few_statements_for_one_run_and_for_many(service: RunningService) -> None:
    Job(service.http(), "demo/first").save(1)
    with statements_of(service.context.database) as one:
        answer(service.http().get("/v1/projects/demo/runs"))
    for name in range(20):
        Job(service.http(), f"demo/run-{name}").save(1)
    with statements_of(service.context.database) as many:
        shown = answer(service.http().get("/v1/projects/demo/runs"))["items"]
    assert len(shown) == 21
    assert all(run["restore_point"]["step"] == 1 for run in shown)
    if service.context.database.is_postgres:
        assert len(many) == len(one)
