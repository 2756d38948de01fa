"""Elastic torchrun: a node is lost and another comes; the job goes on with the ranks there are, from the same state."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from holdfast_client import Client, ClientSettings
from tests.support.ports import free_ports
from tests.support.serve import holdfast_serve, without_holdfast_settings

JOB = Path(__file__).with_name("elastic_job.py")
# A node that is silent for half a minute is lost; the ones that are there wait three seconds for others.
_RENDEZVOUS = "last_call_timeout=3,keep_alive_interval=2,keep_alive_max_attempt=15"
_LINE = re.compile(r"(restored|trained) (-?\d+) (\d+) (\w+)\n")


@contextmanager
def node(port: int, run: str, folder: Path, environment: dict[str, str], *, first: bool) -> Iterator[subprocess.Popen]:
    """An agent and its one rank. The first one has the rendezvous, and is not lost."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3"]
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=elastic"]
    host = [f"--rdzv-conf=is_host={int(first)},{_RENDEZVOUS}", "--local-addr=127.0.0.1"]
    with (folder / "agents.log").open("ab") as log:
        agent = subprocess.Popen(
            [*command, *rendezvous, *host, str(JOB), run, str(folder)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield agent
    finally:
        lose(agent)


def lose(agent: subprocess.Popen) -> None:
    """As when the machine is gone: the agent and its rank, at once."""
    if agent.poll() is None:
        family = [psutil.Process(agent.pid)]
        family[0].suspend()
        family += family[0].children(recursive=True)
        for process in family:
            process.kill()
    agent.wait()


def told(folder: Path) -> list[tuple[str, int, int, str]]:
    found = [_LINE.findall(log.read_text()) for log in sorted(folder.glob("*-*.log"))]
    return [(what, int(step), int(world), digest) for lines in found for what, step, world, digest in lines]


def until(met: Callable[[], bool], folder: Path) -> None:
    deadline = time.monotonic() + 250
    while not met():
        assert time.monotonic() < deadline, (folder / "agents.log").read_text()[-6000:]
        time.sleep(0.3)


@pytest.mark.rule("bit-exact-resume")
@pytest.mark.timeout(900)
def test_a_node_is_lost_and_another_comes(tmp_path: Path) -> None:
    run, folder, port = "elastic/fsdp", tmp_path / "job", free_ports()
    folder.mkdir()
    (tmp_path / "service").mkdir()
    with ExitStack() as stack:
        served = stack.enter_context(holdfast_serve(tmp_path / "service"))
        client = stack.enter_context(
            Client(ClientSettings(url=served.url, data_dir=served.environment["HOLDFAST_DATA_DIR"]))
        )
        environment = without_holdfast_settings() | served.environment | {"OMP_NUM_THREADS": "1"}
        # The second: with it unset, torch 2.13 leaves a node that joins later without the address of rank 0.
        environment |= {"TMPDIR": str(folder), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

        def committed(world: int, above: int = -1) -> int:
            """The newest step that is committed by so many ranks; `above` where there is none above it."""
            runs = [each.name for each in client.runs.list("elastic").items] if client.projects.list().items else []
            points = client.checkpoints.list("elastic", "fsdp").items if runs else []
            return max((p.step for p in points if p.state == "committed" and p.world_size == world), default=above)

        def trained_on(world: int, above: int) -> Callable[[], bool]:
            return lambda: committed(world, above) > above

        first = stack.enter_context(node(port, run, folder, environment, first=True))
        lost = stack.enter_context(node(port, run, folder, environment, first=False))
        until(trained_on(2, -1), folder)
        lose(lost)
        by_two = committed(2)
        until(trained_on(1, by_two), folder)
        by_one = committed(1)
        another = stack.enter_context(node(port, run, folder, environment, first=False))
        until(trained_on(2, by_one), folder)
        (folder / "enough").touch()
        assert [first.wait(timeout=120), another.wait(timeout=120)] == [0, 0], (folder / "agents.log").read_text()

    lines = told(folder)
    trained = {(step, digest) for what, step, _, digest in lines if what == "trained"}
    restored = [(step, world, digest) for what, step, world, digest in lines if what == "restored" and step >= 0]
    assert {(step, digest) for step, _, digest in restored} <= trained
    assert any(world == 1 and step >= by_two for step, world, _ in restored), "on fewer ranks"
    on_two = Counter((step, digest) for step, world, digest in restored if world == 2 and step >= by_one)
    assert on_two, "on more ranks again"
    assert all(count > 1 for count in on_two.values()), "equal on both"
