"""Who is refused and calls again at once is answered later; nobody else is, and the connection may make room."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from starlette.requests import Request

from holdfast_protocol.problems import ProblemCode
from holdfast_service.auth.principal import BURST, FailedCalls, new_token_text
from holdfast_service.errors import ProblemError
from holdfast_service.settings import ServiceSettings
from holdfast_service.web import connections, fair_queue, held_refusals
from tests.support.service import RunningService, running_service

pytestmark = pytest.mark.rule("limits-before-work")
AT_ONCE = int(held_refusals.AT_ONCE_PER_SECOND * held_refusals.BURST_SECONDS)
MOST = 5
OURS, ANOTHER = "127.0.0.1", "127.0.0.2"


class Noted(held_refusals.HeldRefusals):
    """Says which refusals have come to it."""

    def __init__(self) -> None:
        super().__init__()
        self.come: list[ProblemCode] = []

    async def wait(self, request: Request, refusal: ProblemError) -> None:
        if refusal.code is ProblemCode.TOO_MANY_FAILURES:
            self.come.append(refusal.code)
        await super().wait(request, refusal)


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningService]:
    """Where what is held is held until the test is over."""
    monkeypatch.setattr(held_refusals, "HELD_SECONDS", 3600.0)
    monkeypatch.setattr(held_refusals, "AT_ONCE_PER_SECOND", 1e-6)  # none comes again meanwhile
    monkeypatch.setattr(held_refusals, "BURST_SECONDS", AT_ONCE / 1e-6)
    monkeypatch.setattr(fair_queue, "SECONDS_PER_WRONG", 1e6)
    monkeypatch.setattr(fair_queue, "LONGEST_SHUT_SECONDS", 1e9)
    settings = ServiceSettings(data_dir=tmp_path, port=0, most_connections=MOST, shutdown_seconds=0)
    with serving(settings) as running:
        yield running


@contextmanager
def serving(settings: ServiceSettings) -> Iterator[RunningService]:
    with running_service(settings) as running:
        running.app.state.failed_calls = FailedCalls(clock=lambda: 0.0)
        running.app.state.held_refusals = Noted()
        yield running


def call(
    service: RunningService, sockets: ExitStack, token: str, source: str = OURS, path: str = "/v1/service"
) -> socket.socket:
    address = ("127.0.0.1", int(service.url.rpartition(":")[2]))
    connection = socket.create_connection(address, timeout=60, source_address=(source, 0))
    sockets.callback(connection.close)
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n".encode())
    return connection


def told(connection: socket.socket) -> bytes:
    """All of it, until the service closes."""
    come = b""
    with suppress(ConnectionError):  # it has not read what was sent
        while piece := connection.recv(4096):
            come += piece
    return come


def flood(service: RunningService, source: str) -> None:
    """As many wrong tokens as are told so at once but one, each on a connection of its own."""
    for _ in range(BURST + fair_queue.MOST_WRONG - 1):
        with ExitStack() as sockets:
            assert call(service, sockets, new_token_text(), source).recv(12)[-3:] in (b"401", b"429")


@contextmanager
def hung_up(service: RunningService, source: str) -> Iterator[socket.socket]:
    """The last one of them does not wait for its answer."""
    come = len(service.app.state.held_refusals.come)
    with ExitStack() as sockets:
        yield call(service, sockets, new_token_text(), source)
    until = time.monotonic() + 60
    while len(service.app.state.held_refusals.come) == come:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_refusals_of_who_does_not_wait_are_held_and_make_room_and_others_are_not_held(
    service: RunningService,
) -> None:
    good = service.token()
    with service.http(token=good) as http:
        assert http.get("/v1/service").status_code == 200, "from now on it is known"
    with service.http(token=new_token_text()) as http:
        seen = [http.get("/v1/service").status_code for _ in range(BURST + AT_ONCE)]
    assert seen == [401] * BURST + [429] * AT_ONCE, "the first ones are told at once"
    with ExitStack() as sockets:
        held = [call(service, sockets, new_token_text()) for _ in range(MOST)]
        while len(service.app.state.held_refusals.come) < AT_ONCE + MOST:
            time.sleep(0.01)
        # All places are taken by calls that are held. Another of that address gets one, and is answered.
        for connection in held:
            connection.sendall(b"G")  # what comes behind a refused call changes nothing
        assert b" 200 " in call(service, sockets, good).recv(4096)
        try:
            assert held[0].recv(1) == b"", "the first that was held has made room"
        except ConnectionResetError:
            pass
        held[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            held[-1].recv(1)


def test_a_call_that_is_wrong_is_no_refusal_for_load(service: RunningService) -> None:
    with service.http() as http:
        seen = {http.get("/v1/projects/none/runs").status_code for _ in range(2 * AT_ONCE)}
    assert seen == {404}


def test_new_connections_of_an_address_that_goes_on_with_wrong_tokens_are_turned_away(
    service: RunningService, caplog: pytest.LogCaptureFixture
) -> None:
    good = service.token()
    flood(service, ANOTHER)
    with hung_up(service, ANOTHER):
        pass
    seen = len(service.app.state.held_refusals.come)
    with ExitStack() as sockets:
        reply = told(call(service, sockets, good, ANOTHER))
        assert reply.startswith(b"HTTP/1.1 429 "), "though its token is good: no call of it was read"
        assert b"most of its connections are not served. Correct HOLDFAST_TOKEN there." in reply
        assert len(service.app.state.held_refusals.come) == seen
        told(call(service, sockets, good, ANOTHER))
        logged = [str(each.msg) for each in caplog.records if "connections_turned_away" in str(each.msg)]
        assert [ANOTHER in each for each in logged] == [True], "once, however many are"
        assert b" 200 " in call(service, sockets, good, OURS).recv(4096), "another address is served"


def test_a_call_that_was_reset_before_it_was_let_in_counts_for_its_address(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, accept = threading.Event(), connections._Door.accept
    opened.set()

    def wait_and_accept(door: connections._Door) -> tuple[socket.socket, object]:
        opened.wait(60)
        return accept(door)

    monkeypatch.setattr(connections._Door, "accept", wait_and_accept)
    flood(service, ANOTHER)
    opened.clear()
    with hung_up(service, ANOTHER) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        opened.set()
    with ExitStack() as sockets:
        assert told(call(service, sockets, new_token_text(), ANOTHER)).startswith(b"HTTP/1.1 429 ")


@pytest.mark.parametrize("path", ["/v1/service", "/healthz"])
def test_an_address_that_was_served_is_not_turned_away(service: RunningService, path: str) -> None:
    good = service.token()
    with ExitStack() as sockets:
        assert b" 200 " in call(service, sockets, good, ANOTHER, path).recv(4096)
    flood(service, ANOTHER)
    with hung_up(service, ANOTHER):
        pass
    with ExitStack() as sockets:
        assert b" 200 " in call(service, sockets, good, ANOTHER, path).recv(4096)


def test_a_trusted_proxy_is_not_turned_away_for_its_callers(tmp_path: Path, service: RunningService) -> None:
    settings = ServiceSettings(data_dir=tmp_path / "behind", port=0, shutdown_seconds=0, trusted_proxies=ANOTHER)
    with serving(settings) as behind:
        flood(behind, ANOTHER)
        with hung_up(behind, ANOTHER):
            pass
        with ExitStack() as sockets:
            assert b" 200 " in call(behind, sockets, "none", ANOTHER, "/healthz").recv(4096)


def test_who_is_refused_for_wrong_tokens_needs_a_new_connection_for_the_next_call(service: RunningService) -> None:
    """So it comes by the door again."""
    headers = {"Authorization": f"Bearer {new_token_text()}"}
    with httpx.Client(base_url=service.url, headers=headers, timeout=60) as http:
        replies = [http.get("/v1/service") for _ in range(BURST + 2)]
    assert [each.status_code for each in replies] == [401] * BURST + [429] * 2
    assert [each.headers.get("connection") for each in replies] == [None] * BURST + ["close"] * 2
