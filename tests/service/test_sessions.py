"""Sessions of the web page: a session does what its token may, ends with it, and no other page calls in its name."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fastapi.routing import iter_route_contexts
from sqlalchemy import select, text

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.service import CSRF_HEADER, SESSION_COOKIE
from holdfast_protocol.states import CredentialKind, Scope
from holdfast_service.audit.record import Actor
from holdfast_service.auth.credentials import new_text
from holdfast_service.auth.principal import BURST, EXPIRED_SECONDS, FailedCalls
from holdfast_service.auth.sessions import MOST_OF_A_TOKEN
from holdfast_service.db.tables.sign_ins import SignIn
from holdfast_service.errors import ProblemError
from holdfast_service.retention.forget import forget_old
from holdfast_service.serve import warn_of_plain_sessions
from holdfast_service.settings import ServiceSettings, SettingsError
from holdfast_service.web.frame import required_by
from tests.service.conftest import Clock
from tests.support.rank import Job, answer
from tests.support.service import RunningService, running_service
from tests.support.signed_in import SignedIn, sign_in

WRITES = ("POST", "PUT", "PATCH", "DELETE")
# These answer a session otherwise than its token, on purpose.
OF_SESSIONS = ("/v1/sessions", "/v1/sessions/current", "/v1/sign-in-codes")


def problem(reply: Any) -> tuple[int, str]:
    return reply.status_code, reply.json().get("code", "") if reply.status_code >= 400 else ""


def guarded_routes(service: RunningService) -> Iterator[tuple[str, str]]:
    """Each route that asks who calls, as method and path."""
    for route in iter_route_contexts(service.app.routes):
        dependant = getattr(route, "dependant", None)
        if dependant is not None and list(required_by(dependant)):
            for method in sorted((route.methods or set()) - {"OPTIONS"}):
                yield method, route.path


def filled(path: str, known: dict[str, str]) -> str:
    return re.sub(r"{(\w+)}", lambda name: known.get(name[1], "1"), path)


# --- signing in and out


def test_a_token_opens_a_session_whose_cookie_no_script_and_no_other_site_can_use(service: RunningService) -> None:
    token = service.token(Scope.READ)
    reply = service.http(token=token).post("/v1/sessions")
    assert reply.status_code == 201
    view = reply.json()
    assert (view["name"], view["project"], view["scopes"]) == ("test read", None, ["read"])
    assert view["csrf_token"] not in reply.headers["Set-Cookie"]
    name, *attributes = reply.headers["Set-Cookie"].split("; ")
    assert re.fullmatch(rf"{SESSION_COOKIE}=session_[0-9a-f]{{16}}_[0-9a-f]{{64}}", name)
    assert {each.lower() for each in attributes} == {"httponly", "samesite=strict", "path=/", "max-age=43200"}
    assert token not in reply.text + str(reply.headers)
    page = sign_in(service, token)
    assert answer(page.http().get("/v1/sessions/current")) == page.view
    assert page.view["id"] != view["id"], "each sign-in has a session of its own"


def test_over_https_the_cookie_is_bound_to_this_host(service: RunningService) -> None:
    https = service.http()
    https.base_url = "https://127.0.0.1"
    first, *attributes = https.post("/v1/sessions").headers["Set-Cookie"].split("; ")
    name, _, cookie = first.partition("=")
    assert name == f"__Host-{SESSION_COOKIE}"
    assert "Secure" in attributes
    by_cookie = service.http(token=None, headers=[("Cookie", f"__Host-{SESSION_COOKIE}={cookie}")])
    by_cookie.base_url = "https://127.0.0.1"
    assert by_cookie.get("/v1/service").status_code == 200
    # A neighbour of this domain can put a cookie without the prefix beside it.
    planted = service.http(token=None, headers=[("Cookie", f"{SESSION_COOKIE}={cookie}")])
    planted.base_url = "https://127.0.0.1"
    assert problem(planted.get("/v1/service")) == (401, "unauthenticated")


@pytest.fixture
def public(settings: ServiceSettings) -> Iterator[RunningService]:
    """Behind a proxy that ends TLS and that it does not know: calls come over http."""
    with running_service(settings.model_copy(update={"public_url": "https://holdfast.example"})) as service:
        yield service


def test_what_people_reach_over_https_keeps_its_cookie_to_https(public: RunningService) -> None:
    token = public.token(Scope.READ)
    page = public.http(token=token, headers=[("Origin", "https://holdfast.example")])
    first, *attributes = page.post("/v1/sessions").headers["Set-Cookie"].split("; ")
    name, _, cookie = first.partition("=")
    assert name == f"__Host-{SESSION_COOKIE}"
    assert "Secure" in attributes
    for cookie_name, status in ((name, 200), (SESSION_COOKIE, 401)):
        http = public.http(token=None, headers=[("Cookie", f"{cookie_name}={cookie}")])
        assert http.get("/v1/service").status_code == status
    for origin, status in (("https://holdfast.example", 200), ("https://127.0.0.1", 200), ("http://127.0.0.1", 403)):
        by_page = public.http(token=None, headers=[("Cookie", f"{name}={cookie}"), ("Origin", origin)])
        assert by_page.get("/v1/service").status_code == status, origin


def test_where_the_browser_would_drop_the_cookie_the_sign_in_says_where_to_go(public: RunningService) -> None:
    reply = public.http(headers=[("Origin", "http://127.0.0.1")]).post("/v1/sessions")
    assert problem(reply) == (403, "forbidden")
    assert "https://holdfast.example" in reply.json()["detail"]
    assert rows(public) == set()


@pytest.mark.parametrize("told", [("Origin", "https://holdfast.example"), ("X-Forwarded-Proto", "https")])
def test_a_page_over_https_gets_no_cookie_that_would_go_over_http(
    service: RunningService, told: tuple[str, str]
) -> None:
    reply = service.http(headers=[told]).post("/v1/sessions")
    assert problem(reply) == (403, "forbidden")
    assert "Set-Cookie" not in reply.headers
    assert {"HOLDFAST_PUBLIC_URL", "HOLDFAST_TRUSTED_PROXIES"} <= set(re.findall(r"HOLDFAST_\w+", reply.text))
    assert rows(service) == set()
    assert service.http(headers=[("Origin", "http://127.0.0.1")]).post("/v1/sessions").status_code == 201


@pytest.mark.parametrize(
    ("host", "public_url", "warns"),
    [
        ("127.0.0.1", None, False),
        ("0.0.0.0", None, True),
        ("10.1.2.3", "http://holdfast.example", True),
        ("10.1.2.3", "https://holdfast.example", False),
    ],
)
def test_a_service_for_others_says_at_its_start_that_it_knows_of_no_https(
    caplog: pytest.LogCaptureFixture, host: str, public_url: str | None, warns: bool
) -> None:
    warn_of_plain_sessions(ServiceSettings(host=host, public_url=public_url))
    told = [str(record.msg) for record in caplog.records]
    assert [("HOLDFAST_PUBLIC_URL" in each) for each in told] == [True] * warns


@pytest.mark.parametrize(
    "url", ["holdfast.example", "https://", "ftp://a.example", "https://a.example/path", "https://u@a"]
)
def test_what_is_no_address_of_the_page_stops_the_start(url: str) -> None:
    with pytest.raises(SettingsError, match="HOLDFAST_PUBLIC_URL"):
        ServiceSettings(public_url=url)


def test_signing_out_ends_the_session_and_takes_the_cookie_back(service: RunningService) -> None:
    page, other = (sign_in(service, service.token()) for _ in range(2))
    reply = page.http().delete("/v1/sessions/current")
    assert reply.status_code == 204
    assert f'{SESSION_COOKIE}=""; ' in reply.headers["Set-Cookie"]
    assert "Max-Age=0" in reply.headers["Set-Cookie"]
    assert problem(page.http().get("/v1/sessions/current")) == (401, "unauthenticated")
    assert problem(page.http().get("/v1/projects")) == (401, "unauthenticated")
    assert other.http().get("/v1/projects").status_code == 200
    told = answer(service.http().get("/v1/audit-events", params={"action": "session."}))["items"]
    assert [(event["action"], event["actor"]) for event in told] == [
        ("session.end", page.view["name"]),
        ("session.open", other.view["name"]),
        ("session.open", page.view["name"]),
    ]
    assert told[0]["before"] == {"session": page.view["id"]}
    assert page.cookie not in str(told)


def test_without_a_session_there_is_none_to_show(service: RunningService) -> None:
    assert problem(service.http(token=None).get("/v1/sessions/current")) == (401, "unauthenticated")
    assert problem(service.http().get("/v1/sessions/current")) == (404, "session_not_found")
    assert problem(service.http().delete("/v1/sessions/current")) == (404, "session_not_found")


UNKNOWN = f"_{'0123456789abcdef'}_{'0123456789abcdef' * 4}"


@pytest.mark.parametrize("cookie", ["", "x", "session_", f"session{UNKNOWN}", f"hold{UNKNOWN}", "session_é"])
def test_a_cookie_that_is_no_session_lets_nobody_in(service: RunningService, cookie: str) -> None:
    reply = SignedIn(service, cookie, {}).http(csrf=None).get("/v1/projects")
    assert problem(reply) == (401, "unauthenticated")
    assert len(cookie) < 20 or cookie not in reply.text


def test_each_secret_is_good_in_its_own_place_only(service: RunningService) -> None:
    token = service.token()
    code = answer(service.http(token=token).post("/v1/sign-in-codes"))["code"]
    page = sign_in(service, token)
    assert problem(service.http(token=page.cookie).get("/v1/service")) == (401, "unauthenticated")
    for secret in (token, code):
        by_cookie = service.http(token=None, headers=[("Cookie", f"{SESSION_COOKIE}={secret}")])
        assert problem(by_cookie.get("/v1/service")) == (401, "unauthenticated")
    for method, path in guarded_routes(service):
        if path != "/v1/sessions":
            reply = service.http(token=code).request(method, filled(path, {}))
            assert problem(reply)[0] == 401 or method == "HEAD", f"{method} {path} takes a one-time code"


def test_a_token_counts_where_there_is_a_cookie_too(service: RunningService) -> None:
    page = sign_in(service, service.token(Scope.READ))
    with page.http(csrf=None) as http:
        http.headers["Authorization"] = f"Bearer {service.token(Scope.ADMIN)}"
        assert answer(http.get("/v1/service"))["token_scopes"] == ["admin"]
        assert http.put("/v1/projects/made", json={}).status_code == 201, "by token: no other page can have made it"
        http.headers["Authorization"] = "Bearer wrong"
        assert problem(http.get("/v1/service")) == (401, "unauthenticated")
        http.headers["Authorization"] = "Basic b3BlcmF0b3I6cHJveHk="  # what a proxy in front has asked for
        assert answer(http.get("/v1/service"))["token_scopes"] == ["read"]


def test_no_cache_keeps_what_a_cookie_has_let_read(service: RunningService) -> None:
    """A cache knows that a reply to `Authorization` is one caller's. It does not know that of a reply to a cookie."""
    saved = Job(service.http(), "demo/gpt", world_size=1).save(5)
    known = {"project": "demo", "run": "gpt", "checkpoint_id": saved["id"], "rank": "0"}
    http, seen = sign_in(service, service.token()).http(), set()
    for method, path in guarded_routes(service):
        if method == "GET":
            reply = http.get(filled(path, known), params={"seconds": 0} if path == "/v1/events/stream" else {})
            assert reply.headers.get_list("Cache-Control") == ["no-store"], path
            seen.add(reply.status_code)
    assert {200, 404} <= seen


# --- rule session-is-its-token


@pytest.mark.rule("session-is-its-token")
@pytest.mark.parametrize(
    ("scopes", "project"),
    [*(([scope], None) for scope in Scope), (list(Scope), None), (list(Scope), "demo"), (list(Scope), "other")],
    ids=lambda part: part if isinstance(part, str) else "-".join(part or ["every"]),
)
def test_on_each_route_a_session_gets_what_its_token_gets(
    service: RunningService, scopes: list[Scope], project: str | None
) -> None:
    saved = Job(service.http(), "demo/gpt", world_size=1).save(5)
    service.make_project("other")
    known = {"project": "demo", "run": "gpt", "number": "1", "checkpoint_id": saved["id"], "rank": "0"}
    token = service.token(*scopes, project=project)
    by_token, by_session = service.http(token=token), sign_in(service, token).http()
    seen = set()
    for method, path in guarded_routes(service):
        if path in OF_SESSIONS:
            continue
        # A body that no call takes: who may call is said before it is read, and nothing there is changed.
        sent: dict[str, Any] = {"content": b"no JSON"} if method in WRITES else {}
        if path == "/v1/events/stream":
            sent["params"] = {"seconds": 0}
        address = filled(path, known | {"run": "none", "checkpoint_id": "none"} if method in WRITES else known)
        one, other = (problem(http.request(method, address, **sent)) for http in (by_token, by_session))
        assert one == other or max(one[0], other[0]) < 300, f"{method} {path}"
        seen.add(one[0])
    assert 401 not in seen
    assert 200 in seen
    assert 403 in seen or (len(scopes) > 1 and project is None)


@pytest.mark.rule("session-is-its-token")
@pytest.mark.parametrize("path", ["/v1/sessions", "/v1/sign-in-codes"])
def test_a_session_cannot_prolong_itself(service: RunningService, path: str) -> None:
    page = sign_in(service, service.token())
    assert problem(page.http().post(path)) == (403, "forbidden")


@pytest.mark.rule("session-is-its-token")
@pytest.mark.parametrize("how", ["revoked", "expired", "purged"])
def test_a_session_ends_with_its_token(service: RunningService, clock: Clock, how: str) -> None:
    made = answer(
        service.http().post("/v1/tokens", json={"name": "me", "scopes": ["read", "train"], "expires_in_seconds": 3600})
    )
    page = sign_in(service, made["token"])
    code = answer(service.http(token=made["token"]).post("/v1/sign-in-codes"))["code"]
    assert page.view["expires_at"] == made["expires_at"], "earlier than the setting says"
    assert page.http().get("/v1/projects").status_code == 200
    if how == "expired":
        clock.advance(3601)
    else:
        answer(service.http().delete(f"/v1/tokens/{made['id']}"))
    if how == "purged":
        clock.advance(91 * 86400)
        forget_old(service.context, Actor.controller("test"))
    assert problem(page.http().get("/v1/projects")) == (401, "unauthenticated")
    assert problem(page.http().post("/v1/projects/demo/runs/gpt/checkpoints", json={})) == (401, "unauthenticated")
    assert problem(service.http(token=code).post("/v1/sessions")) == (401, "unauthenticated")


@pytest.mark.rule("session-is-its-token")
def test_who_has_signed_out_does_no_more_of_the_work_that_looks_at_the_token_itself(service: RunningService) -> None:
    """Such work is let in by what this process remembers, and looks at the token: it knows of no session."""
    service.make_project("demo")
    token = service.token(Scope.TRAIN)
    page = sign_in(service, token)
    job = Job(page.http(), "demo/gpt", world_size=1)
    job.heartbeat(5)
    assert page.http().delete("/v1/sessions/current").status_code == 204
    beat = page.http().post(f"{job.base}/attempts/1/heartbeat", json={})
    assert problem(beat) == (401, "unauthenticated")
    assert service.http(token=token).get("/v1/service").status_code == 200


@pytest.mark.rule("session-is-its-token")
@pytest.mark.parametrize("how", ["has signed out", "is signed in"])
def test_while_the_database_is_unavailable_no_session_is_let_in_from_memory(
    service: RunningService, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    token = service.token(Scope.METRICS)
    page = sign_in(service, token)
    for http in (page.http(), service.http(token=token)):
        assert http.get("/metrics").status_code == 200
    if how == "has signed out":
        assert page.http().delete("/v1/sessions/current").status_code == 204

    def unavailable(**_: bool) -> None:
        raise ProblemError(ProblemCode.DATABASE_UNAVAILABLE, "It is away.")

    with monkeypatch.context() as away:
        away.setattr(service.context.database, "read", unavailable)
        assert problem(page.http().get("/metrics")) == (503, "database_unavailable")
        assert service.http(token=token).get("/metrics").status_code == 200


def test_the_audit_log_says_which_session_has_made_a_token(service: RunningService) -> None:
    """It may, as its token may; and the new token outlives it."""
    page = sign_in(service, service.token())
    made = answer(page.http().post("/v1/tokens", json={"name": "mine", "scopes": ["read"]}))
    assert page.http().delete("/v1/sessions/current").status_code == 204
    assert service.http(token=made["token"]).get("/v1/service").status_code == 200
    answer(service.http().post("/v1/tokens", json={"name": "another", "scopes": ["read"]}))
    other, told, *_ = answer(service.http().get("/v1/audit-events", params={"action": "token.create"}))["items"]
    assert (told["after"]["token"], told["after"]["by_session"]) == (made["id"], page.view["id"])
    assert "by_session" not in other["after"]


def test_a_session_ends_by_itself_and_its_row_goes(settings: ServiceSettings, clock: Clock) -> None:
    with running_service(settings.model_copy(update={"session_hours": 2})) as service:
        page = sign_in(service, service.token())
        code = answer(service.http().post("/v1/sign-in-codes"))["code"]
        clock.advance(61)
        assert problem(service.http(token=code).post("/v1/sessions")) == (401, "unauthenticated")
        assert page.http().get("/v1/projects").status_code == 200
        forget_old(service.context, Actor.controller("test"))
        assert rows(service) == {page.view["id"]}
        clock.advance(7200)
        assert problem(page.http().get("/v1/projects")) == (401, "unauthenticated")
        forget_old(service.context, Actor.controller("test"))
        assert rows(service) == set()


def rows(service: RunningService) -> set[str]:
    with service.context.database.read() as session:
        return set(session.scalars(select(SignIn.id)))


def test_the_oldest_session_of_a_token_makes_room(service: RunningService, clock: Clock) -> None:
    token, others = service.token(), sign_in(service, service.token())
    pages = []
    for _ in range(MOST_OF_A_TOKEN[CredentialKind.SESSION] + 1):
        clock.advance(1)
        pages.append(sign_in(service, token))
    assert problem(pages[0].http().get("/v1/service")) == (401, "unauthenticated")
    for page in (pages[1], pages[-1], others):
        assert page.http().get("/v1/service").status_code == 200
    (told,) = answer(service.http().get("/v1/audit-events", params={"action": "session.end"}))["items"]
    assert told["before"] == {"session": pages[0].view["id"]}
    assert told["reason"] is not None


def test_the_oldest_code_of_a_token_makes_room(service: RunningService, clock: Clock) -> None:
    token, page, made = service.token(), sign_in(service, service.token()), []
    for _ in range(200):
        clock.advance(0.1)
        made.append(answer(service.http(token=token).post("/v1/sign-in-codes"))["code"])
    most = MOST_OF_A_TOKEN[CredentialKind.CODE]
    assert rows(service) == {page.view["id"], *(code.split("_")[1] for code in made[-most:])}
    assert problem(service.http(token=made[-most - 1]).post("/v1/sessions")) == (401, "unauthenticated")
    assert sign_in(service, made[-most]).http().get("/v1/service").status_code == 200


def test_the_catalog_keeps_no_secret(service: RunningService) -> None:
    page = sign_in(service, service.token())
    code = answer(service.http().post("/v1/sign-in-codes"))["code"]
    with service.context.database.read() as session:
        kept = session.scalars(select(SignIn)).all()
        assert {row.secret_sha256 for row in kept} == {
            hashlib.sha256(secret.rpartition("_")[2].encode()).hexdigest() for secret in (page.cookie, code)
        }
        whole = str(session.execute(text("SELECT * FROM sign_ins")).all())
    for secret in (page.cookie, code, page.view["csrf_token"]):
        assert secret.rpartition("_")[2] not in whole


# --- rule csrf-before-write


@pytest.mark.rule("csrf-before-write")
def test_each_route_that_may_change_something_refuses_a_call_that_another_page_could_make(
    service: RunningService,
) -> None:
    page, other = (sign_in(service, service.token()) for _ in range(2))
    attempts = {
        "no header": page.http(csrf=None),
        "a wrong one": page.http(csrf="0" * 64),
        "one that is no text": page.http(csrf="é"),
        "another session's": page.http(csrf=other.view["csrf_token"]),
        "from another site": page.http(sec_fetch_site="cross-site"),
        "from another port": page.http(sec_fetch_site="same-site"),
        "by no page": page.http(sec_fetch_site="none"),
    }
    before = len(rows(service))
    seen = 0
    for method, path in guarded_routes(service):
        if method in WRITES:
            for how, http in attempts.items():
                reply = http.request(method, filled(path, {"project": "demo"}), json={})
                assert problem(reply) == (403, "csrf_failed"), f"{method} {path}, {how}"
            seen += 1
    assert seen > 40
    assert len(rows(service)) == before
    assert page.http(sec_fetch_site="same-origin").put("/v1/projects/made", json={}).status_code == 201


@pytest.mark.rule("csrf-before-write")
def test_another_page_reads_nothing_in_a_persons_name(service: RunningService) -> None:
    page = sign_in(service, service.token())
    for site in ("cross-site", "same-site"):
        reply = page.http(csrf=None, sec_fetch_site=site).get("/v1/projects")
        assert problem(reply) == (403, "csrf_failed")
    for site in ("same-origin", "none"):  # the page itself, and an address that a person typed
        assert page.http(csrf=None, sec_fetch_site=site).get("/v1/projects").status_code == 200


@pytest.mark.rule("csrf-before-write")
@pytest.mark.parametrize(
    ("base_url", "origin", "own"),
    [
        ("http://127.0.0.1", "http://127.0.0.1", True),
        ("http://127.0.0.1:8400", "http://127.0.0.1:8400", True),
        ("http://127.0.0.1:8400", "http://127.0.0.1:3000", False),
        ("http://127.0.0.1:8400", "http://127.0.0.1", False),
        ("http://127.0.0.1:8400", "https://127.0.0.1:8400", False),
        ("http://127.0.0.1:8400", "http://127.0.0.1:8400.evil.example", False),
        ("http://127.0.0.1:8400", "http://evil.example", False),
        ("http://127.0.0.1:8400", "null", False),
    ],
)
def test_over_plain_http_the_origin_says_whose_page_calls(
    service: RunningService, base_url: str, origin: str, own: bool
) -> None:
    """A browser sends no Sec-Fetch-Site there, unless the service is on loopback."""
    http = sign_in(service, service.token()).http(origin=origin)
    http.base_url = base_url
    read, written = http.get("/v1/projects"), http.put("/v1/projects/made", json={})
    assert [problem(read), problem(written)] == [(200, ""), (201, "")] if own else [(403, "csrf_failed")] * 2


@pytest.mark.rule("csrf-before-write")
def test_a_proxy_may_name_the_port_that_a_browser_leaves_out(service: RunningService) -> None:
    page = sign_in(service, service.token())
    assert page.http(origin="http://127.0.0.1", host="127.0.0.1:80").get("/v1/projects").status_code == 200


@pytest.mark.rule("csrf-before-write")
def test_a_sign_in_cannot_be_made_by_another_page(service: RunningService) -> None:
    """It needs `Authorization`, which no form and no address can send. A link of `holdfast ui` is another matter: the
    page follows it, signs in with its code and names the token."""
    assert problem(service.http(token=None).post("/v1/sessions")) == (401, "unauthenticated")
    reply = service.http(token=None).options("/v1/sessions", headers={"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in reply.headers


# --- one-time codes


def test_a_code_opens_one_session_of_its_token(service: RunningService) -> None:
    service.make_project("demo")
    token = service.token(Scope.READ, project="demo")
    made = answer(service.http(token=token).post("/v1/sign-in-codes"))
    page = sign_in(service, made["code"])
    assert (page.view["project"], page.view["scopes"]) == ("demo", ["read"])
    again = service.http(token=made["code"]).post("/v1/sessions")
    assert problem(again) == (401, "unauthenticated")
    assert made["code"] not in again.text
    assert page.http().get("/v1/service").status_code == 200


@pytest.mark.races
def test_a_code_works_once_through_two_services_at_once(settings: ServiceSettings) -> None:
    with running_service(settings) as one, running_service(settings) as two:
        for _ in range(5):
            code = answer(one.http().post("/v1/sign-in-codes"))["code"]
            with ThreadPoolExecutor(4) as pool:  # of all rounds, fewer fail than may fail before the address waits
                replies = list(
                    pool.map(lambda at: (one, two)[at % 2].http(token=code).post("/v1/sessions").status_code, range(4))
                )
            assert sorted(replies) == [201] + [401] * 3
        page = sign_in(one, answer(two.http().post("/v1/sign-in-codes"))["code"])
    with running_service(settings) as restarted:
        again = SignedIn(restarted, page.cookie, page.view)
        assert answer(again.http().get("/v1/sessions/current")) == page.view
        assert again.http().put("/v1/projects/made", json={}).status_code == 201


def forget_no_failure(service: RunningService) -> None:
    """However slow this machine is."""
    service.app.state.failed_calls = FailedCalls(clock=lambda: 0.0)


def test_who_guesses_codes_is_made_to_wait(service: RunningService) -> None:
    forget_no_failure(service)
    replies = [service.http(token=new_text(CredentialKind.CODE)).post("/v1/sessions").status_code for _ in range(25)]
    assert set(replies) == {401, 429}


@pytest.mark.parametrize("how", ["signed out", "expired", "token revoked", "never opened"])
def test_a_session_that_has_ended_does_not_lock_its_address_out(
    service: RunningService, clock: Clock, how: str
) -> None:
    """A page that is left open asks again and again, and behind its address are other people."""
    forget_no_failure(service)
    made = answer(service.http().post("/v1/tokens", json={"name": "me", "scopes": ["read"]}))
    page = sign_in(service, made["token"])
    if how == "signed out":
        assert page.http().delete("/v1/sessions/current").status_code == 204
    elif how == "expired":
        clock.advance(13 * 3600)
    elif how == "token revoked":
        answer(service.http().delete(f"/v1/tokens/{made['id']}"))
    else:
        page = SignedIn(service, new_text(CredentialKind.SESSION), page.view)
    for _ in range(2 * BURST):
        assert problem(page.http().get("/v1/projects")) == (401, "unauthenticated")
    wrong = service.http(token=new_text(CredentialKind.TOKEN)).get("/v1/service")
    assert problem(wrong) == (401, "unauthenticated"), "it is the first that counts"
    assert sign_in(service, service.token()).http().get("/v1/projects").status_code == 200


def test_a_session_that_a_clock_called_expired_that_was_ahead_is_let_in_again(
    service: RunningService, clock: Clock
) -> None:
    now = 0.0
    service.app.state.failed_calls = FailedCalls(clock=lambda: now)
    page = sign_in(service, service.token(Scope.READ))
    clock.advance(13 * 3600)
    assert problem(page.http().get("/v1/projects")) == (401, "unauthenticated")
    clock.advance(-13 * 3600)
    now += EXPIRED_SECONDS
    assert page.http().get("/v1/projects").status_code == 200


def test_wrong_tokens_do_not_keep_a_session_of_their_address_from_its_work(settings: ServiceSettings) -> None:
    with running_service(settings) as one, running_service(settings) as two:
        forget_no_failure(two)
        page = sign_in(one, one.token(Scope.READ))
        for _ in range(BURST + 1):
            refusal = problem(two.http(token=new_text(CredentialKind.TOKEN)).get("/v1/service"))
        assert refusal == (429, "too_many_failures")
        assert problem(two.http(token=two.token(Scope.READ)).post("/v1/sessions")) == (429, "too_many_failures")
        there = SignedIn(two, page.cookie, page.view)  # which has not seen this session before
        assert there.http().get("/v1/projects").status_code == 200


def test_the_stream_of_events_follows_by_cookie_until_the_person_signs_out(service: RunningService) -> None:
    service.make_project("demo")
    page = sign_in(service, service.token(Scope.READ))
    reply = page.http(csrf=None, sec_fetch_site="same-origin").get("/v1/events/stream", params={"seconds": 0})
    assert reply.headers["Content-Type"].startswith("text/event-stream")
    assert page.http().delete("/v1/sessions/current").status_code == 204
    assert problem(page.http().get("/v1/events/stream", params={"seconds": 0})) == (401, "unauthenticated")


def test_a_stream_ends_with_its_session_though_its_address_has_failed_too_often(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast_service.events.endpoints._QUIET_SECONDS", 0.2)
    forget_no_failure(service)
    page = sign_in(service, service.token(Scope.READ))
    cookie = {"Cookie": f"{SESSION_COOKIE}={page.cookie}"}
    with httpx.stream("GET", f"{service.url}/v1/events/stream", headers=cookie, timeout=60) as reply:
        lines = reply.iter_lines()
        assert next(lines) == "retry: 2000"
        for _ in range(BURST + 1):
            refusal = problem(service.http(token=new_text(CredentialKind.TOKEN)).get("/v1/service"))
        assert refusal == (429, "too_many_failures")
        assert page.http().delete("/v1/sessions/current").status_code == 204
        assert problem(page.http().get("/v1/projects")) == (401, "unauthenticated")
        assert {line.partition(":")[0] for line in lines} <= {"id", ""}


def test_the_header_is_the_documented_one() -> None:
    assert (CSRF_HEADER, SESSION_COOKIE) == ("X-Holdfast-CSRF", "holdfast_session")
