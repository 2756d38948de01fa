"""NaN never becomes the restore point, and a running job goes back by itself: rollback(), restore(skip_diverged=…)."""

from __future__ import annotations

import logging
import random

import pytest
import torch
from gloo import run_ranks
from tests.support.training import Job, values

import holdfast
from holdfast.errors import ConfigurationError, NoRestorePoint, NotRestored, StaleAttempt, StateMismatchError
from holdfast.session.environment import environment
from holdfast_client.client import Client
from holdfast_protocol.runs import parse_run

UNTIL = 14
EVERY = 2


def poisoned_training(rank, run, bad_batch):
    """A DDP training whose batch of that number holds NaN on rank 1. Goes back by itself, and finishes."""
    job = Job(rank, "ddp")
    loader = job.state["dataloader"]
    draw, drawn_at_rollback = loader.batch, []

    def batch():
        drawn = draw()
        return drawn * float("nan") if rank == 1 and loader.given == bad_batch else drawn

    loader.batch = batch
    name = parse_run(run)
    with holdfast.Checkpointer(run, save=holdfast.Every(steps=EVERY), check_finite=True) as ckpt:
        step = ckpt.restore(job.state)
        while step < UNTIL:
            loss = job.step(step)
            handle = ckpt.step(step, job.state, metrics={"loss": loss})
            if handle is not None and handle.diverged:
                assert handle.committed.result(60).health == "diverged"
                with Client() as client:
                    point = client.restores.restore_point(name.project, name.run).restore_point
                assert point.step < bad_batch - 1, "the restore point is from before"
                step = ckpt.rollback(job.state, skip_data=True)
                drawn_at_rollback.append((step, loader.given))
                continue
            if handle is not None:
                assert handle.committed.result(60).health == "ok"
            step += 1
        ckpt.save(UNTIL, job.state, metrics={"loss": loss})
    return values(job.state), drawn_at_rollback


def training_without_those_batches(rank, skipped_at, skipped):
    job = Job(rank, "ddp")
    for step in range(UNTIL):
        if step == skipped_at:
            for _ in range(skipped):
                job.state["dataloader"].batch()
        job.step(step)
    return values(job.state)


@pytest.mark.rule("latest-follows-lineage")
def test_a_nan_at_a_random_step_never_becomes_the_restore_point_and_training_recovers_and_finishes(run, service):
    seed = random.SystemRandom().randrange(2**32)
    bad_batch = random.Random(seed).randrange(EVERY + 1, UNTIL - 1)
    print(f"seed {seed}: the batch number {bad_batch} of rank 1 holds NaN")

    trained = run_ranks(poisoned_training, 2, run, bad_batch)
    [(back_at, drawn)] = trained[0][1]
    assert trained[1][1] == [(back_at, drawn)], "all ranks go back to the same step"
    expected = run_ranks(training_without_those_batches, 2, back_at, drawn - back_at)
    for rank in range(2):
        assert trained[rank][0] == expected[rank], f"rank {rank}"

    name = parse_run(run)
    found = list(service.client.checkpoints.all(name.project, name.run))
    assert [one.step for one in found if one.health == "diverged"] == [back_at + EVERY - 1]
    assert next(one.health_reason for one in found if one.health == "diverged").startswith("model/")
    point = service.client.restores.restore_point(name.project, name.run).restore_point
    assert (point.step, point.attempt) == (UNTIL, 2)
    [second, first] = service.client.attempts.list(name.project, name.run).items
    assert (first.outcome, first.rolled_back_at is not None, second.rolled_back_at) == ("fenced", True, None)
    assert second.outcome == "finished"


def saved(ckpt, job, steps):
    for step in steps:
        job.step(step)
        ckpt.save(step, job.state, metrics={"loss": 1.0}).committed.result(60)


@pytest.mark.rule("latest-follows-lineage")
def test_back_by_steps_and_before_and_what_is_kept(run, service):
    job = Job()
    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore(job.state)
        seen = {}
        for step in range(4):
            saved(ckpt, job, [step])
            seen[step] = values(job.state)
        assert ckpt.rollback(job.state, steps=2) == 2
        assert values(job.state) == seen[1], "two steps back from step 3"
        saved(ckpt, job, [2])
        assert values(job.state) == seen[2], "the same steps again give the same state"
        position = job.state["dataloader"].given
        assert ckpt.rollback(job.state, before=1, keep=["dataloader", "notes"]) == 1
        assert job.state["dataloader"].given == position
        assert job.state["notes"] == {"seen": [0, 1, 2]}
        saved(ckpt, job, [1])
    name = parse_run(run)
    point = service.client.restores.restore_point(name.project, name.run).restore_point
    assert (point.step, point.attempt) == (1, 3), "what was saved beyond it is never the latest again"


def test_a_save_in_flight_is_given_up_and_the_job_goes_on_saving(run, service, monkeypatch):
    monkeypatch.setattr("holdfast.health.rollback._FINISH_SECONDS", 0.0)
    job = Job()
    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore(job.state)
        saved(ckpt, job, [0])
        seen = values(job.state)
        job.step(1)
        in_flight = ckpt.save(1, job.state)
        assert ckpt.rollback(job.state, before=1) == 1
        assert values(job.state) == seen
        assert in_flight.committed.done(), "committed just in time, or given up"
        saved(ckpt, job, [1])
        ckpt.step(2, job.state)
    assert ckpt.stats.superseded + ckpt.stats.committed == 3
    name = parse_run(run)
    point = service.client.restores.restore_point(name.project, name.run).restore_point
    assert (point.step, point.attempt) == (1, 2)


def test_without_a_point_to_go_back_to_nothing_changes(run, service):
    job = Job()
    with holdfast.Checkpointer(run) as ckpt:
        with pytest.raises(ConfigurationError, match="too early"):
            ckpt.rollback(job.state)
        ckpt.restore(job.state)
        saved(ckpt, job, [3])
        before = values(job.state)
        with pytest.raises(NoRestorePoint):
            ckpt.rollback(job.state, before=3)
        for wrong in ({"steps": 0}, {"steps": 1, "before": 2}, {"keep": ["ema"]}):
            with pytest.raises(ConfigurationError):
                ckpt.rollback(job.state, **wrong)
        with pytest.raises(ConfigurationError, match="no data loader"):
            ckpt.rollback({"model": job.state["model"]}, skip_data=True)
        assert values(job.state) == before
        saved(ckpt, job, [4])
    name = parse_run(run)
    assert [each.number for each in service.client.attempts.list(name.project, name.run).items] == [1]


@pytest.mark.rule("latest-follows-lineage")
def test_after_a_rollback_that_failed_nothing_is_saved_until_a_restore_has_ended_well(run, service):
    job, name = Job(), parse_run(run)
    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore(job.state)
        saved(ckpt, job, [0, 1])
        before = values(job.state)
        with pytest.raises(StateMismatchError):
            ckpt.rollback(job.state | {"model": torch.nn.Linear(2, 2)}, before=1)
        assert values(job.state) == before
        for save in (ckpt.save, ckpt.step):
            with pytest.raises(NotRestored, match="attempt 2 has not restored one"):
                save(2, job.state)
        assert ckpt.parts.session.has_begun, "else what the steps before have agreed on outlives the next restore"
        assert ckpt.restore(job.state, at="0") == 1
        saved(ckpt, job, [1])
    newest = service.client.attempts.list(name.project, name.run).items[0]
    point = service.client.restores.restore_point(name.project, name.run, before_step=1).restore_point
    assert (point.step, point.attempt, point.checkpoint_id) == (0, 1, newest.resumed_from)


def test_a_job_that_was_fenced_does_not_fence_its_successor_by_going_back(run, service):
    job, other = Job(), Job()
    ckpt = holdfast.Checkpointer(run)
    ckpt.restore(job.state)
    saved(ckpt, job, [0, 1])
    with holdfast.Checkpointer(run) as successor:
        assert successor.restore(other.state) == 2
        with pytest.raises(StaleAttempt):
            ckpt.rollback(job.state)
        saved(successor, other, [2])
    with pytest.raises(StaleAttempt):
        ckpt.step(2, job.state)
    ckpt.close()


def test_a_diverged_checkpoint_is_restored_only_where_it_is_asked_for(run):
    job = Job()
    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore(job.state)
        saved(ckpt, job, [0])
        job.step(1)
        poisoned = values(job.state)
        handle = ckpt.save(1, job.state, metrics={"val/lm_loss": float("nan"), "grad_norm": 1.0})
        assert handle.diverged == "the metric val/lm_loss is nan"
        assert handle.committed.result(60).health_reason == handle.diverged
    with holdfast.Checkpointer(run) as ckpt:
        assert ckpt.restore(Job().state) == 1
    with holdfast.Checkpointer(run) as ckpt:
        again = Job()
        assert ckpt.restore(again.state, skip_diverged=False) == 2
        assert values(again.state) == poisoned
    with holdfast.Checkpointer(run) as ckpt, pytest.raises(NoRestorePoint):
        ckpt.restore(Job().state, at="1")
    with holdfast.Checkpointer(run) as ckpt:
        assert ckpt.restore(Job().state, at="1", skip_diverged=False) == 2


def test_an_infinite_gradient_norm_is_no_divergence_and_a_rule_that_fails_ends_nothing(run, caplog):
    model = torch.nn.Linear(2, 2)
    asked = []

    def rule(step, metrics):
        asked.append((step, metrics))
        if step == 1:
            raise KeyError("accuracy")
        return "the teacher says so" if step == 2 else step != 3

    with holdfast.Checkpointer(run, healthy=rule) as ckpt:
        ckpt.restore({"model": model})
        handles = [
            ckpt.save(step, {"model": model}, metrics={"grad_norm": float("inf"), "loss": torch.tensor(2.0)})
            for step in range(4)
        ]
        assert [handle.committed.result(60).health_reason for handle in handles] == [
            None,
            None,
            "the teacher says so",
            "the rule rule says so",
        ]
    assert asked[0] == (0, {"grad_norm": float("inf"), "loss": 2.0})
    assert "healthy=rule failed at step 1 (KeyError: 'accuracy'), so only the losses are looked at" in caplog.text


def test_a_missing_component_is_said_once_listed_and_refused_with_strict(run, service, caplog):
    job = Job(loader=False)
    whole = job.state
    without = {key: value for key, value in whole.items() if key != "lr_scheduler"}
    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore(whole)
        assert ckpt.save(0, whole).committed.result(60).missing_components == []
        with caplog.at_level(logging.WARNING, "holdfast"):
            for step in (1, 2):
                assert ckpt.save(step, without).committed.result(60).missing_components == ["lr_scheduler"]
        assert ckpt.save(3, whole).committed.result(60).missing_components == []
    assert caplog.text.count("lacks 'lr_scheduler'") == 1
    with holdfast.Checkpointer(run, strict=True) as ckpt:
        assert ckpt.restore(Job(loader=False).state) == 4
        with pytest.raises(holdfast.errors.MissingComponent, match="lr_scheduler"):
            ckpt.save(4, without)
        assert ckpt.save(4, whole).committed.result(60).step == 4
    with holdfast.Checkpointer(run, strict=True, drop=["lr_scheduler"]) as ckpt:
        ckpt.restore(without)
        assert ckpt.save(5, without).committed.result(60).missing_components == []


def test_another_environment_is_told_on_resume(run, service, caplog, monkeypatch):
    model = {"model": torch.nn.Linear(2, 2)}
    monkeypatch.setattr(
        "holdfast.session.session.environment", lambda hosts: environment(hosts) | {"git_commit": "e" * 40}
    )
    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore(model)
        ckpt.save(0, model)
    name = parse_run(run)
    told = service.client.attempts.get(name.project, name.run, 1).environment
    assert {"python", "torch", "holdfast", "git_commit"} <= told.keys()
    now = {**told, "torch": "9.9.0", "git_commit": "f" * 40}
    looked: list[int] = []
    monkeypatch.setattr("holdfast.session.session.environment", lambda _hosts: looked.append(1) or now)
    with caplog.at_level(logging.WARNING, "holdfast"), holdfast.Checkpointer(run) as ckpt:
        ckpt.restore(model)
    assert [record.getMessage() for record in caplog.records if "since attempt 1" in record.getMessage()] == [
        f"since attempt 1, which saved this, torch was {told['torch']} and is 9.9.0",
        f"since attempt 1, which saved this, the script's git commit was {told['git_commit']} and is {'f' * 40}",
    ]
    assert looked == [1]
