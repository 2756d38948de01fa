"""The same commit gives the same wheel, byte for byte: a published one can be compared with one of that commit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from scripts.supply_chain.lock import ROOT

SOURCES = ("pyproject.toml", "README.md", "LICENSE", "client", "service", "trainer_sdk", "migrations")
PAGE = "holdfast_service/ui/static/index.html"


def copied(to: Path) -> Path:
    """What the Dockerfile copies, and a page in place of the one that needs Node to be built."""
    to.mkdir(parents=True)
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__", "static"))
        else:
            shutil.copy(source, to)
    page = to / "service" / PAGE
    page.parent.mkdir()
    page.write_text("<!doctype html>")
    return to


def built(folder: Path, **environment: str) -> bytes:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "out"]
    subprocess.run(command, cwd=folder, env={**os.environ, **environment}, check=True, capture_output=True)
    (wheel,) = (folder / "out").glob("*.whl")
    return wheel.read_bytes()


def test_a_wheel_that_is_built_twice_has_the_same_bytes(tmp_path: Path) -> None:
    """In another folder, at another time, by a user whose files are closed, in another time zone."""
    first, second = copied(tmp_path / "first"), copied(tmp_path / "elsewhere/second")
    for path in second.rglob("*"):
        path.chmod(path.stat().st_mode & ~0o077)
        os.utime(path, (1_000_000_000, 1_000_000_000))
    once = built(first, SOURCE_DATE_EPOCH="1700000000", TZ="UTC", PYTHONHASHSEED="1")
    again = built(second, SOURCE_DATE_EPOCH="1700000000", TZ="Asia/Tokyo", PYTHONHASHSEED="2")
    assert once == again

    (wheel,) = (first / "out").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {PAGE, "holdfast/checkpointer.py", "holdfast_service/migrations/env.py"} <= set(names)
    assert not [name for name in names if name.endswith(".pyc") or "test" in name]
