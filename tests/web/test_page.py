"""What holds on every screen: moments in the reader's time, the theme that was chosen, tables of however many rows."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from playwright.sync_api import Browser, Page, expect
from sqlalchemy import insert, select

from holdfast_service.db.tables.core import Checkpoint
from tests.support.rank import Job
from tests.support.service import RunningService
from tests.web.chromium import new_context
from tests.web.geometry import faults_of_layout
from tests.web.screens import PHONE, checkpoint, figure, heading, let_in, part, settled, tab_to

_ABORTED = 505
_PAGE = 100
_COUNT_READS_OF_THE_SYSTEMS_THEME = """
window.readsOfTheme = 0;
const { get } = Object.getOwnPropertyDescriptor(MediaQueryList.prototype, "matches");
Object.defineProperty(MediaQueryList.prototype, "matches", {
  get() { window.readsOfTheme += this.media.includes("prefers-color-scheme"); return get.call(this); },
});
"""


@pytest.fixture(scope="module")
def saved() -> list[str]:
    """The one committed checkpoint of demo/long."""
    return []


@pytest.fixture(scope="module")
def seed(saved: list[str]) -> Callable[[RunningService], None]:
    def fill(service: RunningService) -> None:
        """A run of many saves: rows alone, which is what a table reads."""
        saved.append(Job(service.http(), "demo/long", create=True).save(1000)["id"])
        with service.context.database.transaction() as session:
            row = dict(session.execute(select(*Checkpoint.__table__.c)).mappings().one())
            row |= {"state": "aborted", "aborted_at": row["created_at"], "committed_at": None, "digest": None}
            rows = [row | {"id": f"ck_{step:032x}", "step": step} for step in range(1, _ABORTED + 1)]
            session.execute(insert(Checkpoint), rows)

    return fill


def test_moments_are_the_readers_own_and_utc_on_hover_and_focus(
    browser: Browser, service: RunningService, saved: list[str]
) -> None:
    with new_context(browser, timezone_id="Asia/Tokyo") as tokyo:
        let_in(tokyo, service, service.token())
        page = tokyo.new_page()
        page.goto(f"{service.url}/ui/checkpoints/{saved[0]}")
        at = datetime.fromisoformat(checkpoint(service, saved[0])["committed_at"])
        moment = figure(part(page, "What it is"), "Committed").locator("time")
        expect(moment).to_contain_text(f"{at.astimezone(ZoneInfo('Asia/Tokyo')):%H:%M:%S}")
        utc = f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
        settled(page)
        moment.hover()
        expect(page.get_by_role("tooltip").first).to_have_text(utc)
        page.keyboard.press("Escape")
        expect(page.get_by_role("tooltip")).to_have_count(0)
        tab_to(page, moment)
        expect(page.get_by_role("tooltip").first).to_have_text(utc)


def test_a_chosen_theme_stays_and_else_the_systems_is_followed(signed_in: Page) -> None:
    shown = signed_in.locator("html")
    for theme in ("dark", "light"):
        signed_in.emulate_media(color_scheme=theme)
        expect(shown).to_have_attribute("data-theme", theme)
    signed_in.get_by_role("button", name="Show the page dark").click()
    expect(shown).to_have_attribute("data-theme", "dark")
    signed_in.reload()
    expect(signed_in.get_by_role("button", name="Show the page light")).to_be_visible()
    expect(shown).to_have_attribute("data-theme", "dark")
    signed_in.emulate_media(color_scheme="dark")
    signed_in.get_by_role("button", name="Show the page light").click()
    expect(shown).to_have_attribute("data-theme", "light")


def test_the_page_reads_the_systems_theme_once_and_then_listens(signed_in: Page) -> None:
    """Chromium sends no event of a change that was read before it. A page that reads while it draws stays as it was."""
    signed_in.add_init_script(_COUNT_READS_OF_THE_SYSTEMS_THEME)
    signed_in.reload()
    signed_in.get_by_role("link", name="Runs").click()
    expect(heading(signed_in, "Runs")).to_be_visible()
    assert signed_in.evaluate("window.readsOfTheme") == 1


def test_a_long_table_has_the_rows_in_sight_alone_and_reads_page_after_page(screen: Callable[..., Page]) -> None:
    page = screen("runs/long")
    listed = part(page, "Checkpoints")
    table = listed.get_by_role("grid", name="Checkpoints")
    rows = table.get_by_role("row")
    count = listed.get_by_role("status").last
    expect(count).to_have_text(f"{_PAGE} loaded; scroll for more")
    expect(table).to_have_attribute("aria-rowcount", "-1")
    table.focus()
    for read in range(2 * _PAGE, _ABORTED, _PAGE):
        with page.expect_request(re.compile(r"/checkpoints\?.*cursor=")):
            page.keyboard.press("End")
        expect(count).to_have_text(f"{read} loaded; scroll for more")
        assert rows.count() < _PAGE
    page.keyboard.press("End")
    expect(count).to_have_text(f"{_ABORTED + 1} in all")
    page.keyboard.press("End")
    expect(table.get_by_role("gridcell", name="1", exact=True)).to_be_in_viewport()
    expect(table).to_have_attribute("aria-rowcount", str(_ABORTED + 2))
    assert rows.count() < _PAGE
    page.keyboard.press("Home")
    expect(table.get_by_role("gridcell", name="1,000", exact=True)).to_be_in_viewport()
    page.keyboard.press("Enter")
    expect(heading(page, "demo/long@1000#1")).to_be_visible()


def test_a_row_that_is_scrolled_to_by_hand_is_read_too(screen: Callable[..., Page]) -> None:
    page = screen("runs/long")
    table = part(page, "Checkpoints").get_by_role("grid", name="Checkpoints")
    expect(table.get_by_role("gridcell", name="1,000", exact=True)).to_be_visible()
    with page.expect_request(re.compile(r"/checkpoints\?.*limit=100.*cursor=|/checkpoints\?.*cursor=.*limit=100")):
        table.evaluate("it => { it.scrollTop = it.scrollHeight; }")
    expect(table.get_by_role("gridcell", name="1,000", exact=True)).to_have_count(0)


def test_a_phone_leads_from_overview_to_a_checkpoint_and_its_dialogs(screen: Callable[..., Page]) -> None:
    page = screen("")
    page.set_viewport_size(PHONE)
    settled(page)
    page.get_by_role("link", name="long").first.click()
    expect(heading(page, "long")).to_be_visible()
    settled(page)
    part(page, "Restore point").get_by_role("link", name="1,000").click()
    expect(heading(page, "demo/long@1000#1")).to_be_visible()
    settled(page)
    page.get_by_role("button", name="Hold").click()
    expect(page.get_by_role("dialog")).to_be_in_viewport(ratio=1)
    assert not faults_of_layout(page)
