"""Take the guards of the rules out, one at a time, and see that a test named after the rule fails.

    .venv/bin/python -m scripts.prove_guards [RULE …]        (or: make prove)

For each entry of scripts/guards: copy the committed tree, check that the rule's tests pass there, replace the guard's
text, run the same tests again. The rule is defended if they fail then. A guard whose text is no longer in its file is
an error (tests/architecture/test_rules.py sees that too): move the entry along with the code. Exit code 0 only if every
guard is defended.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.guards import GUARDS
from scripts.guards.guard import Guard

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("client", "service", "trainer_sdk")
TIMEOUT_SECONDS = 600


def copy_tree(target: Path) -> None:
    """The committed tree, without its history."""
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(target)], input=archive, check=True)


def failing_tests(tree: Path, tests: tuple[str, ...], rule: str) -> list[str]:
    """Names of the rule's tests that fail in `tree`. Raises RuntimeError where none could be run at all."""
    # In front of the editable install: the processes that the tests start must run the copy too.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(tree / package) for package in PACKAGES)}
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--no-header", "--tb=no", "-p", "no:cacheprovider"]
    command += ["--rule", rule, "--timeout=150", *tests]
    done = subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return [line.split(" ")[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]


def prove(guard: Guard) -> bool:
    with tempfile.TemporaryDirectory(prefix="holdfast-guard-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        path = tree / guard.path
        source = path.read_text(encoding="utf-8")
        if guard.text not in source:
            print(f"{guard.rule:<12} ERROR: {guard.path} no longer has the guard's text: {guard.text.strip()!r}")
            return False
        if broken := failing_tests(tree, guard.tests, guard.rule):
            print(f"{guard.rule:<12} ERROR: fails with its guard in place: {broken}")
            return False
        path.write_text(source.replace(guard.text, guard.without), encoding="utf-8")
        failing = failing_tests(tree, guard.tests, guard.rule)
    verdict = f"{len(failing)} of its tests fail" if failing else "NOT DEFENDED: every test still passes"
    print(f"{guard.rule:<12} {guard.what}: {verdict}", flush=True)
    for name in failing[:3]:
        print(f"{'':<12}   {name}", flush=True)
    return bool(failing)


def main(rules: list[str]) -> int:
    chosen = [guard for guard in GUARDS if not rules or guard.rule in rules]
    defended = [prove(guard) for guard in chosen]
    print(f"{sum(defended)} of {len(chosen)} guards are defended")
    return 0 if chosen and all(defended) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
