"""What a job measures reaches the run's curves: with its heartbeats, its rollbacks and its end."""

import itertools
import time

import pytest
import torch
from tests.support.device import meta_device, on_device
from tests.support.serve import holdfast_serve
from tests.support.training import Job

import holdfast
from holdfast.errors import ServiceUnavailable
from holdfast_client.client import Client
from holdfast_protocol.runs import parse_run


def curve(service, run, **asked):
    """(attempt, step, value) of the loss."""
    name = parse_run(run)
    found = service.client.runs.metrics_history(name.project, name.run, names=["loss"], **asked)
    return [(point.attempt, point.step, point.value) for each in found.metrics for point in each.points]


def test_a_job_of_a_few_steps_tells_them_at_its_end(run, service):
    job = Job()
    with holdfast.Checkpointer(run, save=holdfast.Every(steps=100)) as ckpt:
        for step in range(ckpt.restore(job.state), 5):
            ckpt.step(step, job.state, metrics={"loss": torch.tensor(job.step(step)), "step": step})
        ckpt.save(5, job.state, metrics={"loss": 0.5})
    told = curve(service, run)
    assert [(attempt, step) for attempt, step, _ in told] == [(1, step) for step in range(6)]
    assert told[-1] == (1, 5, 0.5)


def test_a_job_that_crashes_tells_what_it_had_measured(run, service):
    job = Job()

    def crashes():
        with holdfast.Checkpointer(run) as ckpt:
            ckpt.restore(job.state)
            for step in range(3):
                ckpt.step(step, job.state, metrics={"loss": float(step)})
            raise ValueError

    with pytest.raises(ValueError):
        crashes()
    assert curve(service, run) == [(1, 0, 0.0), (1, 1, 1.0), (1, 2, 2.0)]


def test_a_job_whose_device_fails_tells_its_crash_and_what_had_arrived(run, service):
    """After an error of CUDA each of its calls raises it."""
    job = Job()

    def crashes():
        with meta_device() as device, holdfast.Checkpointer(run, save=holdfast.Every(steps=100)) as ckpt:
            ckpt.restore(job.state)
            ckpt.step(0, job.state, metrics={"loss": on_device()})
            device.arrive(1)
            ckpt.step(1, job.state, metrics={"loss": on_device()})
            device.error = RuntimeError("CUDA error: an illegal memory access was encountered")
            raise ValueError("the script's own")

    with pytest.raises(ValueError, match="the script's own"):
        crashes()
    assert curve(service, run) == [(1, 0, 0.0)]
    assert service.client.attempts.get(*run.split("/"), 1).error_type == "ValueError"


def test_a_job_tells_at_its_end_what_its_device_has_given(run, service):
    job = Job()
    with meta_device() as device, holdfast.Checkpointer(run, save=holdfast.Every(steps=100)) as ckpt:
        ckpt.restore(job.state)
        ckpt.step(0, job.state, metrics={"loss": on_device()})
        ckpt.step(1, job.state, metrics={"loss": on_device()})
        device.arrive(1)
    assert curve(service, run) == [(1, 0, 0.0)]


def test_a_rollback_tells_why_and_cuts_the_curve(run, service):
    """Between two heartbeats: the job tells it before it goes back."""
    job = Job()
    with holdfast.Checkpointer(run, save=holdfast.Every(steps=2)) as ckpt:
        ckpt.restore(job.state)
        for step in range(6):
            handle = ckpt.step(step, job.state, metrics={"loss": 1e9 if step == 5 else 1.0})
            if handle is not None:
                handle.committed.result(60)
        step = ckpt.rollback(job.state, before=3)
        for step in range(step, 8):
            ckpt.step(step, job.state, metrics={"loss": 0.5})
    point = service.client.attempts.get(*run.split("/"), 2).resumed_from
    resumed = service.client.checkpoints.get(point).step
    assert curve(service, run) == [(1, step, 1.0) for step in range(resumed + 1)] + [
        (2, step, 0.5) for step in range(resumed + 1, 8)
    ]
    assert curve(service, run, attempt=1)[-1] == (1, 5, 1e9)


def test_heartbeats_bring_each_point_once_while_replies_are_lost(tmp_path, monkeypatch):
    """Every second answer is lost after the service has written what the heartbeat brought."""
    with holdfast_serve(tmp_path, other_settings={"HOLDFAST_LOST_AFTER_SECONDS": "2"}) as served:
        for name, value in served.environment.items():
            monkeypatch.setenv(name, value)
        job = Job()
        ckpt = holdfast.Checkpointer("demo/gpt", save=holdfast.Every(steps=10_000))
        attempts = ckpt.parts.session.brief_client.attempts
        heartbeat, lost = attempts.heartbeat, []

        def loses(*arguments):
            reply = heartbeat(*arguments)
            lost.append(len(lost) % 2 == 0 and bool(arguments[-1].metrics))
            if lost[-1]:
                raise ServiceUnavailable("the reply was lost")
            return reply

        monkeypatch.setattr(attempts, "heartbeat", loses)
        with ckpt:
            ckpt.restore(job.state)
            steps = itertools.count()
            while sum(lost) < 3:
                ckpt.step(step := next(steps), job.state, metrics={"loss": float(step)})
                time.sleep(0.05)  # a curve of more points than are asked for is thinned
        with Client() as client:
            found = client.runs.metrics_history("demo", "gpt", points=2000).metrics[0].points
    assert [(point.step, point.value) for point in found] == [(each, float(each)) for each in range(step + 1)]
