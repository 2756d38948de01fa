"""`python -m benchmarks.scale.upgrade` still runs: saves go on before and after each change, and none fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.timeout(600)
def test_a_small_upgrade_has_every_figure(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.scale.upgrade", "--checkpoints", "200", "--savers", "2"]
    ran = subprocess.run(
        [*command, "--seconds", "1", "--results", str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads((tmp_path / "upgrade.json").read_text())
    assert found["checkpoints"] == 200
    assert list(found["parts"]) == ["before", "migration", "after", "backup", "at the end"]
    assert all(part["seconds"] > 0 for part in found["parts"].values())
    assert all(found["parts"][name]["saves"] > 0 for name in ("before", "after", "at the end"))
