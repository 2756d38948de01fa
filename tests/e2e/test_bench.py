"""The benchmark still runs: the part that needs no peers and no SeaweedFS, with a tiny state. No figure is judged."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import urllib3
from benchmarks import processes, run, servers, swarm
from benchmarks.bars import BARS
from benchmarks.cases.raw_s3 import _BareS3
from benchmarks.processes import Failed
from benchmarks.rows import Row, Rows
from benchmarks.schedule import POSIX, Schedule
from benchmarks.spec import Spec

from tests.support.forked import ForkedProgram
from tests.support.serve import ServedHoldfast, holdfast_serve


@pytest.mark.timeout(2000)
def test_a_small_benchmark_runs_and_has_a_row_for_every_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Nine services and a hundred cases are started, and a start is not what is measured.
    monkeypatch.setattr(servers, "holdfast_serve", _served)
    monkeypatch.setattr(processes, "start", _forked)
    monkeypatch.setattr(
        sys, "argv", ["run", "--size=1MiB", "--repeats=1", "--without-peers", "--only-posix", f"--results={tmp_path}"]
    )
    (tmp_path / "latest.json").write_text("recorded, with peers")
    run.main()
    said = capsys.readouterr().out
    assert (tmp_path / "latest.json").read_text() == "recorded, with peers"
    assert "latest.json is as it was, because something was left out" in said
    rows = {row["name"]: row for row in json.loads((tmp_path / "partial.json").read_text())}
    assert rows.keys() >= BARS.keys()
    assert all(row.keys() == Row.__dataclass_fields__.keys() for row in rows.values())
    measured_here = {name for name in BARS if not name.startswith(("stall_vs_dcp", "s3_", "memory_restore"))}
    for name in measured_here:
        assert rows[name]["value"] is not None, (rows[name]["how"], said)
    assert rows["posix holdfast, restore: rate"]["value"] > 0


@pytest.mark.timeout(1000)
def test_the_benchmark_of_a_gpu_has_all_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """In host memory, where the same is measured."""
    monkeypatch.setattr(servers, "holdfast_serve", _served)
    monkeypatch.setattr(processes, "start", _forked)
    said: list[str] = []
    schedule = Schedule(2**20, 1, Path(sys.executable), with_s3=False, say=said.append)
    rows = [row for row in Rows(schedule.take_gpu_measures()).gpu() if row.name.startswith("gpu_")]
    assert len(rows) == 8
    assert not {row.name: row.how for row in rows if row.value is None}, said


@pytest.mark.timeout(1000)
def test_the_benchmark_of_several_hosts_has_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "holdfast_serve", _served)
    monkeypatch.setattr(processes, "start", _forked)
    small = ["--size=1MiB", "--rate-mb=1000", "--hosts", "1", "2", "--repeats=1"]
    monkeypatch.setattr(sys, "argv", ["swarm", *small, f"--results={tmp_path}"])
    swarm.main()
    *rows, machine = json.loads((tmp_path / "swarm.json").read_text())
    ways = ("passing chunks on", "each for itself")
    assert [row["name"] for row in rows] == [f"restore on {hosts} hosts, {way}" for way in ways for hosts in (1, 2)]
    assert all(row["value"] > 0 for row in rows)
    assert machine["name"].startswith("machine")


def test_without_a_gpu_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["run", "--size=1MiB", "--device=cuda", f"--results={tmp_path}"])
    with pytest.raises(SystemExit, match="no GPU"):
        run.main()
    assert not list(tmp_path.iterdir())


def _served(folder: Path, **wanted: Any) -> AbstractContextManager[ServedHoldfast]:
    return holdfast_serve(folder, **wanted | {"forked": True})


def _forked(_python: Path, spec: Spec, environment: Mapping[str, str], log: Path) -> ForkedProgram:
    case = [spec.encode()]
    return ForkedProgram("benchmarks.case", case, environment=environment, folder=processes.REPOSITORY, log=log)


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


def test_a_row_tells_of_repeats_that_failed() -> None:
    saved = {"bytes": 1e9, "seconds": 2.0, "cpu_seconds": 0.8}
    trained = {"rate": 0.9, "rate_beside_hashing": 0.95}
    rows = {
        row.name: row
        for row in Rows(
            {
                "s3 holdfast": [saved, Failed("the store was full"), saved],
                "s3 bare": [{"bytes": 1e9, "put_seconds": 1.0, "get_seconds": 1.0}],
                "training, holdfast-posix": [trained],
                "training, holdfast-s3": [Failed("no room")],
            }
        ).all()
    }
    assert rows["s3_save_vs_bare_put"].how.endswith("s3 holdfast: 1 of 3 repeats failed: the store was full")
    assert rows["s3 holdfast: rate"].how.startswith("median of 2; ")
    assert rows["train_rate_during_save"].how.endswith("could not be measured: holdfast-s3: no room")


def test_a_restore_that_had_no_save_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.schedule.measured", lambda *_, **__: Failed("no room"))
    schedule = Schedule(2**20, 1, Path(sys.executable), with_s3=False, say=lambda _: None)
    saved_by_dcp = next(subject for subject in POSIX if subject.label == "posix dcp.save")
    schedule._measure(replace(saved_by_dcp, threads=(1,)))
    row = next(row for row in Rows(schedule.measures).all() if row.name == "posix_restore_vs_dcp")
    assert "posix dcp.save x1, restore: its save failed: no room" in row.how


def test_a_bare_get_that_brings_too_little_has_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    bare = _BareS3(Spec("raw_s3", 1))
    for status, body in ((503, b""), (200, b"too little")):
        reply = urllib3.HTTPResponse(io.BytesIO(body), status=status, preload_content=False)
        monkeypatch.setattr(bare._http, "request", lambda *_, reply=reply, **__: reply)
        with pytest.raises(RuntimeError, match=f"answered {status} with {len(body)} of 20 bytes"):
            bare.get("http://store", {}, memoryview(bytearray(20)))
