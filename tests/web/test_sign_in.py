"""Signing in to the page by a pasted token and by the link of `holdfast ui`; staying signed in, and signing out."""

from __future__ import annotations

import pytest
from playwright.sync_api import BrowserContext, Page, expect
from typer.testing import CliRunner

from holdfast_client.cli.main import app
from holdfast_protocol.service import SESSION_COOKIE
from holdfast_protocol.states import Scope
from holdfast_service.auth.principal import new_token_text, parse_token
from tests.support.rank import answer
from tests.support.service import RunningService
from tests.web.screens import settled


def paste(page: Page, token: str) -> None:
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Sign in").click()


def test_a_pasted_token_signs_in_until_the_person_signs_out(
    page: Page, context: BrowserContext, service: RunningService
) -> None:
    token = service.token(Scope.READ)
    page.goto(f"{service.url}/ui/")
    paste(page, token)
    expect(page.get_by_text("test read").first).to_be_visible()
    (cookie,) = context.cookies()
    assert (cookie["name"], cookie["httpOnly"], cookie["sameSite"]) == (SESSION_COOKIE, True, "Strict")
    kept = page.evaluate(
        "() => document.cookie + JSON.stringify({...localStorage}) + JSON.stringify({...sessionStorage})"
    )
    assert token not in kept
    assert "session_" not in kept
    page.reload()
    expect(page.get_by_text("test read").first).to_be_visible()
    page.locator("summary", has_text="test read").click()
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("Token")).to_be_visible()
    assert not context.cookies()
    page.reload()
    expect(page.get_by_label("Token")).to_be_visible()


def test_a_wrong_token_is_told_and_another_one_can_be_tried(page: Page, service: RunningService) -> None:
    page.goto(f"{service.url}/ui/")
    wrong = new_token_text()
    paste(page, wrong)
    expect(page.get_by_role("alert")).to_contain_text("not known")
    assert wrong not in page.content()
    paste(page, service.token(Scope.READ))
    expect(page.get_by_text("test read").first).to_be_visible()


def test_the_link_of_holdfast_ui_signs_in_without_a_typed_token(
    page: Page, context: BrowserContext, service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedded service leaves its token in a file, where the command finds it."""
    monkeypatch.setenv("HOLDFAST_URL", service.url)
    monkeypatch.setenv("HOLDFAST_DATA_DIR", str(service.context.settings.data_dir))
    done = CliRunner().invoke(app, ["ui", "--no-browser"])
    assert done.exit_code == 0, done.output
    link = done.stdout.strip()
    seen = []
    context.on("request", lambda request: seen.append(request.url))
    page.goto(link)
    expect(page.get_by_text("embedded").first).to_be_visible()
    code = link.partition("#code=")[2]
    assert code not in page.url
    assert not [url for url in seen if code in url.partition("#")[0]]
    assert page.evaluate("() => history.length") <= 2, "going back does not lead to the link"
    told = answer(service.http().get("/v1/audit-events", params={"action": "session.open", "limit": 1}))["items"]
    assert told[0]["after"]["by"] == "code"


def test_a_link_that_was_used_signs_nobody_else_in(page: Page, service: RunningService) -> None:
    code = answer(service.http().post("/v1/sign-in-codes"))["code"]
    assert service.http(token=code).post("/v1/sessions").status_code == 201
    page.goto(f"{service.url}/ui/#code={code}")
    expect(page.get_by_role("alert")).to_contain_text("holdfast ui")
    expect(page.get_by_label("Token")).to_be_visible()
    assert code not in page.url


def test_a_revoked_token_signs_its_pages_out_at_their_next_call(page: Page, service: RunningService) -> None:
    token = service.token(Scope.READ)
    page.goto(f"{service.url}/ui/runs")
    paste(page, token)
    expect(page.get_by_role("heading", level=1, name="Runs")).to_be_visible()
    settled(page)  # an event stream that opens after the token has gone would sign the page out under the click
    assert service.http().delete(f"/v1/tokens/{parse_token(token)[0]}").is_success
    page.get_by_role("navigation", name="Screens").get_by_role("link", name="Storage").click()
    expect(page.get_by_label("Token")).to_be_visible()
