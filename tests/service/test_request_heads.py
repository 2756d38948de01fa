"""A request that a proxy and the service could read differently is refused, and nothing behind it is answered."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from holdfast_service.settings import ServiceSettings
from tests.support.service import RunningService, running_service

HOST = b"Host: localhost\r\n"
SMUGGLED = b"GET /openapi.json HTTP/1.1\r\n" + HOST + b"\r\n"
POST = b"POST /v1/tokens HTTP/1.1\r\n" + HOST
AMBIGUOUS = {
    "a length and chunks": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and a length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": POST + b"Content-Length: 0\r\nContent-Length: 5\r\n\r\n",
    "a length twice": POST + b"Content-Length: 0\r\nContent-Length: 0\r\n\r\n",
    "a length with a sign": POST + b"Content-Length: +0\r\n\r\n",
    "another coding": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a coding twice": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a coding in the next line": POST + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "chunks by HTTP/1.0": b"POST /v1/tokens HTTP/1.0\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a space before the colon": POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "lines without CR": b"GET /healthz HTTP/1.1\nHost: localhost\n\n",
    "one line without CR": b"GET /healthz HTTP/1.1\r\n" + HOST + b"X: a\nContent-Length: 0\r\n\r\n",
    "an empty line without CR": b"GET /healthz HTTP/1.1\r\n" + HOST + b"\n",
    "a CR within a line": b"GET /healthz HTTP/1.1\r\n" + HOST + b"X: a\rContent-Length: 5\r\n\r\n",
    "two hosts": b"GET /healthz HTTP/1.1\r\n" + HOST + HOST + b"\r\n",
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    with running_service(ServiceSettings(data_dir=tmp_path_factory.mktemp("heads"), port=0)) as running:
        yield running


def answered(service: RunningService, *pieces: bytes) -> bytes:
    """All that comes until the service closes the connection."""
    come = b""
    with socket.create_connection(("127.0.0.1", int(service.url.rpartition(":")[2])), timeout=60) as connection:
        for piece in pieces:
            connection.sendall(piece)
        while piece := connection.recv(65536):
            come += piece
    return come


@pytest.mark.parametrize("first", AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_what_could_be_read_in_two_ways_is_refused_and_ends_the_connection(
    service: RunningService, first: bytes
) -> None:
    answer = answered(service, first + SMUGGLED)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1


def test_requests_one_after_the_other_are_each_answered(service: RunningService) -> None:
    whole = b"GET /healthz HTTP/1.1\r\n" + HOST
    answer = answered(service, whole + b"\r\n" + whole + b"Connection: close\r\n\r\n")
    assert answer.count(b'{"status":"alive"}') == 2


@pytest.mark.parametrize("trailer", [b"", b"X-Checksum: 1\r\n"])
def test_a_body_in_chunks_is_read_to_its_end(service: RunningService, trailer: bytes) -> None:
    body = json.dumps({"name": "in chunks", "scopes": ["read"]}).encode()
    head = POST + b"Authorization: Bearer " + service.token().encode() + b"\r\nContent-Type: application/json\r\n"
    chunk = b"%x\r\n" % len(body) + body + b"\r\n"
    answer = answered(
        service, head + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n", chunk, b"0\r\n" + trailer + b"\r\n"
    )
    assert answer.startswith(b"HTTP/1.1 201 ")


def test_a_head_may_come_byte_by_byte(service: RunningService) -> None:
    head = b"GET /healthz HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n"
    assert answered(service, *(head[at : at + 1] for at in range(len(head)))).startswith(b"HTTP/1.1 200 ")
