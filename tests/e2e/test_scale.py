"""`make scale` still runs: a storm of a few ranks, a small catalog, each call, and the figures that the plot takes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from benchmarks.scale.lock_waits import LockWaits
from benchmarks.scale.ranks import Told
from benchmarks.scale.storm import _expect_committed

from holdfast_protocol.base import RunName
from holdfast_protocol.states import CheckpointState

REPOSITORY = Path(__file__).resolve().parents[2]
JOBS = {"open attempt", "heartbeat", "begin", "negotiate", "seal", "restore point", "read tickets"}
OPERATORS = {"page of runs", "usage of a project", "projects", "controllers", "/metrics", "/openapi.json"}


@pytest.mark.timeout(1000)
def test_a_small_scale_run_has_every_figure(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.scale", "--ranks", "4", "--repeats", "1", "--checkpoints", "40"]
    ran = subprocess.run(
        [*command, "--calls", "3", "--throughput-ranks", "0", "--without-plot", "--results", str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads((tmp_path / "scale.json").read_text())
    assert [row["ranks"] for row in found["storms"]] == [4]
    for row in found["storms"]:
        assert 0 < row["calls_a_rank"] <= 2.0, "a small shard is begun and sealed, and nothing is tried again"
        parts = ("client_cpu_ms_a_rank", "service_cpu_ms_a_rank", "database_cpu_ms_a_rank", "service_memory_bytes")
        assert all(row[name] > 0 for name in parts)
    assert found["calls"].keys() == {"40"}
    for measured in found["calls"].values():
        assert measured["calls"].keys() == JOBS | OPERATORS
        assert all(0 < each["p50_ms"] <= each["p99_ms"] for each in measured["calls"].values())
        assert measured["database_bytes"] > 0


def test_waits_for_locks_that_could_not_be_sampled_are_not_told_as_none() -> None:
    asked = threading.Event()

    class Refusing:
        def execute(self, _query: str) -> None:
            asked.set()
            raise psycopg.OperationalError("the server closed the connection")

    with pytest.raises(RuntimeError, match="could not be sampled: the server closed"), LockWaits(Refusing()):  # type: ignore[arg-type]
        assert asked.wait(60)


def test_a_storm_whose_commit_no_seal_has_seen_has_no_seconds() -> None:
    view = SimpleNamespace(id="1", state=CheckpointState.COMMITTED)
    client: Any = SimpleNamespace(checkpoints=SimpleNamespace(select=lambda *_: view, get=lambda *_, **__: view))
    told = [Told(seconds=[0.1], cpu_seconds=0.1, committed=False)]
    with pytest.raises(RuntimeError, match="committed after all ranks had sealed"):
        _expect_committed(client, RunName("scale", "of-1"), 1, told)
    _expect_committed(client, RunName("scale", "of-1"), 1, [*told, told[0].model_copy(update={"committed": True})])
