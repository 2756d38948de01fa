"""python -m tests.chaos_run --minutes 10 [--seed N] [--faults N] [--agents]: exit code 0 only if all came back as it
was."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos_run.faults import ALL, OF_AGENTS
from tests.chaos_run.run import Plan, run_chaos
from tests.chaos_run.table import table

_FAULTS_PER_MINUTE = 5


def main() -> int:
    options = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    options.add_argument("--minutes", type=float, default=10.0)
    options.add_argument("--seed", type=int, default=int(time.time()))
    options.add_argument("--faults", type=int, help="go on until there were so many; default: five for each minute")
    options.add_argument("--agents", action="store_true", help="each rank is on a node with an agent; nodes are lost")
    options.add_argument("--kinds", nargs="*", choices=[*ALL, *OF_AGENTS])
    given = options.parse_args()
    kinds = tuple(given.kinds or (ALL | OF_AGENTS if given.agents else ALL))
    if not given.agents and (of_agents := set(kinds) & set(OF_AGENTS)):
        options.error(f"--agents is needed for {', '.join(sorted(of_agents))}")
    folder = Path(tempfile.mkdtemp(prefix="holdfast-chaos-"))
    print(f"chaos: {given.minutes:g} minutes, seed {given.seed}, journals and logs in {folder}", flush=True)
    least = int(given.minutes * _FAULTS_PER_MINUTE) if given.faults is None else given.faults
    # Told to end, it ends its servers and jobs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    plan = Plan(given.minutes * 60, given.seed, least_faults=least, kinds=kinds, agents=given.agents)
    outcome = run_chaos(folder, plan)
    print("\n".join(table(outcome)))
    if outcome.verdict.findings:
        print(f"chaos: FAILED; {folder} is kept")
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    print("chaos: PASS; every job came back by itself, with every byte as it was")
    return 0


if __name__ == "__main__":
    sys.exit(main())
