"""A cloud's notice in a real job: the state is saved, the job leaves, and its attempt says why. Where no cloud is seen
nothing is asked."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import pytest
from tests.support.metadata_fakes import FakeAws, FakeAzure, FakeGcp, served
from tests.support.training import Job

import holdfast
from holdfast.preemption.clouds import start
from holdfast.preemption.clouds.aws import Aws
from holdfast.preemption.clouds.detect import detect_cloud
from holdfast_protocol.states import AttemptOutcome, CheckpointKind

NEVER = holdfast.Every(steps=10**9)


def of_poller() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.endswith("-notices")]


@pytest.mark.parametrize(
    ("name", "fake", "take_away"),
    [
        ("aws", FakeAws, lambda cloud: cloud.interrupt(120)),
        ("gcp", FakeGcp, lambda cloud: cloud.preempt()),
        ("azure", FakeAzure, lambda cloud: cloud.schedule("Preempt", 60)),
    ],
    ids=["aws", "gcp", "azure"],
)
def test_a_notice_saves_the_newest_step_and_ends_the_job(
    service, run, monkeypatch, name: str, fake: Callable, take_away: Callable
):
    monkeypatch.setattr(Aws, "pause_seconds", 0.05)
    monkeypatch.setenv("HOLDFAST_PREEMPTION_CLOUD", name)
    job, steps = Job(), []

    def train() -> None:
        with holdfast.Checkpointer(run, save=NEVER) as checkpointer:
            assert of_poller() == [f"holdfast-{name}-notices"]
            for step in range(checkpointer.restore(job.state), 10**6):
                job.step(step)
                steps.append(step)
                if step == 3:
                    take_away(cloud)
                time.sleep(0.005)
                checkpointer.step(step, job.state)

    with served(fake()) as (cloud, url):
        monkeypatch.setenv("HOLDFAST_METADATA_URL", url)
        with pytest.raises(holdfast.Preempted, match=name) as left:
            train()
        assert left.value.saved_step == steps[-1] >= 3
        assert cloud.refused == []
    assert of_poller() == []
    project, run_name = run.split("/")
    (attempt,) = service.client.attempts.all(project, run_name)
    assert attempt.outcome is AttemptOutcome.PREEMPTED
    (checkpoint,) = service.client.checkpoints.list(project, run_name).items
    assert (checkpoint.step, checkpoint.kind) == (steps[-1], CheckpointKind.EMERGENCY)


def test_where_no_cloud_is_seen_there_is_no_poller_and_no_request(service, run, monkeypatch, tmp_path):
    monkeypatch.setenv("HOLDFAST_PREEMPTION_CLOUD", "auto")
    monkeypatch.setattr(start, "detect_cloud", lambda: detect_cloud(tmp_path))
    real, asked = socket.socket.connect, []

    def connect(self, address):
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "localhost", "::1"):
            asked.append(address)
            raise ConnectionRefusedError(f"a request to {address} left the machine")
        return real(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect)
    job = Job()
    with holdfast.Checkpointer(run, save=NEVER) as checkpointer:
        for step in range(checkpointer.restore(job.state), 2):
            job.step(step)
            checkpointer.step(step, job.state)
        assert of_poller() == []
    assert asked == []
