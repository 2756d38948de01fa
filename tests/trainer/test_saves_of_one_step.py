"""A job saves a step again, and a part of its earlier save of that step is still somewhere: they never meet."""

from __future__ import annotations

import pytest
import torch
from tests.support.node_agent import agent_serve

import holdfast
from holdfast_client.errors import CheckpointConflict
from holdfast_protocol.states import CheckpointKind


@pytest.mark.rule("one-checkpoint-per-step")
def test_a_save_says_its_number_and_takes_its_step_from_an_earlier_save_that_is_left_over(run, service, tmp_path):
    """As the part that a lost host had left to another agent, sealed while this job saves the step again."""
    state = {"model": torch.nn.Linear(3, 3)}
    with agent_serve(tmp_path / "agent.log") as agent:
        for how in ({}, {"agent": agent.socket}, {"local": tmp_path / "nvme"}):
            with holdfast.Checkpointer(run, create=True, **how) as ckpt:
                step = ckpt.restore(state)
                ckpt.save(step, state).committed.result(timeout=60)
                session, workers = ckpt.parts.session, ckpt.parts.workers
                left = session.shard_writer(step + 1, CheckpointKind.PERIODIC, workers, save_number=1).begin()
                view = ckpt.save(step + 1, state).committed.result(timeout=60)
                assert view.id != left.checkpoint_id
                assert service.client.checkpoints.get(left.checkpoint_id).state == "aborted"
                late = session.shard_writer(step + 2, CheckpointKind.PERIODIC, workers, save_number=99).begin()
                failure = ckpt.save(step + 2, state).committed.exception(timeout=60)
                assert isinstance(failure.__cause__, CheckpointConflict)
                assert service.client.checkpoints.get(late.checkpoint_id).state == "uploading"
                late.abort("the test ends")
