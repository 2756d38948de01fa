"""The web page in a real browser, before a real service.

browser      Chromium, for the tests of one file
seed         what the catalog holds: a file that wants more than nothing overrides it
service      a service on SQLite with the built page, for one file; `service.url` is where it listens
page         a page of the browser that nobody has signed in to
signed_in    one that is signed in with every scope; `sign_in_as` is for other tokens
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from holdfast_protocol.service import SESSION_COOKIE
from holdfast_service.settings import ServiceSettings
from tests.support.prepare import NotHereError
from tests.support.service import RunningService, running_service
from tests.support.signed_in import sign_in
from tests.web.built import built_page
from tests.web.chromium import chromium

expect.set_options(timeout=15_000)  # a busy machine


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Ends with the file: other tests of this process start event loops, and Playwright's would be in their way."""
    try:
        with chromium() as started:
            yield started
    except NotHereError as reason:
        # pip cannot install a browser, and no other part of Holdfast needs one.
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def page_folder() -> Path:
    return built_page()


@pytest.fixture(scope="module")
def seed() -> Callable[[RunningService], None]:
    return lambda _service: None


@pytest.fixture(scope="module")
def service(
    page_folder: Path, seed: Callable[[RunningService], None], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningService]:
    settings = ServiceSettings(data_dir=tmp_path_factory.mktemp("service"), port=0)
    with running_service(settings, page_folder=page_folder) as running:
        seed(running)
        yield running


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """A browser without cookies. The test fails if a page of it breaks the page's policy or has an error that nothing
    catches."""
    faults: list[str] = []
    with browser.new_context(locale="en-GB", timezone_id="UTC", reduced_motion="reduce") as made:
        made.on("weberror", lambda error: faults.append(str(error.error)))
        made.on("console", lambda said: faults.append(said.text) if "Content Security Policy" in said.text else None)
        yield made
    assert not faults


@pytest.fixture
def page(context: BrowserContext) -> Page:
    return context.new_page()


@pytest.fixture
def sign_in_as(context: BrowserContext, service: RunningService) -> Callable[[str], Page]:
    """From a token's text to a page that is signed in with it; it shows nothing yet."""

    def open_page(token: str) -> Page:
        cookie = sign_in(service, token).cookie
        context.add_cookies([{"name": SESSION_COOKIE, "value": cookie, "url": service.url, "httpOnly": True}])
        return context.new_page()

    return open_page


@pytest.fixture
def signed_in(sign_in_as: Callable[[str], Page], service: RunningService) -> Page:
    """Shows the page's first screen."""
    made = sign_in_as(service.token())
    made.goto(f"{service.url}/ui/")
    return made
