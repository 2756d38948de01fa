"""Connections that hold the service up without asking it anything: real sockets at a real server."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

from holdfast_service.settings import ServiceSettings
from holdfast_service.stores.posix import endpoints as objects
from holdfast_service.web import connections
from tests.support.service import RunningService, running_service
from tests.support.stores import chunk_key, put_ticket
from tests.support.tls import Authority

pytestmark = pytest.mark.rule("limits-before-work")
MOST = 5
OURS, ANOTHER = "127.0.0.1", "127.0.0.2"
HEAD = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture
def sockets() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """Has no time for slow heads and slow uploads."""
    data_dir = tmp_path_factory.mktemp("hasty")
    settings = ServiceSettings(data_dir=data_dir, port=0, header_seconds=1.0, longest_upload_seconds=1)
    with running_service(settings) as running:
        yield running


@pytest.fixture(scope="module")
def brief(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """As `hasty`, for tests whose own first words must come in time, also on a busy machine."""
    data_dir = tmp_path_factory.mktemp("brief")
    settings = ServiceSettings(data_dir=data_dir, port=0, header_seconds=4.0, longest_upload_seconds=1)
    with running_service(settings) as running:
        yield running


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """Has few connections, and all the time for heads."""
    data_dir = tmp_path_factory.mktemp("small")
    settings = ServiceSettings(data_dir=data_dir, port=0, header_seconds=600, most_connections=MOST)
    with running_service(settings) as running:
        yield running


@pytest.fixture(params=[1.0, 600.0])
def secured(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunningService]:
    """Speaks TLS, and has few connections."""
    certificate, key = tmp_path / "server.pem", tmp_path / "server.key"
    Authority(tmp_path / "authority.pem").sign(certificate, key)
    settings = ServiceSettings(
        data_dir=tmp_path / "data",
        port=0,
        header_seconds=request.param,
        most_connections=MOST,
        tls_certificate=certificate,
        tls_key=key,
    )
    with running_service(settings) as running:
        yield running


def connect(service: RunningService, sockets: ExitStack, sent: bytes = b"", source: str = OURS) -> socket.socket:
    address = ("127.0.0.1", int(service.url.rpartition(":")[2]))
    connection = socket.create_connection(address, timeout=60, source_address=(source, 0))
    sockets.callback(connection.close)
    connection.sendall(sent)
    return connection


def told(connection: socket.socket, text: bytes) -> bool:
    """Whether the answer holds this; it comes in pieces."""
    come = b""
    while text not in come and (piece := connection.recv(4096)):
        come += piece
    return text in come


def send_for_ever(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"1000\r\n" + b" " * 0x1000 + b"\r\n")


def closed(connection: socket.socket) -> bool:
    """Waits for whatever comes: the end, or an answer."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("sent", [b"", b"G", HEAD, b"POST / HTTP/1.1\r\nX: " + b"x" * 1000])
def test_a_head_that_does_not_end_is_not_waited_for(hasty: RunningService, sockets: ExitStack, sent: bytes) -> None:
    assert closed(connect(hasty, sockets, sent))


def test_a_second_head_that_does_not_end_is_not_waited_for_either(brief: RunningService, sockets: ExitStack) -> None:
    connection = connect(brief, sockets, HEAD + b"\r\n")
    assert told(connection, b'{"status":"alive"}')
    connection.sendall(HEAD)
    assert closed(connection)


def test_what_is_left_of_a_refused_body_is_not_waited_for(brief: RunningService, sockets: ExitStack) -> None:
    connection = connect(
        brief, sockets, b"PUT /v1/prices HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    assert told(connection, b" 401 ")
    with pytest.raises(ConnectionError):
        send_for_ever(connection)  # the service reads on for a moment, so that the answer is not lost, and then no more


def test_a_call_that_takes_longer_than_its_head_may_is_answered(brief: RunningService) -> None:
    with httpx.Client(base_url=brief.url, timeout=60) as http:
        for _ in range(3):
            assert http.get("/readyz").status_code == 200


def test_connections_that_ask_nothing_make_room_for_those_that_do(small: RunningService, sockets: ExitStack) -> None:
    idle = [connect(small, sockets, HEAD) for _ in range(3 * MOST)]
    assert httpx.get(f"{small.url}/healthz", timeout=60).status_code == 200
    assert all(closed(connection) for connection in idle[: 2 * MOST])
    idle[-1].sendall(b"\r\n")
    assert told(idle[-1], b'{"status":"alive"}'), "the newest of them stay"


def test_an_address_with_many_of_them_makes_room_and_others_do_not(small: RunningService, sockets: ExitStack) -> None:
    quiet = connect(small, sockets, HEAD, source=ANOTHER)
    flood = [connect(small, sockets, HEAD) for _ in range(3 * MOST)]
    assert all(closed(connection) for connection in flood[: 2 * MOST])
    quiet.sendall(b"\r\n")
    assert told(quiet, b'{"status":"alive"}'), "it was the first of all, and the only one of its address"


@pytest.fixture
def behind_proxy(tmp_path: Path) -> Iterator[RunningService]:
    settings = ServiceSettings(
        data_dir=tmp_path, port=0, header_seconds=600, most_connections=MOST, trusted_proxies=ANOTHER
    )
    with running_service(settings) as running:
        yield running


def test_a_trusted_proxys_connections_make_room_when_no_other_is_left(
    behind_proxy: RunningService, sockets: ExitStack
) -> None:
    kept_alive = [connect(behind_proxy, sockets, HEAD, source=ANOTHER) for _ in range(MOST - 1)]
    flood = [connect(behind_proxy, sockets, HEAD) for _ in range(3 * MOST)]
    assert all(closed(connection) for connection in flood[:-1])
    for connection in kept_alive:
        connection.sendall(b"\r\n")
        assert told(connection, b'{"status":"alive"}'), "of its address there were more"
    more = [connect(behind_proxy, sockets, HEAD, source=ANOTHER) for _ in range(MOST)]
    more[-1].sendall(b"\r\n")
    assert told(more[-1], b'{"status":"alive"}')


def halves_of_bodies(service: RunningService, sockets: ExitStack) -> list[socket.socket]:
    """As many as there may be connections."""
    token = service.token()
    head = f"POST /v1/tokens HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\nExpect: 100-continue\r\n"
    working = [
        connect(service, sockets, head.encode() + b"Content-Type: application/json\r\nContent-Length: 9\r\n\r\n")
        for _ in range(MOST)
    ]
    for connection in working:
        assert told(connection, b"100 Continue")
    return working


def test_halves_of_bodies_make_room_for_another_address(small: RunningService, sockets: ExitStack) -> None:
    working = halves_of_bodies(small, sockets)
    assert told(connect(small, sockets, HEAD + b"\r\n", source=ANOTHER), b'{"status":"alive"}')
    assert closed(working[0]), "the first of the address that has the most of them"
    working[1].sendall(b"123456789")
    assert told(working[1], b" 422 ")


def test_where_all_connections_are_at_work_one_more_is_told_so(small: RunningService, sockets: ExitStack) -> None:
    working = halves_of_bodies(small, sockets)
    assert told(connect(small, sockets), b" 503 ")
    working[0].sendall(b"123456789")
    assert told(working[0], b" 422 ")


@pytest.mark.parametrize("secured", [1.0], indirect=True)
@pytest.mark.parametrize("handshake", [b"", b"\x16\x03\x01"])
def test_a_handshake_that_does_not_end_is_not_waited_for(
    secured: RunningService, sockets: ExitStack, handshake: bytes
) -> None:
    assert closed(connect(secured, sockets, handshake))


@pytest.mark.parametrize("secured", [600.0], indirect=True)
def test_handshakes_that_do_not_end_make_room_for_callers(
    secured: RunningService, sockets: ExitStack, tmp_path: Path
) -> None:
    idle = [connect(secured, sockets) for _ in range(3 * MOST)]
    trusted = ssl.create_default_context(cafile=tmp_path / "authority.pem")
    assert httpx.get(f"{secured.url}/healthz", verify=trusted, timeout=60).status_code == 200
    assert all(closed(connection) for connection in idle[: 2 * MOST])


def test_a_reply_that_nobody_reads_is_not_kept(
    brief: RunningService, sockets: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = len(httpx.get(f"{brief.url}/openapi.json", timeout=60).content)
    monkeypatch.setattr(connections, "UNREAD_SECONDS", 0.2)
    connection = sockets.enter_context(socket.socket())
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # it must be said before it connects
    connection.settimeout(60)
    connection.connect(("127.0.0.1", int(brief.url.rpartition(":")[2])))
    here, lost = connection.getsockname(), threading.Event()
    connection_lost = H11Protocol.connection_lost

    def noted(protocol: H11Protocol, error: Exception | None) -> None:
        connection_lost(protocol, error)
        if protocol.client == here:
            lost.set()

    monkeypatch.setattr(H11Protocol, "connection_lost", noted)
    ask = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
    replies = 20  # more than the kernel keeps for the two of them
    connection.sendall(ask * replies)
    assert lost.wait(60)
    come = 0
    try:
        while piece := connection.recv(1 << 20):
            come += len(piece)
    except ConnectionResetError:
        pass
    assert come < replies * whole


CHUNK = b"chunk" * 20


def begin_upload(service: RunningService, sockets: ExitStack, project_id: str = "p1") -> socket.socket:
    """Sends the head of an upload by a good ticket, and no body."""
    ticket = put_ticket(service.context.store, chunk_key(CHUNK, project_id), CHUNK)
    head = (
        f"PUT {ticket.url} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(CHUNK)}\r\nExpect: 100-continue\r\n\r\n"
    )
    return connect(service, sockets, head.encode())


def test_no_project_takes_all_connections_for_its_chunks(small: RunningService, sockets: ExitStack) -> None:
    assert MOST // 8 < 1, "one at a time"
    first = begin_upload(small, sockets)
    assert told(first, b"100 Continue")
    assert told(begin_upload(small, sockets), b" 429 ")
    other = begin_upload(small, sockets, "p2")
    assert told(other, b"100 Continue")
    first.sendall(CHUNK)
    assert told(first, b" 201 ")
    assert told(begin_upload(small, sockets), b"100 Continue")


@pytest.mark.rule("late-put-window")
@pytest.mark.parametrize("idle_seconds", [0.2, 60.0], ids=["stops coming", "takes too long"])
def test_a_chunk_that_does_not_come_is_not_waited_for(
    brief: RunningService, sockets: ExitStack, monkeypatch: pytest.MonkeyPatch, idle_seconds: float
) -> None:
    monkeypatch.setattr(objects, "IDLE_SECONDS", idle_seconds)
    connection = begin_upload(brief, sockets)
    connection.sendall(CHUNK[:50])
    assert told(connection, b" 408 ")
    assert not list(brief.context.settings.data_dir.rglob("*.part"))
