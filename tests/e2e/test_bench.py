"""The benchmark still runs: the part that needs no peers and no SeaweedFS, with a tiny state. No figure is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.bars import BARS
from benchmarks.processes import Failed
from benchmarks.rows import Row, Rows

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(1000)
def test_a_small_benchmark_runs_and_has_a_row_for_every_bar(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.run", "--size", "1MiB", "--repeats", "1", "--without-peers"]
    ran = subprocess.run(
        [*command, "--only-posix", "--results", str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = {row["name"]: row for row in json.loads((tmp_path / "latest.json").read_text())}
    assert rows.keys() >= BARS.keys()
    assert all(row.keys() == Row.__dataclass_fields__.keys() for row in rows.values())
    for name in ("stall_vs_memcpy", "save_peak_extra_memory_ratio", "dedup_sent_vs_changed", "train_rate_during_save"):
        assert rows[name]["value"] is not None, (rows[name]["how"], ran.stdout)
    assert rows["posix holdfast, restore: rate"]["value"] > 0


def test_a_peer_that_could_not_run_says_why_in_the_row() -> None:
    saved = {"bytes": 1e9, "seconds": 2.0, "cpu_seconds": 0.8, "stall_seconds": 0.1, "state_dict_seconds": 0.0}
    rows = {
        row.name: row
        for row in Rows(
            {
                "s3 holdfast": [saved | {"seconds": seconds, "peak_extra_bytes": 0.0} for seconds in (1.0, 2.0, 9.0)],
                "s3 s3torchconnector x1": [Failed("no wheel for this machine")],
                "s3 bare": [{"bytes": 1e9, "put_seconds": 1.0, "get_seconds": 1.0}],
            }
        ).all()
    }
    assert rows["s3_save_vs_bare_put"].value == pytest.approx(0.5), "the median of the repeats, over the peer's"
    refused = rows["s3_save_vs_s3torchconnector"]
    assert refused.value is None
    assert "no wheel for this machine" in refused.how
