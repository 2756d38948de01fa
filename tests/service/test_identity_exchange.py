"""A token of another issuer becomes one of this service: as the rules say, for a while, and seen by administrators."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select

import holdfast_service.identity.identities
import holdfast_service.identity.keys
from holdfast_protocol.states import Scope
from holdfast_service.audit.record import Actor
from holdfast_service.auth.principal import BURST, FailedCalls, new_token_text
from holdfast_service.db.tables.identities import UsedIdentityToken
from holdfast_service.retention.forget import forget_old
from holdfast_service.settings import ServiceSettings
from tests.service.conftest import Clock
from tests.support.rank import Job, answer
from tests.support.service import RunningService, running_service
from tests.support.workload_issuer import WorkloadIssuer, workload_issuer

CLIENT = "holdfast-page"
HOUR = 3600
RULES = [
    {
        "name": "jobs of team a",
        "claims": {"sub": "system:serviceaccount:team-a:*"},
        "role": "trainer",
        "projects": ["demo"],
        "longest_seconds": 2 * HOUR,
    },
    {
        "name": "deployments",
        "claims": {"sub": "repo:org/name:ref:refs/heads/main"},
        "role": "operator",
        "projects": ["demo", "other"],
        "once": True,
    },
    {"name": "platform", "groups": ["platform"], "role": "admin", "every_project": True, "longest_seconds": HOUR},
    {
        "name": "reports",
        "claims": {"sub": "reports"},
        "role": "reader",
        "projects": ["demo"],
        "requests_per_second": 0.001,
        "concurrent_requests": 8,
    },
    {"name": "lost", "claims": {"sub": "lost"}, "role": "reader", "projects": ["nowhere"]},
]


@pytest.fixture(scope="module")
def issuer() -> Iterator[WorkloadIssuer]:
    with workload_issuer() as running:
        yield running


@pytest.fixture
def identity_file(issuer: WorkloadIssuer, tmp_path: Path) -> Path:
    provider = {"name": "cluster", "issuer": issuer.url, "audiences": ["holdfast"], "client_id": CLIENT}
    path = tmp_path / "identity.json"
    path.write_text(json.dumps({"providers": [provider], "rules": [{"provider": "cluster"} | each for each in RULES]}))
    return path


@pytest.fixture
def settings(settings: ServiceSettings, identity_file: Path) -> ServiceSettings:
    return settings.model_copy(update={"identity_file": identity_file})


@pytest.fixture
def service(settings: ServiceSettings) -> Iterator[RunningService]:
    with running_service(settings) as running:
        running.make_project("demo")
        running.make_project("other")
        yield running


def exchange(service: RunningService, token: str, **asked: Any) -> httpx.Response:
    return service.http(token=None).post("/v1/tokens/exchange", json={"subject_token": token} | asked)


def code_of(reply: httpx.Response) -> tuple[int, str]:
    return reply.status_code, reply.json()["code"]


def status_of(service: RunningService, token: str) -> int:
    return service.http(token=token).get("/v1/service").status_code


def test_a_jobs_token_becomes_a_short_lived_one_that_administrators_see(
    service: RunningService, issuer: WorkloadIssuer, clock: Clock
) -> None:
    given = issuer.signed()
    made = answer(exchange(service, given))
    assert (made["token_type"], made["expires_in"], made["scope"]) == ("Bearer", 2 * HOUR, "read train")
    assert made["issued_token_type"] == "urn:ietf:params:oauth:token-type:access_token"
    assert (made["project"], made["scopes"], made["roles"]) == ("demo", ["read", "train"], ["trainer"])
    job = service.http(token=made["access_token"])
    assert job.get("/v1/projects/demo/runs").status_code == 200
    assert code_of(job.get("/v1/projects/other/runs")) == (403, "forbidden")
    assert code_of(job.get("/v1/tokens")) == (403, "forbidden")

    (listed,) = [each for each in answer(service.http().get("/v1/tokens"))["items"] if each["id"] == made["id"]]
    subject = "system:serviceaccount:team-a:trainer"
    assert (listed["name"], listed["issuer"], listed["subject"]) == (f"cluster: {subject}", issuer.url, subject)
    events = answer(service.http().get("/v1/audit-events", params={"action": "token.exchange"}))["items"]
    (event,) = events
    assert (event["actor"], event["token_id"], event["project"]) == (f"cluster: {subject}", made["id"], "demo")
    assert event["after"]["rules"] == ["jobs of team a"]
    assert (event["after"]["issuer"], event["after"]["subject"]) == (issuer.url, subject)
    assert given not in json.dumps(events)
    assert made["access_token"] not in json.dumps(events)

    clock.advance(2 * HOUR - 60)
    assert status_of(service, made["access_token"]) == 200
    clock.advance(61)
    assert status_of(service, made["access_token"]) == 401


def test_it_can_be_revoked(service: RunningService, issuer: WorkloadIssuer) -> None:
    made = answer(exchange(service, issuer.signed()))
    answer(service.http().delete(f"/v1/tokens/{made['id']}"))
    assert status_of(service, made["access_token"]) == 401


def test_less_can_be_asked_for_and_never_more(service: RunningService, issuer: WorkloadIssuer) -> None:
    given = issuer.signed()
    assert answer(exchange(service, given, expires_in_seconds=60))["expires_in"] == 60
    assert answer(exchange(service, given, expires_in_seconds=30 * 86400))["expires_in"] == 2 * HOUR
    assert answer(exchange(service, given, role="reader"))["scopes"] == ["read"]
    assert code_of(exchange(service, given, role="admin")) == (403, "identity_not_granted")
    assert code_of(exchange(service, given, project="other")) == (403, "identity_not_granted")
    assert code_of(exchange(service, issuer.signed(sub="nobody"))) == (403, "identity_not_granted")
    platform = issuer.signed(sub="ann", groups=["platform"])
    everywhere = answer(exchange(service, platform))
    assert (everywhere["project"], set(everywhere["scopes"])) == (None, {scope.value for scope in Scope})
    assert answer(exchange(service, platform, project="other", role="trainer"))["project"] == "other"


@pytest.mark.rule("limits-before-work")
def test_a_rule_gives_its_tokens_limits_and_another_exchange_brings_no_more_calls(
    service: RunningService, issuer: WorkloadIssuer
) -> None:
    given = issuer.signed(sub="reports")
    made, again = (answer(exchange(service, given)) for _ in range(2))
    for each in (made, again):
        assert (each["requests_per_second"], each["concurrent_requests"]) == (0.001, 8)
    assert status_of(service, made["access_token"]) == 200
    assert status_of(service, again["access_token"]) == 429
    events = answer(service.http().get("/v1/audit-events", params={"action": "token.exchange"}))["items"]
    assert events[0]["after"]["requests_per_second"] == 0.001
    assert answer(exchange(service, issuer.signed()))["requests_per_second"] is None


@pytest.mark.rule("limits-before-work")
def test_an_identity_gets_tokens_no_more_often_than_the_settings_say(
    settings: ServiceSettings, issuer: WorkloadIssuer
) -> None:
    with running_service(settings.model_copy(update={"identity_exchanges_per_second": 0.01})) as service:
        service.make_project("demo")
        given = issuer.signed()
        assert code_of(exchange(service, given, role="admin")) == (403, "identity_not_granted"), "it does not count"
        replies = [exchange(service, each) for each in (given, given, issuer.signed(iat=1))]
        assert [each.status_code for each in replies] == [200] * 3
        assert (replies[2].headers["RateLimit-Limit"], replies[2].headers["RateLimit-Remaining"]) == ("3", "0")
        refused = exchange(service, issuer.signed())
        assert code_of(refused) == (429, "rate_limited")
        assert 1 <= int(refused.headers["Retry-After"]) <= 30
        assert "HOLDFAST_IDENTITY_EXCHANGES_PER_SECOND" in refused.json()["detail"]
        assert status_of(service, replies[0].json()["access_token"]) == 200
        for other in ("reports", "system:serviceaccount:team-a:neighbour"):
            assert exchange(service, issuer.signed(sub=other)).status_code == 200, "another identity"
        assert len([each for each in answer(service.http().get("/v1/tokens"))["items"] if each["issuer"]]) == 5


@pytest.mark.rule("limits-before-work")
def test_who_takes_a_new_name_for_each_token_gets_no_more_than_ten_identities_of_its_rule(
    settings: ServiceSettings, issuer: WorkloadIssuer
) -> None:
    with running_service(settings.model_copy(update={"identity_exchanges_per_second": 0.01})) as service:
        service.make_project("demo")
        named = [issuer.signed(sub=f"system:serviceaccount:team-a:{number}") for number in range(31)]
        *replies, refused = [exchange(service, each) for each in named]
        assert [each.status_code for each in replies] == [200] * 30
        assert code_of(refused) == (429, "rate_limited")
        assert "the rule jobs of team a" in refused.json()["detail"]
        assert refused.headers["RateLimit-Limit"] == "30"
        assert exchange(service, issuer.signed(sub="reports")).status_code == 200, "another rule"


def test_a_project_must_be_named_if_there_are_several_and_must_be_there(
    service: RunningService, issuer: WorkloadIssuer
) -> None:
    reply = exchange(service, issuer.signed(sub="repo:org/name:ref:refs/heads/main"))
    assert code_of(reply) == (409, "identity_project_needed")
    assert reply.json()["context"] == {"projects": ["demo", "other"]}
    assert code_of(exchange(service, issuer.signed(sub="lost"))) == (404, "project_not_found")
    answer(service.http().request("DELETE", "/v1/projects/other", json={}, headers={"If-Match": "*"}))
    given = issuer.signed(sub="repo:org/name:ref:refs/heads/main")
    assert code_of(exchange(service, given, project="other")) == (404, "project_not_found")
    answer(exchange(service, given, project="demo"))  # what was refused has not used it up


def test_a_jobs_token_is_good_for_each_rank_and_a_persons_or_a_rules_for_once(
    service: RunningService, issuer: WorkloadIssuer
) -> None:
    job = issuer.signed(jti="job")
    assert len({answer(exchange(service, job))["id"] for _ in range(3)}) == 3
    once = issuer.signed(sub="repo:org/name:ref:refs/heads/main", jti="once")
    answer(exchange(service, once, project="demo"))
    assert code_of(exchange(service, once, project="other")) == (401, "identity_token_used")
    person = issuer.signed(sub="ann", aud=CLIENT, groups=["platform"])
    answer(exchange(service, person))
    assert code_of(exchange(service, person)) == (401, "identity_token_used")
    answer(exchange(service, issuer.signed(sub="ann", aud=CLIENT, groups=["platform"], nonce="another sign-in")))


def test_nobody_releases_his_own_hold_by_signing_in_again(service: RunningService, issuer: WorkloadIssuer) -> None:
    saved = Job(service.http()).save(100)

    def signed_in(who: str) -> httpx.Client:
        made = answer(exchange(service, issuer.signed(sub=who, groups=["platform"])))
        return service.http(token=made["access_token"])

    held = answer(signed_in("ann").post(f"/v1/checkpoints/{saved['id']}/holds", json={"reason": "audit"}))
    release = f"/v1/holds/{held['id']}/release"
    again = signed_in("ann")
    child = answer(again.post("/v1/tokens", json={"name": "second me", "scopes": ["admin"]}))["token"]
    for ann in (again, service.http(token=child)):
        refused = ann.post(release, json={"reason": "over"})
        assert code_of(refused) == (403, "forbidden")
        assert "is of the identity that has placed this hold" in refused.json()["detail"]
    assert answer(signed_in("bob").post(release, json={"reason": "over"}))["released_at"]


def test_of_many_that_bring_one_token_at_once_one_gets_a_token(service: RunningService, issuer: WorkloadIssuer) -> None:
    person = issuer.signed(sub="ann", aud=CLIENT, groups=["platform"])
    together = threading.Barrier(6)

    def bring() -> int:
        together.wait(60)
        return exchange(service, person).status_code

    with ThreadPoolExecutor(6) as threads:
        replies = [each.result() for each in [threads.submit(bring) for _ in range(6)]]
    assert sorted(replies) == [200, 401, 401, 401, 401, 401]


def test_what_was_used_is_remembered_until_it_has_expired(
    service: RunningService, issuer: WorkloadIssuer, clock: Clock
) -> None:
    answer(exchange(service, issuer.signed(sub="ann", aud=CLIENT, groups=["platform"])))

    def remembered() -> int:
        forget_old(service.context, Actor.controller("retention"))
        with service.context.database.read() as session:
            return len(session.scalars(select(UsedIdentityToken.id)).all())

    assert remembered() == 1
    clock.advance(600 + 61)  # its own life, and the skew
    assert remembered() == 1, "the clock of a service may be behind"
    clock.advance(24 * HOUR)
    assert remembered() == 0


def test_wrong_tokens_are_slowed_down_and_good_ones_are_not(service: RunningService, issuer: WorkloadIssuer) -> None:
    service.app.state.failed_calls = FailedCalls(clock=lambda: 0.0)  # no failure is forgotten meanwhile
    answer(exchange(service, issuer.signed(jti="good")))
    wrong = [exchange(service, issuer.forged({"alg": "none"})) for _ in range(BURST)]
    assert {code_of(reply) for reply in wrong} == {(401, "identity_token_invalid")}
    refused = exchange(service, issuer.forged({"alg": "none"}))
    assert code_of(refused) == (429, "too_many_failures")
    assert int(refused.headers["Retry-After"]) >= 1
    answer(exchange(service, issuer.signed(jti="good")))
    renewed = answer(exchange(service, issuer.signed(jti="the platform gives another one each time")))
    assert service.http().get("/v1/service").status_code == 200
    wrong_tokens = service.http(token="hold_" + "0" * 16 + "_" + "0" * 64).get("/v1/service")
    assert code_of(wrong_tokens) == (401, "unauthenticated"), "tokens of this service have tries of their own"
    while wrong_tokens.status_code != 429:
        wrong_tokens = service.http(token=new_token_text()).get("/v1/service")
    assert status_of(service, renewed["access_token"]) == 200, "made by this process, it is good from its first call on"


def test_tokens_of_those_whom_no_rule_knows_are_slowed_down_though_the_provider_has_signed_them(
    service: RunningService, issuer: WorkloadIssuer
) -> None:
    service.app.state.failed_calls = FailedCalls(clock=lambda: 0.0)  # no failure is forgotten meanwhile
    answer(exchange(service, issuer.signed()))
    strangers = [exchange(service, issuer.signed(sub="repo:stranger/name", jti=str(each))) for each in range(BURST)]
    assert {code_of(reply) for reply in strangers} == {(403, "identity_not_granted")}
    assert code_of(exchange(service, issuer.signed(sub="repo:stranger/name"))) == (429, "too_many_failures")
    answer(exchange(service, issuer.signed(jti="the platform gives another one each time")))


def test_a_provider_that_is_away_breaks_nothing_that_is_signed_in(
    service: RunningService, issuer: WorkloadIssuer
) -> None:
    made = answer(exchange(service, issuer.signed()))
    kept = service.context.identities
    assert kept is not None
    kept._keys.clear()  # as in a process that has not asked for them yet
    issuer.status = 500
    try:
        reply = exchange(service, issuer.signed())
        assert code_of(reply) == (503, "identity_provider_unavailable")
        assert reply.json()["retryable"]
        assert int(reply.headers["Retry-After"]) >= 1
        assert status_of(service, made["access_token"]) == 200
        assert 'holdfast_identity_provider_available{provider="cluster"} 0.0' in service.http().get("/metrics").text
    finally:
        issuer.status = 200


def test_a_provider_that_does_not_answer_keeps_no_call_from_its_turn(
    service: RunningService, issuer: WorkloadIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("CALL_SECONDS", "WHOLE_SECONDS"):  # nobody gives it up before the test lets it answer
        monkeypatch.setattr(holdfast_service.identity.keys, limit, 60.0)
    issuer.proceed.clear()
    asked = len(issuer.calls)
    try:
        with ThreadPoolExecutor(30) as threads:  # many more than calls that are worked on at once
            replies = [threads.submit(exchange, service, issuer.signed()) for _ in range(30)]
            for _ in range(10):
                assert service.http().get("/v1/projects").status_code == 200
            issuer.proceed.set()
            assert {each.result().status_code for each in replies} == {200}
    finally:
        issuer.proceed.set()
    assert len(issuer.calls) == asked + 2


def test_an_edit_that_cannot_be_used_is_told_and_what_was_said_before_goes_on(
    service: RunningService, issuer: WorkloadIssuer, identity_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holdfast_service.identity.identities, "LOOK_AGAIN_SECONDS", 0.0)

    def told() -> tuple[list[str], bool]:
        warnings = answer(service.http().get("/readyz"))["warnings"]
        current = "holdfast_identity_file_current 1.0" in service.http().get("/metrics").text
        return [each for each in warnings if "HOLDFAST_IDENTITY_FILE" in each], current

    answer(exchange(service, issuer.signed()))
    assert told() == ([], True)
    whole = identity_file.read_text()
    identity_file.write_text("secret: [")
    answer(exchange(service, issuer.signed()))
    (warning,), current = told()
    assert "cannot be used" in warning
    assert "secret" not in warning, "a stranger can read it"
    assert not current
    fresh = identity_file.with_suffix(".fresh")
    fresh.write_text(whole.replace('"role": "trainer"', '"role": "reader"'))
    os.replace(fresh, identity_file)
    assert answer(exchange(service, issuer.signed()))["roles"] == ["reader"]
    assert told() == ([], True)


def test_neither_reply_nor_log_repeats_what_was_brought(
    service: RunningService, issuer: WorkloadIssuer, capfd: pytest.CaptureFixture[str]
) -> None:
    brought = [issuer.signed(), issuer.signed(aud="x"), issuer.signed(kid="unknown", key=issuer.keys["first"])]
    replies = [exchange(service, each) for each in brought]
    replies += [exchange(service, brought[0], grant_type="x"), exchange(service, brought[0], project="a/b")]
    assert [reply.status_code for reply in replies] == [200, 401, 503, 422, 422]
    made = answer(replies[0])["access_token"]
    seen = "".join(reply.text for reply in replies[1:]) + "".join(capfd.readouterr())
    for secret in (*brought, made):
        assert secret not in seen
        assert secret.rpartition(".")[2] not in seen


def test_a_body_is_bounded_before_it_is_read(service: RunningService) -> None:
    http = service.http(token=None)
    reply = http.post("/v1/tokens/exchange", content=b"x" * 40_000, headers={"Content-Type": "application/json"})
    assert code_of(reply) == (413, "body_too_large")
    assert code_of(exchange(service, "a" * 17_000)) == (422, "invalid_request")
    assert code_of(http.post("/v1/tokens/exchange", data={"subject_token": "a.b.c"})) == (422, "invalid_request")


class TestWithoutAFile:
    @pytest.fixture
    def settings(self, settings: ServiceSettings) -> ServiceSettings:
        return settings.model_copy(update={"identity_file": None})

    def test_no_identity_is_taken(self, service: RunningService, issuer: WorkloadIssuer) -> None:
        assert code_of(exchange(service, issuer.signed())) == (409, "identity_not_configured")
