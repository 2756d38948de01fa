"""What a storm of one project costs another one: its restore point's time, quiet and during the storm.

python -m benchmarks.scale.fairness [--ranks 256,1024] [--repeats 3] [--workers 1]

The other project's caller is a process of its own and asks again and again, one call at a time. Service, Postgres,
ranks and this caller share the machine's cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from tests.support.serve import without_holdfast_settings

from benchmarks.scale.storm import Cluster, Storm, begin_for, cluster, storm
from holdfast_client.chunks.transfer import OutgoingChunk
from holdfast_client.client import Client
from holdfast_client.shard_writer import ShardWriter
from holdfast_protocol.base import RunName
from holdfast_protocol.checkpoints import Component, IndexOrdinals, ShardSummary

_OTHER = RunName("quiet-project", "of-1")
_QUIET_SECONDS = 15.0
_PAUSE_SECONDS = 0.02


@dataclass(frozen=True)
class Asked:
    """One call of the other project: when it began, by this machine's monotonic clock, and how long it took."""

    began_at: float
    seconds: float


def fairness(cluster: Cluster, ranks: int) -> dict[str, Any]:
    """Milliseconds of the other project's restore point, quiet and while `ranks` ranks save one checkpoint."""
    with cluster.client() as client:
        _save_once(client)
    with _caller(cluster) as quiet:
        time.sleep(_QUIET_SECONDS)
    with _caller(cluster) as asked:
        stormed = storm(cluster, ranks)
    during = _during(asked, stormed)
    row = {"ranks": ranks, "storm_seconds": round(stormed.seconds, 2), "quiet": _figures(quiet), "storm": during}
    return row | {"p99_ratio": round(during["p99_ms"] / row["quiet"]["p99_ms"], 2)}


def _during(asked: list[Asked], stormed: Storm) -> dict[str, float]:
    """A call counts if a part of it was in the storm: the slow ones began before its end."""
    ended_at = stormed.began_at + stormed.seconds
    return _figures([each for each in asked if stormed.began_at - each.seconds < each.began_at < ended_at])


def _figures(asked: list[Asked]) -> dict[str, float]:
    taken = sorted(each.seconds * 1000 for each in asked)
    cuts = quantiles(taken, n=100, method="inclusive")
    figures = {"p50_ms": cuts[49], "p99_ms": cuts[98], "longest_ms": taken[-1]}
    return {"calls": len(taken)} | {name: round(value, 1) for name, value in figures.items()}


def _save_once(client: Client) -> None:
    begin = begin_for(client, _OTHER, 1)
    writer = ShardWriter(client, _OTHER, 0, begin)
    summary = ShardSummary(components={"model": Component(kind="model", logical_bytes=512)})
    chunks = [OutgoingChunk.of(memoryview(os.urandom(512))) for _ in range(2)]
    writer.upload_and_seal(chunks, lambda: (summary, IndexOrdinals(shard=1, layout=0)))


@contextmanager
def _caller(cluster: Cluster) -> Iterator[list[Asked]]:
    """Calls while the block is under way; what it has measured is there when the block has ended."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.scale.fairness", "--call"],
        env=without_holdfast_settings() | cluster.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    asked: list[Asked] = []
    try:
        assert process.stdout is not None
        process.stdout.readline()  # it has a connection
        yield asked
        output, _ = process.communicate("", timeout=120)
        asked += [Asked(*each) for each in json.loads(output)]
    finally:
        process.kill()
        process.wait()


def _call() -> None:
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    told: list[tuple[float, float]] = []
    with Client() as client:
        client.restores.restore_point(_OTHER.project, _OTHER.run)
        print(flush=True)
        while not ended.wait(_PAUSE_SECONDS):
            began_at = time.monotonic()
            client.restores.restore_point(_OTHER.project, _OTHER.run)
            told.append((began_at, time.monotonic() - began_at))
    print(json.dumps(told), flush=True)


def middle(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The row whose ratio is the median."""
    ratio = median(row["p99_ratio"] for row in rows)
    return min(rows, key=lambda row: abs(row["p99_ratio"] - ratio))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="256,1024", help="sizes of the storms")
    parser.add_argument("--repeats", type=int, default=3, help="so many storms of each size")
    parser.add_argument("--workers", type=int, default=1, help="processes of the service that answer requests")
    parser.add_argument("--call", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.call:
        _call()
        return
    with cluster(workers=arguments.workers) as started:
        storm(started, 8)
        for ranks in arguments.ranks.split(","):
            rows = [fairness(started, int(ranks)) for _ in range(arguments.repeats)]
            for row in rows:
                print(json.dumps(row), flush=True)
            print("median:", json.dumps(middle(rows)), flush=True)


if __name__ == "__main__":
    main()
