"""The web page as scripts/prepare-web builds it, by one process at a time."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast_service.ui.endpoints import BUILT_INTO

_BUILD = Path(__file__).parents[2] / "scripts" / "prepare-web"
_BUILDS_WITHIN_SECONDS = 280
_NO_NODE = 69


def built_page() -> Path:
    """The folder that the service serves. Skips the test on a machine that has no Node to build it with."""
    with (Path(sys.prefix) / ".web.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run([str(_BUILD), sys.prefix], capture_output=True, text=True, timeout=_BUILDS_WITHIN_SECONDS)
    if done.returncode == _NO_NODE:
        # pip cannot install Node.js, and the service runs without a page.
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    return BUILT_INTO
