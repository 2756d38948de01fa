"""Chunks from host to host over HTTP, both sides: a stranger's request, and a peer's answer, are read or refused by the
errors that the callers expect, and take no memory for bytes that have not come."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from http import HTTPStatus

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast_client.agent.memory_tier import MemoryTier
from holdfast_client.agent.messages import Find, Found
from holdfast_client.agent.peer_chunks import FIND, OFFERS, TROUBLE
from holdfast_client.agent.peer_server import PeerServer as AgentPeerServer
from holdfast_client.agent.shared_memory import Budget
from holdfast_client.chunks.peer_http import (
    CHUNKS,
    Head,
    PeerAddress,
    PeerError,
    PeerListener,
    ask,
    read_body,
    read_head,
    receive_chunk,
)
from holdfast_client.chunks.peers import PeerServer
from holdfast_client.chunks.transfer import Receiver
from holdfast_client.errors import ChunkCorrupt
from tests.fuzz.mutations import damaged
from tests.fuzz.test_agent_frames import OFFERED, frame

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="agents need Linux")
often = settings(max_examples=1000)
PEER = PeerAddress("127.0.0.1", 9, "ab" * 32)
CHUNK = bytes(range(256))
DIGEST = hashlib.sha256(CHUNK).hexdigest()
EXPECTED = HTTPStatus.OK, HTTPStatus.NOT_FOUND, HTTPStatus.NO_CONTENT, HTTPStatus.SERVICE_UNAVAILABLE


def answer_of(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


ANSWERS = [answer_of(CHUNK), answer_of(b"", "404 Not Found"), answer_of(frame(Found(bytes=[1, None])))]
HUGE = b"HTTP/1.1 200 OK\r\nContent-Length: 67108864\r\n\r\n"
ENDLESS = b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 4000 + b"\r\n\r\n"


def answered(sent: bytes) -> tuple[socket.socket, Head]:
    """A connection whose other end has sent this and is gone. Raises OSError, and PeerError."""
    ours, theirs = socket.socketpair()
    try:
        theirs.sendall(sent)
        theirs.shutdown(socket.SHUT_WR)
        return ours, ask(ours, PEER, "GET", CHUNKS + DIGEST, expects=EXPECTED)[1]
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()


@often
@given(damaged(ANSWERS) | st.binary(max_size=300))
@example(ENDLESS)
def test_a_peers_answer_is_the_chunk_or_is_refused(sent: bytes) -> None:
    buffer = bytearray(len(CHUNK))
    with contextlib.suppress(OSError, PeerError, ChunkCorrupt):
        connection, head = answered(sent)
        with connection:
            receive_chunk(connection, head, Receiver(memoryview(buffer), DIGEST), threading.Event())
        assert bytes(buffer) == CHUNK


@often
@given(damaged(ANSWERS) | st.binary(max_size=300))
@example(HUGE)
@example(ENDLESS)
def test_a_peers_body_is_read_or_refused_and_takes_no_more_memory_than_has_come(sent: bytes) -> None:
    tracemalloc.start()
    try:
        with contextlib.suppress(*TROUBLE):
            connection, head = answered(sent)
            with connection:
                body = read_body(connection, head, 64 * 1024**2)
            assert sent.endswith(body) or body in sent
            Found.model_validate_json(body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * 1024**2


class Asked:
    """A server of the swarm or of an agent, and what its threads ended with."""

    def __init__(self, server: PeerServer | AgentPeerServer) -> None:
        self.server = server
        self.ended: list[BaseException | None] = []

    def ask(self, sent: bytes) -> bytes:
        """All that it answers to who sends no more than this."""
        with socket.create_connection((self.server.address.host, self.server.address.port)) as connection:
            with contextlib.suppress(OSError):  # it may have answered and left before it has read all
                connection.sendall(sent)
                connection.shutdown(socket.SHUT_WR)
            come = b""
            with contextlib.suppress(ConnectionResetError):
                while part := connection.recv(4096):
                    come += part
        return come


def swarm() -> PeerServer:
    server = PeerServer("127.0.0.1")
    server.begin(None, [])
    return server


def agent() -> AgentPeerServer:
    return AgentPeerServer("127.0.0.1", MemoryTier(Budget(1024**2), 1), lambda _offer: None)


@pytest.fixture(scope="module", params=[swarm, agent])
def asked(request: pytest.FixtureRequest) -> Iterator[Asked]:
    server = Asked(request.param())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PeerListener, "handle_error", lambda *_: server.ended.append(sys.exc_info()[1]))
        yield server
        server.server.close()


def request_of(method: str, path: str, body: bytes = b"") -> bytes:
    lines = f"{method} {path} HTTP/1.1", "Host: peer", "Authorization: Bearer TOKEN", f"Content-Length: {len(body)}"
    return "\r\n".join([*lines, "", ""]).encode() + body


REQUESTS = [
    request_of("GET", CHUNKS + DIGEST),
    request_of("POST", OFFERS, frame(OFFERED[0])),
    request_of("POST", FIND, frame(Find(project="demo", run="gpt", digests=[DIGEST]))),
]


@given(sent=damaged(REQUESTS) | st.binary(max_size=300), is_known=st.booleans())
def test_a_request_from_the_network_is_answered_or_cut_off(asked: Asked, sent: bytes, is_known: bool) -> None:
    """`is_known`: who sends it has the token."""
    token = asked.server.address.token.encode()
    come = asked.ask(sent.replace(b"TOKEN", token) if is_known else sent)
    assert all(isinstance(error, (OSError, PeerError)) for error in asked.ended), asked.ended
    if come:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(come)
            theirs.shutdown(socket.SHUT_WR)
            status = int(read_head(ours).first[1])
        assert status in {200, 204, 400, 403, 404, 501, 503}
        assert is_known or status == 403
    if token not in sent.replace(b"TOKEN", token if is_known else b""):
        assert not come or b" 403 " in come
    good = request_of("GET", CHUNKS + DIGEST).replace(b"TOKEN", token)
    assert b" 404 " in asked.ask(good), "it answers the next one"
