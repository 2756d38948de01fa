"""A rank passes chunks on to ranks of other hosts: proven bytes, for those who know its token. What goes wrong costs a
fetch from the store, and no more."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import http.client
import multiprocessing
import os
import signal
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast_client.chunks import peer_http
from holdfast_client.chunks import peers as module
from holdfast_client.chunks.peer_http import PeerAddress
from holdfast_client.chunks.peers import Peers, PeerServer, address_towards
from holdfast_client.errors import TransferStopped
from holdfast_client.local.chunk_folder import ChunkFolder

BODY = bytes(range(256)) * 2000
OTHER = BODY[::-1]
DIGEST, OTHER_DIGEST = (hashlib.sha256(body).hexdigest() for body in (BODY, OTHER))
spawn = multiprocessing.get_context("spawn")


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """A crowded machine answers late."""
    monkeypatch.setattr(peer_http, "CONNECT_SECONDS", 60.0)
    monkeypatch.setattr(peer_http, "SILENCE_SECONDS", 60.0)
    monkeypatch.setattr(module, "LONGEST_WAIT_SECONDS", 60.0)


@pytest.fixture
def folder(tmp_path):
    made = ChunkFolder(tmp_path / "chunks", limit_bytes=10**8)
    yield made
    made.close()


@contextlib.contextmanager
def serving(host: str = "127.0.0.2") -> Iterator[PeerServer]:
    server = PeerServer(host)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def owner(folder):
    """A server that owns both chunks, and has the first."""
    with serving() as server:
        folder.add(DIGEST, BODY, durable=False)
        server.begin(folder, (DIGEST, OTHER_DIGEST))
        server.settle(DIGEST)
        yield server


@pytest.fixture
def own_server():
    with serving("127.0.0.9") as server:
        server.begin(None, ())
        yield server


def take(peers, digest=DIGEST, body=BODY):
    """The bytes; None if the store must give them."""
    buffer = memoryview(bytearray(len(body)))
    return bytes(buffer) if peers.take(digest, buffer, threading.Event()) else None


def ask(address, path, *, token=None, method="GET"):
    with contextlib.closing(http.client.HTTPConnection(address.host, address.port, timeout=60)) as connection:
        headers = {"Authorization": f"Bearer {address.token if token is None else token}"}
        connection.request(method, path, headers=headers)
        reply = connection.getresponse()
        return reply.status, reply.read()


def test_a_chunk_comes_from_its_owner_and_is_counted(owner, own_server):
    peers = Peers({DIGEST: owner.address}, own_server)
    assert take(peers) == BODY
    assert peers.taken_bytes == len(BODY)
    assert take(peers, OTHER_DIGEST, OTHER) is None, "nobody passes it on to this rank"
    assert owner.address.token not in repr(owner.address), "what is printed may be logged"


@pytest.mark.parametrize("host", ["localhost", "::1"])
def test_others_are_told_numbers_whatever_this_host_is_called(folder, own_server, host):
    if host == "::1" and not Path("/proc/net/if_inet6").is_file():
        pytest.skip("this machine has no IPv6")
    with serving(host) as server:
        assert server.address.host in ("127.0.0.1", "::1")
        folder.add(DIGEST, BODY, durable=False)
        server.begin(folder, (DIGEST,))
        server.settle(DIGEST)
        assert take(Peers({DIGEST: server.address}, own_server)) == BODY


def test_a_folder_that_knows_no_sendfile_is_read(owner, own_server, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "sendfile", refuse)
    assert take(Peers({DIGEST: owner.address}, own_server)) == BODY


def test_who_asks_early_waits_until_the_chunk_is_there(folder, own_server):
    with serving() as server:
        asked = threading.Event()
        find = server.find
        server.find = lambda digest: (asked.set(), find(digest))[1]
        got = []
        waiter = threading.Thread(target=lambda: got.append(take(Peers({DIGEST: server.address}, own_server))))
        waiter.start()
        assert asked.wait(60)
        server.begin(folder, (DIGEST,))
        folder.add(DIGEST, BODY, durable=False)
        server.settle(DIGEST)
        waiter.join(60)
        assert got == [BODY]


def test_a_chunk_that_its_owner_has_not_in_time_is_the_stores_and_the_owner_is_asked_for_others(
    owner, own_server, caplog, monkeypatch
):
    monkeypatch.setattr(module, "LONGEST_WAIT_SECONDS", 0.016)
    monkeypatch.setattr(module, "_ANSWER_WITHIN_SECONDS", 0.01)
    peers = Peers(dict.fromkeys((DIGEST, OTHER_DIGEST), owner.address), own_server)
    patience = []
    for _ in range(3):
        patience.append(peers.patience_seconds(owner.address))
        assert take(peers, OTHER_DIGEST, OTHER) is None
    assert patience == [0.016, 0.008, 0.004], "less each time, or an owner that gets nothing any more costs hours"
    assert take(peers) == BODY
    assert peers.patience_seconds(owner.address) == 0.004, "and more again as it gives something"
    assert caplog.text.count(f"the rank at 127.0.0.2:{owner.address.port} is late with a chunk") == 1


def test_an_owner_that_many_ask_says_at_once_that_it_has_a_chunk_not_yet(owner, monkeypatch):
    """Else it would come to the next one that asks too late, and be taken for dead."""
    monkeypatch.setattr(module, "_ANSWER_WITHIN_SECONDS", 120.0)  # longer than ask() waits
    monkeypatch.setattr(module, "_WAITS_UP_TO", 1)
    with socket.create_connection((owner.address.host, owner.address.port)):  # has a thread, and says nothing
        assert ask(owner.address, f"/chunks/{OTHER_DIGEST}") == (503, b"")
        assert ask(owner.address, f"/chunks/{DIGEST}") == (200, BODY)
        monkeypatch.setattr(module, "_SENDS_UP_TO", 1)
        assert ask(owner.address, f"/chunks/{DIGEST}") == (503, b"")
        assert ask(owner.address, "/chunks/of-nobody") == (404, b"")


def test_an_owner_that_has_answered_may_be_silent_once_and_not_twice_in_a_row(owner, own_server, caplog, monkeypatch):
    peers, answers, find = Peers({DIGEST: owner.address}, own_server), threading.Event(), owner.find
    owner.find = lambda digest: (answers.wait(60), find(digest))[1]

    def is_silent():
        answers.clear()
        with monkeypatch.context() as hasty:
            hasty.setattr(peer_http, "SILENCE_SECONDS", 0.2)
            assert take(peers) is None
        answers.set()

    answers.set()
    for _ in range(2):
        assert take(peers) == BODY
        is_silent()
    assert take(peers) == BODY
    assert "no more chunks" not in caplog.text
    is_silent()
    is_silent()
    assert caplog.text.count("is asked for no more chunks") == 1


def test_a_peer_that_says_at_once_that_it_has_nothing_yet_is_not_asked_again_and_again(own_server, monkeypatch):
    monkeypatch.setattr(module, "LONGEST_WAIT_SECONDS", 0.5)
    monkeypatch.setattr(module, "_ANSWER_WITHIN_SECONDS", 0.2)
    with answering(b"HTTP/1.1 503 Service Unavailable\r\n\r\n") as (address, asked):
        assert take(Peers({DIGEST: address}, own_server)) is None
    assert len(asked) <= 4


def test_a_process_without_a_free_descriptor_does_not_hold_it_against_the_peer(owner, own_server, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    peers = Peers({DIGEST: owner.address}, own_server)
    with monkeypatch.context() as full:
        full.setattr(socket, "create_connection", refuse)
        assert take(peers) is None
    assert take(peers) == BODY


def test_what_found_no_room_or_was_evicted_is_the_stores_and_the_owner_is_asked_for_others(
    folder, owner, own_server, caplog
):
    owner.settle(OTHER_DIGEST)
    peers = Peers(dict.fromkeys((DIGEST, OTHER_DIGEST), owner.address), own_server)
    assert take(peers, OTHER_DIGEST, OTHER) is None
    assert take(peers) == BODY
    assert "no more chunks" not in caplog.text


def test_an_owner_that_reads_no_further_keeps_nobody_waiting(owner, own_server):
    owner.give_up()
    peers = Peers(dict.fromkeys((DIGEST, OTHER_DIGEST), owner.address), own_server)
    assert take(peers, OTHER_DIGEST, OTHER) is None
    assert take(peers) == BODY


@pytest.mark.parametrize("lie", [OTHER, BODY[:-1], BODY + b"!"])
def test_a_peer_that_lies_is_believed_nothing_and_asked_no_more(folder, own_server, caplog, lie):
    with serving() as liar:
        folder.add(DIGEST, lie, durable=False)
        folder.add(OTHER_DIGEST, OTHER, durable=False)
        liar.begin(folder, (DIGEST, OTHER_DIGEST))
        liar.settle(DIGEST)
        liar.settle(OTHER_DIGEST)
        peers = Peers(dict.fromkeys((DIGEST, OTHER_DIGEST), liar.address), own_server)
        assert take(peers) is None
        assert take(peers, OTHER_DIGEST, OTHER) is None
        assert peers.taken_bytes == 0
        assert f"the rank at 127.0.0.2:{liar.address.port} is asked for no more chunks" in caplog.text


def test_a_stranger_without_the_token_gets_nothing(owner, own_server):
    for token in ("", "x", owner.address.token[:-1], owner.address.token + "0", "\u00e9"):
        assert ask(owner.address, f"/chunks/{DIGEST}", token=token) == (403, b"")
    assert take(Peers({DIGEST: replace(owner.address, token="0" * 64)}, own_server)) is None


def test_nothing_but_the_digests_that_it_owns_can_be_asked_for(folder, owner):
    unowned = hashlib.sha256(b"beside").hexdigest()
    folder.add(unowned, b"beside", durable=False)
    folder.hold("secret").add([DIGEST])
    for path in (
        f"/chunks/{unowned}",
        f"/chunks/../{DIGEST[:2]}/{DIGEST}",
        f"/chunks/{DIGEST}/",
        f"/chunks/{DIGEST}?x",
        f"/{DIGEST}",
        "/chunks/ledger",
        "/chunks/holds/secret",
        "/",
        "/etc/passwd",
    ):
        assert ask(owner.address, path) == (404, b""), path
    assert ask(owner.address, f"/chunks/{DIGEST}", method="PUT")[0] == 501
    assert ask(owner.address, f"/chunks/{DIGEST}") == (200, BODY)


def serve_from(path, pipe):
    folder = ChunkFolder(path, limit_bytes=10**8)
    server = PeerServer("127.0.0.3")
    server.find = lambda digest: (pipe.send("asked"), PeerServer.find(server, digest))[1]
    server.begin(folder, (DIGEST, OTHER_DIGEST))  # and none of them ever comes
    pipe.send(server.address)
    threading.Event().wait()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_is_killed_or_stands_still_is_dropped_and_the_store_asked(
    tmp_path, own_server, caplog, monkeypatch, number
):
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=serve_from, args=(tmp_path / "theirs", theirs), daemon=True)
    process.start()
    try:
        address = ours.recv()
        if number is signal.SIGSTOP:
            monkeypatch.setattr(peer_http, "SILENCE_SECONDS", 3.0)  # more than it needs to say that it is still waiting
        peers = Peers(dict.fromkeys((DIGEST, OTHER_DIGEST), address), own_server)
        got = []
        waiter = threading.Thread(target=lambda: got.append(take(peers)))
        waiter.start()
        assert ours.recv() == "asked"
        os.kill(process.pid, number)
        waiter.join(60)
        assert got == [None]
        assert take(peers, OTHER_DIGEST, OTHER) is None
        assert caplog.text.count("is asked for no more chunks") == 1
    finally:
        process.kill()
        process.join()


@contextlib.contextmanager
def answering(answer: bytes, *, then: bytes = b"", host: str = "127.0.0.4"):
    """Whoever asks there hears this, then a byte of `then` again and again. With the requests."""
    ended, asked = threading.Event(), []

    class Says(socketserver.BaseRequestHandler):
        def handle(self):
            asked.append(self.request.recv(1000))
            with contextlib.suppress(OSError):
                self.request.sendall(answer)
                while then and not ended.wait(0.05):
                    self.request.sendall(then)

    with socketserver.ThreadingTCPServer((host, 0), Says) as listener:
        thread = threading.Thread(target=listener.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield PeerAddress(host, listener.server_address[1], "t"), asked
        finally:
            ended.set()
            listener.shutdown()
            thread.join(60)


HEAD = f"HTTP/1.1 200 OK\r\nContent-Length: {len(BODY)}\r\n".encode()


@pytest.mark.parametrize(
    ("answer", "then"),
    [
        pytest.param(HEAD + b"\r\n", b"x", id="its bytes trickle"),
        pytest.param(HEAD, b"x", id="its first lines trickle"),
        pytest.param(b"", b"HTTP/1.1 100 Continue\r\n\r\n", id="it says again and again that it goes on"),
    ],
)
def test_a_peer_that_sends_bit_by_bit_is_dropped(own_server, caplog, monkeypatch, answer, then):
    monkeypatch.setattr(peer_http, "SILENCE_SECONDS", 0.3)
    with answering(answer, then=then) as (address, _):
        assert take(Peers({DIGEST: address}, own_server)) is None
    assert "is asked for no more chunks" in caplog.text


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(HEAD + b"\r\n" + BODY[: len(BODY) // 2], id="it ends in the middle"),
        pytest.param(HEAD + b"X: " + b"x" * 10**6, id="its first lines have no end"),
        pytest.param(b"HTTP/1.1 200 OK\r\n\r\n" + BODY, id="it says no length"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: \xb2\r\n\r\n" + BODY, id="its length is no number"),
        pytest.param(b"\x1b[2J" * 9 + b"\r\n\r\n", id="it does not speak HTTP"),
        pytest.param(b"\r\n\r\n", id="it says nothing"),
        pytest.param(b"", id="it goes away"),
    ],
)
def test_what_is_no_answer_is_the_end_with_this_peer(own_server, caplog, answer):
    with answering(answer) as (address, _):
        assert take(Peers({DIGEST: address}, own_server)) is None
    assert "is asked for no more chunks" in caplog.text
    assert "\x1b" not in caplog.text


@pytest.mark.parametrize(("head", "then"), [(b"GET ", b"/"), (b"GET /" + b"x" * 10**6, b"x")])
def test_a_stranger_whose_first_lines_have_no_end_is_cut_off(owner, own_server, monkeypatch, head, then):
    with monkeypatch.context() as hasty:
        hasty.setattr(peer_http, "SILENCE_SECONDS", 0.3)  # before the owner begins to read
        with socket.create_connection((owner.address.host, owner.address.port)) as stranger:
            stranger.settimeout(60)
            with pytest.raises(OSError, match=r"Broken pipe|reset"):  # noqa: PT012
                stranger.sendall(head)
                while True:
                    stranger.sendall(then)
                    time.sleep(0.01)
    assert take(Peers({DIGEST: owner.address}, own_server)) == BODY


def test_a_peer_that_takes_a_chunk_bit_by_bit_is_cut_off(folder, own_server, monkeypatch):
    monkeypatch.setattr(peer_http, "SILENCE_SECONDS", 0.3)
    monkeypatch.setattr(peer_http, "SLOWEST_BYTES_PER_SECOND", 10**9)
    large = bytes(2 * 10**7)  # more than the system keeps for a connection
    digest = hashlib.sha256(large).hexdigest()
    with serving() as server:
        folder.add(digest, large, durable=False)
        server.begin(folder, (digest,))
        server.settle(digest)
        with socket.create_connection((server.address.host, server.address.port)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            connection.settimeout(60)
            words = f"GET /chunks/{digest} HTTP/1.1\r\nAuthorization: Bearer {server.address.token}\r\n\r\n"
            connection.sendall(words.encode())
            came = 0
            with contextlib.suppress(ConnectionResetError):
                while part := connection.recv(10_000):
                    came += len(part)
                    if came < 500_000:
                        time.sleep(0.01)
        assert came < len(large)


def unreachable(host):
    """Refuses each connection."""
    with socket.create_server((host, 0)) as listener:
        return PeerAddress(host, listener.getsockname()[1], "t")


def test_where_no_host_can_be_reached_it_costs_two_tries_and_not_one_for_each(owner, own_server):
    owners = {"a" * 64: unreachable("127.0.0.5"), "b" * 64: unreachable("127.0.0.6"), DIGEST: owner.address}
    peers = Peers(owners, own_server)
    assert take(peers, "a" * 64) is None
    assert take(peers, "b" * 64) is None
    assert take(peers) is None, "it would have answered, but two hosts did not, and none did"


def test_hosts_that_cannot_be_reached_are_dropped_alone_if_another_can(owner, own_server):
    owners = {"a" * 64: unreachable("127.0.0.5"), "b" * 64: unreachable("127.0.0.6"), DIGEST: owner.address}
    peers = Peers(owners, own_server)
    assert [take(peers), take(peers, "a" * 64), take(peers, "b" * 64), take(peers)] == [BODY, None, None, BODY]


def test_a_restore_that_is_stopped_waits_for_no_peer(owner, own_server):
    stop = threading.Event()
    stop.set()
    with pytest.raises(TransferStopped):
        Peers({DIGEST: owner.address}, own_server).take(DIGEST, memoryview(bytearray(len(BODY))), stop)


def test_closing_cuts_off_who_still_asks(folder):
    with serving() as server:
        idle = socket.create_connection((server.address.host, server.address.port))
    with idle:
        idle.settimeout(60)
        with contextlib.suppress(ConnectionResetError):
            assert idle.recv(1) == b""


def test_a_server_without_a_free_descriptor_rests_until_it_has_one(folder, own_server, monkeypatch):
    accept, times = socketserver.TCPServer.get_request, []

    def full(listener):
        if len(times) < 3:
            times.append(time.monotonic())
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socketserver.TCPServer, "get_request", full)
    with serving() as server:
        folder.add(DIGEST, BODY, durable=False)
        server.begin(folder, (DIGEST,))
        server.settle(DIGEST)
        assert take(Peers({DIGEST: server.address}, own_server)) == BODY
    assert times[2] - times[0] > 0.5, "it does not spin"


def test_an_address_is_that_of_the_way_to_the_master_and_never_loopback():
    found = {address_towards(master) for master in (None, "127.0.0.1", "localhost")}
    assert len(found) == 1
    assert all(address is None or not address.startswith("127.") for address in found)


def test_a_master_whose_name_leads_nowhere_by_ipv6_is_found_by_ipv4(monkeypatch):
    nowhere = (socket.AF_INET6, socket.SOCK_DGRAM, 17, "", ("2001:db8::1", 9, 0, 0))
    there = (socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("192.0.2.7", 9))
    monkeypatch.setattr(module, "resolved", lambda host, kind: [nowhere, there] if host == "master" else [])
    found = {nowhere[-1]: None, there[-1]: "10.0.0.7"}
    monkeypatch.setattr(module, "_address_on_the_way", lambda family, kind, where: found[where])
    assert address_towards("master") == "10.0.0.7"


@pytest.mark.parametrize("host", ["192.0.2.1", "10.0.0..1", "a" * 64, "0.0.0.0", "::"])
def test_an_address_that_cannot_be_listened_on_is_an_error_of_the_system(host):
    """Of any other kind it would end this rank's restore, and leave the others waiting for it."""
    with pytest.raises(OSError):
        PeerServer(host)
