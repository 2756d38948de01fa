"""The import rules of pyproject.toml hold: SDK -> client -> protocol <- service, and verbs meet only in the catalog."""

from __future__ import annotations

import subprocess
import sysconfig
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SERVICE = ROOT / "service" / "holdfast_service"
# What is not a verb: the nouns, what every verb needs, and what no verb may need.
NOT_VERBS = {"catalog", "stores", "auth", "web", "migrations"}
# What asks several verbs, as background.py does: it stands above them, and none of them knows it.
ABOVE_VERBS = {"forecast"}


def test_the_import_rules_hold() -> None:
    linter = Path(sysconfig.get_path("scripts")) / "lint-imports"
    done = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_verb_is_under_the_rule_that_keeps_verbs_apart() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (independence,) = [contract for contract in contracts if contract["type"] == "independence"]
    folders = {path.parent.name for path in SERVICE.glob("*/__init__.py")} - NOT_VERBS - ABOVE_VERBS
    assert {f"holdfast_service.{folder}" for folder in folders} == set(independence["modules"])


def test_what_stands_above_the_verbs_is_known_to_the_application_alone() -> None:
    for folder in ABOVE_VERBS:
        knowing = {
            path.relative_to(SERVICE).as_posix()
            for path in SERVICE.rglob("*.py")
            if folder not in path.parts and f"holdfast_service.{folder}" in path.read_text(encoding="utf-8")
        }
        assert knowing == {"app.py"}
