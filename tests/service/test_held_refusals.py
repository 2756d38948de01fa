"""Who is refused and calls again at once is answered later; nobody else is, and the connection may make room."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from starlette.requests import Request

from holdfast_protocol.problems import ProblemCode
from holdfast_service.auth.principal import BURST, FailedCalls, new_token_text
from holdfast_service.errors import ProblemError
from holdfast_service.settings import ServiceSettings
from holdfast_service.web import held_refusals
from tests.support.service import RunningService, running_service

pytestmark = pytest.mark.rule("limits-before-work")
AT_ONCE = int(held_refusals.AT_ONCE_PER_SECOND * held_refusals.BURST_SECONDS)
MOST = 5


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
    settings = ServiceSettings(data_dir=tmp_path, port=0, most_connections=MOST, shutdown_seconds=0)
    with running_service(settings) as running:
        running.app.state.failed_calls = FailedCalls(clock=lambda: 0.0)
        running.app.state.held_refusals = Noted()
        yield running


def call(service: RunningService, sockets: ExitStack, token: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", int(service.url.rpartition(":")[2])), timeout=60)
    sockets.callback(connection.close)
    connection.sendall(f"GET /v1/service HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n".encode())
    return connection


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
