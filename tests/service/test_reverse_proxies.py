"""The real nginx, Envoy and Traefik, as deploy/ configures them, each in front of a real service."""

from __future__ import annotations

import json
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast_protocol.checkpoints import SealShard
from holdfast_service.auth.principal import BURST, FailedCalls
from holdfast_service.settings import ServiceSettings
from tests.support.prepare import NotHereError
from tests.support.rank import Job
from tests.support.reverse_proxies import COMMANDS, ReverseProxy, reverse_proxy
from tests.support.service import RunningService, running_service
from tests.support.stores import chunk_key, put_ticket

WRONG = {"Authorization": f"Bearer hold_{'a1' * 8}_{'0123456789abcdef' * 4}"}
_SOON_SECONDS = 90


class Seen:
    """Every request that reaches the service."""

    def __init__(self, app: ASGIApp, requests: list[Scope]) -> None:
        self._app, self._requests = app, requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self._requests.append(scope)
        await self._app(scope, receive, send)


class Place:
    def __init__(self, service: RunningService, proxy: ReverseProxy, requests: list[Scope]) -> None:
        self.service, self.proxy, self.requests = service, proxy, requests

    def http(self, source: str = "127.0.0.1", token: str | None = "") -> httpx.Client:
        headers = self.service.http(token=token).headers
        return self.proxy.http(source, headers=headers)

    def heads(self) -> list[dict[bytes, bytes]]:
        return [dict(scope["headers"]) for scope in self.requests]

    def smuggled(self) -> list[str]:
        """What reached the service and was no request for the proxy, which adds this header to each."""
        return [scope["path"] for scope in self.requests if b"x-forwarded-for" not in dict(scope["headers"])]

    def paths(self) -> list[str]:
        return [scope["path"] for scope in self.requests]

    @contextmanager
    def connection(self, *protocols: str, name: str = "localhost") -> Iterator[ssl.SSLSocket]:
        address = ("127.0.0.1", self.proxy.port)
        context = self.proxy.trusted()
        context.set_alpn_protocols(protocols or ["http/1.1"])
        if name != "localhost":
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # whatever it shows would do
        with socket.create_connection(address, timeout=_SOON_SECONDS) as plain:
            with context.wrap_socket(plain, server_hostname=name) as secured:
                yield secured


@pytest.fixture(scope="module", params=COMMANDS)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Skips only where there is neither nginx nor apt, or where Envoy and Traefik have no wheel for the machine."""
    folder = tmp_path_factory.mktemp(request.param)
    requests: list[Scope] = []
    settings = ServiceSettings(data_dir=folder / "data", port=0, trusted_proxies="127.0.0.1", allowed_hosts="localhost")
    with running_service(settings) as service:
        service.app.add_middleware(Seen, requests=requests)
        service.app.state.failed_calls = FailedCalls(clock=lambda: 0.0)  # no failure is forgotten meanwhile
        try:
            with reverse_proxy(request.param, folder, service.url.removeprefix("http://")) as proxy:
                yield Place(service, proxy, requests)
        except NotHereError as reason:
            # No other part of Holdfast needs them.
            pytest.skip(str(reason))


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _SOON_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_call_that_waits_is_answered_with_the_outcome(place: Place) -> None:
    with place.http() as http, ThreadPoolExecutor(1) as other:
        job = Job(http, "proxy/waits")
        save = job.begin(1)
        save.upload(0, [b"weights", b"index"])
        waiting = other.submit(save.now, 60)
        until(lambda: place.service.context.notifier.waiting == 1)
        assert save.seal(0, [b"weights", b"index"])["state"] == "committed"
        assert waiting.result(_SOON_SECONDS)["state"] == "committed"


def _messages(lines: Iterator[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(id, event) of each that has data."""
    told: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(":")
            told[name] = value.strip()
            continue
        if "data" in told:
            yield told["id"], json.loads(told["data"])
        told = {}


@contextmanager
def followed(place: Place, last_event_id: str | None = None) -> Iterator[Iterator[tuple[str, dict[str, Any]]]]:
    more = {} if last_event_id is None else {"Last-Event-ID": last_event_id}
    with place.http() as http, http.stream("GET", "/v1/events/stream?type=checkpoint.committed", headers=more) as reply:
        assert reply.status_code == 200
        lines = reply.iter_lines()
        assert next(lines).startswith("retry:")
        yield _messages(lines)


def test_an_event_comes_while_the_stream_is_open_and_the_next_stream_goes_on_after_it(place: Place) -> None:
    with place.http() as http:
        job = Job(http, "proxy/told")
        with followed(place) as events:
            first = job.save(1)
            event_id, event = next(events)
            assert event["data"]["checkpoint_id"] == first["id"]
        later = [job.save(step)["id"] for step in (2, 3)]
        with followed(place, event_id) as events:
            assert [next(events)[1]["data"]["checkpoint_id"] for _ in later] == later


def test_a_chunk_goes_through_as_it_comes(place: Place) -> None:
    data = b"chunk" * 1_000_000
    ticket = put_ticket(place.service.context.store, chunk_key(data), data)
    head = "".join(f"{name}: {value}\r\n" for name, value in ticket.headers.items() if name != "content-length")
    place.requests.clear()
    with place.connection() as connection:
        connection.sendall(
            f"PUT {ticket.url} HTTP/1.1\r\nHost: localhost\r\n{head}Content-Length: {len(data)}\r\n\r\n".encode()
        )
        connection.sendall(data[:1000])
        until(lambda: len(place.requests) == 1)  # the service has it, and most of the body was not sent yet
        connection.sendall(data[1000:])
        assert connection.recv(4096).startswith(b"HTTP/1.1 201 ")
    until(lambda: "PUT" in place.proxy.log_text)
    assert ticket.url.rpartition("=")[2] not in place.proxy.log_text, "the signature is a secret"


def test_a_body_that_no_call_has_ends_at_the_proxy_and_a_smaller_one_at_the_service(place: Place) -> None:
    def sent(size: int) -> httpx.Response:
        with place.http() as http:
            return http.post("/v1/tokens", content=b" " * size, headers={"Content-Type": "application/json"})

    place.requests.clear()
    assert sent(SealShard.largest_body_bytes + 1).status_code == 413
    assert place.requests == []
    reply = sent(SealShard.largest_body_bytes)
    assert (reply.status_code, reply.json()["code"]) == (413, "body_too_large")


@pytest.mark.rule("limits-before-work")
def test_a_caller_has_its_own_address_whatever_it_says(place: Place) -> None:
    def failing(source: str, forwarded: str) -> int:
        with place.proxy.http(source, headers=WRONG | {"X-Forwarded-For": forwarded}) as http:
            return http.get("/v1/service").status_code

    place.requests.clear()
    assert [failing("127.0.0.2", f"203.0.113.{number}") for number in range(BURST + 1)] == [401] * BURST + [429]
    assert failing("127.0.0.3", "127.0.0.2") == 401, "another user of the same proxy"
    assert {scope["client"][0] for scope in place.requests} == {"127.0.0.2", "127.0.0.3"}
    assert {head[b"x-forwarded-for"] for head in place.heads()} == {b"127.0.0.2", b"127.0.0.3"}
    assert {scope["scheme"] for scope in place.requests} == {"https"}


def test_the_sessions_cookie_is_for_https_alone(place: Place) -> None:
    with place.http() as http:
        reply = http.post("/v1/sessions", headers={"Origin": place.proxy.url})
    assert reply.status_code == 201, reply.text
    assert reply.headers["Set-Cookie"].startswith("__Host-")


def test_clients_may_speak_http_2_and_need_the_right_name(place: Place) -> None:
    with place.connection("h2", "http/1.1") as connection:
        assert connection.selected_alpn_protocol() == "h2"
    with pytest.raises((ssl.SSLError, ConnectionResetError)), place.connection(name="other.example"):
        """No certificate is shown."""


def test_connections_to_the_service_are_used_again(place: Place) -> None:
    place.requests.clear()
    with place.http() as http:
        for _ in range(5):
            assert http.get("/v1/service").status_code == 200
    with place.http() as http:
        assert http.get("/v1/service").status_code == 200
    assert len({id(scope["holdfast_connection"]) for scope in place.requests}) == 1


def over_http_2(method: bytes, *fields: tuple[bytes, bytes], path: bytes = b"/healthz", body: bytes = b"") -> bytes:
    """All that a client sends for one request: RFC 9113, with each field as a literal of RFC 7541."""

    def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
        return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload

    own = ((b":method", method), (b":scheme", b"https"), (b":authority", b"localhost"), (b":path", path))
    head = b"".join(b"\0%c%b%c%b" % (len(name), name, len(value), value) for name, value in (*own, *fields))
    settings, headers, data = frame(4, 0, 0), frame(1, 4, 1, head), frame(0, 1, 1, body)
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings + headers + data


SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"
HOST = b"Host: localhost\r\n"
POST = b"POST /v1/tokens HTTP/1.1\r\n" + HOST
_CHUNKS = b"0\r\n\r\n" + SMUGGLED
_AS_BODY = b"Content-Length: %d\r\n" % len(SMUGGLED)
ATTEMPTS = {
    "a length and chunks": POST + b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n" % len(_CHUNKS) + _CHUNKS,
    "chunks and a length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n" + _CHUNKS,
    "a short length and chunks": POST
    + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % len(SMUGGLED)
    + SMUGGLED
    + b"\r\n0\r\n\r\n",
    "two lengths": POST + b"Content-Length: 0\r\n" + _AS_BODY + b"\r\n" + SMUGGLED,
    "two lengths in one": POST + b"Content-Length: 0, %d\r\n\r\n" % len(SMUGGLED) + SMUGGLED,
    "a length with a sign": POST + b"Content-Length: +%d\r\n\r\n" % len(SMUGGLED) + SMUGGLED,
    "a coding that is none": POST + _AS_BODY + b"Transfer-Encoding: xchunked\r\n\r\n" + SMUGGLED,
    "two codings": POST + _AS_BODY + b"Transfer-Encoding: chunked, identity\r\n\r\n" + _CHUNKS,
    "a coding twice": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n" + _CHUNKS,
    "a coding after a tab": POST + _AS_BODY + b"Transfer-Encoding:\tchunked\r\n\r\n" + _CHUNKS,
    "a space before the colon": POST + _AS_BODY + b"Transfer-Encoding : chunked\r\n\r\n" + _CHUNKS,
    "a coding in the next line": POST + _AS_BODY + b"X: a\r\n Transfer-Encoding: chunked\r\n\r\n" + _CHUNKS,
    "a coding behind a bare CR": POST + _AS_BODY + b"X: a\rTransfer-Encoding: chunked\r\n\r\n" + _CHUNKS,
    "a coding behind a bare LF": POST + _AS_BODY + b"X: a\nTransfer-Encoding: chunked\r\n\r\n" + _CHUNKS,
    "a coding with an odd letter": POST + _AS_BODY + b"Transfer\xc5\xbfEncoding: chunked\r\n\r\n" + _CHUNKS,
    "chunks by HTTP/1.0": b"POST /v1/tokens HTTP/1.0\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n" + _CHUNKS,
    "a chunk whose length is too long": POST
    + b"Transfer-Encoding: chunked\r\n\r\n10000000000000000\r\n"
    + SMUGGLED
    + b"0\r\n\r\n",
    "a chunk that ends in a bare LF": POST
    + b"Transfer-Encoding: chunked\r\n\r\n1\nX\n%x\n" % len(SMUGGLED)
    + SMUGGLED
    + b"\n0\n\n",
    "a chunk with an extension over two lines": POST
    + b"Transfer-Encoding: chunked\r\n\r\n1;a=\n%x\r\nX\r\n" % len(SMUGGLED)
    + SMUGGLED
    + b"\r\n0\r\n\r\n",
    "a body of a GET": b"GET /healthz HTTP/1.1\r\n" + HOST + _AS_BODY + b"\r\n" + SMUGGLED,
    "a promise to wait": POST + _AS_BODY + b"Expect: 100-continue\r\n\r\n" + SMUGGLED,
    "an upgrade": POST + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n" + _AS_BODY + b"\r\n" + SMUGGLED,
    "a line break in the path": b"GET /healthz%0d%0a%0d%0aGET%20/smuggled HTTP/1.1\r\n" + HOST + b"\r\n",
    "a header that the proxy drops": POST + b"Connection: Content-Length\r\n" + _AS_BODY + b"\r\n" + SMUGGLED,
    "HTTP/2: a body longer than its length": over_http_2(b"POST", (b"content-length", b"0"), body=SMUGGLED),
    "HTTP/2: chunks": over_http_2(b"POST", (b"transfer-encoding", b"chunked"), body=_CHUNKS),
    "HTTP/2: a line break in a value": over_http_2(b"GET", (b"x", b"a\r\n\r\n" + SMUGGLED)),
    "HTTP/2: a line break in a name": over_http_2(b"GET", (b"x: a\r\n\r\n" + SMUGGLED, b"a")),
    "HTTP/2: a line break in the path": over_http_2(b"GET", path=b"/healthz HTTP/1.1\r\n" + HOST + b"\r\n" + SMUGGLED),
    "HTTP/2: a line break in the method": over_http_2(SMUGGLED + b"GET"),
}


def _sent(place: Place, attempt: bytes, quiet_seconds: float = _SOON_SECONDS) -> bytes:
    """What comes until the proxy closes, or says nothing for so long."""
    come = b""
    with place.connection("h2" if attempt.startswith(b"PRI ") else "http/1.1") as connection:
        connection.sendall(attempt)
        connection.settimeout(quiet_seconds)
        try:
            while piece := connection.recv(65536):
                come += piece
        except (TimeoutError, ConnectionResetError):
            pass
    return come


@pytest.mark.rule("limits-before-work")
@pytest.mark.parametrize("attempt", ATTEMPTS.values(), ids=ATTEMPTS)
def test_no_second_request_comes_through_inside_of_one(place: Place, attempt: bytes) -> None:
    place.requests.clear()
    _sent(place, attempt, 0.5)  # some of them wait for more, and are cut off
    with place.http() as http:  # on the connection to the service that the attempt has used
        for _ in range(3):
            assert http.get("/healthz").json() == {"status": "alive"}
    assert place.smuggled() == []


def test_what_is_counted_are_requests(place: Place) -> None:
    """Else the test above would pass for any reason."""
    place.requests.clear()
    _sent(
        place,
        b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\n" + SMUGGLED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"),
    )
    assert place.paths() == ["/healthz", "/smuggled"]
    assert place.smuggled() == []
    with place.connection("h2") as connection:
        connection.sendall(over_http_2(b"POST", (b"content-length", b"4"), body=b"body"))
        until(lambda: len(place.requests) == 3)
    assert [scope["http_version"] for scope in place.requests] == ["1.1"] * 3
    assert place.smuggled() == []
    httpx.get(f"{place.service.url}/smuggled", headers={"Host": "localhost"})
    assert place.smuggled() == ["/smuggled"]


def test_an_absolute_form_chooses_no_other_host(place: Place) -> None:
    place.requests.clear()
    answer = _sent(place, b"GET http://other.example/smuggled HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert re.match(rb"HTTP/1.1 4(04|21) ", answer)
    assert place.requests == []
    _sent(place, b"GET http://localhost/healthz HTTP/1.1\r\nHost: other.example\r\nConnection: close\r\n\r\n")
    assert [head[b"host"].partition(b":")[0] for head in place.heads()] == [b"localhost"]


def test_headers_of_the_client_about_itself_do_not_reach_the_service(place: Place) -> None:
    place.requests.clear()
    with place.http() as http:
        http.get("/healthz", headers={"Forwarded": "for=203.0.113.1;proto=http", "X-Forwarded-Proto": "http"})
    (head,) = place.heads()
    assert b"forwarded" not in head
    assert (head[b"x-forwarded-proto"], head[b"x-forwarded-for"]) == (b"https", b"127.0.0.1")
    assert head[b"host"] == b"localhost:%d" % place.proxy.port
