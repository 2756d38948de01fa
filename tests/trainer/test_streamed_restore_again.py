"""If the rest of a `restore(state, stream=True)` did not come, the next restore() begins from a clean state. Until one
has ended well, nothing steps. Hooks of others, and of a second Checkpointer, are called beside ours."""

from __future__ import annotations

import pytest
from tests.support.late_rest import late_rest
from tests.support.training import Job, train
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

import holdfast

SAVED = 3
UNTIL = 6


@pytest.fixture(autouse=True)
def _saves_are_proven(monkeypatch):
    """Files handed over through the mount would be read again in the background."""
    monkeypatch.setenv("HOLDFAST_DIRECT_FILES", "false")


def test_hooks_that_were_registered_later_are_called_too(run, service):
    """torch goes through its hooks while ours ends the wait."""
    service.client.runs.create(service.project.name, "other")
    runs, called, hooks = (run, f"{service.project.name}/other"), [], len(_global_optimizer_pre_hooks)
    for each in runs:
        train(0, each, SAVED)
    jobs = [Job(seed=7) for _ in runs]
    with late_rest() as late, holdfast.Checkpointer(runs[0]) as one, holdfast.Checkpointer(runs[1]) as two:
        for ckpt, job in zip((one, two), jobs, strict=True):
            ckpt.restore(job.state, stream=True)
        hook = register_optimizer_step_pre_hook(lambda *_: called.append("step"))
        jobs[0].step(SAVED)
        assert (called, late.waited) == (["step"], 2)
        hook.remove()
        one.restore(jobs[0].state, stream=True)
        optimizer = jobs[0].state["optimizer"]
        optimizer.register_load_state_dict_pre_hook(lambda *_: called.append("load"))
        optimizer.load_state_dict(jobs[1].state["optimizer"].state_dict())
        assert called == ["step", "load"]
    assert len(_global_optimizer_pre_hooks) == hooks
