"""The import rules of pyproject.toml hold: SDK -> client -> protocol <- service, and the service's layers."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_import_rules_hold() -> None:
    """The layers of the service are exhaustive: a folder that no layer names breaks them."""
    linter = Path(sysconfig.get_path("scripts")) / "lint-imports"
    done = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
