"""python -m tests.chaos_run --minutes 10 [--seed N] [--faults N]: exit code 0 only if all came back as it was."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos_run.faults import ALL
from tests.chaos_run.run import Plan, run_chaos
from tests.chaos_run.table import table

_FAULTS_PER_MINUTE = 5


def main() -> int:
    options = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    options.add_argument("--minutes", type=float, default=10.0)
    options.add_argument("--seed", type=int, default=int(time.time()))
    options.add_argument("--faults", type=int, help="go on until there were so many; default: five for each minute")
    options.add_argument("--kinds", nargs="*", choices=list(ALL), default=list(ALL))
    given = options.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="holdfast-chaos-"))
    print(f"chaos: {given.minutes:g} minutes, seed {given.seed}, journals and logs in {folder}", flush=True)
    least = int(given.minutes * _FAULTS_PER_MINUTE) if given.faults is None else given.faults
    # Told to end, it ends its servers and jobs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    outcome = run_chaos(folder, Plan(given.minutes * 60, given.seed, least_faults=least, kinds=tuple(given.kinds)))
    print("\n".join(table(outcome)))
    if outcome.verdict.findings:
        print(f"chaos: FAILED; {folder} is kept")
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    print("chaos: PASS; every job came back by itself, with every byte as it was")
    return 0


if __name__ == "__main__":
    sys.exit(main())
