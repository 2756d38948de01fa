"""python -m tests.soak --minutes 10 [--seed N] [--kills N] [--agents]: exit code 0 only if nothing was unreadable or
leaked, and no save was lost that an agent had taken."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.soak.soak import Plan, run_soak, table

_SECONDS_PER_KILL = 8
_AGENTS = 2


def main() -> int:
    options = argparse.ArgumentParser(prog="make soak", description=__doc__)
    options.add_argument("--minutes", type=float, default=10.0)
    options.add_argument("--seed", type=int, default=int(time.time()))
    options.add_argument("--kills", type=int, help="default: one in 8 seconds")
    options.add_argument("--agents", action="store_true", help="all writers but one hand their saves to node agents")
    given = options.parse_args()
    seconds = given.minutes * 60
    kills = int(seconds / _SECONDS_PER_KILL) if given.kills is None else given.kills
    folder = Path(tempfile.mkdtemp(prefix="holdfast-soak-"))
    agents = _AGENTS if given.agents else 0
    told = f"{given.minutes:g} minutes, seed {given.seed}, {kills} kills, {agents} agents"
    print(f"soak: {told}, logs and ledger in {folder}", flush=True)
    plan = Plan(seconds=seconds, kills=kills, least_checkpoints=10, agents=agents, seed=given.seed)
    outcome = run_soak(folder, plan)
    print("\n".join(table(outcome)))
    if outcome.faults:
        print(f"soak: FAILED; {folder} is kept")
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    print("soak: every committed checkpoint is readable and nothing has leaked")
    return 0


if __name__ == "__main__":
    sys.exit(main())
