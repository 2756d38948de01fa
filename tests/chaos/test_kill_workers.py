"""Three workers and two services on one Postgres: they share the work, and what kill -9 cuts off another one finishes.

Work comes in waves, until each kind of it was done by several processes; so a busy machine only makes the test longer.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import urllib3
from sqlalchemy import func, select, text

from holdfast_client.client import Client
from holdfast_client.settings import ClientSettings
from holdfast_protocol.base import PROTOCOL_HEADER, PROTOCOL_VERSION
from holdfast_protocol.service import OperationView
from holdfast_protocol.states import CheckpointState, OperationState, Proof
from holdfast_service.db.dialect import database_now
from holdfast_service.db.engine import Database
from holdfast_service.db.tables.core import Checkpoint, Copy
from holdfast_service.db.tables.operations import AuditEvent, Operation, Worker
from tests.support.ports import free_ports
from tests.support.postgres import PostgresServer
from tests.support.processes import ServerProcess
from tests.support.rank import Job, answer
from tests.support.serve import ENTRY_POINT, without_holdfast_settings

LEASE_SECONDS = 5
WAIT_SECONDS = 120
WAVE = 10
MOST_WAVES = 30
SMALL_CHUNKS = 50
# Slow enough that a worker can be killed in the middle of reading a checkpoint, however fast the machine is.
READ_BYTES_PER_SECOND = 600_000
BIG = 300_000
TOKEN = f"hold_{secrets.token_hex(8)}_{secrets.token_hex(32)}"


class Cluster:
    """The processes, a client of each service, and the catalog that they share."""

    def __init__(self, folder: Path, url: str, started: ExitStack) -> None:
        self.database = Database(url)
        started.callback(self.database.dispose)
        self._folder = folder
        self._settings = without_holdfast_settings() | {
            "HOLDFAST_DATABASE_URL": url,
            "HOLDFAST_DATA_DIR": str(folder / "data"),
            "HOLDFAST_STORE": f"posix://{folder / 'store'}",
            "HOLDFAST_BOOTSTRAP_TOKEN": TOKEN,
            "HOLDFAST_CONTROLLER_INTERVAL_SECONDS": "2",
            "HOLDFAST_LEASE_SECONDS": str(LEASE_SECONDS),
            "HOLDFAST_CHUNK_LEASE_SECONDS": str(LEASE_SECONDS),
            "HOLDFAST_PROVE_BYTES_PER_SECOND": str(READ_BYTES_PER_SECOND),
        }
        with ThreadPoolExecutor(5) as starts:
            services = [starts.submit(self._serve, started) for _ in range(2)]
            workers = [starts.submit(self._work, started, number) for number in range(3)]
        self.services = [each.result() for each in services]
        self.workers = [each.result() for each in workers]
        self.clients = [started.enter_context(Client(ClientSettings(url=each, token=TOKEN))) for each in self.services]
        headers = {PROTOCOL_HEADER: PROTOCOL_VERSION, "Authorization": f"Bearer {TOKEN}"}
        self.https = [
            started.enter_context(httpx.Client(base_url=each, headers=headers, timeout=60)) for each in self.services
        ]

    def _serve(self, started: ExitStack) -> str:
        port = free_ports()
        url = f"http://127.0.0.1:{port}"

        def is_ready() -> bool:
            try:
                return urllib3.request("GET", f"{url}/readyz", timeout=2, retries=False).status == 200
            except urllib3.exceptions.HTTPError:
                return False

        env = self._settings | {"HOLDFAST_PORT": str(port)}
        log = self._folder / f"{port}.log"
        process = ServerProcess([ENTRY_POINT, "serve"], log=log, ready=is_ready, env=env, forked=True)
        started.callback(process.stop)
        return url

    def _work(self, started: ExitStack, number: int) -> ServerProcess:
        log = self._folder / f"worker-{number}.log"
        process = ServerProcess(
            [ENTRY_POINT, "workers", "run"],
            log=log,
            ready=lambda: log.exists() and "works as" in log.read_text(),
            env=self._settings,
            forked=True,
        )
        started.callback(process.stop)
        return process

    def read(self, what: Callable[[Any], Any]) -> Any:
        with self.database.read() as session:
            return what(session)

    def until(self, holds: Callable[[], Any], what: str) -> Any:
        """Patience and no more: it says what did not come, and never decides between two results."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not (found := holds()):
            assert time.monotonic() < deadline, f"this did not come: {what}"
            time.sleep(0.05)
        return found

    def rows_done(self) -> dict[str, Counter[str]]:
        """By controller, which process has settled how many rows."""
        by_controller: dict[str, Counter[str]] = {}
        for process_id, done in self.read(lambda session: session.execute(select(Worker.id, Worker.done)).all()):
            for controller, rows in done.items():
                by_controller.setdefault(controller, Counter())[process_id] = rows
        return by_controller


@pytest.fixture
def cluster(tmp_path: Path, postgres: PostgresServer) -> Iterator[Cluster]:
    name = f"cluster_{secrets.token_hex(6)}"
    with ExitStack() as started:
        url = postgres.create_database(name)
        started.callback(postgres.drop_database, name)
        yield Cluster(tmp_path, url, started)


def abandoned(cluster: Cluster, wave: int) -> list[str]:
    """Checkpoints that nobody will finish, for the reaper: WAVE of them, of runs of their own, whose jobs have ended
    and are silent for longer than an agent would be that goes on with them."""
    ids = []
    for number in range(WAVE):
        job = Job(cluster.https[number % 2], f"demo/wave-{wave}-{number}", create=True)
        ids.append(job.begin(1).id)
        job.end("preempted")
    long_ago = text("UPDATE attempts SET ended_at = ended_at - interval '1 hour' WHERE outcome = 'preempted'")
    silent = text("UPDATE checkpoints SET deadline_at = deadline_at - interval '10 minutes' WHERE id = ANY(:ids)")
    with cluster.database.transaction() as session:
        session.execute(long_ago)
        session.execute(silent, {"ids": ids})
    return ids


def unproven(cluster: Cluster) -> int:
    """Copies that are to be read: as if no store had hashed those of the small run."""
    with cluster.database.transaction() as session:
        changed = session.execute(
            text("UPDATE copies SET proof = 'unproven' WHERE stored_bytes < 1000 AND state = 'verified'")
        )
        return int(changed.rowcount)  # type: ignore[attr-defined]


def scrubs(cluster: Cluster, checkpoint_ids: list[str]) -> list[OperationView]:
    return [
        OperationView.model_validate(
            answer(cluster.https[number % 2].post(f"/v1/checkpoints/{each}/scrubs", json={"mode": "read"}))
        )
        for number, each in enumerate(checkpoint_ids)
    ]


def all_done(cluster: Cluster, operations: list[OperationView]) -> bool:
    ids = [each.id for each in operations]
    query = select(func.count()).where(Operation.id.in_(ids), Operation.state == OperationState.DONE)
    return bool(cluster.read(lambda session: session.scalar(query)) == len(ids))


def assert_ended_once(cluster: Cluster, operations: list[OperationView]) -> None:
    events = cluster.read(
        lambda session: session.scalars(select(AuditEvent).where(AuditEvent.action == "operation.end")).all()
    )
    ended = Counter(event.after["operation"] for event in events)
    assert [ended[each.id] for each in operations] == [1] * len(operations)


@pytest.mark.timeout(900)
def test_the_load_is_shared_and_what_killed_workers_had_in_hand_is_finished_by_others(cluster: Cluster) -> None:
    http = cluster.https[0]
    small = Job(http, "demo/small", create=True).begin(1)
    small.write(0, [*(f"chunk {number}".encode() for number in range(SMALL_CHUNKS)), b"index"])
    big_job = Job(http, "demo/big", create=True)
    big = [big_job.save(step, content=secrets.token_bytes(BIG))["id"] for step in range(1, 5)]

    reaped: list[str] = []
    proven = 0
    scrubbed: list[OperationView] = []
    for wave in range(MOST_WAVES):
        reaped += abandoned(cluster, wave)
        proven += unproven(cluster)
        scrubbed += scrubs(cluster, [small.id])
        gone = select(func.count()).where(Checkpoint.id.in_(reaped), Checkpoint.state == CheckpointState.ABORTED)
        waiting = select(func.count()).where(Copy.proof == Proof.UNPROVEN)
        cluster.until(lambda: cluster.read(lambda session: session.scalar(gone)) == len(reaped), "all are reaped")
        cluster.until(lambda: cluster.read(lambda session: session.scalar(waiting)) == 0, "all are proven")
        cluster.until(lambda: all_done(cluster, scrubbed), "all are scrubbed")
        shared = cluster.rows_done()
        if all(len(shared.get(controller, ())) > 1 for controller in ("reap", "verify", "operations")):
            break
    assert all(len(shared[controller]) > 1 for controller in ("reap", "verify", "operations")), shared
    # A round is noted when it is over, a little after its last row.
    cluster.until(lambda: cluster.rows_done()["reap"].total() == len(reaped), "each was given up by one")
    cluster.until(lambda: cluster.rows_done()["operations"].total() == len(scrubbed), "each was carried out by one")
    assert cluster.rows_done()["verify"].total() <= proven, "a scrub may have read some of them first"
    aborted = cluster.read(
        lambda session: session.scalars(
            select(AuditEvent.checkpoint_id).where(AuditEvent.action == "checkpoint.abort")
        ).all()
    )
    assert sorted(aborted) == sorted(reaped), "each was given up once"
    assert_ended_once(cluster, scrubbed)

    cut_off, long_ones = kill_two_in_the_middle(cluster, big)
    more = abandoned(cluster, MOST_WAVES)
    gone = select(func.count()).where(Checkpoint.id.in_(more), Checkpoint.state == CheckpointState.ABORTED)
    cluster.until(lambda: cluster.read(lambda session: session.scalar(gone)) == len(more), "the reaper goes on")
    cluster.until(lambda: all_done(cluster, long_ones), "the others finish what was cut off")
    assert_ended_once(cluster, long_ones)
    for operation_id, victim in cut_off.items():
        row = cluster.read(lambda session, wanted=operation_id: session.get(Operation, wanted))
        assert row.worker_id != victim
        assert row.tries > 1
        assert (row.result["bad"], row.result["missing"], row.result["lost"]) == (0, 0, 0)
    asked = cluster.clients[0].controllers.run("repair")
    answered = cluster.clients[1].controllers.wait(asked, timeout_seconds=WAIT_SECONDS)
    assert answered.run_answered_at == asked.run_requested_at

    last = cluster.workers[2]
    last.stop()
    assert "Traceback" not in last.log_text
    assert last_words(cluster, worker_id(last)), "a worker that is asked to end says good-bye"


def kill_two_in_the_middle(cluster: Cluster, big: list[str]) -> tuple[dict[str, str], list[OperationView]]:
    """Two workers end by SIGKILL, each with an operation in hand. Those, by their worker, and all that began."""
    victims = {worker_id(process): process for process in cluster.workers[:2]}
    started: list[OperationView] = []
    held = select(Operation.id, Operation.worker_id, Operation.leased_until).where(
        Operation.state == OperationState.RUNNING, Operation.worker_id.in_(victims)
    )

    def both_hold_one() -> Any:
        if all_done(cluster, started):
            started.extend(scrubs(cluster, big))
        if len({row.worker_id for row in cluster.read(lambda session: session.execute(held).all())}) < 2:
            return None
        # Held still, they cannot settle any more; if one just has, they go on.
        for process in victims.values():
            os.kill(process.pid, signal.SIGSTOP)
        rows = cluster.read(lambda session: session.execute(held).all())
        if len({row.worker_id for row in rows}) == 2:
            return rows
        for process in victims.values():
            os.kill(process.pid, signal.SIGCONT)
        return None

    rows = cluster.until(both_hold_one, "both workers are in the middle of an operation")
    for process in victims.values():
        process.kill9()
    now = cluster.read(database_now)
    assert all((row.leased_until - now).total_seconds() <= LEASE_SECONDS for row in rows), "nothing waits any longer"
    return {row.id: row.worker_id for row in rows}, started


def worker_id(process: ServerProcess) -> str:
    found = re.search(r"works as (\S+)", process.log_text)
    assert found is not None
    return found[1]


def last_words(cluster: Cluster, process_id: str) -> Any:
    return cluster.read(lambda session: session.scalar(select(Worker.ended_at).where(Worker.id == process_id)))
