"""The web page in a real browser, before a real service.

browser      Chromium, for the tests of one file
seed         what the catalog holds: a file that wants more than nothing overrides it, for example with `catalog.fill`
settings     of the service: a file that wants others overrides it
service      a service on SQLite with the built page, for one file; `service.url` is where it listens
screen       opens an address of the page, signed in; the pages of a file share what the browser has loaded
page         a page of a fresh browser that nobody has signed in to
signed_in    one that is signed in with every scope; `sign_in_as` is for other tokens
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from holdfast_protocol.states import Scope
from holdfast_service.settings import ServiceSettings
from holdfast_service.ui.endpoints import BUILT_INTO
from tests.support.prepare import NotHereError, prepare
from tests.support.service import RunningService, running_service
from tests.web.chromium import BUSY_SECONDS, chromium, new_context
from tests.web.screens import let_in, settled, watch
from tests.web.seeded_catalog import SeededCatalog

expect.set_options(timeout=1000 * BUSY_SECONDS)


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
    """What the service serves, as scripts/prepare-web builds it."""
    try:
        prepare("web", "web", sys.prefix)
    except NotHereError as missing:
        # pip cannot install Node.js, and the service runs without a page.
        pytest.skip(str(missing))
    return BUILT_INTO


@pytest.fixture(scope="module")
def catalog() -> SeededCatalog:
    """Empty, unless `seed` fills it."""
    return SeededCatalog()


@pytest.fixture(scope="module")
def seed() -> Callable[[RunningService], None]:
    return lambda _service: None


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> ServiceSettings:
    return ServiceSettings(data_dir=tmp_path_factory.mktemp("service"), port=0)


@pytest.fixture(scope="module")
def service(
    page_folder: Path, seed: Callable[[RunningService], None], settings: ServiceSettings
) -> Iterator[RunningService]:
    with running_service(settings, page_folder=page_folder) as running:
        seed(running)
        yield running


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """A browser without cookies. The test fails if a page of it breaks the page's policy or has an error that nothing
    catches."""
    faults: list[str] = []
    with new_context(browser) as made:
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
        let_in(context, service, token)
        return context.new_page()

    return open_page


@pytest.fixture
def signed_in(sign_in_as: Callable[[str], Page], service: RunningService) -> Page:
    """Shows the page's first screen."""
    made = sign_in_as(service.token())
    made.goto(f"{service.url}/ui/")
    return made


@pytest.fixture
def refused() -> Iterator[list[str]]:
    """The calls of the page that the service did not do. A test takes out those that it expects."""
    calls: list[str] = []
    yield calls
    assert not calls


@pytest.fixture(scope="module")
def contexts(browser: Browser, service: RunningService) -> Iterator[Callable[..., BrowserContext]]:
    """A browser that is signed in with these scopes, or with all. The tests of a file share it."""
    made: dict[tuple[Scope, ...], BrowserContext] = {}
    with ExitStack() as stack:

        def signed_in_with(*scopes: Scope) -> BrowserContext:
            if scopes not in made:
                made[scopes] = stack.enter_context(new_context(browser))
                let_in(made[scopes], service, service.token(*scopes))
            return made[scopes]

        yield signed_in_with


@pytest.fixture
def screen(
    contexts: Callable[..., BrowserContext], refused: list[str], service: RunningService, catalog: SeededCatalog
) -> Iterator[Callable[..., Page]]:
    """Opens an address of the page, signed in with these scopes, or with all; its braces are fields of the catalog.
    The page is settled: a click may miss what still moves. The test fails if the page does what no page may do
    (tests/web/screens.py)."""
    faults: list[str] = []
    with ExitStack() as stack:

        def open_screen(address: str, *scopes: Scope) -> Page:
            page = stack.enter_context(contexts(*scopes).new_page())
            watch(page, service, faults=faults, refused=refused)
            page.goto(f"{service.url}/ui/{address.format_map(vars(catalog))}")
            settled(page)
            return page

        yield open_screen
        told = refused.copy()
    refused[:] = told  # what was under way when the test had ended is no call of the test
    assert not faults
