"""`overlap=True`: a training whose steps come while the last save is still copied is, bit for bit, one without
Holdfast, and each save is the state as it was."""

from __future__ import annotations

import copy
import functools
import logging
import sys
from types import SimpleNamespace

import pytest
import torch
from gloo import run_ranks
from tests.support.late_copies import late_copies
from tests.support.training import Job, random_numbers, train, values
from torch import nn

import holdfast
from holdfast import errors
from holdfast.preemption.notice import Notice
from holdfast.save.job import SaveState
from holdfast.staging.overlap import LateCopy

STEPS = 4
BACKWARDS = range(STEPS - 1, -1, -1)
"""Each restore leaves the later steps off the lineage."""


def trained(rank, run, kind="plain", optimizer="adamw"):
    """Losses, the state after each step, and the state and random numbers at the end."""
    job, losses, saved, handles = Job(rank, kind, optimizer), {}, [], []
    with late_copies() as copies, holdfast.Checkpointer(run, overlap=True, strict=True) as ckpt:
        ckpt.restore(job.state)
        for step in range(STEPS):
            losses[step] = job.step(step)
            saved.append(copy.deepcopy(values(job.state)))
            handles.append(ckpt.save(step, job.state))
        copies.let_go()
        for handle in handles:
            handle.committed.result(timeout=60)
        assert copies.steps_that_waited == STEPS - 2, "the first save is copied before it returns"
        return losses, saved, values(job.state), random_numbers()


def restored(rank, run, at, kind="plain", optimizer="adamw"):
    job = Job(rank, kind, optimizer, seed=7)
    with holdfast.Checkpointer(run) as ckpt:
        assert ckpt.restore(job.state, at=str(at)) == at + 1
    return values(job.state)


def check(whole, overlapped, come_back):
    losses, saved, final, rng = overlapped
    assert losses == whole.losses
    assert final == whole.final
    assert rng == whole.rng
    assert come_back == saved[::-1]


@pytest.mark.rule("overlap-is-guarded")
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "momentum"])
def test_training_goes_on_as_without_holdfast_and_each_save_is_the_state_as_it_was(run, optimizer):
    whole = train(0, None, STEPS, optimizer=optimizer)
    overlapped = trained(0, run, optimizer=optimizer)
    check(whole, overlapped, [restored(0, run, at, optimizer=optimizer) for at in BACKWARDS])


@pytest.mark.rule("overlap-is-guarded")
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_same_on_two_ranks(run, kind):
    whole = run_ranks(functools.partial(train, kind=kind), 2, None, STEPS)
    overlapped = run_ranks(functools.partial(trained, kind=kind), 2, run)
    come_back = [run_ranks(functools.partial(restored, kind=kind), 2, run, at) for at in BACKWARDS]
    for rank in range(2):
        check(whole[rank], overlapped[rank], [each[rank] for each in come_back])


class Normed(nn.Module):
    """Forward changes its buffers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 5))

    def forward(self, x):
        return self.layers(x)


def accumulated(ckpt, options):
    """Two batches a step; a save after each, so that forward and backward of the next run beside the copy."""
    torch.manual_seed(0)
    model = Normed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
    state = {"model": model, "optimizer": optimizer, "scaler": torch.amp.GradScaler("cpu", init_scale=4.0)}
    found, saved, handle = [], [], None
    if ckpt is not None:
        ckpt.restore(state)
    for step in range(STEPS):
        for _ in range(2):
            loss = model(torch.randn(6, 5)).pow(2).mean()
            state["scaler"].scale(loss).backward()
            found.append(float(loss.detach()))
        if step == 2:
            next(model.parameters()).grad.fill_(float("inf"))  # the scaler leaves this step out
        state["scaler"].step(optimizer)
        state["scaler"].update()
        optimizer.zero_grad()
        saved.append(bits(state))
        if ckpt is not None and step != 1:  # after step 1 the copy would wait for a step that is left out
            handle = ckpt.save(step, state)
    return found, saved, handle


def bits(state):
    slots = [slot for each in state["optimizer"].state.values() for slot in each.values()]
    tensors = [*state["model"].state_dict().values(), *slots]
    return [each.detach().numpy().tobytes() for each in tensors], copy.deepcopy(state["scaler"].state_dict())


@pytest.mark.rule("overlap-is-guarded")
@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=str)
def test_accumulated_gradients_a_scaler_and_buffers_that_forward_changes(run, options):
    with late_copies() as copies, holdfast.Checkpointer(run, overlap=True, strict=True) as ckpt:
        found, saved, last = accumulated(ckpt, options)
        copies.let_go()
        last.committed.result(timeout=60)
    assert (found, saved) == accumulated(None, options)[:2]
    for at in (3, 2, 0):
        model = Normed()
        state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), **options)}
        state["scaler"] = torch.amp.GradScaler("cpu")
        with holdfast.Checkpointer(run) as ckpt:
            ckpt.restore(state, at=str(at))
        assert bits(state) == saved[at], f"step {at}"


def committed_steps(service, run):
    return sorted(view.step for view in service.client.checkpoints.all(*run.split("/")) if view.state == "committed")


@pytest.mark.rule("overlap-is-guarded")
@pytest.mark.parametrize("local", [False, True], ids=["at once", "through the spool"])
def test_a_torn_save_does_not_commit_and_the_job_goes_on(run, service, tmp_path, caplog, local):
    job = Job(optimizer="momentum")
    folder = tmp_path / "nvme" if local else None
    with late_copies() as copies, holdfast.Checkpointer(run, overlap=True, local=folder) as ckpt:
        ckpt.restore(job.state)
        handles = []
        for step in range(3):
            job.step(step)
            handles.append(ckpt.save(step, job.state))
            if step > 0:
                with torch.no_grad():
                    job.state["model"].up.weight.mul_(0.5)
        job.step(3)
        _, torn, whole = handles
        why = r"step 1 was not committed.*'model/up.weight' was written to while it was copied"
        assert isinstance(torn.committed.exception(timeout=60), errors.SaveFailed)
        with pytest.raises(errors.SaveFailed, match=why):
            torn.committed.result()
        assert torn.state is SaveState.LOST
        assert isinstance(torn.staged.exception(), errors.SaveFailed)
        assert whole.committed.result(timeout=60).step == 2, "that tensor is copied first now"
        assert (ckpt.stats.failed, ckpt.stats.committed, len(copies.begun)) == (1, 2, 2)
    assert committed_steps(service, run) == [0, 2]
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "step 1 was not committed. 'model/up.weight' was written to" in warnings[0]


@pytest.mark.rule("overlap-is-guarded")
@pytest.mark.parametrize("local", [False, True], ids=["at once", "through the spool"])
def test_a_write_that_ends_after_the_copy_and_before_the_seal_does_not_commit(run, service, tmp_path, caplog, local):
    job = Job(optimizer="momentum")
    folder = tmp_path / "nvme" if local else None
    with late_copies() as copies, holdfast.Checkpointer(run, overlap=True, local=folder) as ckpt:
        ckpt.restore(job.state)
        job.step(0)
        ckpt.save(0, job.state).committed.result(timeout=60)
        job.step(1)
        of = ckpt.parts.pipeline._chunks

        def writes_late(*arguments):
            yield from of(*arguments)
            with torch.no_grad():
                job.state["model"].up.weight.mul_(0.5)
            assert copies.begun[0].wait(0)

        ckpt.parts.pipeline._chunks = writes_late
        handle = ckpt.save(1, job.state)
        copies.let_go()
        with pytest.raises(errors.SaveFailed, match=r"'model/up.weight' was written to"):
            handle.committed.result(timeout=60)
        assert handle.state is SaveState.LOST
    assert committed_steps(service, run) == [0]
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "step 1 was not committed. 'model/up.weight' was written to" in warnings[0]


@pytest.mark.rule("overlap-is-guarded")
def test_a_training_that_always_writes_after_a_save_loses_none(run, service):
    job = Job(optimizer="momentum")
    with holdfast.Checkpointer(run, overlap=True, strict=True) as ckpt:
        ckpt.restore(job.state)
        for step in range(3):
            job.step(step)
            ckpt.save(step, job.state)
            with torch.no_grad():
                job.state["model"].up.weight.mul_(0.5)
    assert committed_steps(service, run) == [0, 1, 2]


@pytest.mark.parametrize("local", [False, True], ids=["at once", "through the spool"])
def test_a_copy_that_ends_by_any_error_fails_its_save_and_the_next_one_goes_well(run, tmp_path, monkeypatch, local):
    job = Job(optimizer="momentum")
    with holdfast.Checkpointer(run, overlap=True, local=tmp_path / "nvme" if local else None) as ckpt:
        ckpt.restore(job.state)
        job.step(0)
        ckpt.save(0, job.state).committed.result(timeout=60)
        job.step(1)

        def ends(late, copier):
            run_late(late, SimpleNamespace(copy_on_host=lambda _: sys.exit("no more")))

        run_late = LateCopy.run
        with monkeypatch.context() as patch:
            patch.setattr(LateCopy, "run", ends)
            handle = ckpt.save(1, job.state)
            with pytest.raises(errors.SaveFailed, match="no more"):
                handle.committed.result(timeout=60)
        job.step(2)
        assert ckpt.save(2, job.state).committed.result(timeout=60).step == 2


def torn_on_one_rank(rank, run):
    job = Job(rank, "ddp")
    with late_copies() as copies, holdfast.Checkpointer(run, overlap=True) as ckpt:
        ckpt.restore(job.state)
        ended = []
        for step in range(3):
            job.step(step)
            handle = ckpt.save(step, job.state)
            if rank == 0 and step == 1:
                with torch.no_grad():  # of each tensor one rank stores it
                    torch._foreach_add_(list(job.state["model"].parameters()), 0)
            if step > 0:
                copies.let_go()
            ended.append(type(handle.committed.exception(timeout=60)))
    return ended


def test_a_save_that_is_torn_on_one_rank_commits_on_none_and_the_next_one_does(run, service):
    assert run_ranks(torn_on_one_rank, 2, run) == [[type(None), errors.SaveFailed, type(None)]] * 2
    assert committed_steps(service, run) == [0, 2]


@pytest.mark.rule("overlap-is-guarded")
def test_a_rollback_waits_for_the_copy_that_still_reads_the_state(run, monkeypatch):
    job, saved = Job(), []
    with late_copies() as copies, holdfast.Checkpointer(run, overlap=True) as ckpt:
        ckpt.restore(job.state)
        for step in range(2):
            job.step(step)
            saved.append(copy.deepcopy(values(job.state)))
            handle = ckpt.save(step, job.state)
        saver = ckpt.parts.saver
        wait = saver.wait_for_copies

        def waits():
            assert not copies.begun[-1].wait(0)
            copies.let_go()
            wait()
            assert copies.begun[-1].wait(0)

        monkeypatch.setattr(saver, "wait_for_copies", waits)
        assert ckpt.rollback(job.state, before=1) == 1
        assert values(job.state) == saved[0]
    left = Job(seed=7)
    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore(left.state, at=handle.committed.result(timeout=60).id)
    assert values(left.state) == saved[1]


def test_a_job_that_leaves_saves_the_step_again_whose_save_in_flight_is_torn(run, service):
    job = Job(optimizer="momentum")
    with late_copies() as copies, holdfast.Checkpointer(run, overlap=True) as ckpt:
        ckpt.restore(job.state)
        job.step(0)
        ckpt.save(0, job.state).committed.result(timeout=60)
        job.step(1)
        torn = ckpt.save(1, job.state)
        with torch.no_grad():
            job.state["model"].up.weight.mul_(0.5)
        pipeline = ckpt.parts.pipeline
        wait_idle = pipeline.wait_idle
        pipeline.wait_idle = lambda seconds: copies.let_go() or wait_idle(seconds)
        ckpt.parts.preemption.give_notice(Notice("SIGTERM", "a signal", None))
        with pytest.raises(holdfast.Preempted) as told:
            ckpt.step(1, job.state)
        assert isinstance(torn.committed.exception(timeout=60), errors.SaveFailed)
        assert told.value.saved_step == 1
    assert committed_steps(service, run) == [0, 1]
    left = Job(optimizer="momentum", seed=7)
    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore(left.state)
    assert values(left.state) == values(job.state)


def test_the_wait_of_a_step_is_told_with_the_save(run, service):
    job = Job()
    with late_copies() as copies, holdfast.Checkpointer(run, overlap=True) as ckpt:
        ckpt.restore(job.state)
        job.step(0)
        ckpt.save(0, job.state).committed.result(timeout=60)
        job.step(1)
        handle = ckpt.save(1, job.state)
        assert (handle.state, handle.staged.done()) == (SaveState.QUEUED, False)
        before = ckpt.stats.blocked_seconds
        job.step(2)
        view = handle.committed.result(timeout=60)
        assert handle.staged.done()
        (late,) = copies.begun
        assert late.waited_seconds > 0
        assert ckpt.stats.blocked_seconds == pytest.approx(before + late.waited_seconds)
        assert view.blocked_seconds > late.waited_seconds
        assert ckpt.parts.session.progress.read()["save_blocked_seconds"] > 0


def test_without_overlap_nothing_is_copied_beside_training(run):
    job = Job()
    with late_copies() as copies, holdfast.Checkpointer(run, stage_every=1) as ckpt:
        ckpt.restore(job.state)
        job.step(0)
        assert ckpt.save(0, job.state).staged.done()
        job.step(1)
        ckpt.step(1, job.state)
    assert not copies.begun
