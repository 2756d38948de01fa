"""A job was cut off for so long that its checkpoint was given up: the ranks begin the step anew, and it commits."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
from gloo import run_ranks
from sqlalchemy import update
from tests.support.service import RunningService, running_service
from tests.support.training import Job

import holdfast
from holdfast import errors
from holdfast.save import job as save_job
from holdfast_client.client import Client
from holdfast_client.errors import IncompleteCheckpoint
from holdfast_client.shard_writer import BEGINS, ShardWriter, worth_another_begin
from holdfast_protocol.states import AbortCause
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Checkpoint, Copy
from holdfast_service.liveness.abandoned_uploads import reconcile
from holdfast_service.settings import ServiceSettings


@pytest.fixture
def service(tmp_path, monkeypatch):
    """In this process and without background work, so that the test says when a checkpoint is given up."""
    with running_service(ServiceSettings(data_dir=tmp_path / "data", port=0)) as running:
        running.make_project("tests")
        monkeypatch.setenv("HOLDFAST_URL", running.url)
        monkeypatch.setenv("HOLDFAST_TOKEN", running.token())
        yield running


def give_up(service: RunningService, checkpoint_id: str) -> None:
    """As the reaper does when no rank has called for long."""
    aborted: tuple[str, ...] = ()
    while checkpoint_id not in aborted:
        with service.context.database.transaction() as session:
            past = database_now(session) - timedelta(days=1)
            session.execute(update(Checkpoint).where(Checkpoint.id == checkpoint_id).values(deadline_at=past))
        aborted = reconcile(service.context).aborted


def views_of(run: str, step: int):
    with Client() as client:
        return [view for view in client.checkpoints.all("tests", run) if view.step == step]


def lose_every_chunk(service: RunningService, checkpoint_id: str) -> None:
    with service.context.database.transaction() as session:
        session.execute(update(Copy).values(state="bad"))


def saved_after(rank, run, held_rank, go_on):
    """`held_rank` says nothing to the service until the file `go_on` is there, as one that is cut off or slow."""
    job = Job(rank, "ddp")
    with holdfast.Checkpointer(run, create=True) as ckpt:
        ckpt.restore(job.state)
        if rank == held_rank:
            write = ckpt.parts.pipeline._write
            ckpt.parts.pipeline._write = lambda writer, job: (wait_for(go_on), write(writer, job))[1]
        view = ckpt.save(7, job.state).committed.result(timeout=100)
        follows = ckpt.save(8, job.state).committed.result(timeout=100)
        return view.step, view.id, follows.step


@contextmanager
def strikes_once_one_has_sealed(service, run, fault, go_on):
    """Calls `fault` when one rank has sealed its part of step 7 and waits; then the file `go_on` is there."""

    def strike():
        while not (waiting := [view for view in views_of(run, 7) if view.sealed_ranks == 1]):
            time.sleep(0.05)
        fault(service, waiting[0].id)
        go_on.touch()

    striker = threading.Thread(target=strike, daemon=True)
    striker.start()
    yield
    striker.join(60)


def wait_for(path):
    while not path.exists():
        time.sleep(0.05)


@pytest.mark.rule("one-checkpoint-per-step")
@pytest.mark.parametrize(
    ("held_rank", "fault", "cause"),
    [(0, give_up, "silent"), (1, give_up, "silent"), (1, lose_every_chunk, "chunk_gone")],
    ids=["rank 0 is cut off", "rank 1 is cut off", "a chunk of rank 0 is lost"],
)
def test_all_ranks_begin_a_step_anew_whose_checkpoint_an_outage_has_aborted(service, tmp_path, held_rank, fault, cause):
    """The rank that has sealed and waits is the host's leader, or waits for what the leader hears."""
    go_on = tmp_path / "go on"

    with Client() as client:
        client.runs.create("tests", "cut")
        with strikes_once_one_has_sealed(service, "cut", fault, go_on):
            results = run_ranks(saved_after, 2, "tests/cut", held_rank, go_on, timeout_seconds=240)
        assert results[0] == results[1]
        assert sorted((view.state, view.abort_cause) for view in views_of("cut", 7)) == [
            ("aborted", cause),
            ("committed", None),
        ]
        assert client.restores.restore_point("tests", "cut").restore_point.step == 8


def leader_has_failed(rank, run, folder, go_on):
    """The leader, rank 0, fails at its part of step 7 as one does that was cut off for longer than its patience."""
    save_job.LONG_POLL_SECONDS = 1
    job = Job(rank, "ddp")
    with holdfast.Checkpointer(run, create=True, local=folder) as ckpt:
        ckpt.restore(job.state)
        if rank == 0:
            write = ckpt.parts.pipeline._write

            def cut_off(writer, job):
                ckpt.parts.pipeline._write = write
                wait_for(go_on)
                raise errors.ServiceUnavailable("cut off for longer than HOLDFAST_RETRY_SECONDS")

            ckpt.parts.pipeline._write = cut_off
        return ckpt.save(7, job.state).committed.result(timeout=100).id


@pytest.mark.rule("waiting-holds-nothing")
def test_a_rank_whose_leader_has_failed_at_a_checkpoint_asks_for_itself_and_begins_anew_with_it(service, tmp_path):
    go_on = tmp_path / "go on"
    with Client() as client:
        client.runs.create("tests", "led")
        with strikes_once_one_has_sealed(service, "led", give_up, go_on):
            results = run_ranks(leader_has_failed, 2, "tests/led", tmp_path / "nvme", go_on)
    assert results[0] == results[1]
    assert sorted(view.state for view in views_of("led", 7)) == ["aborted", "committed"]


def before_the_first_seal(ckpt, fault):
    """Calls `fault(checkpoint_id)` when this rank's chunks are verified, and its shard is not sealed yet."""
    shard_writer, faults = ckpt.parts.session.shard_writer, [fault]

    def struck(*arguments, **named):
        writer = shard_writer(*arguments, **named)

        def upload_strike_and_seal(chunks, describe, **more):
            writer.upload(chunks, **more)
            faults.pop()(writer.checkpoint_id)
            summary, index = describe()
            return writer.seal(summary=summary, index=index)

        if faults:
            writer.upload_and_seal = upload_strike_and_seal
        return writer

    ckpt.parts.session.shard_writer = struck


def one_rank_cannot_begin(rank, run):
    """Rank 1 does not reach the service until its save has failed; rank 0 has sealed by then, or comes later."""
    job = Job(rank, "ddp")
    with holdfast.Checkpointer(run, create=True) as ckpt, pytest.MonkeyPatch.context() as broken:
        broken.setattr(save_job, "LONG_POLL_SECONDS", 1)
        ckpt.restore(job.state)

        def unavailable(writer, *_):
            writer.begin_failed = True
            raise errors.ServiceUnavailable("unavailable")

        with pytest.MonkeyPatch.context() as cut_off:
            if rank == 1:
                cut_off.setattr(ShardWriter, "_begin", unavailable)
            failed = ckpt.save(7, job.state).committed.exception(timeout=60)
        return type(failed).__name__, ckpt.save(8, job.state).committed.result(timeout=60).step


def test_a_rank_that_cannot_begin_in_time_keeps_no_other_rank_waiting(service):
    assert run_ranks(one_rank_cannot_begin, 2, "tests/away") == [("SaveFailed", 8)] * 2


def test_what_had_arrived_is_not_sent_again(service):
    state = {"notes": {"text": "a" * 5000}}
    with holdfast.Checkpointer("tests/again", create=True) as ckpt:
        ckpt.restore(state)
        before_the_first_seal(ckpt, lambda checkpoint_id: give_up(service, checkpoint_id))
        view = ckpt.save(1, state).committed.result(timeout=100)
    assert view.uploaded_bytes == 0
    assert [view.state for view in views_of("again", 1)].count("aborted") == 1


def test_a_chunk_that_is_lost_before_the_seal_is_sent_again_and_no_other_rank_hears_of_a_failure(service):
    state = {"notes": {"text": "a" * 5000}}

    with holdfast.Checkpointer("tests/lost", create=True) as ckpt:
        ckpt.restore(state)
        before_the_first_seal(ckpt, lambda checkpoint_id: lose_every_chunk(service, checkpoint_id))
        view = ckpt.save(1, state).committed.result(timeout=100)
        assert ckpt.restore(state) == 2
    assert [view.id] == [each.id for each in views_of("lost", 1)], "the same checkpoint, never aborted"


def test_a_step_is_begun_anew_a_few_times_and_then_the_save_fails(service):
    with holdfast.Checkpointer("tests/few", create=True) as ckpt:
        ckpt.restore({})
        write = ckpt.parts.pipeline._write
        ckpt.parts.pipeline._write = lambda writer, job: (
            give_up(service, writer.begin().checkpoint_id),
            write(writer, job),
        )[1]
        failed = ckpt.save(1, {}).committed.exception(timeout=100)
        assert isinstance(failed.__cause__, errors.CheckpointAborted)
        ckpt.parts.pipeline._write = write
        assert ckpt.save(2, {}).committed.result(timeout=100).step == 2
    assert [view.state for view in views_of("few", 1)] == ["aborted"] * BEGINS


def test_a_job_that_ends_begins_nothing_anew(service, monkeypatch):
    monkeypatch.setenv("HOLDFAST_DRAIN_SECONDS", "0")
    reached = threading.Event()
    with holdfast.Checkpointer("tests/ends", create=True) as ckpt:
        ckpt.restore({})
        stop = ckpt.parts.pipeline._stop

        def held(writer, job):
            writer.begin()
            reached.set()
            stop.wait(60)
            raise errors.CheckpointAborted("it was silent", context={"cause": AbortCause.SILENT})

        ckpt.parts.pipeline._write = held
        handle = ckpt.save(1, {})
        assert reached.wait(60)
    assert isinstance(handle.committed.exception(timeout=60), errors.SaveFailed)
    assert len(views_of("ends", 1)) == 1


@pytest.mark.parametrize("cause", list(AbortCause))
def test_only_what_an_outage_does_is_begun_anew(cause):
    again = worth_another_begin(errors.CheckpointAborted("it was given up", context={"cause": cause}))
    assert again == (cause in (AbortCause.SILENT, AbortCause.CHUNK_GONE))


def test_what_no_outage_does_is_not_begun_anew():
    assert worth_another_begin(errors.ChunkGone("another rank's chunk"))
    assert worth_another_begin(IncompleteCheckpoint("a chunk of this rank"))
    assert not worth_another_begin(errors.CheckpointAborted("by a service that tells no cause"))
    assert not worth_another_begin(errors.StoreFull("no room"))
