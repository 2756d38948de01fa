"""What a call may cost before and after its caller is known: nothing is read for a stranger, and little for anybody."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import pytest
from fastapi.routing import iter_route_contexts

from holdfast_protocol.attempts import Heartbeat
from holdfast_protocol.base import Request
from holdfast_protocol.checkpoints import (
    MAX_BATCH,
    MAX_CHUNK_BYTES,
    MAX_CHUNKS_PER_SHARD,
    ChunkOffer,
    IndexOrdinals,
    MountProof,
    NegotiateChunks,
    SealShard,
)
from holdfast_protocol.codecs import Codec
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.pruning import MAX_AT_ONCE, ApplyRetention, PruneCheckpoints
from holdfast_protocol.restores import ReadChunks
from holdfast_protocol.runs import MOST_CURVES, MOST_POINTS_TOLD
from holdfast_protocol.states import CredentialKind, Scope
from holdfast_service.auth import principal
from holdfast_service.auth.credentials import new_text
from holdfast_service.auth.principal import (
    BURST,
    SECONDS_PER_FAILURE,
    SECONDS_PER_SESSION,
    SESSIONS_BURST,
    FailedCalls,
    Principal,
    new_token_text,
)
from holdfast_service.errors import ProblemError
from holdfast_service.settings import ServiceSettings
from holdfast_service.web import frame
from holdfast_service.web.frame import GuardedRoute
from tests.support.in_process import LOOP_THREAD
from tests.support.service import RunningService, running_service

pytestmark = pytest.mark.rule("limits-before-work")
SEAL = "/v1/checkpoints/ck_0/shards/0"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """One for all: the database has no part in this."""
    with running_service(ServiceSettings(data_dir=tmp_path_factory.mktemp("data"), port=0)) as running:
        yield running


@pytest.fixture(autouse=True)
def no_failures_yet(service: RunningService) -> None:
    service.app.state.failed_calls = FailedCalls(clock=lambda: 0.0)  # and none is forgotten meanwhile


class Wire:
    """One connection, spoken by hand: what the service answers before it has been sent the body."""

    def __init__(self, service: RunningService, token: str | None) -> None:
        url = urlsplit(service.url)
        self._socket = socket.create_connection((url.hostname, url.port), timeout=60)
        self._token = token

    def head(self, method: str, path: str, *more: str) -> None:
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *more]
        if self._token is not None:
            lines.append(f"Authorization: Bearer {self._token}")
        self.send("\r\n".join(lines).encode() + b"\r\n\r\n")

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def answer(self) -> tuple[int, str]:
        """(status, code); raises where nothing comes."""
        file = self._socket.makefile("rb")
        status = int(file.readline().split()[1])
        headers = dict(line.decode().lower().split(": ", 1) for line in iter(file.readline, b"\r\n"))
        return status, json.loads(file.read(int(headers["content-length"])))["code"]

    def close(self) -> None:
        self._socket.close()


def ask(service: RunningService, token: str | None, method: str, path: str, *headers: str) -> tuple[int, str]:
    """The answer to a head whose body never comes."""
    wire = Wire(service, token)
    try:
        wire.head(method, path, *headers)
        return wire.answer()
    finally:
        wire.close()


def routes_with_bodies(service: RunningService) -> list[tuple[str, str, int]]:
    """(method, path, the most bytes of its body)"""
    found = []
    for route in iter_route_contexts(service.app.routes):
        if isinstance(route.original_route, GuardedRoute) and route.original_route.body_field is not None:
            (method,) = route.methods or ()
            path = (route.path or "").replace("{rank}", "0").replace("{number}", "1").replace("{role}", "second")
            most = frame._Body.of(route.original_route).most_bytes
            found.append((method, path.replace("{", "").replace("}", ""), most))
    return found


@pytest.mark.parametrize(
    "announced",
    [("Content-Length: 30000000",), ("Transfer-Encoding: chunked",), ("Content-Length: 9", "Expect: 100-continue")],
)
def test_a_stranger_is_answered_before_a_byte_of_the_body_is_asked_for(
    service: RunningService, announced: tuple[str, ...]
) -> None:
    for token in (None, new_token_text()):
        assert ask(service, token, "PUT", SEAL, *announced) == (401, "unauthenticated")


def test_who_may_not_make_a_call_is_told_so_before_its_body_is_read(service: RunningService) -> None:
    reader = service.token(Scope.READ)
    assert ask(service, reader, "PUT", SEAL, "Content-Length: 12000000") == (403, "forbidden")


def test_each_route_takes_its_own_bodies_and_no_larger_ones(service: RunningService) -> None:
    routes, token = routes_with_bodies(service), service.token()
    assert len(routes) > 25
    # open, heartbeat, end, begin, negotiate, two seals, read, apply, prune
    assert sum(most > 64 * 1024 for _, _, most in routes) == 10
    for method, path, most in routes:
        answered = ask(service, token, method, path, f"Content-Length: {most + 1}")
        assert answered == (413, "body_too_large"), path


def test_a_body_in_pieces_ends_where_it_becomes_too_large(service: RunningService) -> None:
    wire = Wire(service, service.token())
    wire.head("POST", "/v1/tokens", "Transfer-Encoding: chunked")
    for _ in range(5):
        wire.send(b"4000\r\n" + b" " * 0x4000 + b"\r\n")
    assert wire.answer() == (413, "body_too_large")
    wire.close()


def test_a_body_that_does_not_come_is_not_waited_for(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "BODY_SECONDS", 0.1)
    wire = Wire(service, service.token())
    wire.head("POST", "/v1/tokens", "Content-Length: 100")
    wire.send(b'{"name":')
    assert wire.answer() == (408, "body_too_slow")
    wire.close()


@pytest.mark.parametrize("path", ["/v1/tokens", "/v1/sign-ins"])
def test_who_hangs_up_amid_a_body_is_no_bug(
    service: RunningService, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    wire = Wire(service, service.token())
    wire.head("POST", path, "Content-Length: 100")
    wire.send(b'{"name":')
    wire.close()
    count = {"method": "POST", "route": path, "status": "499"}
    ends_at = time.monotonic() + 30
    while service.app.state.metrics.get_sample_value("holdfast_requests_total", count) != 1:
        assert time.monotonic() < ends_at
        time.sleep(0.01)
    assert "bug" not in caplog.text


def test_a_body_of_many_tiny_values_is_not_even_parsed(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = service.http().put(SEAL, content=b'{"chunks":[' + b"[]," * 300_000 + b"[]]}", headers=JSON)
    assert (reply.status_code, "more values" in reply.text) == (422, True)


JSON = {"Content-Type": "application/json"}


def test_large_bodies_are_parsed_beside_the_event_loop(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed_in: list[str] = []
    parse = frame._Body._parse

    def noted(self: Any, body: bytes) -> Any:
        parsed_in.append(threading.current_thread().name)
        return parse(self, body)

    monkeypatch.setattr(frame._Body, "_parse", noted)
    http = service.http()
    assert http.put(SEAL, content=b" " * 100_000, headers=JSON).status_code == 422
    assert parsed_in not in ([], [LOOP_THREAD])


def test_what_is_no_json_is_a_problem_like_any_other(service: RunningService) -> None:
    http = service.http()
    for content, headers in (
        (b"", JSON),
        (b"{", JSON),
        (b"\xff", JSON),
        (b"{}", {}),
        (b"a=1", {"Content-Type": "x/y"}),
    ):
        reply = http.post("/v1/tokens", content=content, headers=headers)
        assert (reply.status_code, reply.json()["code"]) == (422, "invalid_request"), content


def largest_bodies() -> Iterator[Request]:
    fence: dict[str, Any] = {"epoch": 10**6, "attempt": 10**6}
    digests = ["f" * 64] * MAX_CHUNKS_PER_SHARD
    offer = ChunkOffer(
        digest="f" * 64, bytes=MAX_CHUNK_BYTES, codec=Codec.RAW, stored_digest="f" * 64, stored_bytes=1, md5="f" * 32
    )
    proof = MountProof(proof_id="f" * 32, content="f" * 64)
    yield SealShard(
        **fence, digest="f" * 64, chunks=digests, index=IndexOrdinals(shard=1), logical_bytes=1, components={}
    )
    yield NegotiateChunks(**fence, chunks=[offer] * MAX_BATCH, finished=digests[:MAX_BATCH], mount_proof=proof)
    yield ReadChunks(digests=digests[:MAX_BATCH], mount_proof=proof, other_mount_proofs=[proof] * 4)
    points = [(2**62, -1.2345678901234567e-300)] * (MOST_POINTS_TOLD // MOST_CURVES)
    yield Heartbeat(**fence, metrics={f"{number:0100}": points for number in range(MOST_CURVES)})
    ids = [f"ck_{'f' * 32}"] * MAX_AT_ONCE
    yield ApplyRetention(policy_digest="f" * 100, checkpoint_ids=ids)
    yield PruneCheckpoints(checkpoint_ids=ids, reason="x" * 1000)


@pytest.mark.parametrize("body", list(largest_bodies()), ids=lambda body: type(body).__name__)
def test_the_largest_body_that_a_client_makes_is_small_enough(body: Request) -> None:
    sent = body.model_dump_json()
    assert len(sent) < 0.9 * body.largest_body_bytes
    assert sent.count(",") < 250_000


def test_wrong_tokens_are_slowed_down_and_good_ones_are_not(service: RunningService) -> None:
    good = service.http()
    good.get("/v1/service").raise_for_status()
    with service.http(token=new_token_text()) as wrong:
        codes = [wrong.get("/v1/service").status_code for _ in range(BURST + 2)]
        assert codes[:BURST] == [401] * BURST
        reply = wrong.get("/v1/service")
    assert (reply.status_code, reply.json()["code"], reply.json()["retryable"]) == (429, "too_many_failures", True)
    assert 1 <= int(reply.headers["Retry-After"]) <= SECONDS_PER_FAILURE
    assert good.get("/v1/service").status_code == 200


def test_a_flood_of_wrong_tokens_costs_neither_statements_nor_turns(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    look = principal.authenticate

    def noted(database: Any, text: str) -> Principal:
        looked.append(text)
        return look(database, text)

    monkeypatch.setattr(principal, "authenticate", noted)

    def wrong(_: int) -> tuple[int, str]:
        with service.http(token=new_token_text()) as http:
            reply = http.get("/v1/service")
            return reply.status_code, reply.json()["code"]

    with ThreadPoolExecutor(16) as pool:
        codes = Counter(pool.map(wrong, range(10 * BURST)))
    assert codes.keys() == {(401, "unauthenticated"), (429, "too_many_failures")}
    assert BURST <= len(looked) == codes[401, "unauthenticated"] <= BURST + service.context.settings.requests_at_once
    monkeypatch.setattr(service.app.state.admission, "call", None)
    assert wrong(0) == (429, "too_many_failures"), "it does not come to the line of those that wait"


@pytest.mark.parametrize(("path", "status"), [("/v1/projects", 401), ("/healthz", 200)])
def test_a_long_cookie_is_looked_through_within_a_moment(service: RunningService, path: str, status: int) -> None:
    """On the event loop, before anybody is known."""
    http = service.http(token=None, headers=[("Cookie", 'a="' + "\\" * 60_000 + '"')])
    began = time.process_time()
    assert http.get(path).status_code == status
    assert time.process_time() - began < 2


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


ONE = Principal("0" * 16, "one", frozenset())


def refuse(token: str) -> Principal:
    raise ProblemError(ProblemCode.UNAUTHENTICATED, "wrong")


def fails(calls: FailedCalls, address: str, token: str = "wrong") -> str:
    with pytest.raises(ProblemError) as raised:
        calls.authenticated(address, token, refuse)
    return raised.value.code


def test_failures_are_counted_by_address_and_forgotten_one_by_one() -> None:
    clock = Clock()
    calls = FailedCalls(clock)
    assert {fails(calls, "one") for _ in range(BURST)} == {"unauthenticated"}
    assert fails(calls, "one") == "too_many_failures"
    assert fails(calls, "other") == "unauthenticated"
    clock.now += SECONDS_PER_FAILURE
    assert [fails(calls, "one"), fails(calls, "one")] == ["unauthenticated", "too_many_failures"]
    clock.now += BURST * SECONDS_PER_FAILURE
    assert {fails(calls, "one") for _ in range(BURST)} == {"unauthenticated"}


def test_a_cookie_counts_once_and_made_up_ones_are_slowed_down() -> None:
    clock = Clock()
    calls = FailedCalls(clock)
    asked: list[str] = []

    def over(session: str) -> Principal:
        asked.append(session)
        return refuse(session)

    def told(session: str) -> str:
        with pytest.raises(ProblemError) as raised:
            calls.authenticated("one", session, over)
        return raised.value.code

    left_open = new_text(CredentialKind.SESSION)
    assert {told(left_open) for _ in range(2 * SESSIONS_BURST)} == {"unauthenticated"}
    assert asked == [left_open], "what it was told is remembered"
    made_up = [told(new_text(CredentialKind.SESSION)) for _ in range(SESSIONS_BURST)]
    assert made_up == ["unauthenticated"] * (SESSIONS_BURST - 1) + ["too_many_failures"]
    assert fails(calls, "one") == "unauthenticated", "tokens have tries of their own"
    assert told(left_open) == "unauthenticated"
    clock.now += SECONDS_PER_SESSION
    page = new_text(CredentialKind.SESSION)
    assert calls.authenticated("one", page, lambda _: ONE) is ONE
    assert told(new_text(CredentialKind.SESSION)) == "unauthenticated"
    assert calls.authenticated("one", page, lambda _: ONE) is ONE, "it was good lately"


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("2001:db8:0:1::1", "2001:db8:0:1:ffff::2", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("fe80::1%eth0", "fe80::2", True),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("10.0.0.1", "10.0.0.2", False),
    ],
)
def test_the_addresses_of_one_ipv6_network_share_their_tries(first: str, second: str, *, same: bool) -> None:
    calls = FailedCalls(Clock())
    for _ in range(BURST):
        fails(calls, first)
    assert fails(calls, second) == ("too_many_failures" if same else "unauthenticated")


def test_of_many_tries_at_once_no_more_are_looked_at_than_may_fail() -> None:
    """What asks somebody else counts ahead; a try that was good, or that only met an outage, is taken back."""
    calls = FailedCalls(lambda: 0.0)
    with ExitStack() as at_once:
        for each in range(BURST):
            at_once.enter_context(calls.counted("10.0.0.1", f"invented {each}", ahead=True))
        with pytest.raises(ProblemError) as refusal, calls.counted("10.0.0.1", "one more", ahead=True):
            pytest.fail("it is not looked at")
        assert refusal.value.code is ProblemCode.TOO_MANY_FAILURES
    for _ in range(2 * BURST):
        with pytest.raises(ProblemError), calls.counted("10.0.0.1", "an outage", ahead=True):
            raise ProblemError(ProblemCode.STORE_UNAVAILABLE, "")
    for each in range(BURST):
        with pytest.raises(ProblemError) as failure, calls.counted("10.0.0.1", f"wrong {each}", ahead=True):
            raise ProblemError(ProblemCode.SIGN_IN_FAILED, "")
        assert failure.value.code is ProblemCode.SIGN_IN_FAILED
    assert calls.must_wait("10.0.0.1", "the next") > 0


def test_a_token_that_was_good_is_slowed_down_once_it_is_not() -> None:
    calls = FailedCalls(Clock())
    assert calls.authenticated("one", "good", lambda _: ONE) == calls.last_known("good") == ONE
    for _ in range(BURST):
        fails(calls, "one")
    assert calls.authenticated("one", "good", lambda _: ONE) is ONE
    assert [fails(calls, "one", "good"), fails(calls, "one", "good")] == ["unauthenticated", "too_many_failures"]
    assert calls.last_known("good") is None
