"""What a storm of one project costs another one: its restore point's time, quiet and during the storm.

python -m benchmarks.scale.fairness [--ranks 256,1024] [--repeats 3] [--workers 1] [--ranks-compete] [--peer]
    [--quiet-seconds 15]

The other project's caller is a process of its own and asks again and again, one call at a time. Each project has a
token of its own. Service, Postgres, ranks and this caller are on one machine. Ranks have cores of their own in truth:
here they take what the others leave, unless `--ranks-compete`.

`--peer`: a second service, with a Postgres of its own and nothing to do, is asked by the same caller in turn. What the
storm costs it is the machine's: the two services share cores and nothing else.
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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from tests.support.serve import without_holdfast_settings

from benchmarks.scale.storm import PROJECT, Cluster, Storm, begin_for, cluster, storm
from holdfast_client.chunks.transfer import OutgoingChunk
from holdfast_client.client import Client
from holdfast_client.settings import ClientSettings
from holdfast_client.shard_writer import ShardWriter
from holdfast_protocol.base import RunName
from holdfast_protocol.checkpoints import Component, IndexOrdinals, ShardSummary
from holdfast_protocol.service import CreateToken
from holdfast_protocol.states import Scope

_OTHER = RunName("quiet-project", "of-1")
_PAUSE_SECONDS = 0.02


@dataclass(frozen=True)
class Asked:
    """One call of the other project: when it began, by this machine's monotonic clock, and how long it took."""

    began_at: float
    seconds: float


def fairness(
    cluster: Cluster, ranks: int, *, quiet_seconds: float, peer: Cluster | None = None, compete: bool = False
) -> dict[str, Any]:
    """Milliseconds of the other project's restore point, quiet and while `ranks` ranks save one checkpoint. `compete`:
    the ranks, for the cores."""
    callers = [_for_the_caller(each) for each in (cluster, peer) if each is not None]
    with _caller(callers) as quiet:
        time.sleep(quiet_seconds)
    with _caller(callers) as asked:
        stormed = storm(cluster, ranks, token=_token(cluster, PROJECT), take_what_is_left=not compete)
    row: dict[str, Any] = {"ranks": ranks, "ranks_compete": compete, "storm_seconds": round(stormed.seconds, 2)}
    row |= _compared(quiet[0], asked[0], stormed)
    return row if peer is None else row | {"peer": _compared(quiet[1], asked[1], stormed)}


def _compared(quiet: list[Asked], asked: list[Asked], stormed: Storm) -> dict[str, Any]:
    before, during = _figures(quiet), _during(asked, stormed)
    return {"quiet": before, "storm": during, "p99_ratio": round(during["p99_ms"] / before["p99_ms"], 2)}


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


def _token(cluster: Cluster, project: str) -> str:
    """A token says whose turn a call is."""
    with cluster.client() as client:
        return client.tokens.create(CreateToken(name=project, scopes=[Scope.TRAIN, Scope.READ], project=project)).token


def _for_the_caller(cluster: Cluster) -> dict[str, str]:
    """Where the other project's restore point is."""
    with cluster.client() as client:
        _save_once(client)
    return {"url": cluster.environment["HOLDFAST_URL"], "token": _token(cluster, _OTHER.project)}


@contextmanager
def _caller(services: list[dict[str, str]]) -> Iterator[list[list[Asked]]]:
    """Calls while the block is under way, each service in turn; what it has measured of each is there when the block
    has ended."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.scale.fairness", "--call", json.dumps(services)],
        env=without_holdfast_settings(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # it shares the cores as one of many, and not as one of the ranks
    )
    asked: list[list[Asked]] = []
    try:
        assert process.stdout is not None
        process.stdout.readline()  # it has its connections
        yield asked
        output, _ = process.communicate("", timeout=120)
        asked += [[Asked(*each) for each in of_service] for of_service in json.loads(output)]
    finally:
        process.kill()
        process.wait()


def _call(services: list[dict[str, str]]) -> None:
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    told: list[list[tuple[float, float]]] = [[] for _ in services]
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(ClientSettings(**each))) for each in services]
        for client in clients:
            client.restores.restore_point(_OTHER.project, _OTHER.run)
        print(flush=True)
        while not ended.wait(_PAUSE_SECONDS):
            for client, of_service in zip(clients, told, strict=True):
                began_at = time.monotonic()
                client.restores.restore_point(_OTHER.project, _OTHER.run)
                of_service.append((began_at, time.monotonic() - began_at))
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
    parser.add_argument("--quiet-seconds", type=float, default=15.0, help="so long is asked before each storm")
    parser.add_argument("--ranks-compete", action="store_true", help="for the cores, with the service")
    parser.add_argument("--peer", action="store_true", help="asks a second service in turn that has no storm")
    parser.add_argument("--call", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.call:
        _call(arguments.call)
        return
    with ExitStack() as stack:
        started = stack.enter_context(cluster(workers=arguments.workers))
        peer = stack.enter_context(cluster(workers=arguments.workers)) if arguments.peer else None
        storm(started, 8)
        for ranks in arguments.ranks.split(","):
            rows = [
                fairness(
                    started,
                    int(ranks),
                    quiet_seconds=arguments.quiet_seconds,
                    peer=peer,
                    compete=arguments.ranks_compete,
                )
                for _ in range(arguments.repeats)
            ]
            for row in rows:
                print(json.dumps(row), flush=True)
            print("median:", json.dumps(middle(rows)), flush=True)


if __name__ == "__main__":
    main()
