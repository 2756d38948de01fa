"""The control plane against a server that does what each test says."""

from __future__ import annotations

import logging
import socket
import threading
import time

import pytest

from holdfast_client import Client, ClientSettings, errors
from holdfast_client.errors import HoldfastError
from holdfast_client.transport import Backoff
from holdfast_protocol.base import PROTOCOL_VERSION
from holdfast_protocol.policies.policy import PolicyKind
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.service import CreateToken
from tests.support.scripted_http import DROP, Reply, as_json, in_turn, problem, scripted

SERVER = {
    "version": "1",
    "protocol": PROTOCOL_VERSION,
    "catalog_id": "c",
    "epoch": 1,
    "now": "2025-01-01T00:00:00Z",
    "store_kind": "posix",
    "store_asks_md5": False,
    "token_name": "t",
    "token_project": None,
    "token_scopes": ["read"],
}


def client_of(url: str, **settings) -> Client:
    given = {"token": "hold_id_secret", "retry_seconds": 60, "timeout_seconds": 60, **settings}
    return Client(ClientSettings(url=url, **given))


def test_a_call_tells_token_protocol_and_request_id_and_reads_the_reply():
    with scripted(in_turn(as_json({**SERVER, "something_new": 1}))) as server, client_of(server.url) as client:
        assert client.service.info().epoch == 1
    seen = server.seen[0]
    assert seen.headers["authorization"] == "Bearer hold_id_secret"
    assert seen.headers["holdfast-protocol"] == PROTOCOL_VERSION
    assert len(seen.headers["x-request-id"]) == 32


@pytest.mark.parametrize("code", list(ProblemCode))
def test_every_problem_code_has_its_own_exception(code):
    with scripted(in_turn(problem(code, "It is so."))) as server, client_of(server.url, retry_seconds=0) as client:
        with pytest.raises(HoldfastError) as caught:
            client.service.info()
    error = caught.value
    assert error.code == code
    assert type(error).code == code, "a code without a class of its own cannot be caught"
    assert error.detail == "It is so."
    assert error.request_id == "req-of-the-service"


def test_a_code_newer_than_this_client_goes_by_its_status():
    with scripted(in_turn(problem("not_yet_invented", status=404))) as server, client_of(server.url) as client:
        with pytest.raises(errors.NotFound) as caught:
            client.service.info()
    assert caught.value.code == "not_yet_invented"


def test_a_lost_reply_is_asked_for_again_under_the_same_request_id():
    with scripted(in_turn(DROP, problem("busy"), as_json(SERVER))) as server, client_of(server.url) as client:
        client.service.info()
    assert len(server.seen) == 3
    assert len({seen.headers["x-request-id"] for seen in server.seen}) == 1


@pytest.mark.parametrize(
    ("first", "ambiguous"), [(DROP, True), (problem("database_unavailable"), True), (problem("busy"), False)]
)
def test_the_error_says_whether_an_earlier_try_may_have_been_carried_out(first, ambiguous):
    with scripted(in_turn(first, problem("attempt_conflict"))) as server, client_of(server.url) as client:
        with pytest.raises(errors.AttemptConflict) as caught:
            client.service.info()
    assert caught.value.earlier_try_ambiguous is ambiguous


def test_who_is_told_to_come_later_does_so_and_not_with_all_others_at_once():
    pauses = []
    for _ in range(50):
        backoff = Backoff(60, pauses.append)
        assert backoff.pause(4)
    assert min(pauses) >= 4
    assert max(pauses) <= 4.4
    assert max(pauses) - min(pauses) > 0.1


def test_the_spread_takes_no_try_away_from_the_deadline():
    pauses = []
    backoff = Backoff(4.1, pauses.append)
    assert backoff.pause(4)
    assert 4 <= pauses[0] <= 4.1
    assert not Backoff(3, pauses.append).pause(4)


def test_a_project_that_is_limited_waits_as_long_as_it_is_told_to():
    limited = problem("rate_limited", retry_after_seconds=1)
    limited.headers["Retry-After"] = "1"
    with scripted(in_turn(limited, problem("attempt_conflict"))) as server, client_of(server.url) as client:
        began = time.monotonic()
        with pytest.raises(errors.AttemptConflict) as caught:
            client.service.info()
    assert time.monotonic() - began >= 1
    assert caught.value.earlier_try_ambiguous is False, "a call that was refused for load was not carried out"


def test_what_cannot_succeed_later_is_not_tried_again():
    with scripted(in_turn(problem("forbidden"))) as server, client_of(server.url) as client:
        with pytest.raises(errors.Forbidden):
            client.service.info()
    assert len(server.seen) == 1


def test_a_token_whose_text_was_in_a_lost_reply_is_revoked_and_another_one_made():
    made = {"id": "tok_2", "name": "x", "project": None, "scopes": ["read"], "created_at": "2026-11-23T10:00:00Z"}
    made |= {"expires_at": None, "revoked_at": None}
    replies = in_turn(DROP, problem("already_made", id="tok_1"), as_json(made), as_json(made | {"token": "hold_2_s"}))
    with scripted(replies) as server, client_of(server.url) as client:
        assert client.tokens.create(CreateToken(name="x", scopes=["read"])).token == "hold_2_s"
    first, again, revoked, second = server.seen
    key = "idempotency-key"
    assert first.headers[key] == again.headers[key] != second.headers[key]
    assert (revoked.method, revoked.path) == ("DELETE", "/v1/tokens/tok_1")


def test_that_the_token_ends_soon_is_said_once_in_a_process(caplog):
    ending = SERVER | {"token_id": "abc", "token_expires_at": "2025-01-03T00:00:00Z", "token_ends_soon": True}
    with scripted(lambda seen: as_json(ending)) as server, client_of(server.url) as client:
        for each in (client, client.with_retry_deadline(1, threading.Event())):
            assert not each.store_asks_md5()
    assert len(server.seen) == 2
    assert [record.message for record in caplog.records if "ends at" in record.message] == [
        "The token 't' ends at 2025-01-03 00:00 UTC. Have an administrator replace it: `holdfast tokens rotate abc`."
    ]


def test_a_session_that_is_gone_after_a_lost_reply_has_been_ended():
    with scripted(in_turn(DROP, problem("session_not_found"))) as server, client_of(server.url) as client:
        assert client.sessions.revoke("ses_1") is None
    with scripted(in_turn(problem("session_not_found"))) as server, client_of(server.url) as client:
        with pytest.raises(errors.SessionNotFound):
            client.sessions.revoke("ses_1")


def test_a_policy_that_is_gone_after_a_lost_reply_has_been_deleted():
    with scripted(in_turn(DROP, problem("policy_not_found"))) as server, client_of(server.url) as client:
        assert client.policies.delete(PolicyKind.RETENTION, "demo", etag='"1"') is None
    with scripted(in_turn(problem("policy_not_found"))) as server, client_of(server.url) as client:
        with pytest.raises(errors.PolicyNotFound):
            client.policies.delete(PolicyKind.RETENTION, "demo", etag='"1"')


def test_retrying_ends_with_the_total_time():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with client_of(url, retry_seconds=0.5) as client:
            begun = time.monotonic()
            with pytest.raises(errors.ServiceUnavailable) as caught:
                client.service.info()
    assert time.monotonic() - begun < 30
    assert "holdfast serve" in str(caught.value)
    assert caught.value.earlier_try_ambiguous is False


def test_a_service_that_never_answers_is_given_up_after_the_time_out():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with client_of(url, retry_seconds=0, timeout_seconds=0.3) as client:
            with pytest.raises(errors.ServiceUnavailable) as caught:
                client.service.info()
    assert "HOLDFAST_TIMEOUT_SECONDS" in str(caught.value)
    assert caught.value.earlier_try_ambiguous is True


@pytest.mark.rule("protocol-version")
def test_another_major_version_is_refused_with_both_numbers():
    newer = as_json(SERVER)
    newer.protocol = "2.3"
    with scripted(in_turn(newer)) as server, client_of(server.url) as client:
        with pytest.raises(errors.UnsupportedProtocol) as caught:
            client.service.info()
    assert PROTOCOL_VERSION in str(caught.value)
    assert "2.3" in str(caught.value)


def test_what_the_service_calls_a_bug_is_tried_a_few_times():
    with scripted(in_turn(problem("internal"), problem("internal"), as_json(SERVER))) as server:
        with client_of(server.url) as client:
            assert client.service.info().epoch == 1
    with scripted(in_turn(problem("internal"))) as server, client_of(server.url, retry_seconds=60) as client:
        with pytest.raises(errors.ServiceFault):
            client.service.info()
        assert len(server.seen) == 3


def test_a_slow_call_of_the_background_has_its_whole_retry_deadline_when_it_fails():
    slow = threading.Event()

    def answer(seen):
        if not slow.is_set():
            slow.wait(0.6)  # longer than the retry deadline
            slow.set()
            return DROP
        return as_json(SERVER)

    with scripted(answer) as server, client_of(server.url) as client:
        assert client.with_retry_deadline(0.5, threading.Event()).service.info().epoch == 1


def test_a_call_with_a_retry_deadline_ends_when_it_is_told_to():
    stop = threading.Event()
    with scripted(in_turn(Reply(503))) as server, client_of(server.url) as client:
        threading.Timer(0.3, stop.set).start()
        with pytest.raises(errors.TransferStopped):
            client.with_retry_deadline(900, stop).service.info()
        with pytest.raises(errors.ServiceUnavailable):
            client.with_retry_deadline(0, threading.Event()).service.info()


@pytest.mark.rule("protocol-version")
def test_a_newer_minor_version_is_understood():
    newer = as_json(SERVER)
    newer.protocol = "1.999"
    with scripted(in_turn(newer)) as server, client_of(server.url) as client:
        assert client.service.info().protocol == PROTOCOL_VERSION


@pytest.mark.parametrize(
    "reply",
    [
        Reply(200, b"<html>hello</html>", protocol=None),
        Reply(200, b"{}"),
        Reply(200, b"not json"),
        Reply(302, b"", {"Location": "http://127.0.0.1/login"}, protocol=None),
        Reply(418, b"teapot", protocol=None),
        Reply(501, b"no such method", protocol=None),
    ],
)
def test_what_is_not_holdfast_is_named_and_never_taken_for_an_answer(reply):
    with scripted(in_turn(reply)) as server, client_of(server.url) as client:
        with pytest.raises(errors.UnexpectedReply):
            client.service.info()


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 520, 524, 530])
def test_a_gateway_without_its_service_is_tried_again(status):
    replies = in_turn(Reply(status, b"<html>", protocol=None), as_json(SERVER))
    with scripted(replies) as server, client_of(server.url) as client:
        client.service.info()


def test_neither_token_nor_query_reaches_a_log_or_a_message(caplog):
    caplog.set_level(logging.DEBUG)
    with scripted(in_turn(DROP, problem("forbidden"))) as server, client_of(server.url) as client:
        with pytest.raises(errors.Forbidden) as caught:
            client.restores.restore_point("demo", "gpt", selector="best:secret-metric")
    assert server.seen[0].query["selector"] == "best:secret-metric"
    told = caplog.text + repr(caught.value) + repr(client.settings)
    assert "secret" not in told
    assert "/restore-point" in caplog.text


def test_names_are_quoted_so_that_none_reaches_another_route():
    with scripted(in_turn(problem("run_not_found"))) as server, client_of(server.url) as client:
        with pytest.raises(errors.RunNotFound):
            client.runs.get("..", "a/../../tokens?x=1")
    assert server.seen[0].path.endswith("a%2F..%2F..%2Ftokens%3Fx%3D1")


def test_not_ready_is_an_answer():
    body = {"ready": False, "checks": [{"name": "store", "ok": False, "detail": "unavailable"}]}
    with scripted(in_turn(as_json(body, 503))) as server, client_of(server.url) as client:
        assert client.service.ready().checks[0].detail == "unavailable"
        assert client.service.healthy() is False
    assert len(server.seen) == 2


def test_all_pages_are_read_as_they_are_asked_for():
    def run(name):
        return {
            "id": name,
            "project": "demo",
            "name": name,
            "created_at": "2025-01-01T00:00:00Z",
            "latest_attempt": 0,
            "committed_checkpoints": 0,
            "newest_step": None,
            "restore_point": None,
        }

    def answer(seen):
        if "cursor" not in seen.query:
            return as_json({"items": [run("a"), run("b")], "next_cursor": "n/x=="})
        assert seen.query["cursor"] == "n/x=="
        return as_json({"items": [run("c")], "next_cursor": None})

    with scripted(answer) as server, client_of(server.url) as client:
        assert [one.name for one in client.runs.all("demo")] == ["a", "b", "c"]


def test_a_long_poll_may_last_longer_than_the_time_out():
    def answer(seen):
        time.sleep(0.6)
        return problem("checkpoint_not_found")

    with scripted(answer) as server, client_of(server.url, timeout_seconds=0.3, retry_seconds=0) as client:
        with pytest.raises(errors.CheckpointNotFound):
            client.checkpoints.get("ck_x", wait_seconds=60)
    assert server.seen[0].query == {"wait": "60"}


def test_the_message_is_title_detail_and_remedy():
    with scripted(in_turn(problem("stale_attempt", "Attempt 3 is open"))) as server, client_of(server.url) as client:
        with pytest.raises(errors.StaleAttempt) as caught:
            client.service.info()
    assert str(caught.value) == (
        "This attempt may not write to its run any more. Attempt 3 is open. This job must stop."
    )
