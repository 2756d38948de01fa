"""Ranks of a loop of one's own around dcp.save that do not go on together: one fails, leaves, or loses its step."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gloo import run_ranks
from torch.distributed.checkpoint.api import CheckpointException

import holdfast
from holdfast.dcp.writer import HoldfastWriter
from holdfast.distributed.step_agreement import Outlook
from holdfast_client.client import Client
from holdfast_protocol.checkpoints import AbortCheckpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def fail_on_rank_1(rank, run):
    with holdfast.Checkpointer(run) as ckpt:
        odd = object() if rank == 1 else 1
        try:
            dcp.save({"t": torch.ones(2), f"odd{rank}": odd}, storage_writer=ckpt.writer(0))
        except CheckpointException as error:
            return "odd1" in str(error)
    return False


def leave_own_loop(rank, run):
    """Nothing but the loop's own dcp.save; it saves step 2 by itself, and rank 1 is told to leave in step 6."""
    saved = []
    try:
        with holdfast.Checkpointer(run, create=True, save=holdfast.Every(steps=3)) as ckpt:
            for step in range(10_000):
                state = {"t": torch.full((2,), step)}

                def save(step=step, state=state):
                    dcp.save(state, storage_writer=ckpt.writer(step))
                    saved.append(step)

                if step == 2:
                    save()
                if step == 6:
                    if rank == 1:
                        os.kill(os.getpid(), signal.SIGTERM)
                    while ckpt.parts.preemption.agreement.outlook is not Outlook.AGREED:
                        time.sleep(0.005)
                assert ckpt.step_with(step, save) == (step == 5)
    except holdfast.Preempted as left:
        return saved, left.saved_step, str(left)


def fail_and_leave(rank, run):
    return fail_on_rank_1(rank, run), leave_own_loop(rank, f"{run}-leaves")


@pytest.mark.rule("local-save-flag")
def test_a_rank_that_fails_in_dcp_save_leaves_no_restore_point_and_one_that_is_told_to_leave_does(run, service):
    told = run_ranks(fail_and_leave, 2, run, timeout_seconds=120)
    assert [failed for failed, _ in told] == [True, True]
    decision = service.client.restores.restore_point(*run.split("/"))
    assert decision.restore_point is None
    assert not decision.ever_committed
    for _, (saved, step, said) in told:
        assert (saved, step) == ([2, 5, 6], 6)
        assert "The checkpoint of step 6 is committed." in said
    project, name = f"{run}-leaves".split("/")
    assert service.client.restores.restore_point(project, name).restore_point.step == 6
    [attempt] = service.client.attempts.list(project, name).items
    assert attempt.outcome == "preempted"


def given_up_before_rank_0_begins(rank, run):
    """A person gives the checkpoint up that rank 1 has sealed, before rank 0's first call."""
    written = HoldfastWriter.write_data

    def write_data(self, plan, planner):
        if rank == 1:
            done = written(self, plan, planner)
            dist.barrier()
            return done
        dist.barrier()
        with Client() as client:
            (sealed,) = client.checkpoints.all(*run.split("/"))
            abort = AbortCheckpoint(**ckpt.parts.session.fence.model_dump(), reason="not this one")
            client.checkpoints.abort(sealed.id, abort)
        return written(self, plan, planner)

    with holdfast.Checkpointer(run) as ckpt, pytest.MonkeyPatch.context() as patch:
        patch.setattr(HoldfastWriter, "write_data", write_data)
        with pytest.raises(CheckpointException, match="given up"):
            dcp.save({f"t{rank}": torch.ones(4)}, storage_writer=ckpt.writer(3))
        assert (ckpt.stats.committed, ckpt.stats.last_committed_step) == (0, None)
        patch.undo()
        dcp.save({f"t{rank}": torch.ones(4)}, storage_writer=ckpt.writer(3))
        return ckpt.stats.last_committed_step


@pytest.mark.rule("writer-is-whole")
def test_a_checkpoint_that_is_given_up_between_two_ranks_is_not_called_committed(run, service):
    assert run_ranks(given_up_before_rank_0_begins, 2, run) == [3, None]
    states = sorted(view.state for view in service.client.checkpoints.all(*run.split("/")))
    assert states == ["aborted", "aborted", "committed"]
