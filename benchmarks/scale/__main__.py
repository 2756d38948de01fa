"""`make scale`: storms of several sizes, medians, scale.json and the table. See benchmarks/scale/__init__.py.

python -m benchmarks.scale [--ranks 64,256,1024] [--repeats 3] [--workers 1] [--pooled-connections 0]
    [--results FOLDER]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.scale.storm import Storm, cluster, storm

_RESULTS = Path(__file__).resolve().parents[1] / "results"
_WARM_UP_RANKS = 8


def main() -> None:
    arguments = _arguments()
    rows = []
    with cluster(workers=arguments.workers, pooled_connections=arguments.pooled_connections) as started:
        storm(started, _WARM_UP_RANKS)
        for ranks in arguments.ranks:
            rows.append(_row([storm(started, ranks) for _ in range(arguments.repeats)]))
            print(_line(rows[-1]), flush=True)
    found = {"machine": _machine(arguments.repeats), "storms": rows}
    arguments.results.mkdir(parents=True, exist_ok=True)
    path = arguments.results / "scale.json"
    being_written = path.with_suffix(".tmp")
    being_written.write_text(json.dumps(found, indent=2) + "\n")
    being_written.replace(path)
    print(path)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=_numbers, default=[64, 256, 1024], help="sizes of the storms: 64,256,1024")
    parser.add_argument("--repeats", type=int, default=3, help="the figures are the medians of so many")
    parser.add_argument("--workers", type=int, default=1, help="processes of the service that answer requests")
    parser.add_argument(
        "--pooled-connections", type=int, default=0, help="behind PgBouncer, with so many of Postgres; 0: without"
    )
    parser.add_argument("--results", type=Path, default=_RESULTS, help="the folder for scale.json")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def _row(storms: list[Storm]) -> dict[str, Any]:
    """The medians; calls as they were in the last storm."""
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
