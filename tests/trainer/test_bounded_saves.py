"""`host_memory=`: a state larger than the memory that it may take goes through a window, and comes back bit for bit;
whatever ends the upload lets training go on."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
from gloo import run_ranks
from tests.support.training import Job, values
from torch import nn

import holdfast
from holdfast import errors
from holdfast.layout.plan import ChunkSizes
from holdfast.settings import TrainerSettings
from holdfast.staging import WindowedShard
from holdfast_client.chunks import uploader
from holdfast_client.local.chunk_folder import ChunkFolder
from holdfast_client.transport import check_stop

KIB = 1024
SIZES = ChunkSizes(4 * KIB, 16 * KIB, 8 * KIB)


def some_state(seed=0):
    """About 200 KiB: cut, packed and odd tensors."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.ModuleDict({"wide": nn.Linear(100, 130), "narrow": nn.Linear(7, 5)})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    odd = {
        "strided": torch.randn(90, 120, generator=generator).t(),
        "bits": torch.randint(0, 2, (9001,), generator=generator).bool(),
        "small": [torch.randn(3, generator=generator, dtype=torch.float64) for _ in range(40)],
    }
    return {"model": model, "odd": odd, "count": seed}


def plain(state):
    odd = state["odd"]
    tensors = [*state["model"].state_dict().values(), odd["strided"], odd["bits"], *odd["small"]]
    return [tensor.tolist() for tensor in tensors], state["count"]


def bounded(run, host_memory=16 * KIB, **more):
    return holdfast.Checkpointer(run, host_memory=host_memory, chunk_sizes=SIZES, create=True, **more)


@pytest.mark.rule("staging-slabs")
@pytest.mark.parametrize("host_memory", [16 * KIB, 40 * KIB, 150 * KIB, 8 * KIB * KIB])
def test_a_save_through_a_window_of_any_size_comes_back_bit_for_bit(run, host_memory):
    with bounded(run, host_memory) as ckpt:
        state = some_state()
        assert ckpt.restore(state) == 0
        for step in range(2):
            state = some_state(step)
            handle = ckpt.save(step, state)
            assert handle.staged.done()
            with torch.no_grad():
                state["model"]["wide"].weight.fill_(-1.0)  # the state may change as soon as save() returns
            handle.committed.result(timeout=60)
        slab = ckpt.parts.saver._staging._places[0].slab
        assert slab.capacity_bytes <= host_memory
    state = some_state(7)
    with holdfast.Checkpointer(run) as ckpt:
        assert ckpt.restore(state) == 2
    assert plain(state) == plain(some_state(1))


def test_the_window_changes_no_digest(service, run):
    state = some_state()
    with bounded(run) as ckpt:
        ckpt.restore(state)
        first = ckpt.save(0, state).committed.result(timeout=60)
    with holdfast.Checkpointer(run, chunk_sizes=SIZES) as ckpt:
        ckpt.restore(state)
        whole = ckpt.save(1, state).committed.result(timeout=60)
    digests = [
        {chunk.digest for chunk in service.client.checkpoints.shard_chunks(view.id, 0).chunks}
        for view in (first, whole)
    ]
    assert len(digests[0]) > 2
    assert len(digests[0] - digests[1]) == len(digests[1] - digests[0]) == 1, "only the index, which names the step"


def test_a_step_that_is_saved_twice_goes_through_the_window_twice(run):
    state = some_state()
    with bounded(run) as ckpt:
        ckpt.restore(state)
        first = ckpt.save(0, state).committed.result(timeout=60)
        assert ckpt.save(0, state).committed.result(timeout=60).digest == first.digest


def test_the_setting_bounds_the_memory_as_the_keyword_does(run, monkeypatch):
    monkeypatch.setenv("HOLDFAST_HOST_MEMORY_BYTES", str(20 * KIB))
    with holdfast.Checkpointer(run, chunk_sizes=SIZES) as ckpt:
        ckpt.restore(some_state())
        ckpt.save(0, some_state()).committed.result(timeout=60)
        assert ckpt.parts.saver._staging._places[0].slab.capacity_bytes == 20 * KIB


def test_a_window_without_room_for_the_largest_chunk_is_refused_before_anything_is_opened(run):
    threads = set(threading.enumerate())
    with pytest.raises(errors.ConfigurationError, match=r"host_memory is 16383 bytes.*Give it 16384"):
        bounded(run, 16 * KIB - 1)
    with pytest.raises(errors.ConfigurationError, match="Give it 67108864"):
        holdfast.Checkpointer(run, host_memory=10**6)
    assert set(threading.enumerate()) <= threads


def save_and_resume(rank, run, kind):
    job = Job(rank, kind)
    with holdfast.Checkpointer(run, create=True, host_memory=256, chunk_sizes=ChunkSizes(64, 256, 128)) as ckpt:
        assert ckpt.restore(job.state) == 0
        for step in range(2):
            job.step(step)
            ckpt.save(step, job.state).committed.result(timeout=60)
    saved = values(job.state)
    job = Job(rank, kind, seed=5)
    with holdfast.Checkpointer(run) as ckpt:
        start = ckpt.restore(job.state)
    return start, values(job.state) == saved


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_ranks_with_windows_of_one_chunk_save_and_resume(run, kind):
    assert run_ranks(save_and_resume, 2, run, kind) == [(2, True)] * 2


class AtChunk:
    """Does something on the training thread in mid-window: before it stages the chunk with this ordinal."""

    def __init__(self, monkeypatch, ordinal, action):
        fill_next = WindowedShard._fill_next

        def watched(shard, next_ordinal):
            if next_ordinal == ordinal:
                action()
            fill_next(shard, next_ordinal)

        monkeypatch.setattr(WindowedShard, "_fill_next", watched)


@pytest.mark.rule("bounded-exit")
def test_a_service_that_is_lost_in_mid_window_fails_the_save_and_frees_training(own_service, monkeypatch):
    with bounded("tests/away") as ckpt:
        ckpt.restore(some_state())
        ckpt.save(0, some_state()).committed.result(timeout=60)
        AtChunk(monkeypatch, 5, own_service.served.process.stop)
        handle = ckpt.save(1, some_state(1))
        assert isinstance(handle.committed.exception(timeout=60), errors.SaveFailed)
        assert isinstance(handle.staged.exception(timeout=0), errors.SaveFailed)
        assert ckpt.stats.failed == 1


def test_an_error_while_staging_in_mid_window_aborts_the_save_and_the_next_one_goes_on(run, service, monkeypatch):
    def fails():
        raise MemoryError("no room for the copy")

    with bounded(run) as ckpt:
        ckpt.restore(some_state())
        with monkeypatch.context() as broken:
            AtChunk(broken, 5, fails)
            failed = ckpt.save(0, some_state()).committed.exception(timeout=60)
        assert "no room for the copy" in str(failed)
        ckpt.save(1, some_state(1)).committed.result(timeout=60)
    aborted = [view.step for view in service.client.checkpoints.all(*run.split("/")) if view.state == "aborted"]
    assert aborted == [0]


@pytest.mark.parametrize("tier", [None, "nvme"])
def test_ctrl_c_while_training_waits_for_the_window_ends_the_save_and_not_the_checkpointer(
    run, service, monkeypatch, tmp_path, tier
):
    def interrupted():
        raise KeyboardInterrupt

    with bounded(run, local=tier and tmp_path / tier) as ckpt:
        ckpt.restore(some_state())
        with monkeypatch.context() as broken:
            AtChunk(broken, 5, interrupted)
            with pytest.raises(KeyboardInterrupt):
                ckpt.save(0, some_state())
        assert ckpt.wait(60)
        ckpt.save(1, some_state(1)).committed.result(timeout=60)
    aborted = [view.step for view in service.client.checkpoints.all(*run.split("/")) if view.state == "aborted"]
    assert aborted == [0]


@pytest.mark.rule("bounded-exit")
def test_closing_in_mid_window_frees_the_training_thread(run, monkeypatch):
    sending, results = threading.Event(), []

    def never_done(ticket, body, pool, *, stop, **more):
        sending.set()
        stop.wait()
        check_stop(stop)

    monkeypatch.setattr(uploader, "put_chunk", never_done)
    ckpt = bounded(run, settings=TrainerSettings(drain_seconds=0))
    ckpt.restore(some_state())
    training = threading.Thread(target=lambda: results.append(ckpt.save(0, some_state())))
    training.start()
    assert sending.wait(60)
    ckpt.close()
    training.join(60)
    assert not training.is_alive()
    assert isinstance(results[0].committed.exception(timeout=60), errors.SaveFailed)
    assert ckpt.parts.saver._staging._places[0].slab is None, "the window was given back to the machine"


@pytest.mark.rule("bounded-exit")
def test_a_transfer_that_hangs_in_the_system_does_not_keep_the_job_from_ending(run, monkeypatch):
    hangs, is_over = threading.Event(), threading.Event()

    def hang(*_, **__):  # a write to a filesystem that is gone hears of no stop
        hangs.set()
        is_over.wait()

    monkeypatch.setattr(uploader, "put_chunk", hang)
    monkeypatch.setattr("holdfast.save.pipeline.STOP_SECONDS", 0.1)
    monkeypatch.setattr("holdfast.checkpointer.STOP_SECONDS", 0.1)
    # No signals: a thread closes it, and only the main thread could put the earlier handlers back.
    ckpt = holdfast.Checkpointer(run, settings=TrainerSettings(drain_seconds=0, preemption_signals=""))
    ckpt.restore(some_state())
    handle = ckpt.save(0, some_state())
    assert hangs.wait(60)
    closing = threading.Thread(target=ckpt.close, daemon=True)
    closing.start()
    closing.join(60)
    try:
        assert not closing.is_alive()
        assert isinstance(handle.committed.exception(timeout=0), errors.SaveFailed)
    finally:
        is_over.set()
        closing.join(60)


def fail_on_one(rank, run):
    job = Job(rank, "ddp")
    with holdfast.Checkpointer(run, create=True, host_memory=256, chunk_sizes=ChunkSizes(64, 256, 128)) as ckpt:
        ckpt.restore(job.state)
        with pytest.MonkeyPatch.context() as broken:
            if rank == 1:
                AtChunk(broken, 2, lambda: (_ for _ in ()).throw(MemoryError("no room")))
            failed = ckpt.save(0, job.state).committed.exception(timeout=60)
        after = ckpt.save(1, job.state).committed.result(timeout=60)
        return type(failed).__name__, "no room" in str(failed), after.step


def test_a_rank_that_fails_in_mid_window_fails_the_save_on_all_ranks_and_the_next_one_goes_on(run):
    assert run_ranks(fail_on_one, 2, run) == [("SaveFailed", True, 1)] * 2


def test_a_local_tier_takes_the_window_at_the_disks_pace_and_the_upload_goes_on_behind(run, tmp_path):
    state = some_state(1)
    with bounded(run, local=tmp_path) as ckpt:
        ckpt.restore(state)
        handle = ckpt.save(0, state)
        assert handle.staged.done()
        handle.committed.result(timeout=60)
    fresh = some_state(2)
    with bounded(run) as ckpt:
        assert ckpt.restore(fresh) == 1
    assert plain(fresh) == plain(state)


@pytest.mark.rule("bounded-exit")
def test_a_local_tier_without_room_fails_the_save_in_mid_window_and_frees_training(run, tmp_path, monkeypatch):
    kept, add = [], ChunkFolder.add

    def full_after_three(folder, digest, data, *, durable):
        kept.append(digest)
        return len(kept) <= 3 and add(folder, digest, data, durable=durable)

    with bounded(run, local=tmp_path) as ckpt:
        ckpt.restore(some_state())
        with monkeypatch.context() as broken:
            broken.setattr(ChunkFolder, "add", full_after_three)
            handle = ckpt.save(0, some_state())
            assert isinstance(handle.committed.exception(timeout=60), errors.SaveFailed)
        ckpt.save(1, some_state(1)).committed.result(timeout=60)


KILLED = """
import os, signal, sys
sys.path.insert(0, {here!r})
import holdfast
from holdfast.staging import WindowedShard
from test_bounded_saves import AtChunk, bounded, some_state
import pytest
with bounded({run!r}) as ckpt:
    ckpt.restore(some_state())
    ckpt.save(0, some_state()).committed.result(timeout=60)
    AtChunk(pytest.MonkeyPatch(), 5, lambda: os.kill(os.getpid(), signal.SIGKILL))
    ckpt.save(1, some_state(1))
"""


def test_a_process_that_is_killed_in_mid_window_leaves_the_checkpoint_before(run, request):
    script = KILLED.format(here=str(request.path.parent), run=run)
    ended = subprocess.run([sys.executable, "-c", script], cwd=request.config.rootpath, timeout=120, check=False)
    assert ended.returncode == -9
    state = some_state(7)
    with bounded(run) as ckpt:
        assert ckpt.restore(state) == 1
        assert plain(state) == plain(some_state())
        ckpt.save(1, some_state(1)).committed.result(timeout=60)
