"""The scripts that prepare what pip cannot: each is run by one process at a time, and says where it cannot run."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

_SCRIPTS = Path(__file__).parents[2] / "scripts"
_DONE_WITHIN_SECONDS = 280
_NOT_HERE = 69


class NotHereError(Exception):
    """This machine lacks what the script builds on (Node.js, apt), and pip cannot install that. The text names it."""


def prepare(script: str, subject: str, *arguments: str) -> None:
    """Runs scripts/prepare-`script`; `subject` names the lock. Raises NotHereError."""
    with (Path(sys.prefix) / f".{subject}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(
            [str(_SCRIPTS / f"prepare-{script}"), *arguments],
            capture_output=True,
            text=True,
            timeout=_DONE_WITHIN_SECONDS,
            check=False,
        )
    if done.returncode == _NOT_HERE:
        raise NotHereError(done.stderr.strip())
    if done.returncode != 0:
        raise RuntimeError(f"{subject} could not be prepared: {(done.stdout + done.stderr).strip()[-2000:]}")
