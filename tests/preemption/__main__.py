"""python -m tests.preemption --times 100 [--seed N] [--agents]: exit code 0 only if no launch has lost what it
could save."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.preemption.many import preempt_many, table


def main() -> int:
    options = argparse.ArgumentParser(prog="make preempt", description=__doc__)
    options.add_argument("--times", type=int, default=100)
    options.add_argument("--seed", type=int, default=int(time.time()))
    options.add_argument("--agents", action="store_true", help="each launch is a `holdfast launch --agent`")
    given = options.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="holdfast-preempt-"))
    agents = "with an agent each" if given.agents else "without agents"
    print(f"preempt: {given.times} times {agents}, seed {given.seed}, journals in {folder}", flush=True)
    outcome = preempt_many(folder, given.times, given.seed, agent_every=int(given.agents))
    print("\n".join(table(outcome)))
    if outcome.faults:
        print(f"preempt: FAILED; {folder} is kept")
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    print("preempt: each time the newest state that could be saved in time is there")
    return 0


if __name__ == "__main__":
    sys.exit(main())
