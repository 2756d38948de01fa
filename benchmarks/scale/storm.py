"""All ranks of one checkpoint at once, and what service and database used for it."""

from __future__ import annotations

import itertools
import math
import resource
import secrets
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import psycopg
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import make_url
from tests.support.pgbouncer import pgbouncer
from tests.support.postgres import OwnPostgresServer, postgres_server
from tests.support.serve import holdfast_serve, without_holdfast_settings

from benchmarks.measure import cpu_seconds_of_tree, memory_bytes_of_tree
from benchmarks.scale.catalog import fill
from benchmarks.scale.lock_waits import LockWaits
from benchmarks.scale.ranks import READY, Orders, Told
from holdfast_client.client import Client
from holdfast_client.settings import ClientSettings
from holdfast_protocol.attempts import ResumedFrom
from holdfast_protocol.base import Fence, RunName
from holdfast_protocol.checkpoints import BeginCheckpoint
from holdfast_protocol.states import CheckpointState
from holdfast_service.db.engine import Database
from holdfast_service.db.migrate import upgrade

PROJECT = "scale"
_LEAST_PROCESSES = 2
_RANKS_PER_PROCESS = 512
"""At most: the threads of more would wait for each other, which ranks of many hosts do not."""
_COMMIT_SECONDS = 60
_MOST_CONNECTIONS = 10_000  # no rank's idle connection is taken for another rank's
RANKS_PER_HOST = 8
RUNS, PROJECTS = 1000, 4
"""Of a catalog that is filled first."""
_REST_SECONDS, _LONGEST_UNREST_SECONDS = 10, 1800
_REST = 0.05
"""Of a core: more than that, and the controllers are still at work."""


@dataclass(frozen=True)
class Storm:
    """One checkpoint: from the first rank's begin until it was committed."""

    ranks: int
    began_at: float
    """By this machine's monotonic clock."""
    seconds: float
    client_cpu_seconds: float
    service_cpu_seconds: float
    database_cpu_seconds: float
    calls: dict[str, int]
    """By method and route."""
    call_seconds: dict[str, float]
    """The service's, added up, by method and route."""
    lock_wait_seconds: dict[str, float]
    """Of all statements together, by how they begin."""
    longest_lock_wait_seconds: float
    service_memory_bytes: int
    database_memory_bytes: int
    """Right after the commit; what processes share counts once."""


@dataclass(frozen=True)
class Cluster:
    """A service and its database, and the environment by which ranks find them."""

    environment: dict[str, str]
    service_pid: int
    postgres: OwnPostgresServer

    def client(self) -> Client:
        return Client(ClientSettings(url=self.environment["HOLDFAST_URL"], token=self.environment["HOLDFAST_TOKEN"]))

    def wait_for_rest(self) -> None:
        """Until the controllers have done what saves, or a fill, have left to them. A catalog that saves have filled
        has its tallies; one that was filled at once gets them from the first service, which is minutes at work."""
        deadline = time.monotonic() + _LONGEST_UNREST_SECONDS
        spent = cpu_seconds_of_tree(self.service_pid)
        while time.monotonic() < deadline:
            time.sleep(_REST_SECONDS)
            before, spent = spent, cpu_seconds_of_tree(self.service_pid)
            if spent - before <= _REST * _REST_SECONDS:
                return
        raise RuntimeError(f"the controllers are still at work after {_LONGEST_UNREST_SECONDS} s")


@contextmanager
def cluster(*, workers: int = 1, pooled_connections: int = 0, checkpoints: int = 0) -> Iterator[Cluster]:
    """One service of so many processes on a Postgres of its own; checkpoints lie in a folder on this machine.
    `pooled_connections`: PgBouncer stands in between, with so many of Postgres; 0: nothing does. `checkpoints`: so many
    are in the catalog already, and the controllers have compared and recorded what a fill leaves to them."""
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # each rank has connections of its own
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        postgres = stack.enter_context(postgres_server(own=True))
        assert isinstance(postgres, OwnPostgresServer)
        token = f"hold_{secrets.token_hex(8)}_{secrets.token_hex(32)}"
        url = postgres.create_database("scale")
        if checkpoints:
            _fill(url, checkpoints, store_url=f"posix://{folder / 'data' / 'store'}")
        if pooled_connections:
            url = stack.enter_context(pgbouncer(url, server_connections=pooled_connections)).url_for(url)
        settings = {
            "HOLDFAST_DATABASE_URL": url,
            "HOLDFAST_BOOTSTRAP_TOKEN": token,
            "HOLDFAST_SERVE_WORKERS": str(workers),
            "HOLDFAST_MOST_CONNECTIONS": str(_MOST_CONNECTIONS),
        }
        service = stack.enter_context(holdfast_serve(folder, other_settings=settings, forked=False))
        environment = service.environment | {"HOLDFAST_TOKEN": token}
        started = Cluster(environment, service.process.pid, postgres)
        if checkpoints:
            started.wait_for_rest()
        yield started


def _fill(url: str, checkpoints: int, store_url: str) -> None:
    database = Database(url)
    try:
        upgrade(database)
    finally:
        database.dispose()
    dsn = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(dsn, autocommit=True) as connection:
        fill(connection, checkpoints=checkpoints, runs=RUNS, projects=PROJECTS, store_url=store_url)


def storm(
    cluster: Cluster,
    ranks: int,
    *,
    ranks_per_host: int = RANKS_PER_HOST,
    token: str | None = None,
    take_what_is_left: bool = False,
) -> Storm:
    """On hosts of so many ranks; the last may have fewer. `token`: the ranks'. `take_what_is_left`: of the cores, they
    get what service and database do not want. Raises RuntimeError if a rank fails or the checkpoint is not committed.
    """
    with cluster.client() as client, ExitStack() as stack:
        run = RunName(PROJECT, f"of-{ranks}")
        begin = begin_for(client, run, ranks)
        processes = [
            stack.enter_context(_ranks(cluster, orders, token))
            for orders in (
                Orders(
                    run=str(run),
                    begin=begin,
                    first=first,
                    last=last,
                    ranks_per_host=ranks_per_host,
                    take_what_is_left=take_what_is_left,
                )
                for first, last in _parts(ranks)
            )
        ]
        for process in processes:
            _expect_ready(process)
        calls, seconds = _counted(cluster)
        waits = stack.enter_context(LockWaits(stack.enter_context(cluster.postgres.connect())))
        service, database = cpu_seconds_of_tree(cluster.service_pid), cpu_seconds_of_tree(cluster.postgres.pid)
        began = time.monotonic()
        for process in processes:
            print(file=process.stdin, flush=True)
        told = [_told(process) for process in processes]
        ended = time.monotonic()
        _expect_committed(client, run, begin.step + 1, told)
        service = cpu_seconds_of_tree(cluster.service_pid) - service
        database = cpu_seconds_of_tree(cluster.postgres.pid) - database
        calls_after, seconds_after = _counted(cluster)
    calls_after.subtract(calls)
    return Storm(
        ranks,
        began_at=began,
        seconds=ended - began,
        client_cpu_seconds=sum(each.cpu_seconds for each in told),
        service_cpu_seconds=service,
        database_cpu_seconds=database,
        calls={route: count for route, count in calls_after.items() if count},
        call_seconds={route: seconds_after[route] - seconds[route] for route in calls_after if calls_after[route]},
        lock_wait_seconds=dict(waits.seconds),
        longest_lock_wait_seconds=waits.longest_seconds,
        service_memory_bytes=memory_bytes_of_tree(cluster.service_pid),
        database_memory_bytes=memory_bytes_of_tree(cluster.postgres.pid),
    )


def begin_for(client: Client, run: RunName, ranks: int) -> BeginCheckpoint:
    """What each rank begins first: a launch's first save after the newest checkpoint, if there is one."""
    launch = uuid.uuid4().hex
    opened = client.attempts.open_next(run, launch, world_size=ranks, host="scale", create=True)
    fence = Fence(epoch=opened.epoch, attempt=opened.attempt, launch_id=launch)
    point = opened.restore_point
    resumed = ResumedFrom(checkpoint_id=None if point is None else point.checkpoint_id, **fence.model_dump())
    client.attempts.resumed_from(run.project, run.run, opened.attempt, resumed)
    return BeginCheckpoint(step=0 if point is None else point.step + 1, world_size=ranks, **fence.model_dump())


def _parts(ranks: int) -> list[tuple[int, int]]:
    processes = max(_LEAST_PROCESSES, math.ceil(ranks / _RANKS_PER_PROCESS))
    bounds = [at * ranks // processes for at in range(processes + 1)]
    return list(itertools.pairwise(bounds))


@contextmanager
def _ranks(cluster: Cluster, orders: Orders, token: str | None) -> Iterator[subprocess.Popen[str]]:
    theirs = {} if token is None else {"HOLDFAST_TOKEN": token}
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.scale.ranks"],
        env=without_holdfast_settings() | cluster.environment | theirs,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=orders.take_what_is_left,
    )
    try:
        print(orders.model_dump_json(), file=process.stdin, flush=True)
        yield process
    finally:
        process.kill()
        process.communicate()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise RuntimeError(f"the ranks ended with {process.wait()}; their own words are above")
    return line


def _expect_ready(process: subprocess.Popen[str]) -> None:
    if (line := _line(process)) != READY:
        raise RuntimeError(f"the ranks said {line!r} and not {READY!r}")


def _told(process: subprocess.Popen[str]) -> Told:
    return Told.model_validate_json(_line(process))


def _expect_committed(client: Client, run: RunName, step: int, told: Sequence[Told]) -> None:
    """By one of the ranks' seals: of another commit it is not known when it was."""
    view = client.checkpoints.select(run.project, run.run, str(step))
    view = client.checkpoints.get(view.id, wait_seconds=_COMMIT_SECONDS)
    if view.state is not CheckpointState.COMMITTED:
        raise RuntimeError(f"{run} step {step} is {view.state} after all ranks have sealed: {view.abort_reason}")
    if not any(each.committed for each in told):
        raise RuntimeError(f"{run} step {step} was committed after all ranks had sealed")


def _counted(cluster: Cluster) -> tuple[Counter[str], Counter[str]]:
    """Calls and seconds since the service started, by method and route."""
    headers = {"Authorization": f"Bearer {cluster.environment['HOLDFAST_TOKEN']}"}
    answer = httpx.get(f"{cluster.environment['HOLDFAST_URL']}/metrics", headers=headers, timeout=60).raise_for_status()
    calls: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            key = f"{sample.labels.get('method')} {sample.labels.get('route')}"
            if not key.startswith(("POST ", "PUT ")):  # the others are this process's own
                continue
            if sample.name == "holdfast_requests_total":
                calls[key] += int(sample.value)
            elif sample.name == "holdfast_request_seconds_sum":
                seconds[key] += sample.value  # type: ignore[assignment]
    return calls, seconds
