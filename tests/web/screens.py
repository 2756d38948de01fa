"""What tests ask of a screen of the page, in the words of a reader: headings, parts, tables, and where the focus is."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import BrowserContext, Locator, Page, Response, expect

from holdfast_protocol.service import SESSION_COOKIE
from tests.support.rank import answer
from tests.support.service import RunningService
from tests.support.signed_in import sign_in

PHONE = {"width": 390, "height": 844}


def let_in(context: BrowserContext, service: RunningService, token: str) -> None:
    """Its pages are signed in with the token, from the first one on."""
    cookie = sign_in(service, token).cookie
    context.add_cookies([{"name": SESSION_COOKIE, "value": cookie, "url": service.url, "httpOnly": True}])


def settled(page: Page) -> None:
    """Nothing is being loaded, and what changes from now on is seen."""
    expect(page.get_by_role("status").filter(has_text=re.compile("^Live$"))).to_be_visible()
    expect(page.get_by_role("status").filter(has_text=re.compile("^Loading"))).to_have_count(0)


def heading(page: Page, text: str) -> Locator:
    """The screen's own."""
    return page.get_by_role("heading", level=1, name=text, exact=True)


def part(page: Page, name: str) -> Locator:
    """A part of a screen, by its heading."""
    return page.get_by_role("region", name=name, exact=True)


def row(inside: Page | Locator, table: str, *texts: str) -> Locator:
    """Of a grid: the row that has these texts."""
    found = inside.get_by_role("grid", name=table, exact=True).get_by_role("row")
    for text in texts:
        found = found.filter(has_text=text)
    return found


def figure(inside: Page | Locator, name: str) -> Locator:
    """What stands under a name in a list of figures or facts."""
    page = inside.page if isinstance(inside, Locator) else inside
    term = page.locator("dt", has_text=re.compile(f"^{re.escape(name)}$"))
    return inside.locator("dl > div").filter(has=term).locator("dd")


def command(page: Page, label: str) -> str:
    """Copies a command by its button; what the clipboard has then."""
    page.get_by_role("button", name=f"Copy: {label}", exact=True).click()
    expect(page.get_by_role("status").filter(has_text=re.compile("^Copied$"))).not_to_have_count(0)
    return str(page.evaluate("() => navigator.clipboard.readText()"))


def tab_to(page: Page, wanted: Locator) -> None:
    """Presses Tab until it has the focus."""
    expect(wanted).to_be_visible()
    for _ in range(150):
        if wanted.evaluate("it => it === document.activeElement"):
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"Tab does not lead to {wanted}")


def checkpoint(service: RunningService, checkpoint_id: str) -> dict[str, Any]:
    found: dict[str, Any] = answer(service.http().get(f"/v1/checkpoints/{checkpoint_id}"))
    return found


def state_of(service: RunningService, checkpoint_id: str) -> str:
    return str(checkpoint(service, checkpoint_id)["state"])


def audited(service: RunningService, action: str) -> list[dict[str, Any]]:
    """The newest first."""
    found: list[dict[str, Any]] = answer(service.http().get("/v1/audit-events", params={"action": action}))["items"]
    return found


def watch(page: Page, service: RunningService, *, faults: list[str], refused: list[str]) -> None:
    """Writes down what no page may do (break its policy, throw what nothing catches, call what is not public), and the
    calls that the service did not do."""
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda said: faults.append(said.text) if "Content Security Policy" in said.text else None)

    def note(reply: Response) -> None:
        url = urlsplit(reply.url)
        if f"{url.scheme}://{url.netloc}" != service.url or not is_public(service, url.path):
            faults.append(f"It calls {reply.request.method} {reply.url}")
        if url.path.startswith("/v1/") and reply.status >= 400:
            refused.append(f"{reply.status} {reply.request.method} {reply.url}")

    page.on("response", note)


def is_public(service: RunningService, path: str) -> bool:
    """Of the page's own files, in the OpenAPI document, or where a ticket for a chunk leads."""
    return path.startswith(("/ui/", "/v1/objects/")) or any(
        each.fullmatch(path) for each in _routes(service.app.openapi)
    )


@cache
def _routes(document: Callable[[], dict[str, Any]]) -> list[re.Pattern[str]]:
    return [re.compile(re.sub(r"\\{[^}]*\\}", "[^/]+", re.escape(path))) for path in document()["paths"]]
