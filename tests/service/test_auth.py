"""Tokens: who gets in, what a scope allows, and what a project's token does not see."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.routing import iter_route_contexts
from sqlalchemy import select, update

from holdfast_protocol.states import Scope
from holdfast_service.auth import bootstrap
from holdfast_service.auth.principal import (
    ADMITTED_SECONDS,
    FailedCalls,
    Principal,
    check_entropy,
    new_token_text,
    parse_token,
)
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Token
from holdfast_service.db.tables.operations import AuditEvent
from holdfast_service.settings import ServiceSettings, SettingsError
from holdfast_service.web.frame import GuardedRoute, operation_id, required_by
from tests.service.conftest import Clock
from tests.support.interleave import hold_after, overlap
from tests.support.rank import Job, Refused, Save, answer
from tests.support.retention import purge
from tests.support.service import RunningService, running_service


def problem(service: RunningService, token: str | None, method: str, path: str, **body: Any) -> tuple[int, str]:
    reply = service.http(token=token).request(method, path, **body)
    return reply.status_code, reply.json().get("code", "")


@pytest.mark.parametrize(
    "token", [None, "hold_", "hold_0123456789abcdef_" + "0" * 64, "hold_0123456789abcdef_" + "A" * 64, "x" * 10_000]
)
def test_without_a_known_token_nothing_is_told(service: RunningService, token: str | None) -> None:
    reply = service.http(token=token).get("/v1/service")
    assert (reply.status_code, reply.json()["code"]) == (401, "unauthenticated")
    assert reply.headers["WWW-Authenticate"] == "Bearer"
    assert reply.headers["Content-Type"] == "application/problem+json"
    assert token in (None, "hold_") or token not in reply.text


def test_the_secret_of_another_token_is_refused(service: RunningService) -> None:
    one, other = service.token(), service.token()
    mixed = one.rpartition("_")[0] + "_" + other.rpartition("_")[2]
    assert problem(service, mixed, "GET", "/v1/service") == (401, "unauthenticated")


def test_an_expired_token_is_refused(service: RunningService, clock: Clock) -> None:
    token = service.token(Scope.READ, expires_in_seconds=60)
    assert service.http(token=token).get("/v1/service").status_code == 200
    clock.advance(61)
    assert problem(service, token, "GET", "/v1/service") == (401, "unauthenticated")


def test_a_revoked_token_is_refused_at_once(service: RunningService) -> None:
    made = answer(service.http().post("/v1/tokens", json={"name": "trainer", "scopes": ["train", "read"]}))
    token = made["token"]
    assert service.http(token=token).get("/v1/service").json()["token_scopes"] == ["read", "train"]
    first = answer(service.http().delete(f"/v1/tokens/{made['id']}"))
    assert first["revoked_at"] is not None
    assert problem(service, token, "GET", "/v1/service") == (401, "unauthenticated")
    assert answer(service.http().delete(f"/v1/tokens/{made['id']}")) == first


class AtWork:
    """A job whose token was just seen good: the next call of it is let in to its work without a look at the token."""

    def __init__(self, service: RunningService) -> None:
        service.make_project("demo")
        self.token = service.token(Scope.TRAIN, project="demo", expires_in_seconds=30)
        self.job = Job(service.http(token=self.token), "demo/gpt", world_size=2)
        self.save = self.job.begin(5)
        self.save.upload(0, [b"weights", b"index"])

    def calls(self) -> dict[str, Callable[[], Any]]:
        """Each of the routes whose work looks at the token, with something there to work on and, where it can be,
        without."""
        unknown = Save(self.job, {"id": "ck_none"})
        return {
            "attempts_heartbeat": lambda: self.job.heartbeat(6),
            "checkpoints_begin": lambda: self.job.begin(6),
            "uploads_negotiate": lambda: self.save.negotiate(0, [b"more"]),
            "uploads_negotiate, finished": lambda: self.save.negotiate(0, finished=[b"weights"]),
            "uploads_negotiate, unknown": lambda: unknown.negotiate(0, [b"more"]),
            "checkpoints_seal": lambda: self.save.seal(0, [b"weights", b"index"]),
            "checkpoints_seal, unknown": lambda: unknown.seal(0, [b"weights"]),
            "checkpoints_seal, failed": lambda: self.save.fail(1),
            "checkpoints_seal_together": lambda: self.save.seal_together({0: [b"weights", b"index"]}),
        }


@pytest.mark.parametrize("over", ["revoked", "expired"])
def test_work_that_looks_at_the_token_itself_refuses_one_that_was_good_just_now(
    service: RunningService, clock: Clock, over: str
) -> None:
    at_work = AtWork(service)
    routes = {
        operation_id(route.original_route)
        for route in iter_route_contexts(service.app.routes)
        if isinstance(route.original_route, GuardedRoute)
        and any(required.work_looks for required in required_by(route.original_route.dependant))
    }
    calls = at_work.calls()
    assert routes == {name.partition(",")[0] for name in calls}, "each such route has a call here"
    at_work.job.heartbeat(5)
    if over == "revoked":
        answer(service.http().delete(f"/v1/tokens/{parse_token(at_work.token)[0]}"))
    else:
        clock.advance(31)
    for name, call in calls.items():
        with pytest.raises(Refused) as refused:
            call()
        assert (refused.value.status, refused.value.code) == (401, "unauthenticated"), name
    assert answer(service.http().get(f"/v1/checkpoints/{at_work.save.id}"))["state"] == "uploading"
    assert answer(service.http().get(f"{at_work.job.base}/attempts/1"))["last_step"] == 5


def test_a_token_is_looked_at_before_the_work_once_a_minute() -> None:
    now = 100.0
    calls = FailedCalls(lambda: now)
    caller = Principal("0" * 16, "one", frozenset())
    calls.authenticated("10.0.0.1", "good", lambda _: caller)
    assert calls.last_known("good", within_seconds=ADMITTED_SECONDS) is caller
    assert calls.last_known("another", within_seconds=ADMITTED_SECONDS) is None
    now += ADMITTED_SECONDS + 1
    assert calls.last_known("good", within_seconds=ADMITTED_SECONDS) is None
    assert calls.last_known("good") is caller, "while the database is unavailable"


@pytest.mark.parametrize(
    ("scope", "method", "path", "body"),
    [
        (Scope.READ, "POST", "/v1/projects/demo/runs/gpt/attempts", {"launch_id": "a", "after": 0, "world_size": 1}),
        (Scope.TRAIN, "GET", "/v1/projects", None),
        (Scope.OPERATE, "POST", "/v1/tokens", {"name": "x", "scopes": ["read"]}),
        (Scope.READ, "PATCH", "/v1/checkpoints/ck_0", {"labels": []}),
        (Scope.TRAIN, "PUT", "/v1/projects/other", {}),
        (Scope.TRAIN, "POST", "/v1/projects/demo/runs/gpt/retention/prune", {"filter": {}}),
        (Scope.TRAIN, "DELETE", "/v1/projects/demo/runs/gpt", {}),
        (Scope.TRAIN, "PUT", "/v1/projects/demo/policies/retention", {"document": {}}),
        (Scope.OPERATE, "POST", "/v1/holds/hd_0/release", {"reason": "x"}),
    ],
)
def test_a_scope_allows_its_own_calls_only(
    service: RunningService, scope: Scope, method: str, path: str, body: Any
) -> None:
    assert problem(service, service.token(scope), method, path, json=body) == (403, "forbidden")


def test_a_projects_token_sees_its_project_and_nothing_else(service: RunningService) -> None:
    service.make_project("mine")
    theirs = Job(service.http(), "theirs/gpt").save(100)
    Job(service.http(), "mine/gpt").save(100)
    token = service.token(project="mine")
    http = service.http(token=token)
    assert [project["name"] for project in answer(http.get("/v1/projects"))["items"]] == ["mine"]
    for path in ("/v1/projects/theirs", "/v1/projects/theirs/runs", "/v1/projects/theirs/runs/gpt/restore-point"):
        assert problem(service, token, "GET", path) == (403, "forbidden")
    # An id tells nothing: the same reply as for one that was never there.
    for path in ("", "/manifest", "/shards/0"):
        seen = problem(service, token, "GET", f"/v1/checkpoints/{theirs['id']}{path}")
        assert seen == (404, "checkpoint_not_found")
        assert seen == problem(service, token, "GET", f"/v1/checkpoints/ck_{'0' * 32}{path}")
    digest = hashlib.sha256(b"theirs/gpt 1 100 0").hexdigest()
    reads = {"json": {"digests": [digest]}}
    assert problem(service, token, "POST", f"/v1/checkpoints/{theirs['id']}/reads", **reads)[0] == 404


def test_a_projects_administrator_makes_tokens_for_that_project_only(service: RunningService) -> None:
    service.make_project("mine")
    service.make_project("theirs")
    everybodys = answer(service.http().post("/v1/tokens", json={"name": "all", "scopes": ["read"]}))
    http = service.http(token=service.token(Scope.ADMIN, Scope.READ, project="mine"))
    made = answer(http.post("/v1/tokens", json={"name": "reader", "project": "mine", "scopes": ["read"]}))
    assert made["project"] == "mine"
    for body in (
        {"name": "x", "scopes": ["read"]},
        {"name": "x", "project": "theirs", "scopes": ["read"]},
        {"name": "x", "project": "mine", "scopes": ["train"]},
    ):
        with pytest.raises(Refused) as refused:
            answer(http.post("/v1/tokens", json=body))
        assert refused.value.code == "forbidden"
    assert everybodys["id"] not in {token["id"] for token in answer(http.get("/v1/tokens"))["items"]}
    with pytest.raises(Refused) as refused:
        answer(http.delete(f"/v1/tokens/{everybodys['id']}"))
    assert refused.value.code == "token_not_found"


def test_tokens_are_listed_without_secrets_and_kept_as_a_hash(service: RunningService) -> None:
    made = [answer(service.http().post("/v1/tokens", json={"name": f"t{n}", "scopes": ["read"]})) for n in range(3)]
    seen: list[Any] = []
    cursor: str | None = None
    while True:
        params = {"limit": 2} | ({"cursor": cursor} if cursor else {})
        reply = service.http().get("/v1/tokens", params=params)
        page = answer(reply)
        assert "secret" not in reply.text
        assert not any(token["token"] in reply.text for token in made)
        seen += page["items"]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert [token["name"] for token in seen[:3]] == ["t2", "t1", "t0"]
    assert len({token["id"] for token in seen}) == len(seen)
    with service.context.database.read() as session:
        row = session.get_one(Token, made[0]["id"])
        assert row.secret_sha256 == hashlib.sha256(made[0]["token"].rpartition("_")[2].encode()).hexdigest()


def test_the_embedded_service_leaves_its_first_token_in_a_file_for_its_owner(tmp_path: Any) -> None:
    settings = ServiceSettings(data_dir=tmp_path / "data", port=0)
    with running_service(settings) as service:
        token = settings.token_file.read_text().strip()
        assert stat.S_IMODE(os.stat(settings.token_file).st_mode) == 0o600
        info = service.http(token=token).get("/v1/service").json()
        assert set(info["token_scopes"]) == {scope.value for scope in Scope}
    with running_service(settings):
        assert settings.token_file.read_text().strip() == token, "the second start must keep the token"
    (tmp_path / "data" / "catalog.db").unlink()
    (tmp_path / "data" / "store" / "holdfast-store.json").unlink()
    with running_service(settings) as service:
        fresh = settings.token_file.read_text().strip()
        assert fresh != token, "a new catalog does not know the old token"
        assert service.http(token=fresh).get("/v1/service").status_code == 200


def test_a_service_on_postgres_or_for_others_makes_no_token_file(settings: ServiceSettings) -> None:
    for_others = settings.model_copy(update={"host": "0.0.0.0"})
    with running_service(for_others):
        assert not settings.token_file.exists()
    assert settings.embedded is settings.database_url_text.startswith("sqlite")


def test_the_bootstrap_token_is_kept_as_given_and_stays_revoked(settings: ServiceSettings) -> None:
    text = new_token_text()
    with_token = ServiceSettings(**settings.model_dump() | {"bootstrap_token": text})
    with running_service(with_token) as service:
        http = service.http(token=text)
        assert http.get("/v1/service").json()["token_name"] == "bootstrap"
        answer(http.delete(f"/v1/tokens/{text.split('_')[1]}"))
    with running_service(with_token) as service:
        assert service.http(token=text).get("/v1/service").status_code == 401
        with service.context.database.read() as session:
            assert len(session.scalars(select(Token).where(Token.name == "bootstrap")).all()) == 1


@pytest.mark.parametrize("over", ["revoked_at", "expires_at"])
def test_a_bootstrap_token_stays_over_when_other_tokens_are_forgotten(
    settings: ServiceSettings, clock: Clock, over: str
) -> None:
    text = new_token_text()
    with_token = ServiceSettings(**settings.model_dump() | {"bootstrap_token": text})
    with running_service(with_token) as service:
        other = parse_token(service.token())[0]
        with service.context.database.transaction() as session:
            ended = update(Token).where(Token.id.in_([parse_token(text)[0], other]))
            session.execute(ended.values({over: database_now(session)}))
        clock.advance((settings.keep_tokens_days + 1) * 86_400)
        purge(service)
        with service.context.database.read() as session:
            assert session.get(Token, other) is None
    with running_service(with_token) as service:
        assert problem(service, text, "GET", "/v1/service") == (401, "unauthenticated")


@pytest.mark.races
def test_of_two_services_that_start_at_once_one_writes_down_that_the_first_token_was_made(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    database, text = service.context.database, new_token_text()

    def made() -> int:
        with database.read() as session:
            return len(session.scalars(select(AuditEvent.id).where(AuditEvent.action == "token.create")).all())

    before = made()
    gate = hold_after(monkeypatch, bootstrap, "insert_new")
    first, second = overlap(
        service,
        gate,
        lambda: bootstrap.ensure_bootstrap_token(database, text),
        lambda: bootstrap.ensure_bootstrap_token(database, text),
    )
    assert (first.result(), second.result(), made() - before) == (True, False, 1)


@pytest.mark.parametrize("text", ["secret", "hold_0123456789abcdef_" + "0" * 64, "hold_0123456789abcdef_" + "ab" * 32])
def test_a_bootstrap_token_that_somebody_made_up_stops_the_start(settings: ServiceSettings, text: str) -> None:
    wrong = ServiceSettings(**settings.model_dump() | {"bootstrap_token": text})
    with pytest.raises(SettingsError, match="HOLDFAST_BOOTSTRAP_TOKEN") as refused:
        with running_service(wrong):
            pass
    assert text not in str(refused.value)


def test_random_tokens_pass_the_check_for_made_up_ones() -> None:
    for _ in range(2000):
        check_entropy(new_token_text())
