"""The ranks of a launch with an agent: python -m tests.preemption.node RUN SEED GRACE_SECONDS FOLDER, which
`holdfast launch --agent` starts. It forks both ranks, passes a SIGTERM on to those that the plan tells, and writes down
each rank's exit code in FOLDER as it ends."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from tests.preemption.job import train
from tests.preemption.plan import WORLD_SIZE, Plan, plan_of
from tests.support.ports import free_ports
from tests.support.ranks import rank_environment

_LOOK_EVERY_SECONDS = 0.02


def exit_file(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.exit"


def run_ranks(run: str, plan: Plan, folder: Path) -> None:
    port = free_ports()
    context = multiprocessing.get_context("fork")
    environments = [rank_environment(rank, WORLD_SIZE, port) for rank in range(WORLD_SIZE)]
    ranks = [
        context.Process(target=train, args=(rank, environment, run, plan, folder))
        for rank, environment in enumerate(environments)
    ]
    for process in ranks:
        process.start()

    def tell(*_: object) -> None:
        for rank in plan.told:
            with contextlib.suppress(ProcessLookupError):
                os.kill(ranks[rank].pid or 0, signal.SIGTERM)

    signal.signal(signal.SIGTERM, tell)
    told: set[int] = set()
    while len(told) < WORLD_SIZE:
        for rank, process in enumerate(ranks):
            if rank not in told and process.exitcode is not None:
                exit_file(folder, rank).write_text(str(process.exitcode))
                told.add(rank)
        time.sleep(_LOOK_EVERY_SECONDS)


if __name__ == "__main__":
    plan = replace(plan_of(int(sys.argv[2])), grace_seconds=float(sys.argv[3]))
    run_ranks(sys.argv[1], plan, Path(sys.argv[4]))
