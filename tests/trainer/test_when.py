"""When to save, on real ranks: the best step by rank 0's metric, what was deferred, and ranks that do not agree."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist
from gloo import run_ranks

import holdfast
from holdfast import Best, Every, OnPreemption


def save_the_best(rank, run):
    """Only rank 0's values count, and the other rank's are the wrong way round. Then the job comes again."""
    told = []
    for launch, losses in enumerate(([5.0, 3.0, float("nan"), 4.0, 2.0], [2.5, 1.0])):
        with holdfast.Checkpointer(run, create=True, save=Best("val_loss") | OnPreemption()) as ckpt:
            ckpt.restore({})
            for at, loss in enumerate(losses):
                step = 10 * launch + at
                value = loss if rank == 0 else (None if at == 1 else -loss)
                if (handle := ckpt.step(step, {}, metrics={"val_loss": value, "loss": 0.0})) is not None:
                    told.append((step, handle.committed.result(timeout=60).step))
    return told


def put_off(rank, run):
    """Rank 1's upload is held back while rank 0's is long over."""
    with holdfast.Checkpointer(run, create=True, save=Every(steps=10_000)) as ckpt:
        ckpt.restore({})
        ckpt.step(9_999, {}).committed.result(timeout=60)
        gate = threading.Event()
        if rank == 1:
            write = ckpt.parts.pipeline._write
            ckpt.parts.pipeline._write = lambda writer, job: (gate.wait(60), write(writer, job))[1]
        slow = ckpt.step(19_999, {})
        declined = ckpt.step(29_999, {})
        gate.set()
        slow.committed.result(timeout=60)
        step, done = 29_999, None
        while done is None:
            step += 1
            time.sleep(0.002)
            done = ckpt.step(step, {})
        return type(declined.committed.exception()).__name__, step, done.committed.result(timeout=60).step


def pass_it_on_one_rank(rank, run):
    with holdfast.Checkpointer(run, create=True, save=Best("val_loss") | Every(steps=10)) as ckpt:
        ckpt.restore({})
        try:
            for step in range(10):
                ckpt.step(step, {}, metrics={"val_loss": 1.0} if step == 3 and rank == 0 else None)
        except holdfast.errors.RanksDisagree as error:
            return step, "step 3 and step 9" in str(error), "on every rank" in str(error)
    return None


def wait_for_each_other(rank, run):
    """Rank 0 in the vote, and rank 1, which was not passed the metric, in the training's own collective."""
    with holdfast.Checkpointer(run, create=True, save=Best("val_loss")) as ckpt:
        ckpt.restore({})
        began = time.monotonic()
        try:
            for step in range(10):
                if step == 4:
                    dist.barrier()
                ckpt.step(step, {}, metrics={"val_loss": 1.0} if step == 3 and rank == 0 else {"loss": 1.0})
        except holdfast.errors.RanksDisagree as error:
            if rank == 0:
                dist.barrier()
            in_time = time.monotonic() - began < ckpt.parts.ranks.timeout_seconds / 2
            return step, in_time, "metrics['val_loss'] was not passed to step() on rank 1 at step 3" in str(error)
    return None


def all_four(rank, run):
    jobs = {"best": save_the_best, "off": put_off, "one": pass_it_on_one_rank, "wait": wait_for_each_other}
    return [job(rank, f"{run}-{name}") for name, job in jobs.items()]


@pytest.mark.rule("local-save-flag")
@pytest.mark.rule("one-vote-per-step")
def test_ranks_save_after_the_same_steps_for_the_best_and_what_was_put_off_or_all_raise(run, service):
    first, second = run_ranks(all_four, 2, run)
    # The second launch knows that 2.0 was reached, though it never saw it.
    assert first[0] == second[0] == [(0, 0), (1, 1), (4, 4), (11, 11)]
    project, _, name = run.partition("/")
    best = service.client.restores.restore_point(project, f"{name}-best", "best:val_loss").restore_point
    assert best.step == 11
    # What it cost is what the service advises by.
    assert service.client.checkpoints.get(best.checkpoint_id).blocked_seconds > 0
    advice = service.client.insights.save_interval(project, f"{name}-best")
    assert (advice.saves_source, advice.saves_measured, advice.run_interruptions) == ("run", 4, 0)
    name_of_error, step, saved = first[1]
    assert (name_of_error, saved) == ("SaveDeclined", step)
    assert 29_999 < step < 39_999
    assert second[1] == first[1]
    assert (first[2], second[2]) == ((3, True, True), (9, True, True))
    assert (first[3], second[3]) == ((3, True, True), (4, True, True))
