"""Events: what happens to runs and checkpoints is listed, and followed without a gap (rule events-in-order)."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import Request
from pydantic import SecretStr
from sqlalchemy import NullPool, create_engine, delete, func, insert, select, text, update

import holdfast_service.attached_stores.controller as stores
import holdfast_service.events.controller as events
from holdfast_client.client import Client
from holdfast_client.errors import EventsForgotten, RateLimited
from holdfast_client.settings import ClientSettings
from holdfast_protocol.events import EventType, EventView
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import Scope
from holdfast_service.auth.principal import Principal, RequireScope
from holdfast_service.db.engine import Database
from holdfast_service.db.tables.core import Project, Run
from holdfast_service.db.tables.events import EventNumbering, EventRow
from holdfast_service.db.tables.webhooks import WebhookDelivery
from holdfast_service.errors import ProblemError
from holdfast_service.events.announce import announce
from holdfast_service.events.numbering import forget_some, number_new
from holdfast_service.events.reading import EventFilter, Read, read_after
from holdfast_service.settings import ServiceSettings
from holdfast_service.work.processes import announce_stores, attached_here, say_alive, unavailable_here
from holdfast_service.work.report import ReconcileReport
from tests.service.conftest import Clock
from tests.support.interleave import in_background
from tests.support.rank import Job, Refused, answer
from tests.support.serve import holdfast_serve
from tests.support.service import RunningService, running_service


def listed(service: RunningService, *, token: str = "", **wanted: Any) -> list[dict[str, Any]]:
    return list(answer(service.http(token=token).get("/v1/events", params=wanted))["items"])


def messages(service: RunningService, *, token: str = "", last_event_id: str = "", **wanted: Any) -> list[EventView]:
    """What a stream has now."""
    headers = {"Last-Event-ID": last_event_id} if last_event_id else {}
    params = {"seconds": 0, **wanted}
    reply = service.http(token=token).get("/v1/events/stream", params=params, headers=headers)
    if not reply.is_success:
        raise Refused(reply)
    assert reply.headers["content-type"].startswith("text/event-stream")
    found = []
    for message in reply.text.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in message.splitlines())
        if "data" in fields:
            view = EventView.model_validate_json(fields["data"])
            assert (fields["id"], fields["event"]) == (view.id, view.type)
            found.append(view)
    return found


def some_life(service: RunningService, run: str = "demo/gpt") -> Job:
    """Seven events: two commits, an abort, a restore, a checkpoint in quarantine, an attempt's end."""
    job = Job(service.http(), run, create=True)
    first, second = job.save(100), job.save(200)
    job.begin(300).abort("the loss was NaN")
    job.end("failed", error_type="ValueError", error_rank=1, detail="ValueError: no")
    Job(service.http(), run, after=job.number).resumed_from(second["id"])
    odd = {"health": "quarantined", "health_reason": "loss spike"}
    answer(service.http().patch(f"/v1/checkpoints/{first['id']}", json=odd, headers={"If-Match": first["etag"]}))
    return job


LIFE = [
    "checkpoint.committed",
    "checkpoint.committed",
    "checkpoint.aborted",
    "attempt.failed",
    "restore.started",
    "restore.finished",
    "checkpoint.quarantined",
]


def test_what_happens_is_listed_newest_first_and_streamed_in_order(service: RunningService) -> None:
    some_life(service)
    told = listed(service)
    assert [event["type"] for event in reversed(told)] == LIFE
    assert [event["id"] for event in reversed(told)] == [f"1-{number}" for number in range(1, 8)]
    aborted = told[4]
    assert aborted["data"]["reason"] == "the loss was NaN"
    assert (aborted["data"]["project"], aborted["data"]["run"], aborted["data"]["step"]) == ("demo", "gpt", 300)
    assert aborted["data"]["attempt"] == 1
    streamed = messages(service, after="1-0")
    assert [json.loads(event.model_dump_json()) for event in streamed] == list(reversed(told))
    assert messages(service, last_event_id=streamed[2].id) == streamed[3:]
    assert messages(service, after="1-0", last_event_id=streamed[3].id) == streamed[4:], "who comes again knows better"
    assert messages(service) == [], "without an id from now on"


def test_only_what_was_asked_for(service: RunningService) -> None:
    for run in ("demo/gpt", "demo/other", "else/gpt"):
        some_life(service, run)
    wanted = {"project": "demo", "run": "gpt", "type": ["checkpoint.aborted", "attempt.failed"]}
    assert [event["type"] for event in listed(service, **wanted)] == ["attempt.failed", "checkpoint.aborted"]
    assert [event.type for event in messages(service, after="1-0", **wanted)] == [
        "checkpoint.aborted",
        "attempt.failed",
    ]
    assert len(messages(service, after="1-0", project="demo")) == 14
    assert len(messages(service, after="1-0")) == 21
    with pytest.raises(Refused, match="named with its project"):
        listed(service, run="gpt")
    with pytest.raises(Refused, match="run_not_found"):
        messages(service, project="demo", run="no-such")
    assert service.http().get("/v1/events", params={"type": "no.such"}).status_code == 422


def test_what_happened_in_a_time(service: RunningService, clock: Clock) -> None:
    some_life(service)
    clock.advance(3600)
    Job(service.http(), "demo/other").save(1)
    newest, *earlier = listed(service)
    assert newest["data"]["run"] == "other"
    assert listed(service, since=newest["timestamp"]) == [newest], "the moment itself is in it"
    assert listed(service, until=newest["timestamp"]) == earlier, "and is in no time that ends with it"
    both = {"since": earlier[-1]["timestamp"], "until": newest["timestamp"]}
    assert listed(service, project="demo", run="gpt", **both) == earlier
    page = answer(service.http().get("/v1/events", params={**both, "limit": 4}))
    rest = listed(service, cursor=page["next_cursor"], **both)
    assert page["items"] + rest == earlier
    with pytest.raises(Refused, match="invalid_request"):
        listed(service, since="2026-01-01T00:00:00")  # of which zone?


def test_pages(service: RunningService) -> None:
    some_life(service)
    http = service.http()
    first = answer(http.get("/v1/events", params={"limit": 4}))
    rest = answer(http.get("/v1/events", params={"limit": 4, "cursor": first["next_cursor"]}))
    assert [event["type"] for event in reversed(first["items"] + rest["items"])] == LIFE
    assert rest["next_cursor"] is None


def test_a_projects_token_sees_its_project_and_no_other(service: RunningService) -> None:
    some_life(service)
    some_life(service, "else/gpt")
    own = service.token(Scope.READ, project="demo")
    assert {event["data"]["project"] for event in listed(service, token=own)} == {"demo"}
    assert {event.data.project for event in messages(service, token=own, after="1-0")} == {"demo"}
    for refused in (listed, messages):
        with pytest.raises(Refused, match="forbidden"):
            refused(service, token=own, project="else")
        with pytest.raises(Refused, match="forbidden"):
            refused(service, token=service.token(Scope.TRAIN))


class TestStores:
    """A store that cannot be used is told to all projects, once, and so is its return."""

    @pytest.fixture
    def settings(self, settings: ServiceSettings) -> ServiceSettings:
        return settings.model_copy(update={"store_unavailable_seconds": 0.0})

    @staticmethod
    def say(*services: RunningService) -> None:
        """As each process does every ten seconds."""
        for each in services:
            stores.reconcile(each.context)
            with each.context.database.transaction() as session:
                unavailable = unavailable_here(each.context)
                say_alive(session, each.context.process_id, "serve", attached_here(each.context), unavailable)
            announce_stores(each.context.database)

    def test_it_is_back_when_no_process_complains_any_more(
        self, service: RunningService, clock: Clock, tmp_path: Path
    ) -> None:
        service.make_project("demo")
        own = service.token(Scope.READ, project="demo")
        hook = {"url": "https://alerts.example/hook", "events": ["store.unavailable", "store.available"]}
        answer(service.http().post("/v1/projects/demo/webhooks", json=hook))
        self.say(service)
        assert messages(service, after="1-0") == []
        with running_service(service.context.settings) as other:
            (tmp_path / "store").rename(tmp_path / "not mounted")
            for _ in range(2):
                self.say(service, other)
            (tmp_path / "not mounted").rename(tmp_path / "store")
            self.say(service)
            (told,) = messages(service, token=own, after="1-0", project="demo")
            assert (told.type, told.data.project, told.data.store) == ("store.unavailable", None, "primary")
            clock.advance(60)  # the other one is killed
            self.say(service)
            assert [event.type for event in messages(service, token=own, last_event_id=told.id)] == ["store.available"]
            self.say(other, service)
        both = ["store.available", "store.unavailable"]
        assert [event["type"] for event in listed(service, token=own)] == both
        assert listed(service, project="demo", type="store.available") == listed(service, type="store.available")
        with service.context.database.read() as session:
            calls = session.execute(select(WebhookDelivery.body).order_by(WebhookDelivery.id)).scalars().all()
        assert [body["type"] for body in calls] == both[::-1]
        assert {body["data"]["project"] for body in calls} == {"demo"}

    def test_one_that_is_attached_no_more_is_told_by_its_old_name(
        self, service: RunningService, tmp_path: Path
    ) -> None:
        (tmp_path / "store").rename(tmp_path / "not mounted")
        self.say(service)
        with service.context.database.transaction() as session:
            say_alive(session, service.context.process_id, "serve", {}, {})  # started anew with another store
        announce_stores(service.context.database)
        assert [(event["type"], event["data"]["store"]) for event in listed(service)] == [
            ("store.available", "primary"),
            ("store.unavailable", "primary"),
        ]


def test_what_is_announced_twice_is_told_once(service: RunningService) -> None:
    job = Job(service.http())
    saved = job.save(100)
    job.end("finished")
    job.end("finished")
    other = Job(service.http(), after=1)
    other.resumed_from(saved["id"])
    other.resumed_from(saved["id"])
    assert [event["type"] for event in reversed(listed(service))] == [
        "checkpoint.committed",
        "attempt.finished",
        "restore.started",
        "restore.finished",
    ]


@pytest.fixture
def gpt(service: RunningService) -> tuple[str, str]:
    """The ids of a project and its run."""
    Job(service.http())
    with service.context.database.read() as session:
        project_id, run_id = session.execute(select(Project.id, Run.id).join(Run, Run.project_id == Project.id)).one()
    return project_id, run_id


@pytest.mark.rule("events-in-order")
@pytest.mark.races
@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)  # SQLite has one writer at a time
def test_an_event_that_is_committed_late_is_not_missed(service: RunningService, gpt: tuple[str, str]) -> None:
    """Its row has the smaller id. Whoever reads on from the greatest id that was visible never sees it."""
    database = service.context.database
    tell = partial(
        announce, event=EventType.CHECKPOINT_COMMITTED, at=datetime.now(UTC), project_id=gpt[0], run_id=gpt[1]
    )
    with database.transaction() as slow:
        tell(slow, subject="began first", step=1)
        with database.transaction() as quick:
            tell(quick, subject="committed first", step=2)
        (seen,) = messages(service, after="1-0")
        assert seen.data.step == 2
    (late,) = messages(service, last_event_id=seen.id)
    assert late.data.step == 1
    assert [event.data.step for event in messages(service, after="1-0")] == [2, 1], "and the order stays"


@pytest.mark.rule("events-in-order")
@pytest.mark.races
def test_two_that_number_at_once_leave_no_gap_and_give_none_twice(
    service: RunningService, gpt: tuple[str, str]
) -> None:
    for _ in range(5):
        with service.context.database.transaction() as session:
            for _ in range(7):
                announce(session, EventType.CHECKPOINT_TRASHED, None, datetime.now(UTC), project_id=gpt[0])
        with in_background() as threads:
            numbering = [threads.submit(number_new, service.context.database) for _ in range(4)]
        for each in numbering:
            each.result()
    assert [event.id for event in messages(service, after="1-0")] == [f"1-{number}" for number in range(1, 36)]


def test_old_ones_are_forgotten_and_who_wants_them_is_told(service: RunningService, clock: Clock) -> None:
    some_life(service)
    with service.context.database.transaction() as session:
        session.execute(update(EventRow).values(number=None))  # nobody asked for them yet
        session.execute(update(EventNumbering).values(last=0))
    clock.advance(31 * 86400)
    job = Job(service.http(), after=2)
    job.save(400)
    assert events.reconcile(service.context) == ReconcileReport(done=7)
    assert events.reconcile(service.context) == ReconcileReport()
    left = ["restore.started", "checkpoint.committed"]
    assert [event["type"] for event in reversed(listed(service))] == left
    assert [event.type for event in messages(service, after="1-7")] == left
    for unknown in ("1-6", "1-0", "1-10", "2-7", "0-7"):
        with pytest.raises(Refused, match="410 events_forgotten"):
            messages(service, after=unknown)
    with pytest.raises(Refused, match="422 invalid_request"):
        messages(service, last_event_id="yesterday")


def test_what_is_forgotten_says_so_however_late_the_numbers_are(service: RunningService, clock: Clock) -> None:
    """Old events without a number are kept until they have one."""
    some_life(service)
    clock.advance(31 * 86400)
    with service.context.database.transaction() as session:
        assert forget_some(session, older_than=timedelta(days=30)) == 0
        assert session.scalar(select(func.count()).select_from(EventRow)) == 7


def test_one_who_has_fallen_behind_is_told_what_is_forgotten_meanwhile(service: RunningService, clock: Clock) -> None:
    some_life(service)
    database = service.context.database
    assert len(read_after(database, 1, number_new(database) - 3, EventFilter(), limit=9).events) == 3
    clock.advance(31 * 86400)
    events.reconcile(service.context)
    for number in (6, 8):  # one that was there, and one of a catalog that has gone back
        with pytest.raises(ProblemError, match="not known any more"):
            read_after(database, 1, number, EventFilter(), limit=9)
    assert read_after(database, 1, 7, EventFilter(), limit=9) == Read([], 7)


@pytest.fixture
def client(service: RunningService) -> Iterator[Client]:
    with Client(ClientSettings(url=service.url, token=SecretStr(service.token()))) as connected:
        yield connected


def next_of(follower: Iterator[EventView], count: int) -> list[EventView]:
    return [next(follower) for _ in range(count)]


def until(holds: Callable[[], object]) -> None:
    while not holds():
        threading.Event().wait(0.05)


def test_a_follower_hears_what_happens_in_any_process(service: RunningService, client: Client) -> None:
    some_life(service)
    with closing(client.events.follow(after="1-4")) as follower:
        assert [event.type for event in next_of(follower, 3)] == LIFE[4:]
        some_life(service, "demo/here")
        assert [event.type for event in next_of(follower, 7)] == LIFE
        with running_service(service.context.settings) as other:
            some_life(other, "demo/there")
            assert [event.type for event in next_of(follower, 7)] == LIFE


def test_what_does_not_fit_in_memory_is_read_from_the_catalog(
    service: RunningService, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast_service.events.feed._KEPT", 3)
    monkeypatch.setattr("holdfast_service.events.feed._AT_ONCE", 2)
    with closing(client.events.follow(project="demo", after="1-0")) as follower:
        some_life(service)
        (first,) = next_of(follower, 1)
        some_life(service, "else/gpt")
        some_life(service, "demo/other")
        told = [first, *next_of(follower, 13)]
    assert [event.type for event in told] == LIFE * 2
    assert len({event.id for event in told}) == 14


def test_the_client_tells_what_is_forgotten(client: Client) -> None:
    with pytest.raises(EventsForgotten, match="follow without an id"):
        next(client.events.follow(after="7-1"))


def test_a_stream_ends_with_its_token(service: RunningService, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast_service.events.endpoints._QUIET_SECONDS", 0.2)
    token = answer(service.http().post("/v1/tokens", json={"name": "short", "scopes": ["read"]}))
    headers = {"Authorization": f"Bearer {token['token']}"}
    with httpx.stream("GET", f"{service.url}/v1/events/stream", headers=headers, timeout=60) as reply:
        lines = reply.iter_lines()
        assert next(lines) == "retry: 2000"
        client.transport.send("DELETE", f"/v1/tokens/{token['id']}")
        assert {line.partition(":")[0] for line in lines} <= {"id", ""}


@pytest.mark.rule("events-in-order")
def test_followers_learn_that_the_catalog_went_back(service: RunningService, client: Client) -> None:
    """Its numbers are given again, for other events: a follower that only waited on would miss them."""
    with closing(client.events.follow(after="1-0")) as follower:
        some_life(service)
        next_of(follower, 7)
        with service.context.database.transaction() as session:
            session.execute(delete(EventRow).where(EventRow.number > 3))
            session.execute(update(EventNumbering).values(last=3))
        with pytest.raises(EventsForgotten, match="restored"):
            next(follower)


class TestADatabaseThatDoesNotAnswer:
    @pytest.fixture
    def settings(self, settings: ServiceSettings) -> ServiceSettings:
        # Half a second, as the other tests have, is not enough for each transaction of a start on a busy machine.
        return settings.model_copy(update={"database_statement_seconds": 5})

    @pytest.mark.parametrize("database_url", ["postgres"], indirect=True)  # SQLite's readers wait for nobody
    def test_a_stream_outlives_it(self, service: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
        """The look at its token fails, which says nothing about the token."""
        looks: list[ProblemCode] = []
        caller_of = RequireScope.caller_of

        def note(require: RequireScope, request: Request) -> Principal:
            try:
                return caller_of(require, request)
            except ProblemError as problem:
                looks.append(problem.code)
                raise

        token = service.token(Scope.READ)
        monkeypatch.setattr("holdfast_service.events.endpoints._QUIET_SECONDS", 0.1)
        headers = {"Authorization": f"Bearer {token}"}
        with httpx.stream("GET", f"{service.url}/v1/events/stream", headers=headers, timeout=60) as reply:
            lines = reply.iter_lines()
            assert next(lines) == "retry: 2000"
            # The service's own connections would lose the lock by its limits.
            unlimited = create_engine(service.context.database.url, poolclass=NullPool)
            with unlimited.begin() as locked:
                locked.execute(text("LOCK TABLE tokens IN ACCESS EXCLUSIVE MODE"))
                monkeypatch.setattr(RequireScope, "caller_of", note)
                until(lambda: looks)
            some_life(service)
            assert "event: checkpoint.committed" in lines
        assert set(looks) == {ProblemCode.DATABASE_UNAVAILABLE}


class TestLimits:
    @pytest.fixture
    def settings(self, settings: ServiceSettings) -> ServiceSettings:
        return settings.model_copy(update={"project_streams": 1})

    def test_one_who_reads_nothing_is_cut_off(self, service: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
        """It would hold its project's stream for an hour."""
        monkeypatch.setattr("holdfast_service.events.endpoints._TAKEN_WITHIN_SECONDS", 0.5)
        service.make_project("demo")
        token = service.token(project="demo")
        settings = ClientSettings(url=service.url, token=SecretStr(token), retry_seconds=0)
        with one_who_does_not_read(service.url, token), Client(settings) as other:
            with pytest.raises(RateLimited, match="HOLDFAST_PROJECT_STREAMS"):
                other.events.position()
            more_events_than_buffers_take(service.context.database)  # from now on it may be cut off

            def let_in() -> bool:
                try:
                    return bool(other.events.position())
                except RateLimited:
                    return False

            until(let_in)

    def test_a_project_has_so_many_streams_and_one_more_is_refused(self, service: RunningService) -> None:
        service.make_project("demo")
        token = service.token(project="demo")
        headers = {"Authorization": f"Bearer {token}"}
        with Client(ClientSettings(url=service.url, token=SecretStr(token), retry_seconds=0)) as limited:
            first = httpx.stream("GET", f"{service.url}/v1/events/stream", headers=headers, timeout=60)
            with first as reply:
                lines = reply.iter_lines()  # the connection ends with it
                next(lines)
                with pytest.raises(RateLimited, match="HOLDFAST_PROJECT_STREAMS"):
                    next(limited.events.follow())


def test_a_service_that_ends_lets_its_followers_go(tmp_path: Path) -> None:
    """They wait for nothing: the service must not wait for them as for calls that end by themselves."""
    with holdfast_serve(tmp_path, other_settings={"HOLDFAST_SHUTDOWN_SECONDS": "600"}) as served:
        token = (tmp_path / "data" / "token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}"}
        with httpx.stream("GET", f"{served.url}/v1/events/stream", headers=headers, timeout=60) as reply:
            lines = reply.iter_lines()
            next(lines)
            served.process.signal(signal.SIGTERM)
            assert [line for line in lines if line and not line.startswith("id: ")] == [], "its last chunk has come"
        served.process.wait(60)
        assert "Traceback" not in served.process.log_text


def test_one_who_does_not_read_keeps_no_service_from_its_end(tmp_path: Path) -> None:
    with holdfast_serve(tmp_path, other_settings={"HOLDFAST_SHUTDOWN_SECONDS": "600"}) as served:
        more_events_than_buffers_take(Database(f"sqlite:///{tmp_path / 'data' / 'catalog.db'}"))
        with one_who_does_not_read(served.url, (tmp_path / "data" / "token").read_text().strip()):
            threading.Event().wait(1)  # it fills the buffers meanwhile
            served.process.signal(signal.SIGTERM)
            served.process.wait(60)
        assert "Traceback" not in served.process.log_text


def more_events_than_buffers_take(database: Database) -> None:
    """They concern all projects."""
    row = {"type": "store.unavailable", "happened_at": datetime.now(UTC), "store": "primary", "reason": "x" * 500}
    with database.transaction() as session:
        session.execute(insert(EventRow), [row] * 20_000)


@contextmanager
def one_who_does_not_read(url: str, token: str) -> Iterator[None]:
    """A connection that follows from the first event on, and takes no more than the head of the reply."""
    server = urlsplit(url)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((server.hostname, server.port))
        head = f"GET /v1/events/stream?after=1-0 HTTP/1.1\r\nHost: {server.netloc}\r\nAuthorization: Bearer {token}"
        connection.sendall(f"{head}\r\n\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 200 OK")
        yield


def test_many_who_begin_at_once_miss_nothing(service: RunningService, client: Client) -> None:
    """The first of them begin while the process does not know yet how far the events go."""
    told: list[list[str]] = [[] for _ in range(20)]

    def follow(into: list[str]) -> None:
        with closing(client.events.follow(after="1-0")) as follower:
            into += [event.type for event in next_of(follower, 14)]

    threads = [threading.Thread(target=follow, args=(each,)) for each in told]
    for thread in threads:
        thread.start()
    some_life(service)
    some_life(service, "demo/other")
    for thread in threads:
        thread.join(60)
    assert told == [LIFE * 2] * 20
