"""Who is worked on, who waits and who is refused, over HTTP. Whose turn it is: tests/unit/test_fair_queue.py."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

import holdfast_service.training.endpoints as endpoints
from holdfast_client import Client, ClientSettings
from holdfast_protocol.attempts import Heartbeat
from holdfast_protocol.base import RunName
from holdfast_protocol.checkpoints import BeginCheckpoint
from holdfast_service.context import WAITS_FOR_STORE, waiting_for_store
from holdfast_service.settings import ServiceSettings
from holdfast_service.stores.base import Store
from holdfast_service.training import seal
from holdfast_service.web import admission
from tests.support.rank import Job, Refused, answer
from tests.support.service import RunningService, running_service

AT_ONCE = 2
"""One project has one place, and one is left for another."""
MOST = 8
SECONDS = 30


@pytest.fixture
def service(tmp_path: Path) -> Iterator[RunningService]:
    settings = ServiceSettings(
        data_dir=tmp_path / "data", port=0, requests_at_once=AT_ONCE, project_requests=MOST, project_long_polls=2
    )
    with running_service(settings) as running:
        yield running


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as pool:
        yield pool


class Gate:
    """An operation that does not end before it is let through. `came`: the names of those that were worked on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.open = threading.Event()
        self.came: list[Any] = []
        self._real: Callable[..., Any] = getattr(endpoints, name)
        monkeypatch.setattr(endpoints, name, self._work)

    def _work(self, *arguments: Any) -> Any:
        self.came.append(arguments)
        assert self.open.wait(SECONDS)
        return self._real(*arguments)

    def until(self, count: int) -> None:
        until(lambda: len(self.came) >= count)


@pytest.fixture
def begins(monkeypatch: pytest.MonkeyPatch, threads: ThreadPoolExecutor) -> Iterator[Gate]:
    """Opened before the threads are waited for."""
    gate = Gate(monkeypatch, "begin_and_negotiate")
    yield gate
    gate.open.set()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def waiting(service: RunningService, kind: str) -> float:
    return service.app.state.metrics.get_sample_value("holdfast_calls_waiting", {"class": kind}) or 0.0


def storm(
    service: RunningService, job: Job, begins: Gate, threads: ThreadPoolExecutor, count: int
) -> list[Future[Any]]:
    """One begin is worked on, and the others wait."""
    pending = [threads.submit(job.begin, step) for step in range(count)]
    begins.until(1)
    until(lambda: waiting(service, "begin") == count - 1)
    return pending


def test_a_call_that_asks_a_store_takes_no_place_from_its_project(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many places that gives to others: tests/unit/test_fair_queue.py."""
    real, away = endpoints.begin_and_negotiate, []

    def of_the_project() -> int:
        return int(service.app.state.admission._queue._projects["storm"].away)

    def asks(*arguments: Any) -> Any:
        with waiting_for_store():
            away.append(of_the_project())
        away.append(of_the_project())
        return real(*arguments)

    monkeypatch.setattr(endpoints, "begin_and_negotiate", asks)
    assert Job(service.http(), "storm/a").begin(1)
    assert away == [1, 0]


def test_what_has_arrived_is_asked_of_a_store_in_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    @contextmanager
    def waits() -> Iterator[None]:
        asked.append("waits")
        yield
        asked.append("goes on")

    token = WAITS_FOR_STORE.set(waits)
    try:
        monkeypatch.setattr(seal, "ask_store", lambda *_: asked.append("asks"))
        store: Any = Mock(spec=Store)
        upload: Any = object()
        seal.ask_for_all(store, [upload] * 2)
    finally:
        WAITS_FOR_STORE.reset(token)
    assert asked == ["waits", "asks", "asks", "goes on"]


def test_the_time_that_a_store_takes_is_not_taken_for_the_time_of_a_place(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, clock, ahead = endpoints.begin_and_negotiate, time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock() + ahead[0])

    def asks(*arguments: Any) -> Any:
        with waiting_for_store():
            ahead[0] += 20
        return real(*arguments)

    job = Job(service.http(), "storm/a")
    monkeypatch.setattr(endpoints, "begin_and_negotiate", asks)
    assert job.begin(1)
    assert service.app.state.admission._queue._call_seconds < 1, "a sixteenth of 20 s is more"


def test_another_projects_call_is_worked_on_at_once(
    service: RunningService, begins: Gate, threads: ThreadPoolExecutor
) -> None:
    job, other = Job(service.http(), "storm/a"), Job(service.http(), "quiet/b")
    pending = storm(service, job, begins, threads, 4)
    point = service.http().get(f"{other.base}/restore-point")
    assert point.status_code == 200
    assert len(begins.came) == 1
    begins.open.set()
    assert {each.result().view["state"] for each in pending} == {"uploading"}


def test_listings_pause_beside_another_projects_training_and_go_on_by_themselves(
    service: RunningService, begins: Gate, threads: ThreadPoolExecutor
) -> None:
    """No call ends meanwhile that would have the next one dealt."""
    job, other = Job(service.http(), "storm/a"), Job(service.http(), "quiet/b")
    pending = storm(service, job, begins, threads, 1)
    for _ in range(3):
        assert service.http().get(f"/v1/projects/{other.project}/runs").status_code == 200
    assert len(begins.came) == 1
    begins.open.set()
    assert pending[0].result()


def test_a_process_is_crowded_while_it_uses_a_good_part_of_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    used = 0.0
    monkeypatch.setattr(time, "process_time", lambda: used)
    interpreter = admission._Interpreter()
    began = time.monotonic()
    assert interpreter.is_crowded(began), "nothing is known yet"
    assert not interpreter.is_crowded(began + 1)
    used = 0.5
    assert not interpreter.is_crowded(began + 1.01), "it was looked at a moment ago"
    assert interpreter.is_crowded(began + 2)
    assert not interpreter.is_crowded(began + 3), "its calls wait for the database"


def test_begins_are_refused_first_and_told_when_to_come_again(
    service: RunningService, begins: Gate, threads: ThreadPoolExecutor
) -> None:
    job = Job(service.http(), "storm/a")
    storm(service, job, begins, threads, MOST // 2)
    reply = service.http().post(f"{job.base}/checkpoints", json=job.fence | {"step": 99, "world_size": 1})
    assert (reply.status_code, reply.json()["code"], reply.json()["retryable"]) == (429, "rate_limited", True)
    assert int(reply.headers["Retry-After"]) >= 1
    assert "HOLDFAST_PROJECT_REQUESTS" in reply.json()["detail"]
    refused = {"class": "begin", "project": "storm", "limit": "HOLDFAST_PROJECT_REQUESTS"}
    assert service.app.state.metrics.get_sample_value("holdfast_calls_refused_total", refused) == 1


def test_a_begin_that_would_be_answered_too_late_is_told_when_to_come_again(
    service: RunningService, begins: Gate, threads: ThreadPoolExecutor
) -> None:
    job = Job(service.http(), "storm/a")
    storm(service, job, begins, threads, 2)
    service.app.state.admission._queue._projects["storm"].call_seconds = 60.0  # as if calls took a minute
    reply = service.http().post(f"{job.base}/checkpoints", json=job.fence | {"step": 99, "world_size": 1})
    assert (reply.status_code, reply.json()["code"], reply.json()["retryable"]) == (429, "rate_limited", True)
    assert 1 <= int(reply.headers["Retry-After"]) <= 30
    assert "HOLDFAST_SERVE_WORKERS" in reply.json()["detail"]
    refused = {"class": "begin", "project": "storm", "limit": "wait"}
    assert service.app.state.metrics.get_sample_value("holdfast_calls_refused_total", refused) == 1


def test_seals_and_heartbeats_are_never_refused_and_go_first(
    service: RunningService, begins: Gate, threads: ThreadPoolExecutor
) -> None:
    job = Job(service.http(), "storm/a")
    begins.open.set()
    save = job.begin(1)
    save.upload(0, [b"weights", b"index"])
    begins.open.clear()
    begins.came.clear()
    pending = storm(service, job, begins, threads, MOST // 2)
    beats = [threads.submit(job.heartbeat, 1) for _ in range(2 * MOST)]
    sealed = threads.submit(save.seal, 0, [b"weights", b"index"])
    until(lambda: waiting(service, "promised") == 2 * MOST + 1)
    with pytest.raises(Refused) as caught:
        job.begin(99)
    assert caught.value.status == 429
    begins.open.set()
    assert sealed.result()["state"] == "committed"
    assert all(each.result() for each in [*beats, *pending])


def test_a_token_has_no_more_calls_under_way_than_it_may(
    service: RunningService, begins: Gate, threads: ThreadPoolExecutor
) -> None:
    whole = service.http()
    job = Job(whole, "storm/a")
    body = {"name": "small", "scopes": ["train", "read"], "concurrent_requests": 4}
    small = service.http(token=answer(whole.post("/v1/tokens", json=body))["token"])
    assert small.get(f"{job.base}/restore-point").status_code == 200
    job.http = small
    pending = storm(service, job, begins, threads, 2)
    with pytest.raises(Refused, match="HOLDFAST_TOKEN_REQUESTS") as caught:
        job.begin(99)
    assert (caught.value.status, caught.value.code) == (429, "rate_limited")
    job.http = whole
    pending.append(threads.submit(job.begin, 3))
    until(lambda: waiting(service, "begin") == 2)
    begins.open.set()
    assert all(each.result() for each in pending)
    job.http = small
    assert job.begin(4), "its calls are over"


def test_a_call_whose_client_does_not_wait_is_not_worked_on(
    service: RunningService, begins: Gate, threads: ThreadPoolExecutor
) -> None:
    job = Job(service.http(), "storm/a")
    pending = storm(service, job, begins, threads, 1)
    head = (
        f"GET {job.base}/restore-point HTTP/1.1\r\nHost: localhost\r\n"
        f"Authorization: {service.http().headers['Authorization']}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", int(service.url.rpartition(":")[2]))) as connection:
        connection.sendall(head.encode())
        until(lambda: waiting(service, "restore") == 1)
    # The server sees what happened on its sockets in order: once this is answered, that the other one is closed.
    assert httpx.get(f"{service.url}/healthz", timeout=SECONDS).status_code == 200
    begins.open.set()
    assert pending[0].result()
    route = {"method": "GET", "route": "/v1/projects/{project}/runs/{run}/restore-point", "status": "499"}
    until(lambda: service.app.state.metrics.get_sample_value("holdfast_requests_total", route) == 1)
    assert service.http().get(f"{job.base}/restore-point").status_code == 200, "its place is free again"


def test_a_body_that_does_not_come_holds_no_place(service: RunningService) -> None:
    job = Job(service.http(), "storm/a")
    address = ("127.0.0.1", int(service.url.rpartition(":")[2]))
    head = (
        f"POST {job.base}/checkpoints HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 9\r\n"
        f"Authorization: {service.http().headers['Authorization']}\r\nContent-Type: application/json\r\n\r\n"
    )
    connections = [socket.create_connection(address) for _ in range(3)]
    try:
        for connection in connections:
            connection.sendall(head.encode())
            connection.settimeout(SECONDS)
            assert b"100 Continue" in connection.recv(4096)
        assert job.begin(1).view["state"] == "uploading"
    finally:
        for connection in connections:
            connection.close()


def test_strangers_whose_bodies_do_not_come_keep_no_new_token_out(service: RunningService) -> None:
    address = ("127.0.0.1", int(service.url.rpartition(":")[2]))
    head = (
        "POST /v1/sign-ins HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 9\r\n"
        "Content-Type: application/json\r\n\r\n"
    )
    connections = [socket.create_connection(address) for _ in range(2 * MOST)]
    try:
        for connection in connections:
            connection.sendall(head.encode())
            connection.settimeout(SECONDS)
            assert b"100 Continue" in connection.recv(4096)
        assert service.http(token=service.token()).get("/v1/projects").status_code == 200
    finally:
        for connection in connections:
            connection.close()


def test_long_polls_hold_no_place_and_are_bounded(service: RunningService, threads: ThreadPoolExecutor) -> None:
    job = Job(service.http(), "storm/a")
    save = job.begin(1)
    polls = [threads.submit(save.now, 60) for _ in range(2)]
    until(lambda: service.context.notifier.waiting == 2)
    reply = service.http().get(f"/v1/checkpoints/{save.id}", params={"wait": 60})
    assert (reply.status_code, reply.json()["code"]) == (429, "rate_limited")
    assert "HOLDFAST_PROJECT_LONG_POLLS" in reply.json()["detail"]
    assert save.now()["state"] == "uploading", "to ask without waiting is another matter"
    assert save.write(0, [b"weights", b"index"])["state"] == "committed"
    assert {each.result()["state"] for each in polls} == {"committed"}


def test_a_checkpoint_of_another_process_belongs_to_its_project_once_a_rank_has_sealed(service: RunningService) -> None:
    job = Job(service.http(), "storm/a", world_size=2)
    save = job.begin(1)
    load = service.context.load
    load._projects.clear()  # as if another process had begun it
    save.write(0, [b"weights", b"index"])
    assert load.project_of(save.id) == "storm"


def test_a_checkpoints_calls_belong_to_its_project_whatever_the_token(
    service: RunningService, begins: Gate, threads: ThreadPoolExecutor
) -> None:
    begins.open.set()
    saves = {name: Job(service.http(), f"{name}/a").begin(1) for name in ("storm", "quiet")}
    begins.open.clear()
    begins.came.clear()
    storm(service, saves["storm"].job, begins, threads, 2)
    assert saves["quiet"].now()["state"] == "uploading"
    behind = threads.submit(saves["storm"].now)
    until(lambda: waiting(service, "restore") == 1)
    assert not behind.done()
    begins.open.set()
    assert behind.result()["state"] == "uploading"


def test_tokens_that_were_not_seen_share_the_turns_of_one_project(
    service: RunningService, begins: Gate, threads: ThreadPoolExecutor
) -> None:
    """A new token's first call is worked on while a project's storm waits, and a wrong one is refused."""
    job = Job(service.http(), "storm/a")
    storm(service, job, begins, threads, 3)
    assert service.http(token=service.token()).get("/v1/projects").status_code == 200
    assert service.http(token=f"hold_{'0' * 16}_{'1' * 64}").get("/v1/projects").status_code == 401


def test_clients_ride_a_limit_out(service: RunningService, threads: ThreadPoolExecutor) -> None:
    """More ranks than a project may have calls under way: each begins, later."""
    ranks = 3 * MOST
    run = RunName("storm", "of-many")
    settings = ClientSettings(url=service.url, token=re.sub("^Bearer ", "", service.http().headers["Authorization"]))
    with Client(settings) as client:
        opened = client.attempts.open_next(run, "launch", world_size=ranks, host="here", create=True)
        fence = {"epoch": opened.epoch, "attempt": opened.attempt, "launch_id": "launch"}
        begin = BeginCheckpoint(step=1, world_size=ranks, **fence)
        told: list[str] = []
        client.transport.on_retry = lambda failure: told.append(failure.code)
        begun = [threads.submit(client.checkpoints.begin, run.project, run.run, begin) for _ in range(ranks)]
        alive = client.attempts.heartbeat(run.project, run.run, opened.attempt, Heartbeat(**fence))
        assert alive
        assert len({each.result().id for each in begun}) == 1
    assert set(told) <= {"rate_limited"}


def test_a_scraper_sees_who_waits(service: RunningService) -> None:
    shown = service.http().get("/metrics").text
    assert "# TYPE holdfast_calls_waiting gauge" in shown
    assert "# TYPE holdfast_calls_refused_total counter" in shown
    assert "# TYPE holdfast_call_wait_seconds histogram" in shown


def test_health_is_asked_past_every_queue(service: RunningService, begins: Gate, threads: ThreadPoolExecutor) -> None:
    for name in ("storm", "too"):
        threads.submit(Job(service.http(), f"{name}/a").begin, 1)
    begins.until(2)
    assert httpx.get(f"{service.url}/healthz", timeout=SECONDS).status_code == 200
    assert service.http().get("/readyz").status_code == 200
