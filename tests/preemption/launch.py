"""Two ranks of a job, the signal at its moment, and SIGKILL at the deadline, as a machine that goes does it."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.preemption.job import train
from tests.preemption.plan import Plan
from tests.support.forked import fork_server
from tests.support.ports import free_ports
from tests.support.ranks import rank_environment

WORLD_SIZE = 2
START_SECONDS = 90


@dataclass(frozen=True)
class Launched:
    """What the ranks wrote down, how they ended, and when the first of them was told."""

    journals: list[list[dict[str, Any]]]
    exit_codes: list[int]
    told_at: float
    seconds: float
    """From the signal to the end of the last rank."""


def launch(run: str, plan: Plan, folder: Path, service: dict[str, str]) -> Launched:
    """Raises RuntimeError where the ranks do not get as far as their Checkpointer."""
    folder.mkdir(parents=True)
    server = fork_server()
    port = free_ports()
    ranks: list[Any] = []
    for rank in range(WORLD_SIZE):
        environment = service | rank_environment(rank, WORLD_SIZE, port)
        process = server.Process(target=train, args=(rank, environment, run, plan, folder), daemon=True)
        process.start()
        ranks.append(process)
    try:
        _wait_until(plan.begins_with, folder, ranks)
        time.sleep(plan.after_seconds)
        told_at = time.time()
        for rank in plan.told:
            os.kill(ranks[rank].pid, signal.SIGTERM)
        for process in ranks:
            process.join(max(0.0, told_at + plan.grace_seconds - time.time()))
        return_codes = [process.exitcode for process in ranks]
        seconds = time.time() - told_at
    finally:
        for process in ranks:
            process.kill()
            process.join()
    codes = [-signal.SIGKILL if code is None else code for code in return_codes]
    return Launched([_read(folder / f"{rank}.jsonl") for rank in range(WORLD_SIZE)], codes, told_at, seconds)


def _wait_until(written: str, folder: Path, ranks: list[Any]) -> None:
    given_up = time.time() + START_SECONDS
    while not all(any(written in line for line in _read(folder / f"{rank}.jsonl")) for rank in range(WORLD_SIZE)):
        if time.time() > given_up or any(process.exitcode is not None for process in ranks):
            raise RuntimeError(f"the ranks did not start; see {folder}")
        time.sleep(0.01)


def _read(path: Path) -> list[dict[str, Any]]:
    """Whole lines only: a rank that is killed may be within one."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
