"""The frame around every request: errors as problem+json, request ids, the protocol's version, the log."""

from __future__ import annotations

import io
import json
import logging
import time
from typing import Any

import anyio.to_thread
import httpx
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from holdfast_protocol.base import PROTOCOL_HEADER, PROTOCOL_VERSION, speaks_with
from holdfast_protocol.problems import PROBLEM_KINDS, ProblemCode
from holdfast_protocol.states import CredentialKind
from holdfast_protocol.text import without_secrets
from holdfast_service.auth.principal import parse_token
from holdfast_service.logging import configure_logging
from holdfast_service.settings import ServiceSettings
from holdfast_service.stores.base import StoreFull, StoreRefused, StoreUnavailable
from tests.support.rank import Job, answer, digest_of, redeem
from tests.support.service import RunningService


@pytest.fixture
def http(service: RunningService) -> httpx.Client:
    return service.http()


def assert_problem(reply: httpx.Response, code: ProblemCode, status: int | None = None) -> dict[str, object]:
    body: dict[str, object] = reply.json()
    assert reply.headers["Content-Type"] == "application/problem+json"
    assert reply.status_code == body["status"] == (status or PROBLEM_KINDS[code].status)
    assert body["code"] == code.value
    assert body["type"] == f"https://holdfast.dev/problems/{code.value}"
    assert body["retryable"] is PROBLEM_KINDS[code].retryable
    assert body["request_id"] == reply.headers["X-Request-Id"]
    assert str(body["detail"]).endswith((".", "`"))
    return body


def test_an_unknown_route_and_a_wrong_method_are_problems_too(http: httpx.Client) -> None:
    assert_problem(http.get("/v1/nothing"), ProblemCode.ROUTE_NOT_FOUND)
    reply = http.post("/v1/projects")
    assert_problem(reply, ProblemCode.METHOD_NOT_ALLOWED)
    assert reply.headers["Allow"] == "GET"
    # Its methods are those of several routes.
    assert http.request("TRACE", "/v1/projects/demo").headers["Allow"] == "DELETE, GET, PUT"
    # It is no token's id.
    assert http.request("OPTIONS", "/v1/tokens/exchange").headers["Allow"] == "POST"


def test_a_call_hops_to_a_thread_for_its_token_and_for_its_work_alone(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    hops: list[Any] = []
    run_sync = anyio.to_thread.run_sync

    async def counted(work: Any, *arguments: Any, **options: Any) -> Any:
        hops.append(work)
        return await run_sync(work, *arguments, **options)

    monkeypatch.setattr(anyio.to_thread, "run_sync", counted)
    assert http.get("/v1/projects").status_code == 200
    assert len(hops) == 2


def test_a_wrong_request_names_the_field_and_never_repeats_it(http: httpx.Client) -> None:
    body = assert_problem(
        http.post("/v1/tokens", json={"name": "x", "scopes": ["hold_secret"], "typo": 1}), ProblemCode.INVALID_REQUEST
    )
    assert "scopes" in str(body["detail"])
    assert "typo" in json.dumps(body["context"])
    assert "hold_secret" not in json.dumps(body)
    assert_problem(http.post("/v1/tokens", content=b"{"), ProblemCode.INVALID_REQUEST)


def test_a_bug_tells_its_request_id_and_nothing_else(
    http: httpx.Client, service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug() -> None:
        raise RuntimeError("password=hunter2")

    monkeypatch.setattr(service.context.database, "read", bug)
    reply = http.get("/v1/projects")
    assert_problem(reply, ProblemCode.INTERNAL)
    assert "hunter2" not in reply.text
    assert "RuntimeError" not in reply.text
    assert reply.headers[PROTOCOL_HEADER] == PROTOCOL_VERSION


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (StoreUnavailable("no answer"), ProblemCode.STORE_UNAVAILABLE),
        (StoreFull("no room"), ProblemCode.STORE_FULL),
        (StoreRefused("wrong key"), ProblemCode.STORE_REFUSED),
    ],
)
def test_a_stores_error_says_what_the_caller_can_do(
    http: httpx.Client, service: RunningService, monkeypatch: pytest.MonkeyPatch, error: Exception, code: ProblemCode
) -> None:
    save = Job(http).begin(100)

    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(service.context.store, "presign_put", fails)
    reply = http.post(
        f"/v1/checkpoints/{save.id}/shards/0/chunks",
        json=save.job.fence | {"chunks": [{"digest": "0" * 64, "bytes": 1}]},
    )
    assert_problem(reply, code)
    assert ("Retry-After" in reply.headers) is PROBLEM_KINDS[code].retryable


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("trainer-17:abc.def", True),
        ("short", False),
        ("x" * 200, False),
        ("bad id with spaces", False),
        ("a\tb" * 5, False),
    ],
)
def test_a_callers_own_request_id_is_kept_if_it_is_sane(http: httpx.Client, sent: str, kept: bool) -> None:
    reply = http.get("/v1/service", headers={"X-Request-Id": sent})
    assert (reply.headers["X-Request-Id"] == sent) is kept
    assert reply.headers.get_list("X-Request-Id") == [reply.headers["X-Request-Id"]]


@pytest.mark.rule("protocol-version")
@pytest.mark.parametrize("theirs", ["2.0", "0.9", "1", "one.two", "", "1.0.0", "1.x"])
def test_a_client_of_another_protocol_is_refused_with_both_numbers(http: httpx.Client, theirs: str) -> None:
    reply = http.get("/v1/service", headers={PROTOCOL_HEADER: theirs})
    body = assert_problem(reply, ProblemCode.UNSUPPORTED_PROTOCOL)
    assert body["context"] == {"client": theirs, "service": PROTOCOL_VERSION}
    assert reply.headers[PROTOCOL_HEADER] == PROTOCOL_VERSION


@pytest.mark.rule("protocol-version")
@pytest.mark.parametrize("theirs", [None, "1.0", "1.7"])
def test_a_client_of_the_same_major_version_is_served(service: RunningService, theirs: str | None) -> None:
    http = service.http()
    del http.headers[PROTOCOL_HEADER]
    reply = http.get("/v1/service", headers={} if theirs is None else {PROTOCOL_HEADER: theirs})
    assert reply.status_code == 200
    assert reply.headers[PROTOCOL_HEADER] == PROTOCOL_VERSION
    assert theirs is None or speaks_with(theirs)


GUARDS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; sandbox",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


@pytest.mark.rule("page-from-here")
def test_each_kind_of_reply_says_that_nothing_runs_in_it(
    http: httpx.Client, service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = b"<script src=/v1/objects/another></script>"
    saved = Job(http).save(5, content=script)
    (ticket,) = answer(
        http.post(f"/v1/checkpoints/{saved['id']}/reads", json={"digests": [digest_of(script)]}),
    )["chunks"]
    replies = {
        "a chunk": redeem(http, ticket),
        "a wrong signature": http.get("/v1/objects/x", params={"signature": "x"}),
        "JSON": http.get("/v1/projects"),
        "no content": http.request("HEAD", "/v1/projects"),
        "metrics": http.get("/metrics"),
        "a stream": http.get("/v1/events/stream", params={"seconds": 0}),
        "no token": service.http(token=None).get("/v1/projects"),
        "a wrong body": http.post("/v1/tokens", json={}),
        "no route": http.get("/v1/nothing"),
        "another host": http.get("/v1/projects", headers={"Host": "evil.example"}),
        "another protocol": http.get("/v1/projects", headers={PROTOCOL_HEADER: "9.0"}),
        "the document": http.get("/openapi.json"),
        "a redirection": http.get("/", follow_redirects=False),
    }
    assert replies["a chunk"].content == script
    assert replies["a stream"].headers["Content-Type"].startswith("text/event-stream")

    def bug() -> None:
        raise RuntimeError

    with monkeypatch.context() as broken:
        broken.setattr(service.context.database, "read", bug)
        replies["a bug"] = http.get("/v1/projects")
    assert replies["a bug"].status_code == 500
    for what, reply in replies.items():
        for name, value in GUARDS.items():
            assert reply.headers.get_list(name) == [value], (what, name)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """The service's own logging, into a text."""
    written = io.StringIO()
    monkeypatch.setattr("sys.stderr", written)
    configure_logging(ServiceSettings(log_format="json"))
    return written


def requests_in(log: io.StringIO) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    return [line for line in lines if line["event"] == "request"]


def test_the_log_has_one_json_line_per_request_and_no_secret(log: io.StringIO, service: RunningService) -> None:
    token = service.token()
    http = service.http(token=token)
    Job(http).save(100)
    http.get("/v1/projects", params={"cursor": "secret-in-a-query"})
    logging.getLogger("some.library").warning("GET https://store/x?X-Amz-Signature=abc with %s whsec_c2VjcmV0", token)
    # A request's line is written when its reply is already on the way.
    ends_at = time.monotonic() + 60
    while not (listed := [line for line in requests_in(log) if line["path"] == "/v1/projects"]):
        assert time.monotonic() < ends_at, "the request has no line"
        time.sleep(0.01)
    assert {"method", "path", "status", "seconds", "request_id", "timestamp", "level"} <= listed[0].keys()
    assert (listed[0]["client"], listed[0]["token"]) == ("127.0.0.1", parse_token(token)[0])
    requests = requests_in(log)
    assert any(line["path"] == "/v1/objects/…" for line in requests)
    for secret in (token, "signature", "Signature", "secret-in-a-query", "c2VjcmV0"):
        assert secret not in log.getvalue()


def test_an_error_of_the_database_tells_no_values(service: RunningService) -> None:
    """The log has a bug's error whole."""
    insert = text("INSERT INTO webhooks (id, no_such_column) VALUES (:id, :secret)")
    with pytest.raises(DBAPIError) as raised, service.context.database.engine.begin() as connection:
        connection.execute(insert, {"id": "wh_1", "secret": "hunter2"})
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        *((f"{kind}_0123456789abcdef_00ff end", f"{kind}_*** end") for kind in CredentialKind),
        ("GET /v1/objects/abc?signature=xyz HTTP/1.1", "GET /v1/objects/abc?*** HTTP/1.1"),
        ("postgresql://user:pass@host/db", "postgresql://***@host/db"),
        ("git clone HTTPS://secret@host/x", "git clone HTTPS://***@host/x"),
        ("'s3://key:secret@host/b?region=x', https://a/b?c", "'s3://***@host/b?***', https://a/b?***"),
        ("a?b/c?d", "a?b/c?***"),
        ("signed by whsec_c2VjcmV0+/=", "signed by whsec_***"),
        ("why? because", "why? because"),
    ],
)
def test_secrets_are_taken_out_of_any_text(said: str, shown: str) -> None:
    assert without_secrets(said) == shown


@pytest.mark.rule("limits-before-work")
@pytest.mark.parametrize("part", ["/", "a-", "a://", "?", "/?", "hold_", "whsec_"])
def test_secrets_are_looked_for_in_a_long_text_within_a_moment(part: str) -> None:
    """The log does it on the event loop, with a path that any stranger chooses: as long as a head may be."""
    began = time.process_time()
    without_secrets(part * (64_000 // len(part)))
    assert time.process_time() - began < 1


@pytest.mark.rule("limits-before-work")
def test_a_path_that_a_stranger_made_up_is_one_short_line_that_no_terminal_obeys(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.StringIO()
    monkeypatch.setattr("sys.stderr", written)
    configure_logging(ServiceSettings(log_format="console"))
    service.http(token=None).get("/%1B%5D0;title%07%0Amade_up" + "/x" * 10_000)
    ends_at = time.monotonic() + 60
    while "]0;title" not in written.getvalue():
        assert time.monotonic() < ends_at, "the request has no line"
        time.sleep(0.01)
    (line,) = [line for line in written.getvalue().splitlines() if "]0;title" in line]
    assert "made_up" in line
    assert len(line) < 2000
    assert not {"\x1b", "\x07"} & set(written.getvalue())
