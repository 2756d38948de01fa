"""`make scale`: storms, calls and processes; writes scale.json, draws the plot, prints lines. See
benchmarks/scale/__init__.py.

python -m benchmarks.scale [--ranks 64,256,1024] [--repeats 3] [--checkpoints 1000,10000,1000000] [--calls 100]
    [--ranks-per-host 8] [--throughput-ranks 256] [--without-plot] [--results FOLDER]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import memory_bytes_of_tree
from benchmarks.scale.calls import time_calls
from benchmarks.scale.storm import PROJECTS, RANKS_PER_HOST, RUNS, Storm, cluster, storm

_REPOSITORY = Path(__file__).resolve().parents[2]
_RESULTS = _REPOSITORY / "benchmarks" / "results"
_PEERS = _REPOSITORY / ".venv-bench"
_WARM_UP_RANKS = 8
_POOLED_CONNECTIONS = 8
_SETUPS = ((1, 0), (2, 0), (1, _POOLED_CONNECTIONS), (2, _POOLED_CONNECTIONS))
"""Processes that serve, and connections of Postgres behind PgBouncer; 0: without it."""


def main() -> None:
    arguments = _arguments()
    found: dict[str, Any] = {"machine": _machine(arguments.repeats)}
    path: Path = arguments.results / "scale.json"
    arguments.results.mkdir(parents=True, exist_ok=True)

    def keep(name: str, measured: Any) -> None:
        """After each part: what was measured so far outlives a part that fails."""
        found[name] = measured
        being_written = path.with_suffix(".tmp")
        being_written.write_text(json.dumps(found, indent=2) + "\n")
        being_written.replace(path)

    keep("storms", _storms(arguments.ranks, arguments.repeats, arguments.ranks_per_host))
    if arguments.throughput_ranks:
        keep("throughput", _throughput(arguments.throughput_ranks, arguments.repeats))
    keep("calls", {str(count): _calls(count, arguments.calls) for count in arguments.checkpoints})
    if not arguments.without_plot:
        prepare = [str(_REPOSITORY / "benchmarks" / "prepare-peers"), sys.executable, str(_PEERS)]
        subprocess.run(prepare, check=True)
        picture = _REPOSITORY / "docs" if arguments.results == _RESULTS else arguments.results
        plot = [str(_PEERS / "bin" / "python"), "-m", "benchmarks.scale.plot", str(path), str(picture / "scale.png")]
        subprocess.run(plot, cwd=_REPOSITORY, check=True)
    print(path)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=_numbers, default=[64, 256, 1024], help="sizes of the storms: 64,256,1024")
    parser.add_argument(
        "--ranks-per-host", type=int, default=RANKS_PER_HOST, help="of the storms; 1: each rank calls alone"
    )
    parser.add_argument("--repeats", type=int, default=3, help="the storms' figures are the medians of so many")
    parser.add_argument(
        "--checkpoints",
        type=_numbers,
        default=[1000, 10_000, 1_000_000],
        help="sizes of the catalogs in which calls are timed",
    )
    parser.add_argument("--calls", type=int, default=100, help="each call is made so often")
    parser.add_argument("--throughput-ranks", type=int, default=256, help="a storm on 1 and 2 processes; 0: none")
    parser.add_argument("--without-plot", action="store_true", help="scale.json alone")
    parser.add_argument("--results", type=Path, default=_RESULTS, help="the folder for scale.json")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",") if each]


def _storms(
    sizes: list[int],
    repeats: int,
    ranks_per_host: int = RANKS_PER_HOST,
    *,
    workers: int = 1,
    pooled_connections: int = 0,
) -> list[dict[str, Any]]:
    with cluster(workers=workers, pooled_connections=pooled_connections) as started:
        storm(started, _WARM_UP_RANKS)
        rows = []
        for ranks in sizes:
            try:
                storms = [storm(started, ranks, ranks_per_host=ranks_per_host) for _ in range(repeats)]
                rows.append(_row(storms))
            except RuntimeError as error:  # a rank failed; its own words are printed already
                rows.append({"ranks": ranks, "failed": str(error)})
                print(f"{ranks:6} ranks: {error}", flush=True)
                break  # more of them would fail too
            print(_line(rows[-1]), flush=True)
        return rows


def _throughput(ranks: int, repeats: int) -> list[dict[str, Any]]:
    """The same storm on more processes, and through PgBouncer."""
    rows = []
    for workers, pooled in _SETUPS:
        (row,) = _storms([ranks], repeats, workers=workers, pooled_connections=pooled)
        row.pop("storms", None)
        rate = {} if "failed" in row else {"ranks_a_second": round(ranks / row["seconds"], 1)}
        rows.append({"workers": workers, "pooled_connections": pooled} | rate | row)
    return rows


def _calls(checkpoints: int, repeats: int) -> dict[str, Any]:
    with cluster(checkpoints=checkpoints) as started:
        times = time_calls(started, projects=PROJECTS, runs=min(RUNS, checkpoints), repeats=repeats)
        with started.postgres.connect() as connection:
            size = connection.execute("SELECT pg_database_size('scale')").fetchone()
        assert size is not None
        measured = {
            "calls": times,
            "database_bytes": size[0],
            "service_memory_bytes": memory_bytes_of_tree(started.service_pid),
            "database_memory_bytes": memory_bytes_of_tree(started.postgres.pid),
        }
    for name, each in times.items():
        print(f"{checkpoints:9} checkpoints: {name} {each['p50_ms']:.1f} ms, p99 {each['p99_ms']:.1f} ms", flush=True)
    return measured


def _row(storms: list[Storm]) -> dict[str, Any]:
    """The medians, and the storms."""
    ranks = storms[-1].ranks

    def middle(of: Callable[[Storm], float]) -> float:
        return round(median(of(each) for each in storms), 3)

    return {
        "ranks": ranks,
        "seconds": middle(lambda each: each.seconds),
        "client_cpu_ms_a_rank": middle(lambda each: each.client_cpu_seconds / ranks * 1000),
        "service_cpu_ms_a_rank": middle(lambda each: each.service_cpu_seconds / ranks * 1000),
        "database_cpu_ms_a_rank": middle(lambda each: each.database_cpu_seconds / ranks * 1000),
        "lock_wait_ms_a_rank": middle(lambda each: sum(each.lock_wait_seconds.values()) / ranks * 1000),
        "longest_lock_wait_ms": middle(lambda each: each.longest_lock_wait_seconds * 1000),
        "calls_a_rank": middle(lambda each: sum(each.calls.values()) / ranks),
        "service_memory_bytes": middle(lambda each: each.service_memory_bytes),
        "database_memory_bytes": middle(lambda each: each.database_memory_bytes),
        "storms": [dataclasses.asdict(each) for each in storms],
    }


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['ranks']:6} ranks: {row['seconds']:7.2f} s; {row['calls_a_rank']:.2f} calls a rank; CPU a rank: service "
        f"{row['service_cpu_ms_a_rank']:.1f} ms, database {row['database_cpu_ms_a_rank']:.1f} ms, clients "
        f"{row['client_cpu_ms_a_rank']:.1f} ms; lock waits a rank {row['lock_wait_ms_a_rank']:.1f} ms, the longest "
        f"{row['longest_lock_wait_ms']:.0f} ms"
    )


def _machine(repeats: int) -> str:
    cores = len(os.sched_getaffinity(0))
    return (
        f"medians of {repeats}; {datetime.now(UTC):%Y-%m-%d %H:%M} UTC; {cores} cores for service, Postgres and ranks; "
        f"Python {platform.python_version()}; load average of 15 minutes {os.getloadavg()[2]:.1f}"
    )


if __name__ == "__main__":
    main()
