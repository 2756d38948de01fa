"""Signing in to the page at a real provider, in a real browser: there, back, signed out; and every refusal in words."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from holdfast_protocol.service import SESSION_COOKIE, SIGN_IN_COOKIE
from holdfast_service.settings import ServiceSettings
from tests.support.oidc_provider import OidcProvider
from tests.support.people import READERS, TWO_PROJECTS, identity_file
from tests.support.service import RunningService


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, oidc: OidcProvider) -> ServiceSettings:
    folder = tmp_path_factory.mktemp("service")
    oidc.account("ada", "readers")
    oidc.account("bo", "both")
    oidc.account("nobody")
    rules = identity_file(folder / "identity.yaml", oidc, READERS, TWO_PROJECTS)
    return ServiceSettings(data_dir=folder, port=0, identity_file=rules)


@pytest.fixture(scope="module")
def seed() -> Callable[[RunningService], None]:
    def projects(service: RunningService) -> None:
        service.make_project("demo")
        service.make_project("other")

    return projects


@pytest.fixture
def page(context: BrowserContext) -> Page:
    # The provider's own pages ask for a font of another site.
    context.route(re.compile("googleapis"), lambda route: route.abort())
    return context.new_page()


def sign_in_at_provider(page: Page, login: str) -> None:
    page.get_by_role("button", name="Sign in with Corp").click()
    page.get_by_placeholder("Enter any login").fill(login)
    page.get_by_placeholder("and password").fill("any")
    page.get_by_role("button", name="Sign-in").click()
    page.get_by_role("button", name="Continue").click()


def test_a_person_signs_in_comes_back_to_the_same_screen_and_signs_out(
    page: Page, context: BrowserContext, service: RunningService
) -> None:
    page.goto(f"{service.url}/ui/runs?project=demo")
    sign_in_at_provider(page, "ada")
    expect(page.get_by_role("heading", level=1, name="Runs")).to_be_visible()
    expect(page).to_have_url(re.compile(rf"^{re.escape(service.url)}/ui/runs\?project=demo"))
    assert not re.search("code=|state=", page.url)
    kept = {each["name"]: each for each in context.cookies(service.url)}
    assert (kept[SESSION_COOKIE]["httpOnly"], kept[SESSION_COOKIE]["sameSite"]) == (True, "Strict")
    assert SIGN_IN_COOKIE not in kept
    page.reload()
    page.locator("summary", has_text="corp: ada").click()
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("Token")).to_be_visible()
    assert not [each for each in context.cookies(service.url) if each["name"] == SESSION_COOKIE]


def test_who_may_work_on_several_projects_chooses_one_and_gives_no_password_again(
    page: Page, service: RunningService
) -> None:
    page.goto(f"{service.url}/ui/")
    sign_in_at_provider(page, "bo")
    choice = page.get_by_role("region", name="Choose a project")
    expect(choice).to_contain_text("as bo@example.com (bo)")
    choice.get_by_role("button", name="other").click()
    page.get_by_role("button", name="Continue").click()  # of the provider, which asks again for a client without secret
    page.locator("summary", has_text="corp: bo").click()
    expect(page.get_by_text("Token corp: bo, other")).to_be_visible()


def test_a_person_without_a_grant_and_one_who_declines_read_why(page: Page, service: RunningService) -> None:
    page.goto(f"{service.url}/ui/")
    sign_in_at_provider(page, "nobody")
    expect(page.get_by_role("alert")).to_contain_text("You are signed in at Corp as nobody@example.com (nobody)")
    expect(page.get_by_role("alert")).to_contain_text("no rule gives it anything")
    page.context.clear_cookies()  # at the provider, too
    page.get_by_role("button", name="Sign in with Corp").click()
    page.get_by_role("link", name="[ Cancel ]").click()
    expect(page.get_by_role("alert")).to_contain_text("declined at Corp")
    expect(page.get_by_label("Token")).to_be_visible()


def test_a_callback_that_this_browser_has_not_begun_signs_nobody_in(page: Page, service: RunningService) -> None:
    page.goto(f"{service.url}/ui/sign-in?code=of-somebody-else&state=of-somebody-else")
    expect(page.get_by_role("alert")).to_contain_text("has begun no sign-in")
    expect(page).to_have_url(f"{service.url}/ui/")
