"""The states that real saves go through, and that none of them ever asks for one that cannot follow."""

from __future__ import annotations

import logging
import sys
import threading
import time

import pytest
import torch

import holdfast
from holdfast import errors
from holdfast.layout.plan import ChunkSizes
from holdfast.save.job import SaveHandle, SaveState
from holdfast_client.shard_writer import ShardWriter
from holdfast_client.transport import Transport
from holdfast_protocol.states import CheckpointState

Q, S, H, P, U, D, C, L = SaveState


@pytest.fixture
def seen(monkeypatch):
    """Step -> the states of its save, in their order."""
    states: dict[int, list[SaveState]] = {}
    become = SaveHandle.become

    def noted(handle, state, *, over=False):
        changed = become(handle, state, over=over)
        if changed:
            states.setdefault(handle.step, [Q]).append(state)
        return changed

    monkeypatch.setattr(SaveHandle, "become", noted)
    return states


def save(run, step=0, **settings):
    state = {"model": torch.nn.Linear(64, 64), "notes": {"n": step}}
    with holdfast.Checkpointer(run, **settings) as ckpt:
        ckpt.restore(state)
        handle = ckpt.save(step, state)
        handle.committed.result(timeout=60)
    assert handle.state is C


@pytest.mark.parametrize(
    ("local", "window", "expected"),
    [
        pytest.param(False, False, [Q, S, U, D, C], id="at once"),
        pytest.param(True, False, [Q, S, H, P, U, D, C], id="through the spool"),
        pytest.param(False, True, [Q, U, D, C], id="through a window"),
        pytest.param(True, True, [Q, H, P, U, D, C], id="through a window and the spool"),
    ],
)
def test_a_save_that_commits(run, tmp_path, seen, local, window, expected):
    settings = {"chunk_sizes": ChunkSizes(4096, 4096, 4096), "host_memory": 3 * 4096} if window else {}
    save(run, local=tmp_path / "nvme" if local else None, **settings)
    assert seen == {0: expected}


@pytest.mark.parametrize("local", [False, True])
def test_a_save_that_the_job_has_no_time_for(run, tmp_path, seen, monkeypatch, local):
    monkeypatch.setenv("HOLDFAST_DRAIN_SECONDS", "0")
    reached = threading.Event()
    with holdfast.Checkpointer(run, local=tmp_path / "nvme" if local else None) as ckpt:
        ckpt.restore({})
        stop = ckpt.parts.pipeline._stop

        def held(writer, job):
            reached.set()
            stop.wait(60)
            raise errors.CheckpointAborted("stopped")

        ckpt.parts.pipeline._write = held
        handle = ckpt.save(0, {})
        assert reached.wait(60)
    assert isinstance(handle.committed.exception(timeout=60), errors.SaveFailed)
    assert seen == {0: [Q, S, H, P, U, P] if local else [Q, S, U, L]}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(("said", "local"), [("committed p", False), ("not committed", False), ("not kept", True)])
def test_a_log_handler_that_raises_costs_no_save_its_outcome(run, tmp_path, monkeypatch, said, local):
    raised = []

    def raise_once(record):
        if said in record.getMessage() and not raised:
            raised.append(record)
            raise BrokenPipeError("the script's log is gone")
        return True

    logger = logging.getLogger("holdfast")
    logger.addFilter(raise_once)
    try:
        with holdfast.Checkpointer(run, local=tmp_path / "nvme" if local else None) as ckpt:
            ckpt.restore({})
            with monkeypatch.context() as broken:
                if said == "not committed":
                    broken.setattr(ckpt.parts.pipeline, "_write", None)
                if local:
                    broken.setattr(ckpt.parts.pipeline, "_kept", None)
                first = ckpt.save(0, {}).committed.exception(timeout=60)
            assert raised
            assert isinstance(first, errors.SaveFailed) == (said == "not committed")
            assert ckpt.save(1, {}).committed.result(timeout=60).step == 1, "the thread lives on"
    finally:
        logger.removeFilter(raise_once)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_callback_that_ends_its_thread_ends_no_later_save(run):
    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore({})
        handle = ckpt.save(0, {})
        handle.committed.add_done_callback(lambda _: sys.exit())
        handle.committed.result(timeout=60)
        assert ckpt.save(1, {}).committed.result(timeout=60).step == 1


def test_a_stop_while_the_seal_is_answered_does_not_undo_the_commit(run, monkeypatch):
    seal = ShardWriter._seal

    def seal_and_be_stopped(writer, *arguments):
        view = seal(writer, *arguments)
        writer.stop()
        time.sleep(1)  # the uploading thread sees the stop before the answer
        return view

    monkeypatch.setattr(ShardWriter, "_seal", seal_and_be_stopped)
    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore({})
        handle = ckpt.save(1, {"notes": {"text": "a" * 5000}})
        assert handle.committed.result(timeout=60).state is CheckpointState.COMMITTED
        assert ckpt.stats.last_committed_step == 1


def test_a_save_whose_chunks_fit_one_batch_makes_two_calls(run, monkeypatch):
    calls, call = [], Transport.call

    def counted(self, method, route, *arguments, **more):
        if method != "GET" and not route.endswith(("/heartbeat", "/mount-proofs")):
            calls.append((method, route.rpartition("/")[2]))
        return call(self, method, route, *arguments, **more)

    with holdfast.Checkpointer(run, create=True) as ckpt:
        ckpt.restore({})
        monkeypatch.setattr(Transport, "call", counted)
        ckpt.save(1, {"notes": {"text": "a" * 5000}}).committed.result(timeout=60)
        monkeypatch.undo()
    assert calls == [("POST", "checkpoints"), ("PUT", "0")]


def test_a_save_that_is_asked_for_within_another_leaves_no_handle_open(run):
    """As by the script's own signal handler, which runs wherever the training thread is."""
    within = []

    def rule(step, metrics):
        if step == 0:
            within.append(ckpt.save(1, {"w": torch.ones(4)}))
        return True

    with holdfast.Checkpointer(run, healthy=rule) as ckpt:
        ckpt.restore({"w": torch.ones(4)})
        gate, commit = threading.Event(), ckpt.parts.pipeline._commit
        ckpt.parts.pipeline._commit = lambda job: (gate.wait(60), commit(job))[1]
        outer = ckpt.save(0, {"w": torch.ones(4)})
        gate.set()
        assert within[0].committed.result(timeout=60).step == 1
        assert "still uploading" in str(outer.committed.exception(timeout=60)), "there is memory for one save"
        assert ckpt.wait(60)
