"""Two services and two workers on one Postgres, all through PgBouncer in transaction mode, and ranks behind a balancer
that knows no callers. In each storm one of them ends by kill -9: the storm commits, and nobody waits longer than a
lease.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from benchmarks.scale.ranks import Orders, Ranks
from sqlalchemy import select

from holdfast_client.client import Client
from holdfast_protocol.attempts import ResumedFrom
from holdfast_protocol.base import Fence
from holdfast_protocol.checkpoints import BeginCheckpoint, CheckpointView
from holdfast_protocol.runs import RunName
from holdfast_protocol.states import CheckpointState, OperationState
from holdfast_service.db.dialect import database_now
from holdfast_service.db.engine import Database
from holdfast_service.db.tables.core import Checkpoint
from holdfast_service.db.tables.operations import Operation, Worker
from tests.support.balancer import balancer
from tests.support.pgbouncer import PgBouncer
from tests.support.ports import free_ports
from tests.support.postgres import PostgresServer
from tests.support.processes import ServerProcess
from tests.support.serve import HOLDFAST, is_ready, without_holdfast_settings

RANKS = 16
LEASE_SECONDS = 20
WAIT_SECONDS = 120
# A worker that reads a storm's checkpoint so slowly is in the middle of it when it is killed.
READ_BYTES_PER_SECOND = 2_000
TOKEN = f"hold_{secrets.token_hex(8)}_{secrets.token_hex(32)}"


class Cluster:
    """One service of two processes and one of one, and two workers. `url`: the balancer's."""

    def __init__(self, folder: Path, url: str, started: ExitStack) -> None:
        self.database = Database(url)
        started.callback(self.database.dispose)
        self._folder = folder
        self._settings = without_holdfast_settings() | {
            "HOLDFAST_DATABASE_URL": url,
            "HOLDFAST_DATABASE_CONNECTIONS": "10",
            "HOLDFAST_DATA_DIR": str(folder / "data"),
            "HOLDFAST_STORE": f"posix://{folder / 'store'}",
            "HOLDFAST_BOOTSTRAP_TOKEN": TOKEN,
            "HOLDFAST_SERVE_CONTROLLERS": "false",
            "HOLDFAST_CONTROLLER_INTERVAL_SECONDS": "2",
            "HOLDFAST_LEASE_SECONDS": str(LEASE_SECONDS),
            "HOLDFAST_CHUNK_LEASE_SECONDS": str(LEASE_SECONDS),
            "HOLDFAST_PROVE_BYTES_PER_SECOND": str(READ_BYTES_PER_SECOND),
        }
        with ThreadPoolExecutor(4) as starts:
            services = [starts.submit(self._serve, started, processes) for processes in (2, 1)]
            workers = [starts.submit(self._work, started, number) for number in range(2)]
        self.services = [each.result() for each in services]
        self.workers = [each.result() for each in workers]
        self.url = started.enter_context(balancer([url for url, _ in self.services])).url

    def _serve(self, started: ExitStack, processes: int) -> tuple[str, ServerProcess]:
        port = free_ports()
        url = f"http://127.0.0.1:{port}"
        process = ServerProcess(
            [HOLDFAST, "serve", "--workers", str(processes)],
            log=self._folder / f"service-{processes}.log",
            ready=lambda: is_ready(url),
            env=self._settings | {"HOLDFAST_PORT": str(port)},
        )
        started.callback(process.stop)
        return url, process

    def _work(self, started: ExitStack, number: int) -> ServerProcess:
        log = self._folder / f"worker-{number}.log"
        process = ServerProcess(
            [HOLDFAST, "workers", "run"],
            log=log,
            ready=lambda: log.exists() and "works as" in log.read_text(),
            env=self._settings,
        )
        started.callback(process.stop)
        return process

    def pids(self, kind: str) -> dict[str, int]:
        """Of the processes that have said so and are there, by the name that they have in the catalog."""
        there = select(Worker.id, Worker.pid).where(Worker.kind == kind, Worker.ended_at.is_(None))
        rows = self.read(lambda session: session.execute(there).all())
        return {row.id: row.pid for row in rows if psutil.pid_exists(row.pid)}

    def read(self, what: Callable[[Any], Any]) -> Any:
        with self.database.read() as session:
            return what(session)

    def until(self, holds: Callable[[], Any], what: str) -> Any:
        """Patience and no more: it says what did not come, and never decides between two results."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not (found := holds()):
            assert time.monotonic() < deadline, f"this did not come: {what}"
            time.sleep(0.02)
        return found


@pytest.fixture
def cluster(
    tmp_path: Path, postgres: PostgresServer, pooler: PgBouncer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cluster]:
    name = f"storm_{secrets.token_hex(6)}"
    with ExitStack() as started:
        url = pooler.url_for(postgres.create_database(name))
        started.callback(postgres.drop_database, name)
        made = Cluster(tmp_path, url, started)
        for setting, value in {
            "HOLDFAST_URL": made.url,
            "HOLDFAST_TOKEN": TOKEN,
            # A rank whose call is not answered for a lease fails, and its storm with it.
            "HOLDFAST_RETRY_SECONDS": str(LEASE_SECONDS),
            "HOLDFAST_TIMEOUT_SECONDS": str(LEASE_SECONDS),
        }.items():
            monkeypatch.setenv(setting, value)
        yield made


@pytest.mark.timeout(600)
def test_a_storm_commits_whoever_is_killed_in_it_and_nobody_waits_longer_than_a_lease(cluster: Cluster) -> None:
    with Client() as client:
        of_two, alone = (process for _, process in cluster.services)
        children = {each.pid for each in psutil.Process(of_two.pid).children(recursive=True)}

        killed = next(pid for pid in cluster.pids("serve").values() if pid in children)
        first = storm(cluster, client, lambda: os.kill(killed, signal.SIGKILL))
        cluster.until(lambda: len(cluster.pids("serve")) == 3 and not psutil.pid_exists(killed), "it is started again")

        storm(cluster, client, alone.kill9)

        killed_in: list[tuple[str, str]] = []
        last = storm(cluster, client, lambda: killed_in.append(kill_who_scrubs(cluster, client, first)))
        ((victim, scrub_id),) = killed_in
        now, row = cluster.read(lambda session: (database_now(session), session.get_one(Operation, scrub_id)))
        assert row.worker_id != victim or (row.leased_until - now).total_seconds() <= LEASE_SECONDS
        done = client.operations.wait(scrub_id, timeout_seconds=WAIT_SECONDS)
        assert (done.state, done.result["lost"]) == (OperationState.DONE, 0)
        row = cluster.read(lambda session: session.get_one(Operation, scrub_id))
        assert (row.tries, row.worker_id != victim) == (2, True), "the other worker has finished it"

        assert client.checkpoints.get(last).state is CheckpointState.COMMITTED
    assert "Traceback" not in of_two.log_text


def kill_who_scrubs(cluster: Cluster, client: Client, checkpoint_id: str) -> tuple[str, str]:
    """The worker's name, and the scrub that it has just begun and has seconds to go."""
    pids, scrub = cluster.pids("worker"), client.scrubs.checkpoint(checkpoint_id)
    held = select(Operation.worker_id).where(Operation.id == scrub.id, Operation.state == OperationState.RUNNING)
    victim: str = cluster.until(lambda: cluster.read(lambda session: session.scalar(held)), "a worker has begun")
    os.kill(pids[victim], signal.SIGKILL)
    return victim, scrub.id


def storm(cluster: Cluster, client: Client, kill: Callable[[], None]) -> str:
    """The checkpoint's id. `kill` is called when a rank has sealed, while others save."""
    run, launch = RunName("demo", f"run-{uuid.uuid4().hex[:8]}"), uuid.uuid4().hex
    opened = client.attempts.open_next(run, launch, world_size=RANKS, host="test", create=True)
    fence = Fence(epoch=opened.epoch, attempt=opened.attempt, launch_id=launch)
    resumed = ResumedFrom(checkpoint_id=None, **fence.model_dump())
    client.attempts.resumed_from(run.project, run.run, opened.attempt, resumed)
    begin = BeginCheckpoint(step=1, world_size=RANKS, **fence.model_dump())
    ranks = Ranks(Orders(run=str(run), begin=begin, first=0, last=RANKS, ranks_per_host=4))
    with closing(ranks), ThreadPoolExecutor(2) as pool:
        ranks.save_once()
        begun = client.checkpoints.begin(run.project, run.run, begin.model_copy(update={"step": 2}))
        count = select(Checkpoint.sealed_ranks).where(Checkpoint.id == begun.id)
        # In a long poll, maybe at another process than the one that commits.
        waiting = pool.submit(until_settled, client, begun.id)
        raging = pool.submit(ranks.storm)
        cluster.until(lambda: cluster.read(lambda session: session.scalar(count)), "a rank has sealed")
        kill()
        assert len(raging.result().seconds) == RANKS
        assert waiting.result().state is CheckpointState.COMMITTED
    return begun.id


def until_settled(client: Client, checkpoint_id: str) -> CheckpointView:
    while (view := client.checkpoints.get(checkpoint_id, wait_seconds=30)).state is CheckpointState.UPLOADING:
        pass
    return view
