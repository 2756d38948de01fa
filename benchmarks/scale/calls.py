"""How long each call takes, one after the other on a quiet service: those of a save and a restore, and an operator's.

Over HTTP, on one connection, with no client's work in between. Each save goes into another run of the filled catalog
(benchmarks/scale/catalog.py), which has a thousandth of its checkpoints.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable
from math import ceil
from statistics import median
from typing import Any, TypeVar

import httpx
from tests.support.rank import Job, digest_of, offer_of

from benchmarks.scale.catalog import ATTEMPTS, project_of, run_name
from benchmarks.scale.storm import Cluster
from holdfast_protocol.base import PROTOCOL_HEADER, PROTOCOL_VERSION

Result = TypeVar("Result")

_CHUNK_BYTES = 512
_STEP = 10**9
"""Behind every step of the filled catalog."""
_LONGEST_SECONDS = 30.0
_FEWEST = 3


class _Times:
    def __init__(self) -> None:
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)

    def of(self, name: str, call: Callable[[], Result]) -> Result:
        began = time.monotonic()
        result = call()
        self._seconds[name].append(time.monotonic() - began)
        return result

    def figures(self) -> dict[str, dict[str, float]]:
        """Milliseconds. Of fewer than a hundred calls the p99 is the slowest."""
        return {name: _figures(seconds) for name, seconds in self._seconds.items()}


def time_calls(cluster: Cluster, *, projects: int, runs: int, repeats: int) -> dict[str, dict[str, float]]:
    """By call: `p50_ms`, `p99_ms` and `calls`. The first save and the first reads are not counted, because they open
    connections and compile statements. The reads follow once the controllers have recorded the saves. An operator's
    call that is slow is made at least three times."""
    headers = {"Authorization": f"Bearer {cluster.environment['HOLDFAST_TOKEN']}", PROTOCOL_HEADER: PROTOCOL_VERSION}
    url = cluster.environment["HOLDFAST_URL"]
    with httpx.Client(base_url=url, headers=headers, timeout=300) as http:
        times = _Times()
        _save(http, _Times(), project_of(1, projects), run_name(1))
        for run in range(2, min(runs, repeats + 1) + 1):
            _save(http, times, project_of(run, projects), run_name(run))
        cluster.wait_for_rest()
        for name, path in _operators_reads(project_of(1, projects)).items():
            _get(http, path)
            began = time.monotonic()
            for made in range(repeats):
                if made >= _FEWEST and time.monotonic() - began > _LONGEST_SECONDS:
                    break
                times.of(name, lambda path=path: _get(http, path))  # type: ignore[misc]
    return times.figures()


def _operators_reads(project: str) -> dict[str, str]:
    return {
        "page of runs": f"/v1/projects/{project}/runs?limit=100",
        "usage of a project": f"/v1/projects/{project}/usage",
        "projects": "/v1/projects",
        "controllers": "/v1/controllers",
        "/metrics": "/metrics",
        "/openapi.json": "/openapi.json",
    }


def _save(http: httpx.Client, times: _Times, project: str, run: str) -> None:
    """An attempt that takes the run over, saves a step in four calls and reads it back."""
    first, rest = ([os.urandom(_CHUNK_BYTES) for _ in range(2)] for _ in range(2))
    job = times.of("open attempt", lambda: Job(http, f"{project}/{run}", after=ATTEMPTS))
    point = job.opened["restore_point"]
    job.resumed_from(None if point is None else point["checkpoint_id"])
    times.of("heartbeat", lambda: job.heartbeat(1))
    save = times.of("begin", lambda: job.begin(_STEP, offers=[offer_of(0, first)]))
    save.send(first, save.view["negotiated"][0]["chunks"])
    negotiated = times.of("negotiate", lambda: save.negotiate(0, rest))
    save.send(rest, negotiated["chunks"])
    times.of("seal", lambda: save.seal(0, first + rest))
    times.of("restore point", lambda: _get(http, f"{job.base}/restore-point"))
    asked = {"digests": [digest_of(data) for data in first + rest]}
    times.of("read tickets", lambda: http.post(f"/v1/checkpoints/{save.id}/reads", json=asked).raise_for_status())


def _get(http: httpx.Client, path: str) -> Any:
    return http.get(path).raise_for_status().content


def _figures(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    slowest = ordered[ceil(0.99 * len(ordered)) - 1]
    return {
        "p50_ms": round(median(ordered) * 1000, 2),
        "p99_ms": round(slowest * 1000, 2),
        "calls": len(ordered),
    }
