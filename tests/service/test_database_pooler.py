"""The service behind PgBouncer in transaction mode, where each transaction gets another connection of Postgres."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from sqlalchemy import make_url, text

from holdfast_service.db.engine import Database
from holdfast_service.db.migrate import exclusive_connection, upgrade
from holdfast_service.db.postgres import LimitedConnection
from holdfast_service.errors import ProblemError
from holdfast_service.settings import ServiceSettings
from tests.support.databases import PostgresCatalogs
from tests.support.pgbouncer import PgBouncer
from tests.support.postgres import PostgresServer
from tests.support.rank import Job, answer
from tests.support.service import RunningService, running_service

_JOBS = 8
_STEPS = 6
"""psycopg prepares a statement that it sends for the sixth time."""


@pytest.fixture
def database_url(postgres_catalogs: PostgresCatalogs, pooler: PgBouncer) -> Iterator[str]:
    url = postgres_catalogs.new()
    yield pooler.url_for(url)
    postgres_catalogs.give_back(url)


def test_jobs_save_resume_and_are_planned_for(service: RunningService) -> None:
    def train(number: int) -> int:
        with service.http() as http:
            job = Job(http, f"demo/gpt-{number}", create=True)
            for step in range(1, _STEPS + 1):
                assert job.save(step)["state"] == "committed"
            plan = answer(http.post(f"{job.base}/retention/plan", json={"policy": {"keep_last": 2}}))
            assert plan["freed"]["bytes"] > 0, "counted in tables of the transaction"
            return int(answer(http.get(f"{job.base}/restore-point"))["restore_point"]["step"])

    with ThreadPoolExecutor(_JOBS) as jobs:
        assert list(jobs.map(train, range(_JOBS))) == [_STEPS] * _JOBS


def test_a_commit_wakes_who_waits_at_another_service(settings: ServiceSettings, service: RunningService) -> None:
    with running_service(settings) as other, service.http() as http, other.http() as elsewhere:
        save = Job(http).begin(1)
        with ThreadPoolExecutor(1) as waiting:
            outcome = waiting.submit(lambda: answer(elsewhere.get(f"/v1/checkpoints/{save.id}", params={"wait": 60})))
            while not other.context.notifier.waiting:
                threading.Event().wait(0.01)
            save.write(0, [b"state", b"index"])
            assert outcome.result()["state"] == "committed"


def test_limits_hold_in_each_transaction_and_reach_no_other_client(database_url: str) -> None:
    with ExitStack() as stack:
        limited, other = (Database(database_url, statement_seconds=seconds) for seconds in (2.0, 7.0))
        stack.callback(limited.dispose)
        stack.callback(other.dispose)
        for _ in range(2 * _STEPS):
            assert _limit(limited) == "2s"
            assert _limit(other) == "7s"
        with pytest.raises(ProblemError, match="statement timeout"), limited.transaction() as session:
            session.execute(text("SELECT pg_sleep(600)"))
        with exclusive_connection(limited) as connection:
            assert connection.scalar(text("SHOW statement_timeout")) == "0"
        with other.read(in_transaction=False) as session:
            assert session.scalar(text("SHOW statement_timeout")) == "0", "what a session sets would meet others"


def _limit(database: Database) -> str:
    with database.read() as session:
        return str(session.scalar(text("SHOW statement_timeout")))


def test_only_a_pooler_is_taken_for_one(database_url: str, postgres: PostgresServer) -> None:
    direct = postgres.url_for(str(make_url(database_url).database))
    for url, pooled in ((database_url, True), (direct, False)):
        database = Database(url)
        with closing(database.engine.raw_connection()) as raw:
            assert isinstance(raw.driver_connection, LimitedConnection)
            assert raw.driver_connection.pooled is pooled
        database.dispose()


def test_an_empty_database_is_migrated_by_two_at_once(
    postgres: PostgresServer, pooler: PgBouncer, tmp_path: Path
) -> None:
    name = f"empty_{tmp_path.name.replace('-', '_')}"
    url = pooler.url_for(postgres.create_database(name))
    databases = [Database(url), Database(url)]
    try:
        with ThreadPoolExecutor(2) as starts:
            list(starts.map(upgrade, databases))
        assert all(_limit(each) == "1min" for each in databases)
    finally:
        for each in databases:
            each.dispose()
        postgres.drop_database(name)
