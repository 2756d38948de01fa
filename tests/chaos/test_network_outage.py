"""Service and store away for a minute during training: no step waits, and what was staged before is committed."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

import holdfast
from holdfast_client.client import Client
from holdfast_protocol.runs import EditProject
from tests.chaos.conftest import TOKEN, RestartableService
from tests.chaos.network_job import state_at
from tests.support.fault_proxy import BlackHole, FaultProxy, Throttle, fault_proxy
from tests.support.seaweedfs import SeaweedFS, seaweedfs_server

ROOT = Path(__file__).parents[2]
OUTAGE_SECONDS = 60
STEPS = 100
"""A loop of 50 ms a step makes some 1,000 in that time. One that waits for anything that is unavailable makes none."""


class Training:
    """A job, and what it has said so far; read on a thread of its own, so that its pipe never fills."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._unread: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def until(self, wanted: str, timeout_seconds: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_seconds
        while wanted not in self.lines:
            self._note(self._unread.get(timeout=max(0.0, deadline - time.monotonic())))

    def said_by_now(self) -> list[str]:
        while not self._unread.empty():
            self._note(self._unread.get())
        return list(self.lines)

    def numbers(self, word: str) -> list[int]:
        """Of the lines that begin with this word, in their order."""
        return [int(line.split()[1]) for line in self.lines if line.startswith(f"{word} ")]

    def _note(self, line: str | None) -> None:
        assert line is not None, f"the job has ended: {self.lines[-5:]}"
        self.lines.append(line)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._unread.put(line.strip())
        self._unread.put(None)


@contextmanager
def training(run: str, settings: dict[str, str]) -> Iterator[Training]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.chaos.network_job", run],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | settings,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )
    try:
        yield Training(process)
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def port_of(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port


@pytest.fixture
def weed() -> Iterator[SeaweedFS]:
    with seaweedfs_server() as server:
        yield server


@pytest.fixture
def to_store(weed: SeaweedFS) -> Iterator[FaultProxy]:
    with fault_proxy(port_of(weed.endpoint)) as proxy:
        yield proxy


@pytest.fixture
def service_settings(weed: SeaweedFS, to_store: FaultProxy) -> dict[str, str]:
    return {"HOLDFAST_STORE": f"{weed.store_url}&public_endpoint={to_store.url}", **weed.environment}


@pytest.fixture
def to_service(service: RestartableService, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    # The jobs find everything else as a user has it: the settings are the defaults.
    monkeypatch.delenv("HOLDFAST_RETRY_SECONDS")
    with fault_proxy(port_of(service.url)) as proxy:
        yield proxy


@pytest.mark.timeout(600)
def test_a_minute_without_service_and_store_costs_no_step_and_no_staged_checkpoint(
    service: RestartableService, weed: SeaweedFS, to_service: FaultProxy, to_store: FaultProxy, tmp_path: Path
) -> None:
    """Two jobs at once: one with the defaults, and one that has a local tier as well."""
    with Client() as client:
        client.projects.edit("tests", EditProject())
    found = {"HOLDFAST_URL": to_service.url, "HOLDFAST_TOKEN": TOKEN}
    with (
        training("tests/plain", found) as plain,
        training("tests/local", found | {"HOLDFAST_LOCAL_DIR": str(tmp_path / "nvme")}) as local,
    ):
        jobs = (plain, local)
        for job in jobs:
            job.until("committed 0")
        # The saves are under way for as long as it takes to pull the plug.
        sent = to_store.count("put")
        to_store.script(Throttle(1000), on="put")
        to_store.script(BlackHole(), on="put", times=None)
        for job in jobs:
            job.go_on()
            job.until("staged 1")
        to_store.wait_for("put", sent + 1)
        for proxy in (to_service, to_store):
            proxy.refuse()
        service.stop()
        weed.stop()
        before = [job.said_by_now() for job in jobs]
        time.sleep(OUTAGE_SECONDS)
        local.until(f"step {5 * STEPS}")  # a busy machine makes it longer
        by_then = [job.said_by_now() for job in jobs]
        weed.start()
        service.start()
        for proxy in (to_service, to_store):
            proxy.heal()
            proxy.accept()
        for job, earlier, later in zip(jobs, before, by_then, strict=True):
            assert "committed 1" not in later, "the save was under way when the plug was pulled"
            assert sum(line.startswith("step ") for line in later[len(earlier) :]) > STEPS
            job.until("closed")
            assert job.process.wait(60) == 0
            steps = job.numbers("step")
            assert steps == list(range(2, 2 + len(steps)))
            assert job.numbers("SaveFailed") == []
            assert job.numbers("committed")[:2] == [0, 1]
        assert plain.numbers("SaveDeclined"), "without a local tier one save is in flight at a time"
        assert local.numbers("SaveDeclined") == []
        # Every save of the outage was kept on the node, and committed in order.
        assert len(local.numbers("committed")) > 5
        assert local.numbers("committed") == sorted(local.numbers("committed"))
    # Backwards: a job that goes back leaves what came after off its line.
    for run, at in (("tests/local", local.numbers("committed")[-2]), ("tests/local", 1), ("tests/plain", 1)):
        state = state_at(0)
        with holdfast.Checkpointer(run) as ckpt:
            assert ckpt.restore(state, at=str(at)) == at + 1
        assert torch.equal(state["big"]["t"], state_at(at)["big"]["t"])
        assert state["notes"] == {"step": at}
