"""`check_finite=`: a model that holds NaN is kept as diverged, whatever its dtype; to look may fail on one rank."""

from __future__ import annotations

import weakref

import pytest
import torch
from gloo import run_ranks
from tests.support.training import Job
from torch import nn

import holdfast
from holdfast.health import diverged
from holdfast.health.diverged import FiniteCheck

FLOATS = [dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and dtype.is_floating_point]
STORED = sorted({dtype for dtype in FLOATS if not str(dtype).startswith("torch.float4")}, key=str)


def test_a_model_with_nan_is_marked_as_diverged_and_skipped(run):
    model = nn.Linear(2, 2)
    with holdfast.Checkpointer(run, check_finite=True) as ckpt:
        ckpt.restore({"model": model})
        assert ckpt.save(0, {"model": model}).committed.result(timeout=60).health == "ok"
        with torch.no_grad():
            model.weight[0, 0] = float("nan")
        assert ckpt.save(1, {"model": model}).committed.result(timeout=60).health == "diverged"
    with holdfast.Checkpointer(run) as ckpt:
        assert ckpt.restore({"model": model}) == 1, "the diverged one is skipped"


def test_a_model_of_every_float_is_looked_at(run):
    """Those of one byte too, most of which torch cannot compare."""
    model = nn.Module()
    for dtype in STORED:
        model.register_buffer(str(dtype).replace("torch.", "of_"), torch.ones(3).to(dtype))
    with holdfast.Checkpointer(run, check_finite=True) as ckpt:
        ckpt.restore({"model": model})
        assert ckpt.save(0, {"model": model}).committed.result(timeout=60).health == "ok"
        for step, buffer in enumerate(model.buffers(), start=1):
            before = buffer.clone()
            buffer.copy_(torch.tensor([1.0, float("nan"), 1.0]))
            view = ckpt.save(step, {"model": model}).committed.result(timeout=60)
            assert view.health == "diverged", buffer.dtype
            buffer.copy_(before)


def test_of_one_byte_floats_no_more_is_copied_at_once_than_the_part_that_is_looked_at(monkeypatch):
    alive, most = weakref.WeakSet(), []
    parts = diverged._parts

    def counted(tensor):
        for part in parts(tensor):
            alive.add(part)
            most.append(len(alive))
            yield part
            del part

    monkeypatch.setattr(diverged, "_CONVERTED", 4)
    monkeypatch.setattr(diverged, "_parts", counted)
    weight = torch.ones(64)
    weight[-1] = float("nan")
    assert FiniteCheck().holds_nan("weight", weight.to(torch.float8_e4m3fn))
    assert len(most) == 16
    assert max(most) <= 2, "the next one is made before the last is let go"


def one_rank_cannot_look(rank, run):
    job = Job(rank, "ddp")
    with holdfast.Checkpointer(run, create=True, check_finite=True) as ckpt:
        ckpt.restore(job.state)
        for step, breaks in enumerate([(torch, "aminmax"), (FiniteCheck, "found")]):
            with pytest.MonkeyPatch.context() as broken:
                if rank == 1:
                    broken.setattr(*breaks, full)
                failed = ckpt.save(step, job.state).committed.exception(timeout=60)
            assert type(failed).__name__ == "SaveFailed"
            assert "CUDA out of memory" in str(failed)
        after = ckpt.save(2, job.state).committed.result(timeout=60)
        return after.step, after.health


def full(*_):
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_rank_that_cannot_look_fails_the_save_on_all_ranks_and_the_next_one_goes_on(run):
    assert run_ranks(one_rank_cannot_look, 2, run) == [(2, "ok")] * 2
