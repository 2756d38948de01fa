"""If the rest of a `restore(state, stream=True)` did not come, the next restore() begins from a clean state. Until one
has ended well, nothing steps. Hooks of others, and of a second Checkpointer, are called beside ours."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import replace

import pytest
import torch
from gloo import run_ranks
from tests.support.late_rest import late_rest
from tests.support.training import Job, train, values
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

import holdfast
from holdfast import errors
from holdfast.restore.checkpoint_reader import CheckpointSource
from holdfast.restore.streamed_rest import StreamedRest
from holdfast.state.load import LoadPlan

SAVED = 3
UNTIL = 6


@pytest.fixture(autouse=True)
def _saves_are_proven(monkeypatch):
    """Files handed over through the mount would be read again in the background."""
    monkeypatch.setenv("HOLDFAST_DIRECT_FILES", "false")


def failing(error):
    def fail(*_, **__):
        raise error

    return fail


def scaled_job():
    torch.manual_seed(0)
    model = nn.Linear(5, 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return {"model": model, "optimizer": optimizer, "scaler": torch.amp.GradScaler("cpu", init_scale=4.0)}


def backward(state, step):
    batch = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
    state["scaler"].scale(state["model"](batch).pow(2).mean()).backward()


def scaled_step(state, step):
    """Gradients are cleared after the step, not before it."""
    backward(state, step)
    state["scaler"].step(state["optimizer"])
    state["scaler"].update()
    state["optimizer"].zero_grad()


def test_gradients_of_a_step_that_was_not_taken_are_no_part_of_the_next(run, monkeypatch):
    state, ends = scaled_job(), []
    with holdfast.Checkpointer(run, strict=True) as ckpt:
        ckpt.restore(state)
        for step in range(2):
            scaled_step(state, step)
            ckpt.save(step, state).committed.result(timeout=60)
    for met in ("nothing", "an error", "no step"):
        state = scaled_job()
        with late_rest(), holdfast.Checkpointer(run, strict=True) as ckpt:
            start = ckpt.restore(state, stream=met != "nothing")
            if met == "an error":
                with monkeypatch.context() as patch:
                    patch.setattr(CheckpointSource, "read", failing(errors.ServiceUnavailable("it is away")))
                    with pytest.raises(errors.ServiceUnavailable):
                        scaled_step(state, start)
            elif met == "no step":
                backward(state, start)
            if met != "nothing":
                start = ckpt.restore(state, stream=True)
            scaled_step(state, start)
            ends.append((start, [each.tolist() for each in state["model"].parameters()], state["scaler"].state_dict()))
    assert ends[1:] == ends[:1] * 2


def test_a_restore_that_fails_after_it_lets_no_optimizer_step(run):
    train(0, run, SAVED)
    job = Job(seed=7)
    with late_rest(), holdfast.Checkpointer(run, strict=True) as ckpt:
        ckpt.restore(job.state, stream=True)
        with pytest.raises(errors.ConfigurationError, match="not usable"):
            ckpt.restore(job.state, at="no:such:point")
        before = [each.tolist() for each in job.state["model"].parameters()]
        for use in (lambda: job.step(SAVED), job.state["optimizer"].state_dict, lambda: ckpt.save(SAVED, job.state)):
            with pytest.raises(errors.NotRestored, match=r"rest of step 2 .* has not come"):
                use()
        assert [each.tolist() for each in job.state["model"].parameters()] == before
        for step in range(ckpt.restore(job.state, stream=True), UNTIL):
            job.step(step)
    assert values(job.state) == train(0, None, UNTIL).final


def test_damage_that_no_step_has_met_counts_at_the_next_restore(run, monkeypatch):
    train(0, run, SAVED)
    job = Job(seed=7)
    with late_rest() as late, holdfast.Checkpointer(run, strict=True) as ckpt:
        assert ckpt.restore(job.state, stream=True) == SAVED
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointSource, "read", failing(errors.IntegrityError("It is not as its layout says")))
            late.let_go()
        assert ckpt.restore(job.state, stream=True) == SAVED - 1
        for step in range(SAVED - 1, UNTIL):
            job.step(step)
    assert values(job.state) == train(0, None, UNTIL).final


def one_cannot_apply(rank, run):
    """Rank 1 fails where all that comes first is put into the state."""
    whole = train(rank, None, UNTIL, kind="ddp")
    train(rank, run, SAVED, kind="ddp")
    job = Job(rank, "ddp", seed=7)
    with late_rest(), holdfast.Checkpointer(run, strict=True) as ckpt:
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                refused = errors.StateMismatchError("model", "it has two values here", "build it as it was saved")
                patch.setattr(LoadPlan, "apply_first", failing(refused))
            with pytest.raises(errors.StateMismatchError):
                ckpt.restore(job.state, stream=True)
        for step in range(ckpt.restore(job.state, stream=True), UNTIL):
            job.step(step)
    return values(job.state) == whole.final


def test_ranks_agree_after_a_restore_that_one_of_them_refused(run):
    assert run_ranks(one_cannot_apply, 2, run) == [True, True]


def one_cannot_give_up(rank, run):
    """What rank 1 still reads does not end."""
    whole = train(rank, None, UNTIL, kind="ddp")
    train(rank, run, SAVED, kind="ddp")
    job = Job(rank, "ddp", seed=7)
    with late_rest(), holdfast.Checkpointer(run, strict=True) as ckpt:
        ckpt.restore(job.state, stream=True)
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(StreamedRest, "stop", lambda coming, seconds: False)
            with pytest.raises(errors.NotRestored, match="may still write into the state") as told:
                ckpt.restore(job.state)
        for step in range(ckpt.restore(job.state, stream=True), UNTIL):
            job.step(step)
    return "On rank 1" in str(told.value), values(job.state) == whole.final


def test_no_rank_waits_for_one_that_cannot_give_the_rest_up(run):
    assert run_ranks(one_cannot_give_up, 2, run) == [(True, True), (False, True)]


def test_a_rest_without_a_thread_raises_at_the_step(run, monkeypatch):
    start_thread = threading.Thread.start

    def start(thread):
        if thread.name == "holdfast-rest":
            raise RuntimeError("can't start new thread")
        start_thread(thread)

    train(0, run, SAVED)
    job = Job(seed=7)
    with holdfast.Checkpointer(run, strict=True) as ckpt:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            assert ckpt.restore(job.state, stream=True) == SAVED
        with pytest.raises(RuntimeError, match="can't start new thread"):
            job.step(SAVED)
        for step in range(ckpt.restore(job.state, stream=True), UNTIL):
            job.step(step)
    assert values(job.state) == train(0, None, UNTIL).final


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


def test_what_was_closed_before_the_rest_came_keeps_no_state_alive(run):
    train(0, run, SAVED)
    job = Job()
    with late_rest(), holdfast.Checkpointer(run) as ckpt:
        ckpt.restore(job.state, stream=True)
    model = weakref.ref(job.state["model"])
    del job, ckpt
    gc.collect()
    assert model() is None


def with_rests(monkeypatch, change):
    """`change` gets each rest, and gives the one that is begun."""
    begin = StreamedRest.__init__
    monkeypatch.setattr(StreamedRest, "__init__", lambda self, rest, verdict: begin(self, change(rest), verdict))


def test_a_restore_does_not_wait_for_the_end_of_the_lease_of_the_one_before(run, monkeypatch):
    let_go, has_ended = threading.Event(), threading.Event()

    def end_late():
        let_go.wait(60)
        has_ended.set()

    def change(rest):
        rest.held.callback(end_late)
        return rest

    train(0, run, SAVED)
    job = Job(seed=7)
    with holdfast.Checkpointer(run, strict=True) as ckpt:
        with monkeypatch.context() as patch, late_rest():
            with_rests(patch, change)
            ckpt.restore(job.state, stream=True)
            assert ckpt.restore(job.state) == SAVED
        assert not has_ended.is_set()
        let_go.set()
        assert has_ended.wait(60)


def test_a_read_that_does_not_end_is_waited_for_within_bounds(run, monkeypatch):
    let_go = threading.Event()

    def change(rest):
        def read():
            assert let_go.wait(60)
            return rest.read()

        return replace(rest, read=read, stop_reading=lambda: None)

    train(0, run, SAVED)
    job = Job(seed=7)
    monkeypatch.setenv("HOLDFAST_COLLECTIVE_TIMEOUT_SECONDS", "0.1")
    with holdfast.Checkpointer(run, strict=True) as ckpt:
        with monkeypatch.context() as patch:
            with_rests(patch, change)
            ckpt.restore(job.state, stream=True)
            with pytest.raises(errors.NotRestored, match="may still write into the state"):
                ckpt.restore(job.state)
        let_go.set()
        assert ckpt.parts.rest.coming.is_over.wait(60)
        for step in range(ckpt.restore(job.state), UNTIL):
            job.step(step)
    assert values(job.state) == train(0, None, UNTIL).final
