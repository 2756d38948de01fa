"""A person signs in to the page at a real provider, and every way in which that is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from holdfast_protocol.service import CSRF_HEADER, SESSION_COOKIE, SIGN_IN_COOKIE, SIGN_IN_SECONDS
from holdfast_service.auth.principal import FailedCalls
from holdfast_service.identity import sign_in
from holdfast_service.settings import ServiceSettings
from tests.support.oidc_provider import CLIENT_SECRET, CONFIDENTIAL_CLIENT, OidcProvider, oidc_provider
from tests.support.people import OPERATORS, READERS, TWO_PROJECTS, PersonsBrowser, identity_file
from tests.support.rank import answer
from tests.support.service import RunningService, running_service


@pytest.fixture
def rules_file(tmp_path: Path, oidc: OidcProvider) -> Path:
    oidc.account("ada", "readers")
    oidc.account("olga", "operators")
    oidc.account("bo", "both")
    oidc.account("nobody", "visitors")
    return identity_file(tmp_path / "identity.yaml", oidc, READERS, OPERATORS, TWO_PROJECTS)


@pytest.fixture
def settings(database_url: str, tmp_path: Path, rules_file: Path) -> ServiceSettings:
    return ServiceSettings(
        database_url=database_url,
        store=f"posix://{tmp_path / 'store'}",
        data_dir=tmp_path / "data",
        port=0,
        identity_file=rules_file,
    )


@pytest.fixture
def another(service: RunningService, oidc: OidcProvider) -> Iterator[Callable[[], PersonsBrowser]]:
    with ExitStack() as opened:
        yield lambda: opened.enter_context(PersonsBrowser(service, oidc))


@pytest.fixture
def browser(another: Callable[[], PersonsBrowser], service: RunningService) -> PersonsBrowser:
    for project in ("demo", "other"):
        service.make_project(project)
    return another()


def refusal(reply: httpx.Response, code: str = "sign_in_failed") -> str:
    assert reply.json().get("code") == code, reply.text
    assert SESSION_COOKIE not in reply.cookies
    return str(reply.json()["detail"])


# --- signing in


def test_a_person_signs_in_and_has_the_role_of_the_group_for_as_long_as_its_rule_says(
    browser: PersonsBrowser, service: RunningService
) -> None:
    reply = browser.sign_in("ada")
    assert reply.status_code == 201, reply.text
    session = reply.json()
    assert (session["name"], session["project"], session["scopes"]) == ("corp: ada", "demo", ["read"])
    lives = datetime.fromisoformat(session["expires_at"]) - datetime.fromisoformat(session["created_at"])
    assert lives <= timedelta(seconds=READERS["longest_seconds"])
    kept = next(each for each in reply.headers.get_list("set-cookie") if each.startswith(SESSION_COOKIE))
    assert "HttpOnly" in kept
    assert "SameSite=strict" in kept
    assert browser.at_service.get("/v1/projects/demo").is_success
    assert browser.at_service.get("/v1/projects/other").status_code == 403
    told = answer(service.http().get("/v1/audit-events", params={"action": "session.open"}))["items"]
    assert told[0]["after"]["by"] == "identity"
    token = next(
        each for each in answer(service.http().get("/v1/tokens"))["items"] if each["id"] == session["token_id"]
    )
    assert token["subject"] == "ada"


@pytest.mark.rule("csrf-before-write")
def test_the_session_writes_with_its_csrf_token_alone_and_ends_when_the_person_signs_out(
    browser: PersonsBrowser,
) -> None:
    session = answer(browser.sign_in("olga"))
    http = browser.at_service
    assert http.delete("/v1/sessions/current").json()["code"] == "csrf_failed"
    assert http.delete("/v1/sessions/current", headers={CSRF_HEADER: session["csrf_token"]}).status_code == 204
    assert http.get("/v1/sessions/current").status_code == 401


def test_the_provider_is_asked_with_pkce_a_nonce_and_the_pages_own_address(browser: PersonsBrowser) -> None:
    begun = browser.begin()
    asked = {name: values[0] for name, values in parse_qs(urlsplit(begun.json()["url"]).query).items()}
    assert (asked["response_type"], asked["code_challenge_method"]) == ("code", "S256")
    assert asked["redirect_uri"] == "http://127.0.0.1/ui/sign-in"
    assert len({asked["state"], asked["nonce"], asked["code_challenge"]}) == 3
    (kept,) = begun.headers.get_list("set-cookie")
    assert f"Max-Age={SIGN_IN_SECONDS}" in kept
    assert "HttpOnly" in kept
    assert "SameSite=strict" in kept
    again = {name: values[0] for name, values in parse_qs(urlsplit(browser.begin().json()["url"]).query).items()}
    assert not {asked["state"], asked["nonce"], asked["code_challenge"]} & set(again.values())


def test_who_may_work_on_several_projects_chooses_one(browser: PersonsBrowser) -> None:
    reply = browser.sign_in("bo")
    assert "as bo@example.com (bo)" in refusal(reply, "identity_project_needed")
    assert (reply.json()["context"]["provider"], reply.json()["context"]["projects"]) == ("corp", ["demo", "other"])
    assert answer(browser.sign_in("bo", project="other"))["project"] == "other"
    assert "as bo@example.com" in refusal(browser.sign_in("bo", project="third"), "identity_not_granted")


def test_a_person_without_a_grant_reads_as_whom_and_what_is_missing(
    browser: PersonsBrowser, service: RunningService
) -> None:
    said = refusal(browser.sign_in("nobody"), "identity_not_granted")
    assert said.startswith("You are signed in at Corp as nobody@example.com (nobody). ")
    assert "no rule" in said
    assert not [each for each in answer(service.http().get("/v1/tokens"))["items"] if each["subject"] == "nobody"]


def test_a_group_that_was_taken_away_counts_at_the_next_sign_in(browser: PersonsBrowser, oidc: OidcProvider) -> None:
    oidc.account("eve", "operators")
    assert "operate" in answer(browser.sign_in("eve"))["scopes"]
    oidc.account("eve", "readers")
    assert answer(browser.sign_in("eve"))["scopes"] == ["read"]


def test_the_page_knows_where_people_can_sign_in_and_no_more(service: RunningService, oidc: OidcProvider) -> None:
    reply = answer(service.http(token=None).get("/v1/sign-ins/providers"))
    (provider,) = reply["items"]
    assert (provider["name"], provider["title"], provider["issuer"]) == ("corp", "Corp", oidc.issuer)
    assert provider["device_client_id"] == "holdfast"


def test_without_an_identity_file_nobody_is_offered_a_provider(tmp_path: Path) -> None:
    with running_service(ServiceSettings(data_dir=tmp_path / "data", port=0)) as service:
        http = service.http(token=None)
        assert answer(http.get("/v1/sign-ins/providers"))["items"] == []
        assert http.post("/v1/sign-ins", json={"provider": "corp"}).json()["code"] == "identity_not_configured"


def test_a_client_with_a_secret_signs_in_and_a_wrong_secret_is_told(
    browser: PersonsBrowser, rules_file: Path, oidc: OidcProvider, tmp_path: Path, service: RunningService
) -> None:
    secret = tmp_path / "secret"
    secret.write_text(CLIENT_SECRET + "\n")
    identity_file(rules_file, oidc, READERS, client_id=CONFIDENTIAL_CLIENT, client_secret_file=str(secret))
    _wait_for_rules(service, CONFIDENTIAL_CLIENT)
    assert answer(browser.sign_in("ada"))["project"] == "demo"
    (provider,) = answer(browser.at_service.get("/v1/sign-ins/providers"))["items"]
    assert provider["device_client_id"] is None, "a command has no secret"
    assert CLIENT_SECRET not in str(provider)
    secret.write_text("another-secret-that-the-provider-does-not-know")
    said = refusal(browser.sign_in("ada"))
    assert "invalid_client" in said
    assert "another-secret" not in said


def _wait_for_rules(service: RunningService, client_id: str) -> None:
    """The file is looked at once in a second."""
    identities = service.context.identities
    assert identities is not None
    while identities.rules.providers[0].client_id != client_id:
        identities._look_at = 0.0


def test_a_provider_that_changed_its_keys_meanwhile_signs_in(browser: PersonsBrowser, tmp_path: Path) -> None:
    """With one of its own: others must not wait for the pause after an unknown key."""
    with oidc_provider() as own:
        own.account("ada", "readers")
        rules = identity_file(tmp_path / "own.yaml", own, READERS)
        with running_service(ServiceSettings(data_dir=tmp_path / "own", port=0, identity_file=rules)) as service:
            service.make_project("demo")
            with PersonsBrowser(service, own) as person:
                back = person.visit(person.begin(), "ada")
                own.rotate(keep=False)
                identities = service.context.identities
                assert identities is not None
                identities.keys_of(identities.rules.providers[0])._tried_at = None  # the pause is over
                assert person.finish(back).status_code == 201


# --- refusals


@pytest.mark.rule("sign-in-ends-where-it-began")
def test_a_code_and_a_state_are_good_for_nothing_in_another_browser(
    browser: PersonsBrowser, another: Callable[[], PersonsBrowser]
) -> None:
    """Of a person who is made to follow an attacker's callback, and of one whose callback was stolen."""
    back = browser.visit(browser.begin(), "olga")
    assert "begun no sign-in" in refusal(another().finish(back))
    victim = another()
    victim.begin()
    assert "in another browser" in refusal(victim.finish(back))


@pytest.mark.rule("sign-in-ends-where-it-began")
def test_a_code_of_another_sign_in_is_not_redeemed_even_with_this_browsers_state(
    browser: PersonsBrowser, another: Callable[[], PersonsBrowser]
) -> None:
    """The provider compares the PKCE verifier, which only the browser's cookie leads to."""
    stolen = browser.visit(browser.begin(), "olga")["code"]
    thief = another()
    own = thief.visit(thief.begin(), "nobody")
    assert "does not take the code" in refusal(thief.finish(own | {"code": stolen}))


def test_a_callback_is_good_once_and_its_code_is_too(browser: PersonsBrowser) -> None:
    begun = browser.begin()
    kept = browser.cookie
    assert kept is not None
    back = browser.visit(begun, "ada")
    assert browser.finish(back).status_code == 201
    assert browser.cookie is None
    assert "it has ended it already" in refusal(browser.finish(back))
    browser.cookie = kept  # of who has kept a copy
    assert "used before" in refusal(browser.finish(back))


def test_a_refused_sign_in_is_over_too(browser: PersonsBrowser) -> None:
    back = browser.visit(browser.begin(), "ada")
    assert "in another browser" in refusal(browser.finish(back | {"state": "guessed"}))
    assert "begun no sign-in" in refusal(browser.finish(back))


def test_a_sign_in_that_took_too_long_is_over(browser: PersonsBrowser, monkeypatch: pytest.MonkeyPatch) -> None:
    back = browser.visit(browser.begin(), "ada")
    later = sign_in.time.time() + SIGN_IN_SECONDS + 1
    monkeypatch.setattr(sign_in, "time", SimpleNamespace(time=lambda: later))
    assert "more than 10 minutes" in refusal(browser.finish(back))


@pytest.mark.rule("sign-in-ends-where-it-began")
def test_a_cookie_that_was_changed_is_not_read(browser: PersonsBrowser) -> None:
    browser.begin()
    whole = str(browser.cookie)
    content, _, signature = whole.partition(".")
    said = json.loads(sign_in._bytes(content))
    longer = sign_in._base64(json.dumps([*said[:3], said[3] + 9000]).encode())
    for text in (f"{longer}.{signature}", content, f"{content}.", f".{signature}", "ü.ü"):
        changed = browser.at_service.post(
            "/v1/sign-ins/finish",
            json={"state": "x", "code": "y"},
            headers={"Cookie": f"{SIGN_IN_COOKIE}={text}".encode("latin-1")},
        )
        assert "begun no sign-in" in refusal(changed), text


def test_what_the_provider_says_in_place_of_a_code_is_told(browser: PersonsBrowser) -> None:
    assert "declined at Corp" in refusal(browser.finish(browser.visit(browser.begin(), "ada", cancel=True)))
    state = browser.visit(browser.begin(), "ada")["state"]
    asked = {"state": state, "error": "temporarily_unavailable", "error_description": "come back later"}
    assert "temporarily_unavailable come back later" in refusal(browser.finish(asked))
    state = browser.visit(browser.begin(), "ada")["state"]
    assert "neither a code" in refusal(browser.finish({"state": state}))


def test_an_answer_of_another_provider_is_refused_before_its_code_is_sent_anywhere(browser: PersonsBrowser) -> None:
    back = browser.visit(browser.begin(), "ada")
    assert "of another provider" in refusal(browser.finish(back | {"issuer": "https://evil.example"}))


def test_a_code_that_was_made_up_is_refused(browser: PersonsBrowser) -> None:
    state = browser.visit(browser.begin(), "ada")["state"]
    assert "does not take the code" in refusal(browser.finish({"state": state, "code": "made-up"}))


def test_a_provider_that_left_the_file_meanwhile_signs_nobody_in(
    browser: PersonsBrowser, rules_file: Path, oidc: OidcProvider, service: RunningService
) -> None:
    back = browser.visit(browser.begin(), "ada")
    identity_file(rules_file, oidc, client_id="renamed", name="other")
    _wait_for_rules(service, "renamed")
    assert "names no such provider" in refusal(browser.finish(back))
    assert "names no such provider" in refusal(browser.begin())


@pytest.mark.rule("csrf-before-write")
@pytest.mark.parametrize("headers", [{"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "same-site"}])
def test_another_page_begins_and_finishes_no_sign_in(browser: PersonsBrowser, headers: dict[str, str]) -> None:
    http = browser.at_service
    begun = http.post("/v1/sign-ins", json={"provider": "corp"}, headers=headers)
    assert refusal(begun, "csrf_failed")
    assert SIGN_IN_COOKIE not in begun.cookies
    back = browser.visit(browser.begin(), "ada")
    assert refusal(http.post("/v1/sign-ins/finish", json=back, headers=headers), "csrf_failed")


def test_no_caller_says_where_a_sign_in_leads(browser: PersonsBrowser) -> None:
    http = browser.at_service
    asked = {"provider": "corp", "redirect_uri": "https://evil.example"}
    assert refusal(http.post("/v1/sign-ins", json=asked), "invalid_request")
    named = http.post("/v1/sign-ins", json={"provider": "corp"}, headers={"Host": "evil.example"})
    assert refusal(named, "host_not_allowed")


def test_behind_a_proxy_a_sign_in_comes_back_to_the_public_address_and_its_cookie_is_for_https_alone(
    tmp_path: Path, rules_file: Path
) -> None:
    settings = ServiceSettings(
        data_dir=tmp_path / "data", port=0, identity_file=rules_file, public_url="https://holdfast.example.org"
    )
    with running_service(settings) as service:
        http = service.http(token=None)
        page = {"Origin": "https://holdfast.example.org"}
        begun = http.post("/v1/sign-ins", json={"provider": "corp"}, headers=page)
        asked = parse_qs(urlsplit(answer(begun)["url"]).query)
        assert asked["redirect_uri"] == ["https://holdfast.example.org/ui/sign-in"]
        (kept,) = begun.headers.get_list("set-cookie")
        assert kept.startswith(f"__Host-{SIGN_IN_COOKIE}=")
        assert "Secure" in kept
        inside = http.post("/v1/sign-ins", json={"provider": "corp"}, headers={"Origin": "http://127.0.0.1"})
        assert inside.status_code == 403, "its browser would keep no cookie"


def test_a_provider_that_does_not_answer_keeps_nobody_with_a_token_out(tmp_path: Path) -> None:
    with oidc_provider() as gone:
        rules = identity_file(tmp_path / "gone.yaml", gone, READERS)
        with running_service(ServiceSettings(data_dir=tmp_path / "data", port=0, identity_file=rules)) as service:
            with PersonsBrowser(service, gone) as person:
                back = person.visit(person.begin(), "ada")
                gone.stop()
                assert refusal(person.finish(back), "identity_provider_unavailable")
            assert service.http(token=service.token()).post("/v1/sessions").status_code == 201


def test_who_guesses_is_made_to_wait(browser: PersonsBrowser, service: RunningService) -> None:
    service.app.state.failed_calls = FailedCalls(clock=lambda: 0.0)  # no failure is forgotten meanwhile
    codes = [browser.finish({"state": "guessed", "code": "guessed"}).json()["code"] for _ in range(25)]
    assert codes[0] == "sign_in_failed"
    assert codes[-1] == "too_many_failures"


# --- signing out a command


def test_a_token_of_an_identity_revokes_itself_and_no_other_token_does(
    service: RunningService, oidc: OidcProvider, browser: PersonsBrowser
) -> None:
    brought = {"subject_token": oidc.id_token("ada")}
    made = answer(service.http(token=None).post("/v1/tokens/exchange", json=brought))
    http = service.http(token=made["access_token"])
    assert answer(http.delete("/v1/tokens/current"))["revoked_at"] is not None
    assert http.get("/v1/service").status_code == 401
    assert "holdfast tokens revoke" in refusal(service.http().delete("/v1/tokens/current"), "forbidden")
    session = answer(browser.sign_in("ada"))
    by_cookie = browser.at_service.delete("/v1/tokens/current", headers={CSRF_HEADER: session["csrf_token"]})
    assert refusal(by_cookie, "forbidden")
