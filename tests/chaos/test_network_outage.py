"""Service and store away for a minute during training: no step waits, and what was staged before is committed."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

import holdfast
from holdfast_client.client import Client
from holdfast_protocol.runs import EditProject
from tests.chaos.conftest import TOKEN, RestartableService
from tests.chaos.network_job import state_at
from tests.support.fault_proxy import FaultProxy, Throttle, fault_proxy
from tests.support.seaweedfs import SeaweedFS, seaweedfs_server

ROOT = Path(__file__).parents[2]
OUTAGE_SECONDS = 60
STEPS = 100
"""A loop of 20 ms a step makes some 2,500 in that time. One that waits for anything that is away makes none."""


class Reader:
    """What a job has said so far, read on a thread of its own so that its pipe never fills."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.lines: list[str] = []
        self._process = process
        self._unread: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def until(self, wanted: str, timeout_seconds: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_seconds
        while wanted not in self.lines:
            line = self._unread.get(timeout=max(0.0, deadline - time.monotonic()))
            assert line is not None, f"the job ended before it said {wanted!r}: {self.lines[-5:]}"
            self.lines.append(line)

    def catch_up(self) -> list[str]:
        """Everything that was said by now."""
        while not self._unread.empty():
            line = self._unread.get()
            assert line is not None, f"the job has ended: {self.lines[-5:]}"
            self.lines.append(line)
        return list(self.lines)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._unread.put(line.strip())
        self._unread.put(None)


@contextmanager
def training(run: str, **settings: str) -> Iterator[tuple[subprocess.Popen[str], Reader]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.chaos.network_job", run],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | settings,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )
    try:
        yield process, Reader(process)
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
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


@pytest.mark.timeout(400)
def test_a_minute_without_service_and_store_costs_no_step_and_no_staged_checkpoint(
    service: RestartableService, weed: SeaweedFS, to_service: FaultProxy, to_store: FaultProxy
) -> None:
    with Client() as client:
        client.edit_project("tests", EditProject())
    runs = {"tests/plain": {}}
    with ExitStack() as stack:
        jobs = {
            run: stack.enter_context(training(run, HOLDFAST_URL=to_service.url, HOLDFAST_TOKEN=TOKEN, **settings))
            for run, settings in runs.items()
        }
        for process, said in jobs.values():
            said.until("committed 0")
            # So slow that the save is under way for as long as it takes to pull the plug.
            sent = to_store.count("put")
            to_store.script(Throttle(1000), on="put", times=None)
            process.stdin.write("go\n")
            process.stdin.flush()
            said.until("staged 1")
        to_store.wait_for("put", sent + 1)
        for proxy in (to_service, to_store):
            proxy.refuse()
        service.stop()
        weed.stop()
        before = {run: said.catch_up() for run, (_, said) in jobs.items()}
        time.sleep(OUTAGE_SECONDS)
        during = {run: said.catch_up()[len(before[run]) :] for run, (_, said) in jobs.items()}
        weed.start()
        service.start()
        for proxy in (to_service, to_store):
            proxy.heal()
            proxy.accept()
        for run, (process, said) in jobs.items():
            assert "committed 1" not in before[run] + during[run]
            assert sum(line.startswith("step ") for line in during[run]) > STEPS
            said.until("committed 1")
            said.until("closed")
            assert process.wait(60) == 0
            assert not [line for line in said.lines if line.startswith("SaveFailed")]
            steps = [int(line.split()[1]) for line in said.lines if line.startswith("step ")]
            assert steps == list(range(2, 2 + len(steps)))
    for run in runs:
        state = state_at(0)
        with holdfast.Checkpointer(run) as ckpt:
            assert ckpt.restore(state, at="1") == 2
        assert torch.equal(state["big"]["t"], state_at(1)["big"]["t"])
        assert state["notes"] == {"step": 1}
