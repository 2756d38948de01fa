"""Staging of a state on a GPU: its memory is page-locked for the copy engine, CUDA is asked no more than that takes,
and a state in host memory asks nothing. On stand-ins; tests/trainer/test_cuda.py does it on a GPU."""

import logging
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from holdfast.layout.plan import ChunkSizes, build_local_plan
from holdfast.staging import StagingArea, copy
from tests.support.gpus import OnGpu, gpus
from tests.support.staged import pieces_of

SIZES = ChunkSizes(own_chunk_bytes=1024, cut_bytes=4096, pack_bytes=2048)


def stage(tensors, *on_gpus, area=None):
    """Those named in `on_gpus` are on the second GPU."""
    pieces = pieces_of(tensors)
    plan = build_local_plan([piece.spec for piece in pieces], rank=0, world_size=1, sizes=SIZES)
    placed = [p._replace(local=OnGpu(p.local)) if p.spec.name in on_gpus else p for p in pieces]
    return (area or StagingArea()).stage(plan, placed)


def is_locked(here, shard):
    """Whether all of its bytes are page-locked."""
    spans = [
        (np.frombuffer(shard.chunk(at), np.uint8).ctypes.data, len(shard.chunk(at))) for at in range(shard.chunk_count)
    ]
    return all(any(at <= start and start + size <= at + of for at, of in here.locked.items()) for start, size in spans)


def content(shard):
    return b"".join(bytes(shard.chunk(ordinal)) for ordinal in range(shard.chunk_count))


@pytest.mark.rule("staging-slabs")
@pytest.mark.parametrize("on_gpus", ["ab", "a", "b"])
def test_memory_for_a_state_on_a_gpu_is_locked_once_and_until_the_end(on_gpus):
    values = {"a": torch.randn(600), "b": torch.randn(700)}
    area = StagingArea()
    with gpus() as here:
        for _ in range(3):
            shard = stage(values, *on_gpus, area=area)
            assert is_locked(here, shard)
            assert content(shard) == b"".join(value.numpy().tobytes() for value in values.values())
            shard.release()
        assert here.calls.count("lock") == 1
        assert here.contexts == {1}, "the first GPU is another rank's"
        held = stage(values, *on_gpus, area=area)
        area.close()
        assert here.locked
        held.release()
        assert not here.locked
        assert here.contexts == {1}


@pytest.mark.rule("staging-slabs")
@pytest.mark.parametrize("window", [None, 8192])
def test_a_state_in_host_memory_asks_nothing_of_cuda(window):
    """Else each rank takes a context on the first GPU for nothing: some hundred MB."""
    area = StagingArea(window_bytes=window)
    with gpus() as here:
        shard = stage({"a": torch.randn(600), "b": torch.randn(3)}, area=area)
        assert shard.total_bytes == 2412
        shard.release()
        area.close()
        assert not here.calls
        assert not here.contexts


def test_a_state_that_moves_to_a_gpu_has_its_memory_locked_from_then_on():
    values, area = {"a": torch.randn(600)}, StagingArea()
    with gpus() as here:
        stage(values, area=area).release()
        assert not here.locked
        assert is_locked(here, stage(values, "a", area=area))


def test_memory_that_cannot_be_locked_is_used_as_it_is(caplog):
    values, area = {"a": torch.randn(600)}, StagingArea()
    with gpus() as here:
        here.refusal = 2
        for _ in range(2):
            shard = stage(values, "a", area=area)
            assert content(shard) == values["a"].numpy().tobytes()
            shard.release()
        area.close()
        assert here.calls.count("lock") == 1
        assert "unlock" not in here.calls
        assert not here.left_error, "the training's next kernel would raise it"
    assert caplog.text.count("cannot be page-locked (CUDA error 2)") == 1


def test_memory_that_cuda_takes_for_other_memory_is_not_copied_into_and_the_next_save_has_other_memory():
    values, area = {"a": torch.randn(600)}, StagingArea()
    with gpus() as here:
        here.refusal = 712
        with pytest.raises(RuntimeError, match="locked for other memory"):
            stage(values, "a", area=area)
        here.refusal = 0
        shard = stage(values, "a", area=area)
        assert content(shard) == values["a"].numpy().tobytes()
        shard.release()
        area.close()
        assert not here.locked


def test_a_slab_is_released_after_an_error_of_cuda():
    area = StagingArea()
    with gpus() as here:
        stage({"a": torch.zeros(4)}, "a", area=area).release()
        here.broken = True
        area.close()
        area.close()
        assert here.calls.count("unlock") == 1


def test_what_training_writes_after_a_save_is_not_in_it():
    value = torch.zeros(600)
    with gpus():
        shard = stage({"a": value}, "a")
        value.fill_(7.0)
        assert content(shard) == bytes(2400)


def test_a_gpus_copies_are_queued_before_the_hosts_are_made(monkeypatch):
    queued = []
    with gpus() as here:
        queue, run = here.queue, copy.HostCopy.run
        monkeypatch.setattr(here, "queue", lambda work: (queued.append("gpu"), queue(work)))
        monkeypatch.setattr(copy.HostCopy, "run", lambda *args: (queued.append("host"), run(*args)))
        stage({"a": torch.randn(600), "b": torch.randn(700)}, "b")
    assert queued == ["gpu", "host"]


@pytest.mark.parametrize(("pinned", "staged"), [(True, 7.0), (False, 0.0)])
def test_pinned_memory_is_read_when_the_copies_that_training_has_queued_into_it_are_done(monkeypatch, pinned, staged):
    value = torch.zeros(600)
    with gpus():
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: pinned)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: value.fill_(7.0)))
        assert content(stage({"a": value})) == torch.full((600,), staged).numpy().tobytes()


def test_once_training_goes_on_no_thread_asks_cuda_for_the_copies():
    """Training may capture a graph then, which another thread's question would invalidate."""
    area, values = StagingArea(window_bytes=8192), {"a": torch.randn(3000), "b": torch.randn(2000)}
    with gpus() as here:
        shard = stage(values, "a", "b", area=area)
        last, taken = shard.chunk_count - 1, []

        def upload():
            for ordinal in range(last):
                taken.append(bytes(shard.chunk(ordinal)))
                shard.done_with(ordinal)

        uploading = threading.Thread(target=upload)
        uploading.start()
        assert shard.fill()
        here.captures = True
        taken_last = bytes(shard.chunk(last))
        here.captures = False
        uploading.join()
        assert b"".join([*taken, taken_last]) == b"".join(value.numpy().tobytes() for value in values.values())
        shard.release()
        area.close()
        assert not here.locked


@pytest.fixture(autouse=True)
def _warnings(caplog):
    caplog.set_level(logging.WARNING, logger="holdfast")
