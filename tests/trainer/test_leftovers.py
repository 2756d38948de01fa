"""What a Checkpointer leaves behind after close(): no thread, no file, no connection, no memory; however it ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.leftovers import STATE_BYTES

ROOT = Path(__file__).parents[2]

GROWTH_BYTES = STATE_BYTES // 4
"""Of ten saves, between the third and the last. Seven saves that each keep one chunk of the smallest own size (8 MiB)
would make 58 MB, one kept state 100 MB; what malloc's arenas, the interpreter and the connections gain and lose by
chance is a few MB."""

KEPT_BYTES = STATE_BYTES // 4
"""After close(), against before a job in a process that has seen one. The staging memory alone is a whole state."""


UNHAPPY = ("exception", "failed", "stuck at begin", "stuck at negotiate", "stuck at put", "stuck at seal")


def reports_of(folder: Path, run: str, *ways: str) -> dict[str, Any]:
    """Each way's report; all in one process, one after the other."""
    temporary = folder / "tmp"
    temporary.mkdir()
    ended = subprocess.run(
        [sys.executable, "-m", "tests.trainer.leftovers", run, *ways],
        env=os.environ | {"TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        check=True,
        timeout=280,
        stdout=subprocess.PIPE,
    )
    return dict(zip(ways, map(json.loads, ended.stdout.splitlines()), strict=True))


def assert_nothing_left(report: dict[str, Any]) -> None:
    assert report["left"] == {"threads": [], "files": [], "temporary": []}
    assert report["kept_bytes"] < KEPT_BYTES


def test_ten_saves_leave_memory_flat_and_nothing_behind(tmp_path: Path, run: str) -> None:
    report = reports_of(tmp_path, run, "ten saves")["ten saves"]
    third, last = report["resident"][2], report["resident"][-1]
    assert last - third < GROWTH_BYTES, report["resident"]
    assert_nothing_left(report)


@pytest.mark.rule("bounded-exit")
def test_however_a_job_ends_it_leaves_nothing_behind(tmp_path: Path, run: str) -> None:
    for way, report in reports_of(tmp_path, run, *UNHAPPY).items():
        print(way, report)
        assert_nothing_left(report)
