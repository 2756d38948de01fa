"""Connections that hold the service up without asking it anything: real sockets at a real server."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from holdfast_service.settings import ServiceSettings
from tests.support.service import RunningService, running_service
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
    """Has no time for slow heads."""
    data_dir = tmp_path_factory.mktemp("hasty")
    with running_service(ServiceSettings(data_dir=data_dir, port=0, header_seconds=1.0)) as running:
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


def test_a_second_head_that_does_not_end_is_not_waited_for_either(hasty: RunningService, sockets: ExitStack) -> None:
    connection = connect(hasty, sockets, HEAD + b"\r\n")
    assert told(connection, b'{"status":"alive"}')
    connection.sendall(HEAD)
    assert closed(connection)


def test_what_is_left_of_a_refused_body_is_not_waited_for(hasty: RunningService, sockets: ExitStack) -> None:
    connection = connect(
        hasty, sockets, b"PUT /v1/prices HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    assert told(connection, b" 401 ")
    with pytest.raises(ConnectionError):
        send_for_ever(connection)  # the service reads on for a moment, so that the answer is not lost, and then no more


def test_a_call_that_takes_longer_than_its_head_may_is_answered(hasty: RunningService) -> None:
    with httpx.Client(base_url=hasty.url, timeout=60) as http:
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
