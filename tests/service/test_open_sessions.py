"""Who sees and ends which sessions of the web page: one's own with any scope, others' with operate or admin."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from holdfast_client.cli.main import app
from holdfast_client.cli.output import ExitCode
from holdfast_protocol.states import Scope
from tests.service.conftest import Clock
from tests.support.rank import answer
from tests.support.service import RunningService
from tests.support.signed_in import SignedIn, sign_in


def problem(reply: Any) -> tuple[int, str]:
    return reply.status_code, reply.json().get("code", "") if reply.status_code >= 400 else ""


def listed(http: httpx.Client) -> list[str]:
    return [each["id"] for each in answer(http.get("/v1/sessions"))["items"]]


@pytest.fixture
def signed_in(service: RunningService, clock: Clock) -> dict[str, SignedIn]:
    """Of an administrator, and of people of two projects, in this order; and a code, which is no session."""
    pages = {"all": sign_in(service, service.token())}
    for project in ("demo", "other"):
        service.make_project(project)
        clock.advance(1)
        pages[project] = sign_in(service, service.token(Scope.READ, project=project))
    answer(service.http().post("/v1/sign-in-codes"))
    return pages


@pytest.mark.parametrize(
    ("scopes", "project", "seen"),
    [
        ((Scope.ADMIN,), None, ["other", "demo", "all"]),
        ((Scope.OPERATE,), None, ["other", "demo", "all"]),
        ((Scope.OPERATE,), "demo", ["demo"]),
        ((Scope.ADMIN, Scope.READ), "other", ["other"]),
        ((Scope.READ,), None, []),
        ((Scope.TRAIN, Scope.METRICS), None, []),
        ((Scope.READ,), "demo", []),
    ],
)
def test_who_sees_and_ends_which_sessions(
    service: RunningService, signed_in: dict[str, SignedIn], scopes: tuple[Scope, ...], project: str | None,
    seen: list[str],
) -> None:  # fmt: skip
    token = service.token(*scopes, project=project)
    http = service.http(token=token)
    assert listed(http) == [signed_in[name].view["id"] for name in seen]
    for name, page in signed_in.items():
        reply = http.delete(f"/v1/sessions/{page.view['id']}")
        assert problem(reply) == ((200, "") if name in seen else (404, "session_not_found")), name
        still = page.http().get("/v1/sessions/current").status_code
        assert still == (401 if name in seen else 200), name
    assert listed(http) == []
    mine = sign_in(service, token)
    assert listed(http) == [mine.view["id"]], "one's own is seen with any scope"
    assert problem(http.delete(f"/v1/sessions/{mine.view['id']}")) == (200, "")


def test_an_open_session_is_told_without_its_secrets(service: RunningService) -> None:
    page = sign_in(service, service.token(Scope.READ))
    other = sign_in(service, service.token())
    reply = other.http().get("/v1/sessions")
    shown = {each["id"]: each for each in reply.json()["items"]}
    told = {name: page.view[name] for name in ("id", "token_id", "name", "project", "created_at", "expires_at")}
    assert shown[page.view["id"]] == told | {"current": False}
    assert shown[other.view["id"]]["current"] is True
    for secret in (page.cookie, page.view["csrf_token"], other.cookie, other.view["csrf_token"]):
        assert secret.rpartition("_")[2] not in reply.text


@pytest.mark.parametrize("how", ["expired", "token revoked", "token expired", "signed out"])
def test_what_has_ended_is_not_listed_and_cannot_be_ended(service: RunningService, clock: Clock, how: str) -> None:
    body = {"name": "me", "scopes": ["read"], "expires_in_seconds": 3600}
    made = answer(service.http().post("/v1/tokens", json=body))
    page = sign_in(service, made["token"])
    assert listed(service.http()) == [page.view["id"]]
    if how == "signed out":
        assert page.http().delete("/v1/sessions/current").status_code == 204
    elif how == "token revoked":
        answer(service.http().delete(f"/v1/tokens/{made['id']}"))
    else:
        clock.advance(13 * 3600 if how == "expired" else 3601)
    assert listed(service.http()) == []
    reply = service.http().delete(f"/v1/sessions/{page.view['id']}")
    assert problem(reply) == (404, "session_not_found")


def test_the_audit_log_says_who_has_ended_whose_session(service: RunningService) -> None:
    page = sign_in(service, service.token(Scope.READ))
    operator = service.token(Scope.OPERATE)
    answer(service.http(token=operator).delete(f"/v1/sessions/{page.view['id']}"))
    told, _ = answer(service.http().get("/v1/audit-events", params={"action": "session."}))["items"]
    assert (told["action"], told["actor"]) == ("session.end", "test operate")
    assert told["before"] == {"session": page.view["id"], "token": page.view["token_id"], "name": page.view["name"]}


def test_pages_of_sessions(service: RunningService, clock: Clock) -> None:
    ids = []
    for _ in range(5):
        ids.append(sign_in(service, service.token(Scope.READ)).view["id"])
        clock.advance(1)
    found, cursor = [], None
    while cursor is not None or not found:
        page = answer(service.http().get("/v1/sessions", params={"limit": 2} | ({"cursor": cursor} if cursor else {})))
        found += [each["id"] for each in page["items"]]
        cursor = page["next_cursor"]
    assert found == ids[::-1]


def test_the_command_line_lists_and_ends_sessions(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_URL", service.url)
    monkeypatch.setenv("HOLDFAST_TOKEN", service.token(Scope.OPERATE))
    page = sign_in(service, service.token(Scope.READ))
    assert page.view["id"] in CliRunner().invoke(app, ["sessions", "list"]).stdout
    (shown,) = json.loads(CliRunner().invoke(app, ["sessions", "list", "--json"]).stdout)
    assert shown["id"] == page.view["id"]
    assert page.view["token_id"] in CliRunner().invoke(app, ["sessions", "revoke", shown["id"]]).stdout
    assert problem(page.http().get("/v1/projects")) == (401, "unauthenticated")
    assert CliRunner().invoke(app, ["sessions", "revoke", shown["id"]]).exit_code == ExitCode.NOT_FOUND
    assert "Nobody" in CliRunner().invoke(app, ["sessions", "list"]).output
