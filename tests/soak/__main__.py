"""python -m tests.soak --minutes 10 [--seed N] [--kills N]: exit code 0 only if nothing was unreadable or leaked."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.soak.soak import Plan, run_soak, table

_SECONDS_PER_KILL = 8


def main() -> int:
    options = argparse.ArgumentParser(prog="make soak", description=__doc__)
    options.add_argument("--minutes", type=float, default=10.0)
    options.add_argument("--seed", type=int, default=int(time.time()))
    options.add_argument("--kills", type=int, help="default: one in 8 seconds")
    given = options.parse_args()
    seconds = given.minutes * 60
    kills = int(seconds / _SECONDS_PER_KILL) if given.kills is None else given.kills
    folder = Path(tempfile.mkdtemp(prefix="holdfast-soak-"))
    print(f"soak: {given.minutes:g} minutes, seed {given.seed}, {kills} kills, logs and ledger in {folder}", flush=True)
    outcome = run_soak(folder, Plan(seconds=seconds, kills=kills, least_checkpoints=10, seed=given.seed))
    print("\n".join(table(outcome)))
    if outcome.faults:
        print(f"soak: FAILED; {folder} is kept")
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    print("soak: every committed checkpoint is readable and nothing has leaked")
    return 0


if __name__ == "__main__":
    sys.exit(main())
