"""A database that does not answer, takes too long, or takes no writes: what a caller is told, and what goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from unittest.mock import Mock

import httpx
import psycopg
import pytest
from pydantic import SecretStr
from sqlalchemy import delete, func, make_url, select, text

import holdfast_service.runs.endpoints
from holdfast_protocol.problems import ProblemCode
from holdfast_service.app import create_app
from holdfast_service.background.registry import Background
from holdfast_service.db import postgres
from holdfast_service.db.engine import Database, note_change
from holdfast_service.db.migrate import exclusive_connection, upgrade
from holdfast_service.db.tables.records import HistoryMark
from holdfast_service.errors import ProblemError
from holdfast_service.service import close_service, open_service
from holdfast_service.settings import ServiceSettings
from tests.support.databases import PostgresCatalogs
from tests.support.in_process import in_process
from tests.support.rank import Job, answer
from tests.support.read_only import read_only
from tests.support.service import RunningService, running_service
from tests.support.tcp_relay import TcpRelay, tcp_relay


@pytest.fixture
def relayed(postgres_catalogs: PostgresCatalogs) -> Iterator[tuple[Database, TcpRelay]]:
    """A database with short limits behind a relay."""
    given = postgres_catalogs.new()
    url = make_url(given)
    with tcp_relay(url.host or "127.0.0.1", url.port or 5432) as relay:
        behind = url.set(host="127.0.0.1", port=relay.port).render_as_string(hide_password=False)
        database = Database(behind, statement_seconds=2)
        try:
            yield database, relay
        finally:
            relay.thaw()
            database.dispose()
    postgres_catalogs.give_back(given)


@pytest.mark.parametrize("used_before", [True, False])
def test_a_server_that_accepts_and_never_answers_holds_up_no_caller(
    relayed: tuple[Database, TcpRelay], used_before: bool
) -> None:
    database, relay = relayed
    if used_before:
        with database.read() as session:
            session.execute(text("SELECT 1"))
    relay.freeze()
    with pytest.raises(ProblemError) as refused, database.transaction() as session:
        session.execute(text("SELECT 1"))
    assert refused.value.code is ProblemCode.DATABASE_UNAVAILABLE
    relay.thaw()
    with database.transaction() as session:
        assert session.scalar(text("SELECT 2")) == 2


def test_a_server_that_freezes_in_the_middle_of_a_transaction_holds_up_no_caller(
    relayed: tuple[Database, TcpRelay],
) -> None:
    database, relay = relayed

    def read_twice() -> None:
        with database.transaction() as session:
            session.execute(text("SELECT 1"))
            relay.freeze()
            session.execute(text("SELECT 1"))

    with pytest.raises(ProblemError, match="no answer within"):
        read_twice()


def test_a_statement_that_takes_too_long_is_ended_by_the_server_and_a_migration_is_not(
    relayed: tuple[Database, TcpRelay],
) -> None:
    database, _ = relayed
    with pytest.raises(ProblemError, match="statement timeout"), database.transaction() as session:
        session.execute(text("SELECT pg_sleep(600)"))
    with exclusive_connection(database) as connection:
        connection.execute(text("SELECT pg_sleep(3)"))
        assert connection.scalar(text("SHOW idle_in_transaction_session_timeout")) == "0"
    upgrade(database)
    with database.read() as session:
        assert session.scalar(text("SHOW statement_timeout")) == "2s"
        assert session.scalar(text("SHOW idle_in_transaction_session_timeout")) == "2s"


def test_a_connection_that_has_just_answered_is_used_as_it_is_and_one_that_the_server_ended_is_not(
    relayed: tuple[Database, TcpRelay], monkeypatch: pytest.MonkeyPatch
) -> None:
    database, _ = relayed
    ping = Mock(wraps=postgres.brief_ping)
    monkeypatch.setattr(postgres, "brief_ping", ping)
    monkeypatch.setattr(postgres, "_TRUSTED_SECONDS", 600)  # it has just answered, however long the test takes

    def backend() -> int:
        with database.transaction() as session:
            return int(session.scalar(text("SELECT pg_backend_pid()")) or 0)

    first = backend()
    assert (backend(), ping.call_count) == (first, 0)
    with closing(psycopg.connect(database.url.set(drivername="postgresql").render_as_string(False))) as other:
        other.autocommit = True
        other.execute("SELECT pg_terminate_backend(%s, 5000)", (first,))
    assert backend() != first
    monkeypatch.setattr(postgres, "_TRUSTED_SECONDS", 0)
    ping.reset_mock()
    backend()
    assert ping.call_count == 1


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_whether_the_process_lives_is_answered_while_every_call_waits(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, go_on = threading.Semaphore(0), threading.Event()

    def waits(*_: object) -> None:
        there.release()
        go_on.wait()
        raise ProblemError(ProblemCode.BUSY, "It was held up.")

    monkeypatch.setattr(holdfast_service.runs.endpoints, "server_info", waits)
    callers, places = 40, service.context.settings.requests_at_once
    with service.http() as http, ThreadPoolExecutor(callers) as pool:
        http.get("/healthz")
        calls = [pool.submit(lambda: service.http().get("/v1/service").status_code) for _ in range(callers)]
        try:
            for _ in range(places - 1):  # one project never has all of them
                there.acquire()
            assert http.get("/healthz").json() == {"status": "alive"}
        finally:
            go_on.set()
        assert {call.result() for call in calls} == {503}


def test_a_catalog_that_takes_no_writes_is_not_ready_and_says_so(service: RunningService) -> None:
    with service.http() as http:
        assert http.get("/readyz").status_code == 200
        with read_only(service.context.database):
            reply = http.get("/readyz")
            (failed,) = [check for check in reply.json()["checks"] if not check["ok"]]
            assert (reply.status_code, failed["name"]) == (503, "database")
            assert "takes no writes now" in failed["detail"]
            refused = http.put("/v1/projects/other", json={})
            assert (refused.status_code, refused.json()["code"]) == (503, "catalog_read_only")
        assert http.get("/readyz").status_code == 200


@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
def test_changes_whose_marks_the_database_refuses_leave_no_slot_behind(service: RunningService) -> None:
    """Each outage would leave more rows, which every later question of the history reads."""
    database = service.context.database

    def change() -> None:
        with database.transaction() as session:
            note_change(session, "a change")

    def slots() -> int:
        with database.read() as session:
            mine = HistoryMark.memory_id == database.memory.id
            return session.execute(select(func.count()).select_from(HistoryMark).where(mine)).scalar_one()

    change()
    before = slots()
    with read_only(database):
        for _ in range(3):
            with pytest.raises(ProblemError, match="takes no writes now"):
                change()
    change()
    assert slots() == before


@pytest.mark.rule("read-lease")
def test_what_is_committed_is_read_from_a_catalog_that_takes_no_writes_and_the_cost_is_said(
    service: RunningService,
) -> None:
    with service.http() as http:
        job = Job(http)
        saved = job.save(7)
        shard = answer(http.get(f"/v1/checkpoints/{saved['id']}/shards/0"))
        digests = [chunk["digest"] for chunk in shard["chunks"]]
        protected = answer(http.post(f"/v1/checkpoints/{saved['id']}/reads", json={"digests": digests}))
        assert protected["unprotected"] is None
        with read_only(service.context.database):
            assert answer(http.get(f"{job.base}/restore-point"))["restore_point"]["step"] == 7
            reads = answer(
                http.post(
                    f"/v1/checkpoints/{saved['id']}/reads",
                    json={"digests": digests, "lease_id": protected["lease_id"]},
                )
            )
            assert [chunk["kind"] for chunk in reads["chunks"]] == ["http"] * len(digests)
            assert "no lease keeps this checkpoint" in reads["unprotected"]
            assert http.delete(f"/v1/read-leases/{reads['lease_id']}").status_code == 204
        again = {"digests": digests, "lease_id": reads["lease_id"]}
        assert answer(http.post(f"/v1/checkpoints/{saved['id']}/reads", json=again))["unprotected"] is None


@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
@pytest.mark.parametrize("is_behind", [False, True])
def test_a_service_starts_on_a_catalog_that_takes_no_writes_and_gives_back_what_is_committed(
    settings: ServiceSettings, is_behind: bool
) -> None:
    with running_service(settings) as service:
        saved = Job(service.http()).save(7)
        headers = dict(service.http().headers)
        if is_behind:
            with service.context.database.transaction() as session:
                session.execute(delete(HistoryMark))
    standby = make_url(settings.database_url_text).update_query_dict({"options": "-c default_transaction_read_only=on"})
    at_standby = {"database_url": SecretStr(standby.render_as_string(hide_password=False))}
    context = open_service(settings.model_copy(update=at_standby))
    try:
        background = Background(context, (), "serve")
        background.start()
        with in_process(create_app(context)) as transport:
            http = httpx.Client(base_url="http://127.0.0.1", headers=headers, transport=transport)
            assert answer(http.get(f"/v1/checkpoints/{saved['id']}")) == saved
            assert http.get("/readyz").status_code == 503
        assert background.stop(timeout_seconds=60)
    finally:
        close_service(context)
