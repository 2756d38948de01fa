"""A job was cut off for so long that its checkpoint was given up: the ranks begin the step anew, and it commits."""

from __future__ import annotations

import threading
import time

import pytest
from gloo import run_ranks
from tests.chaos.conftest import TOKEN, RestartableService
from tests.support.training import Job

import holdfast
from holdfast import errors
from holdfast.begin_anew import BEGINS, worth_another_begin
from holdfast_client.client import Client
from holdfast_protocol.runs import EditProject
from holdfast_protocol.states import AbortCause, CheckpointState


@pytest.fixture
def service(tmp_path, monkeypatch):
    """It gives up what nobody has called for in five seconds, which is the least that it can be told."""
    idle = {"HOLDFAST_UPLOAD_IDLE_SECONDS": "5", "HOLDFAST_CONTROLLER_INTERVAL_SECONDS": "0.2"}
    running = RestartableService(tmp_path, idle)
    monkeypatch.setenv("HOLDFAST_URL", running.url)
    monkeypatch.setenv("HOLDFAST_TOKEN", TOKEN)
    with Client() as client:
        client.edit_project("tests", EditProject())
    yield running
    running.stop()


def wait_until_given_up(writer):
    with Client() as client:
        while client.checkpoint(writer.checkpoint_id).state is CheckpointState.UPLOADING:
            time.sleep(0.1)


def hold_until_given_up(ckpt, times):
    """Says nothing to the service, as a rank that is cut off, until its checkpoint was aborted; so many times."""
    write, left = ckpt._pipeline._write, [None] * times

    def held(writer, job):
        if left:
            left.pop()
            wait_until_given_up(writer)
        return write(writer, job)

    ckpt._pipeline._write = held


def saved_after_silence(rank, run, silent_rank):
    job = Job(rank, "ddp")
    with holdfast.Checkpointer(run, create=True) as ckpt:
        ckpt.restore(job.state)
        if rank == silent_rank:
            hold_until_given_up(ckpt, times=1)
        view = ckpt.save(7, job.state).committed.result(timeout=100)
        follows = ckpt.save(8, job.state).committed.result(timeout=100)
        return view.step, view.id, follows.step


@pytest.mark.rule("protocol-6")
@pytest.mark.parametrize("silent_rank", [0, 1])
def test_all_ranks_begin_a_step_anew_that_was_given_up_for_silence(service, silent_rank):
    """The one that waits is the host's leader, or waits for what the leader hears."""
    results = run_ranks(saved_after_silence, 2, "tests/cut", silent_rank)
    assert results[0] == results[1]
    with Client() as client:
        views = [view for view in client.all_checkpoints("tests", "cut") if view.step == 7]
        assert {(view.state, view.abort_cause) for view in views} == {("aborted", "silent"), ("committed", None)}
        assert client.restore_point("tests", "cut").restore_point.step == 8


def test_what_had_arrived_is_not_sent_again(service):
    state = {"notes": {"text": "a" * 5000}}
    with holdfast.Checkpointer("tests/again", create=True) as ckpt:
        ckpt.restore(state)
        begin, seals = ckpt._session.begin_shard, []

        def begin_shard(*arguments):
            writer = begin(*arguments)
            if not seals:
                seals.append(writer.seal)
                writer.seal = lambda **options: (wait_until_given_up(writer), seals[0](**options))[1]
            return writer

        ckpt._session.begin_shard = begin_shard
        view = ckpt.save(1, state).committed.result(timeout=100)
        assert ckpt.stats.sent_bytes > 0
    assert view.uploaded_bytes == 0


def test_a_step_is_begun_anew_a_few_times_and_then_the_save_fails(service):
    with holdfast.Checkpointer("tests/few", create=True) as ckpt:
        ckpt.restore({})
        hold_until_given_up(ckpt, times=BEGINS)
        failed = ckpt.save(1, {}).committed.exception(timeout=100)
        assert isinstance(failed.__cause__, errors.CheckpointAborted)
        assert ckpt.save(2, {}).committed.result(timeout=100).step == 2
    with Client() as client:
        states = [view.state for view in client.all_checkpoints("tests", "few") if view.step == 1]
    assert states == ["aborted"] * BEGINS


def test_a_job_that_ends_begins_nothing_anew(service, monkeypatch):
    monkeypatch.setenv("HOLDFAST_DRAIN_SECONDS", "0")
    reached, ended = threading.Event(), threading.Event()
    with holdfast.Checkpointer("tests/ends", create=True) as ckpt:
        ckpt.restore({})

        def held(writer, job):
            reached.set()
            ended.wait(60)
            raise errors.CheckpointAborted("it was silent", context={"cause": AbortCause.SILENT})

        ckpt._pipeline._write = held
        stop = ckpt._pipeline._stop
        threading.Thread(target=lambda: (stop.wait(), ended.set())).start()
        handle = ckpt.save(1, {})
        reached.wait(60)
    assert isinstance(handle.committed.exception(timeout=60), errors.SaveFailed)
    with Client() as client:
        assert len([view for view in client.all_checkpoints("tests", "ends") if view.step == 1]) == 1


@pytest.mark.parametrize("cause", list(AbortCause))
def test_only_what_an_outage_does_is_begun_anew(cause):
    again = worth_another_begin(errors.CheckpointAborted("it was given up", context={"cause": cause}))
    assert again == (cause in (AbortCause.SILENT, AbortCause.CHUNK_GONE))
    assert not worth_another_begin(errors.CheckpointAborted("by a service that tells no cause"))
    assert not worth_another_begin(errors.StoreFull("no room"))
