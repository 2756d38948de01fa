"""Every screen of the page on a catalog that has something on each: what it shows, that it calls nothing that fails,
that it is whole and axe finds nothing grave in light, in dark and on a phone, and what a person does with the keyboard.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest
from playwright.sync_api import Locator, Page, expect

from holdfast_protocol.states import Scope
from holdfast_service.background.registry import OPERATION_KINDS
from holdfast_service.operations.controller import reconcile
from tests.support.rank import Job, answer
from tests.support.service import RunningService
from tests.web.axe import grave_violations
from tests.web.chromium import BUSY_SECONDS
from tests.web.geometry import differences, faults_of_layout
from tests.web.screens import PHONE, heading, settled, state_of, tab_to, watch
from tests.web.seeded_catalog import SeededCatalog, trains

GPT = "demo/gpt@300#2"
SCREENS = [
    # address, heading, something that the catalog put there
    ("", "Overview", "Lost chunks"),
    ("?project=demo", "Overview", "The service took no samples in 3 hours of this time"),
    ("runs", "Runs", "bert"),
    ("runs/gpt?before=1&after=2&metric=loss", "gpt", "0.0005"),
    ("runs/bert", "bert", "corrupt"),
    ("checkpoints", "Checkpoints", "doctor, step 2"),
    ("checkpoints?find=demo/gpt@300%232", GPT, "Pin and holds"),
    ("checkpoints/{restore_point}", GPT, "holdfast checkpoints pull"),
    ("checkpoints/{diverged}", "demo/gpt@350#2", "diverged"),
    ("checkpoints/{trashed}", "demo/gpt@400#1", "of a branch that was left"),
    ("checkpoints/{whole}?part=tensors&tensor=sample/bytes", "demo/doctor@2#2", "uint8"),
    ("checkpoints/{corrupt}?part=copies", "demo/bert@40#1", "Bad copies, and whom they concern"),
    ("checkpoints/{corrupt}?part=history", "demo/bert@40#1", "corrupt"),
    ("checkpoints/{whole}/compare", "Compare demo/doctor@2#2", "the one before it"),
    ("checkpoints/{whole}/compare?with={whole_before}", "Compare demo/doctor@2#2", "Tensors by digest"),
    ("retention", "Retention and cost", "What is kept and what expires"),
    ("retention?run=gpt", "Retention and cost", "What is kept and what expires"),
    ("retention?kind=objectives", "Retention and cost", "RPO 1 h, RTO 15 min"),
    ("retention?view=prune&run=gpt&filter=%7B%22health%22%3A%5B%22diverged%22%5D%7D", "Retention and cost", "350"),
    ("retention?view=prune&filter=%7B%22health%22%3A%5B%22diverged%22%5D%7D", "Retention and cost", "350"),
    ("retention?view=trash", "Retention and cost", "gpt"),
    ("retention?view=trash&run=gpt", "Retention and cost", "of a branch that was left"),
    ("retention?view=usage", "Retention and cost", "By run, the dearest first"),
    ("storage?run=bert", "Storage", "Tiers of bert"),
    ("storage", "Storage", "Restored within (RTO)"),
    ("operations", "Controllers", "collect"),
    ("operations/long", "Long operations", "sweep"),
    ("operations/events", "Events", "checkpoint.committed"),
    ("operations/webhooks", "Webhooks", "hooks.example"),
    ("operations/tokens", "Tokens", "test train read"),
    ("operations/projects", "Projects", "demo"),
    ("operations/audit", "Audit", "checkpoint.trash"),
    ("operations/workers", "Workers", "Workers"),
]


@pytest.fixture(scope="module")
def seed(catalog: SeededCatalog) -> Callable[[RunningService], None]:
    return catalog.fill


@pytest.mark.parametrize(("address", "title", "shown"), SCREENS, ids=[each[0] or "overview" for each in SCREENS])
def test_a_link_opens_its_screen_for_everybody(
    screen: Callable[..., Page], address: str, title: str, shown: str
) -> None:
    page = screen(address)
    expect(heading(page, title)).to_be_visible()
    expect(page.locator("#content").get_by_text(shown).filter(visible=True).first).to_be_visible()
    settled(page)
    expect(page).to_have_title(f"{title} · Holdfast")
    expect(page.get_by_role("alert")).to_have_count(0)
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        expect(page.locator("html")).to_have_attribute("data-theme", theme)
        # What a theme changes is its colours: the rest is looked at once.
        assert not grave_violations(page, *(["color-contrast"] if theme == "dark" else [])), theme
    assert not differences(page)
    assert not faults_of_layout(page)
    page.set_viewport_size(PHONE)
    expect(heading(page, title)).to_be_visible()
    assert not faults_of_layout(page), "on a phone"
    assert not grave_violations(page), "on a phone"


def test_the_keyboard_alone_leads_through_the_page(screen: Callable[..., Page], catalog: SeededCatalog) -> None:
    page = screen("")
    page.keyboard.press("Tab")
    skip = page.get_by_role("link", name="Skip to the content")
    expect(skip).to_be_focused()
    expect(skip).to_be_in_viewport()
    page.keyboard.press("Enter")
    expect(page.locator("#content")).to_be_focused()
    page.reload()
    settled(page)
    tab_to(page, page.get_by_role("navigation", name="Screens").get_by_role("link", name="Runs"))
    page.keyboard.press("Enter")
    expect(heading(page, "Runs")).to_be_focused()
    tab_to(page, page.get_by_role("link", name="gpt"))
    page.keyboard.press("Enter")
    expect(heading(page, "gpt")).to_be_focused()
    tab_to(page, page.get_by_role("grid", name="Checkpoints"))
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    expect(page.get_by_role("navigation", name="Parts of the checkpoint")).to_be_visible()


def test_a_dialog_keeps_the_focus_and_escape_gives_it_back(screen: Callable[..., Page]) -> None:
    page = screen("checkpoints/{restore_point}")
    pin = page.get_by_role("button", name="Pin", exact=True)
    tab_to(page, pin)
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    assert not grave_violations(page)
    for _ in range(6):
        page.keyboard.press("Tab")
        assert page.evaluate(
            "() => [document.body, null].includes(document.activeElement) || !!document.activeElement.closest('dialog')"
        )
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    expect(pin).to_be_focused()


def test_no_key_closes_a_dialog_that_acts(screen: Callable[..., Page]) -> None:
    """A browser lets a page refuse the first Escape alone."""
    page = screen("checkpoints/{restore_point}")
    page.route("**/v1/checkpoints/*/pin", lambda _route: None)  # it never answers
    page.get_by_role("button", name="Pin", exact=True).click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Reason").fill("paper")
    with page.expect_request("**/pin"):
        dialog.get_by_role("button", name="Pin", exact=True).click()
    for _ in range(3):
        page.keyboard.press("Escape")
    expect(dialog).to_be_visible()
    expect(dialog.get_by_role("button", name="Cancel")).to_be_disabled()


def test_the_keyboard_brings_the_reason_of_a_control_below_the_fold(screen: Callable[..., Page]) -> None:
    page = screen("checkpoints/{deletable}", Scope.READ)
    page.set_viewport_size({"width": 900, "height": 320})
    settled(page)
    control = page.get_by_role("button", name="See what would go")
    expect(control).not_to_be_in_viewport()
    tab_to(page, control)
    expect(control).to_be_in_viewport()
    expect(page.get_by_role("tooltip").first).to_contain_text("has not the scope “operate”")
    page.keyboard.press("Escape")
    expect(page.get_by_role("tooltip")).to_have_count(0)


def test_an_older_checkpoint_is_proven_by_a_drill_of_it(
    screen: Callable[..., Page], service: RunningService, catalog: SeededCatalog
) -> None:
    page = screen("checkpoints/{whole_before}?part=copies")
    page.get_by_role("button", name="Start a drill").click()
    page.get_by_role("dialog").get_by_role("button", name="Start the drill").click()
    drills = page.get_by_role("list", name="Drills of this checkpoint")
    expect(drills).to_contain_text("from the primary store alone")
    reconcile(service.context, kinds=OPERATION_KINDS)
    expect(drills).to_contain_text("each byte verified")
    expect(drills).to_contain_text("behind step 2, the newest (RPO)")
    proven = answer(service.http().get("/v1/operations", params={"kind": "drill"}))["items"]
    assert [each["result"]["checkpoint_id"] for each in proven] == [catalog.whole_before]


def test_a_call_of_a_webhook_is_sent_again(screen: Callable[..., Page], service: RunningService) -> None:
    http = service.http()
    (hook,) = answer(http.get("/v1/projects/demo/webhooks"))["items"]
    call = answer(http.post(f"/v1/webhooks/{hook['id']}/test"))
    page = screen(f"operations/webhooks?webhook={hook['id']}")
    page.get_by_role("button", name=f"Send webhook.test {call['id']} again").click()
    expect(page.get_by_text(f"{call['id']} is sent again")).to_be_visible()
    newest = answer(http.get("/v1/audit-events", params={"limit": 1}))["items"][0]
    assert (newest["action"], newest["after"]["delivery"]) == ("webhook.redeliver", call["id"])


def test_the_overview_tells_of_other_projects(screen: Callable[..., Page], service: RunningService) -> None:
    Job(service.http(), "zeta/vit", create=True).end("failed", detail="out of memory")
    page = screen("")
    other = page.get_by_role("region", name="In other projects")
    expect(other).to_contain_text("out of memory")
    settled(page)
    assert not grave_violations(page)
    other.get_by_role("link", name="zeta/vit").click()
    expect(heading(page, "vit")).to_be_visible()


def test_a_checkpoint_goes_to_the_trash_by_its_count_and_comes_back(
    screen: Callable[..., Page], service: RunningService, catalog: SeededCatalog
) -> None:
    page = screen("checkpoints/{deletable}")
    page.get_by_role("button", name="See what would go").click()
    plan = page.get_by_role("status").filter(has_text="1 checkpoint goes to the trash")
    expect(plan).to_be_visible()
    assert state_of(service, catalog.deletable) == "committed"
    plan.get_by_role("button", name="Move to the trash").click()
    dialog = page.get_by_role("dialog")
    move = dialog.get_by_role("button", name="Move to the trash")
    expect(move).to_be_disabled()
    dialog.get_by_label("to go on").fill("2")
    expect(move).to_be_disabled()
    dialog.get_by_label("to go on").fill("1")
    dialog.get_by_label("Reason").fill("tried")
    move.click()
    expect(page.get_by_role("heading", name="In the trash")).to_be_visible()
    assert state_of(service, catalog.deletable) == "trashed"
    page.goto(f"{service.url}/ui/retention?project=demo&view=trash&run=bert")
    back = page.get_by_role("button", name="Take step 10 of attempt 1 of bert back")
    expect(back).to_be_visible()
    settled(page)
    back.click()
    expect(page.get_by_text("Nothing of this run is in the trash")).to_be_visible()
    assert state_of(service, catalog.deletable) == "committed"


@pytest.mark.parametrize(
    ("address", "control"),
    [
        ("checkpoints/{deletable}", "See what would go"),
        ("checkpoints/{deletable}", "Pin"),
        ("runs/bert", "Delete run"),
        ("retention?view=trash&run=gpt", "Take step 400 of attempt 1 of gpt back"),
        ("retention?view=trash", "Take step 400 of attempt 1 of gpt back"),
        ("storage", "Look for orphans"),
    ],
)
def test_a_reader_hears_why_a_control_is_not_for_this_token(
    screen: Callable[..., Page], address: str, control: str
) -> None:
    page = screen(address, Scope.READ)
    button = page.get_by_role("button", name=control, exact=True)
    expect(button).to_have_attribute("aria-disabled", "true")
    settled(page)
    button.hover()
    expect(page.get_by_role("tooltip").first).to_contain_text("has not the scope “operate”")
    button.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_a_reader_is_told_what_tokens_are_for(screen: Callable[..., Page]) -> None:
    page = screen("operations/tokens", Scope.READ)
    expect(page.get_by_text("Tokens: not for this token")).to_be_visible()


@pytest.mark.parametrize("address", ["", "runs", "storage?run=bert", "operations", "operations/workers"])
def test_a_projects_token_is_told_what_is_not_for_it_without_a_refused_call(
    refused: list[str], sign_in_as: Callable[[str], Page], service: RunningService, address: str
) -> None:
    page = sign_in_as(service.token(project="demo"))
    watch(page, service, faults=[], refused=refused)
    page.goto(f"{service.url}/ui/{address}")
    settled(page)
    expect(page.get_by_role("alert")).to_have_count(0)
    assert not refused


def test_a_tab_out_of_sight_holds_no_connection_and_misses_nothing(
    screen: Callable[..., Page], catalog: SeededCatalog
) -> None:
    page = screen("runs/gpt")
    page.evaluate(
        """() => {
        let sight = 'visible';
        Object.defineProperty(document, 'visibilityState', { configurable: true, get: () => sight });
        window.turn = to => { sight = to; document.dispatchEvent(new Event('visibilitychange')); };
        }"""
    )
    with page.expect_event("requestfailed", lambda request: "/v1/events/stream" in request.url):
        page.evaluate("() => window.turn('hidden')")
    trains(catalog.job, 406)
    catalog.job.save(405)
    with page.expect_request(lambda request: "/v1/events/stream" in request.url) as again:
        page.evaluate("() => window.turn('visible')")
    assert re.fullmatch(r"[0-9]+-[0-9]+", again.value.headers["last-event-id"])
    point = page.get_by_role("region", name="Restore point")
    expect(point.get_by_role("link", name="405", exact=True)).to_be_visible()


def test_a_commit_is_seen_without_a_reload(
    screen: Callable[..., Page], service: RunningService, catalog: SeededCatalog
) -> None:
    page = screen("runs/gpt")
    page.evaluate("() => { window.stays = true; }")
    trains(catalog.job, 411)
    catalog.job.save(410)
    point = page.get_by_role("region", name="Restore point")
    expect(point.get_by_role("link", name="410", exact=True)).to_be_visible()
    page.get_by_role("navigation", name="Screens").get_by_role("link", name="Overview").click()
    expect(heading(page, "Overview")).to_be_visible()
    live = page.get_by_role("grid", name="Runs")
    expect(live.get_by_role("gridcell", name="410", exact=True).last).to_be_visible()
    settled(page)
    catalog.job.save(420)
    expect(live.get_by_role("gridcell", name="420", exact=True).last).to_be_visible()
    assert page.evaluate("() => window.stays")


def test_the_curve_stands_over_the_attempts_on_the_same_steps_and_is_a_link(screen: Callable[..., Page]) -> None:
    page = screen("runs/gpt?from=100&to=400")
    expect(page.get_by_text("Not finite: nan at step 350.")).to_be_visible()
    curve = page.get_by_role("figure", name="loss over steps")
    expect(curve.locator(".u-over")).to_be_visible()
    # The timeline takes its steps' places from the plot, once that is drawn.
    deadline = time.monotonic() + BUSY_SECONDS
    while (drawn := edges(curve.locator(".u-over"))) != pytest.approx(edges_of_ticks(page), abs=1):
        assert time.monotonic() < deadline, (drawn, edges_of_ticks(page))
        page.wait_for_timeout(100)
    curve.get_by_text("loss over steps as a table").click()
    # The last column: what the first attempt had measured when the second one went back.
    for row in ("200 0.5 0.5 –", "210 0.28571 – 0.47619", "300 0.2 0.25 0.33333", "350 – – 0.28571"):
        expect(curve.get_by_role("row", name=row, exact=True)).to_be_visible()
    page.get_by_role("link", name="All steps").click()
    expect(curve.get_by_role("row", name="10 10 – –", exact=True)).to_be_visible()
    expect(page.get_by_text("greatest 10 at step 10.")).to_be_visible()  # and not 10^6, which is on no lineage
    # The words of its options belong to its name, for the label is around it.
    page.get_by_role("combobox", name=re.compile("^Metric")).first.select_option("lr")
    expect(page).to_have_url(re.compile("metric=lr"))
    page.reload()
    expect(page.get_by_role("figure", name="lr over steps")).to_be_visible()


def edges(element: Locator) -> list[float]:
    """Left and right, in px."""
    box = element.bounding_box()
    assert box is not None
    return [box["x"], box["x"] + box["width"]]


def edges_of_ticks(page: Page) -> list[float]:
    """Of the first and the last line of the timeline's axis, which are at the ends of its range."""
    ticks = page.get_by_test_id("timeline").locator("> g:not([data-attempt]) > line")
    found = ticks.evaluate_all("lines => lines.map(line => line.getBoundingClientRect().x)")
    return [min(found), max(found)]


def test_a_heartbeats_points_and_steps_come_without_a_reload(
    sign_in_as: Callable[[str], Page], service: RunningService, catalog: SeededCatalog
) -> None:
    page = sign_in_as(service.token())
    page.clock.install()
    page.goto(f"{service.url}/ui/runs/gpt?project=demo&metric=lr")
    settled(page)
    curve = page.get_by_role("figure", name="lr over steps")
    curve.get_by_text("lr over steps as a table").click()
    expect(curve.get_by_role("row", name="360 0.0004", exact=True)).to_be_visible()
    trains(catalog.job, 480, lr=[[480, 0.0003]])
    page.clock.fast_forward(31_000)
    expect(curve.get_by_role("row", name="480 0.0003", exact=True)).to_be_visible()
    lane = page.get_by_test_id("timeline").locator("[data-attempt='2']")
    expect(lane.get_by_text("Steps 201 to 480 are on the lineage")).to_be_attached()
