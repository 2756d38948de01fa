"""A connection that is cut while a thread sends on it: what it sends meanwhile stays encrypted."""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast_client import Client, ClientSettings, errors
from holdfast_service.webhooks.deliver import call
from holdfast_service.webhooks.target import Target
from tests.support.tls import self_signed

MEANWHILE = b"sent by another thread, just when the connection is cut"


class FarEnd:
    """Takes one connection, and never answers."""

    def __init__(self, certificate: Path) -> None:
        self.has_sent = threading.Event()
        self.is_cut = threading.Event()
        """Between the two the near end's thread is in none of the TLS socket's methods: a test stands in for it."""
        self.has_understood = False
        self._has_taken = threading.Event()
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(certificate)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._take, daemon=True).start()

    def wait_until_taken(self) -> None:
        assert self._has_taken.wait(30)

    def _take(self) -> None:
        with self._listener:
            plain, _ = self._listener.accept()
        arrived = b""
        try:
            with self._tls.wrap_socket(plain, server_side=True) as near:
                while not arrived.endswith(MEANWHILE) and (block := near.recv(65536)):
                    arrived += block
            self.has_understood = arrived.endswith(MEANWHILE)
        except OSError:  # it was not encrypted
            pass
        finally:
            self._has_taken.set()


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FarEnd:
    certificate = self_signed(tmp_path / "localhost.pem", "localhost")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    return FarEnd(certificate)


@pytest.fixture(autouse=True)
def another_thread_sends(far: FarEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly when the connection is cut."""
    shutdown = socket.socket.shutdown

    def send_first(self: socket.socket, how: int) -> None:
        self.sendall(MEANWHILE)
        far.wait_until_taken()  # closing a socket may take back what the other end has not read
        shutdown(self, how)

    monkeypatch.setattr(socket.socket, "shutdown", send_first)


def test_a_transfer_that_is_given_up(far: FarEnd) -> None:
    def body() -> Iterator[memoryview]:
        yield memoryview(b"first")
        far.has_sent.set()
        assert far.is_cut.wait(30)
        yield memoryview(b"after")

    def put(client: Client) -> None:
        with client.transfers.request("PUT", "/chunk", {"content-length": "1000"}, body()):
            raise AssertionError("nobody answers")

    url = f"https://localhost:{far.port}"
    with Client(ClientSettings(url=url, token="t")) as client, ThreadPoolExecutor(1) as threads:
        putting = threads.submit(put, client)
        assert far.has_sent.wait(30)
        client.transfers.cut()
        far.is_cut.set()
        with pytest.raises(errors.StoreUnavailable):
            putting.result()
    assert far.has_understood


def test_a_webhook_that_takes_too_long(far: FarEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    timers = []

    def timer(seconds: float, function: object, args: object) -> SimpleNamespace:
        timers.append(lambda: function(*args))
        return SimpleNamespace(start=lambda: None, cancel=lambda: None)

    def get_no_response(self: http.client.HTTPConnection) -> http.client.HTTPResponse:
        far.has_sent.set()
        assert far.is_cut.wait(30)
        return get_response(self)

    get_response = http.client.HTTPConnection.getresponse
    monkeypatch.setattr(http.client.HTTPConnection, "getresponse", get_no_response)
    monkeypatch.setattr("holdfast_service.webhooks.deliver.threading", SimpleNamespace(Timer=timer))
    target = Target(host="localhost", port=far.port, path="/", tls=True, addresses=("127.0.0.1",))
    with ThreadPoolExecutor(1) as threads:
        calling = threads.submit(call, target, b"first", {}, ssl.create_default_context())
        assert far.has_sent.wait(30)
        timers[0]()
        far.is_cut.set()
        assert "gave no answer" in (calling.result().error or "")
    assert far.has_understood
