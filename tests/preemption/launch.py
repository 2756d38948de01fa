"""Two ranks of a job, the signal at its moment, and SIGKILL at the deadline, as a machine that goes does it: also to
`holdfast launch` and to its agent, where there is one."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from examples.demo.launches import Launch, launch_environment

from holdfast_client.agent.link import status_of
from holdfast_client.errors import HoldfastError
from tests.preemption.job import train
from tests.preemption.node import exit_file
from tests.preemption.plan import WORLD_SIZE, Plan
from tests.support.forked import fork_server
from tests.support.ports import free_ports
from tests.support.ranks import rank_environment
from tests.support.serve import HOLDFAST, without_holdfast_settings

START_SECONDS = 240
"""On a machine that is busy with other things."""
_LOOK_EVERY_SECONDS = 0.05


@dataclass(frozen=True)
class Launched:
    """What the ranks wrote down, how they ended, and when the first of them was told."""

    journals: list[list[dict[str, Any]]]
    exit_codes: list[int]
    told_at: float
    seconds: float
    """From the signal to the end of the last rank, or of `holdfast launch`."""
    handed: int = 0
    """Shards that the agent of the launch has taken."""


class _Ranks(Protocol):
    """Both, as processes."""

    handed: int

    @property
    def has_one_ended(self) -> bool: ...

    def tell(self) -> None:
        """Those that the plan tells."""

    def wait(self, until: float) -> list[int | None]:
        """Each rank's exit code when all has ended, or at that time; None where it has not."""

    def kill(self) -> None: ...


def launch(run: str, plan: Plan, folder: Path, service: dict[str, str], agent: Path | None = None) -> Launched:
    """`agent`: `holdfast launch --agent` starts the ranks, with an agent at this socket. Raises RuntimeError where the
    ranks do not get as far as their Checkpointer."""
    folder.mkdir(parents=True)
    ranks: _Ranks
    if agent is None:
        ranks = _Forked(run, plan, folder, service)
    else:
        ranks = _WithAgent(run, plan, folder, service, agent)
    try:
        _wait_until(plan.begins_with, folder, lambda: ranks.has_one_ended)
        time.sleep(plan.after_seconds)
        told_at = time.time()
        ranks.tell()
        codes = ranks.wait(told_at + plan.grace_seconds)
        seconds = time.time() - told_at
    finally:
        ranks.kill()
    exit_codes = [-signal.SIGKILL if code is None else code for code in codes]
    journals = [_read(folder / f"{rank}.jsonl") for rank in range(WORLD_SIZE)]
    return Launched(journals, exit_codes, told_at, seconds, ranks.handed)


class _Forked:
    """From a process that has torch imported."""

    handed = 0

    def __init__(self, run: str, plan: Plan, folder: Path, service: dict[str, str]) -> None:
        self._plan = plan
        server, port = fork_server(), free_ports()
        self._ranks: list[Any] = []
        for rank in range(WORLD_SIZE):
            environment = service | rank_environment(rank, WORLD_SIZE, port)
            process = server.Process(target=train, args=(rank, environment, run, plan, folder), daemon=True)
            process.start()
            self._ranks.append(process)

    @property
    def has_one_ended(self) -> bool:
        return any(process.exitcode is not None for process in self._ranks)

    def tell(self) -> None:
        for rank in self._plan.told:
            os.kill(self._ranks[rank].pid, signal.SIGTERM)

    def wait(self, until: float) -> list[int | None]:
        for process in self._ranks:
            process.join(max(0.0, until - time.time()))
        return [process.exitcode for process in self._ranks]

    def kill(self) -> None:
        for process in self._ranks:
            process.kill()
            process.join()


class _WithAgent:
    """Of `holdfast launch --agent`. It is told, and passes it on; job and agent have the grace together."""

    def __init__(self, run: str, plan: Plan, folder: Path, service: dict[str, str], agent: Path) -> None:
        self.handed = 0
        self._folder = folder
        self._agent = agent
        grace = max(1, math.ceil(plan.grace_seconds))
        node = ("-m", "tests.preemption.node", run, str(plan.seed), str(plan.grace_seconds), str(folder))
        base = without_holdfast_settings() | {"HOLDFAST_AGENT": str(agent)}
        self._launch = _HoldfastLaunch(
            [HOLDFAST, "launch", "--agent", f"--grace={grace}", "--", sys.executable, *node],
            environment=launch_environment(base, service, temporary=folder),
            log=folder / "launch.log",
        )

    @property
    def has_one_ended(self) -> bool:
        return self._launch.exit_code is not None or any(code is not None for code in self._exit_codes())

    def tell(self) -> None:
        self._launch.tell()

    def wait(self, until: float) -> list[int | None]:
        while self._launch.exit_code is None and time.time() < until:
            self._ask_agent()
            time.sleep(_LOOK_EVERY_SECONDS)
        return self._exit_codes()

    def kill(self) -> None:
        self._launch.kill()

    def _exit_codes(self) -> list[int | None]:
        texts = [path.read_text() if path.exists() else "" for path in self._exit_files()]
        return [int(text) if text else None for text in texts]

    def _exit_files(self) -> list[Path]:
        return [exit_file(self._folder, rank) for rank in range(WORLD_SIZE)]

    def _ask_agent(self) -> None:
        with contextlib.suppress(HoldfastError):  # it has ended
            self.handed = max(self.handed, status_of(self._agent).counts.taken)


class _HoldfastLaunch(Launch):
    """SIGKILL reaches its agent and its ranks too."""

    def tell(self) -> None:
        os.kill(self._process.pid, signal.SIGTERM)


def _wait_until(written: str, folder: Path, has_one_ended: Callable[[], bool]) -> None:
    given_up = time.time() + START_SECONDS
    while not all(any(written in line for line in _read(folder / f"{rank}.jsonl")) for rank in range(WORLD_SIZE)):
        if time.time() > given_up or has_one_ended():
            raise RuntimeError(f"the ranks did not start; see {folder}")
        time.sleep(0.01)


def _read(path: Path) -> list[dict[str, Any]]:
    """Whole lines only: a rank that is killed may be within one."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
