"""python -m tests.jepsen --minutes 10 [--seed N] [--kinds PART] [--agents]: exit code 0 only if nothing was lost,
mixed, wrong or leaked, and every job came back."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.jepsen.faults import ALL, WITHOUT_AGENTS
from tests.jepsen.table import table
from tests.jepsen.trial import Plan, run_trial


def main() -> int:
    options = argparse.ArgumentParser(prog="make jepsen", description=__doc__)
    options.add_argument("--minutes", type=float, default=10.0)
    options.add_argument("--seed", type=int, default=int(time.time()))
    options.add_argument("--kinds", default="", help="only faults whose name has this; several with commas")
    options.add_argument("--agents", action="store_true", help="jobs hand their saves to a node agent, which fails too")
    given = options.parse_args()
    kinds = [
        kind
        for kind in (ALL if given.agents else WITHOUT_AGENTS)
        if any(part in kind for part in given.kinds.split(","))
    ]
    # Whoever ends it, what it started ends with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder = Path(tempfile.mkdtemp(prefix="holdfast-jepsen-"))
    told = f"{given.minutes:g} minutes, seed {given.seed}, {'with' if given.agents else 'without'} an agent"
    print(f"jepsen: {told}, logs and journal in {folder}", flush=True)
    plan = Plan(seconds=given.minutes * 60, seed=given.seed, kinds=kinds, agents=given.agents)
    outcome = run_trial(folder, plan)
    print("\n".join(table(outcome)))
    if not outcome.is_good:
        print(f"jepsen: FAILED with seed {given.seed}; {folder} is kept")
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    print("jepsen: every commit that a job was told of is there, as it was saved, and nothing has leaked")
    return 0


if __name__ == "__main__":
    sys.exit(main())
