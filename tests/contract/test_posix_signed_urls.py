"""posix, for a client that does not see the mount."""

from __future__ import annotations

import json
import secrets
import socket
import time
from urllib.parse import urlsplit

import pytest

from holdfast_service.stores.base import ObjectMissing
from holdfast_service.stores.posix.posix_store import PosixStore
from holdfast_service.stores.posix.signed_urls import UrlSigner
from holdfast_service.stores.registry import open_store
from tests.contract.backends import Backend
from tests.contract.posix_outage import unmounted
from tests.contract.suite import StoreContract, TicketContract
from tests.support.object_server import object_server
from tests.support.stores import chunk_key, put_ticket, send

_KEY = b"k" * 32


@pytest.fixture(scope="module")
def backend(tmp_path_factory):
    root = tmp_path_factory.mktemp("posix") / "store"
    store = open_store(f"posix://{root}", _KEY)
    past = PosixStore(root, UrlSigner(_KEY, now=lambda: time.time() - 7200))
    with object_server(root, _KEY, root.parent / "server.log") as server:

        def hand_in(key, data):
            assert send(server.url, put_ticket(store, key, data), data).status == 201

        yield Backend(
            store,
            hand_in,
            proves=True,
            reopen=lambda: open_store(f"posix://{root}", _KEY),
            outage=lambda: unmounted(root),
            past_store=past,
            service_url=server.url,
        )


class TestStore(StoreContract):
    pass


class TestTickets(TicketContract):
    pass


@pytest.mark.rule("drop-box")
def test_a_service_killed_in_the_middle_of_an_upload_leaves_nothing_visible(tmp_path):
    store = open_store(f"posix://{tmp_path / 'store'}", _KEY)
    data = secrets.token_bytes(8 * 1024 * 1024)
    key = chunk_key(data)
    incoming = tmp_path / "store" / "incoming"
    with object_server(tmp_path / "store", _KEY, tmp_path / "server.log") as server:
        ticket = put_ticket(store, key, data)
        url = urlsplit(server.url + ticket.url)
        with socket.create_connection((url.hostname, url.port), timeout=10) as connection:
            request = (
                f"PUT {url.path}?{url.query} HTTP/1.1\r\nhost: {url.netloc}\r\ncontent-length: {len(data)}\r\n\r\n"
            )
            connection.sendall(request.encode() + data[:-1])
            while sum(path.stat().st_size for path in incoming.iterdir()) < len(data) // 2:
                time.sleep(0.005)  # the test's own time-out ends this, if nothing arrives
            server.process.kill9()
    with pytest.raises(ObjectMissing):
        store.head(key)
    assert list(store.list_objects("p1")) == []
    assert store.sweep_incoming(older_than_seconds=-60) == 1
    with object_server(tmp_path / "store", _KEY, tmp_path / "server.log") as server:
        assert send(server.url, put_ticket(store, key, data), data).status == 201
    assert store.head(key).sha256 == key.digest


@pytest.mark.parametrize(
    ("changed", "status", "code"),
    [("signature", 403, "signature_invalid"), ("clock", 403, "ticket_expired"), ("body", 422, "checksum_mismatch")],
)
def test_a_refusal_is_a_problem_with_its_code(backend, changed, status, code):
    data = secrets.token_bytes(100)
    key = chunk_key(data)
    ticket = put_ticket(backend.past_store if changed == "clock" else backend.store, key, data)
    url = ticket.url[:-4] + "AAAA" if changed == "signature" else ticket.url
    answer = send(backend.service_url, ticket, data[::-1] if changed == "body" else data, url=url)
    problem = json.loads(answer.data)
    assert (answer.status, problem["code"]) == (status, code)
    assert answer.headers["content-type"] == "application/problem+json"
    assert "signature=" not in answer.data.decode()
    assert list((backend.store.root / "incoming").iterdir()) == []


def test_a_url_signed_with_another_key_is_refused(backend):
    data = secrets.token_bytes(100)
    key = chunk_key(data)
    foreign = PosixStore(backend.store.root, UrlSigner(b"x" * 32))
    assert send(backend.service_url, put_ticket(foreign, key, data), data).status == 403


def test_a_large_upload_that_is_refused_gets_its_answer_and_no_broken_pipe(backend):
    data = secrets.token_bytes(32 * 1024 * 1024)
    ticket = put_ticket(backend.past_store, chunk_key(data), data)
    answer = send(backend.service_url, ticket, (data[at : at + 262144] for at in range(0, len(data), 262144)))
    assert json.loads(answer.data)["code"] == "ticket_expired"
