"""Five tasks of an operator, each from Overview with at most four clicks. A choice in a select is a click; typing is
none, and neither is the Enter that ends it."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from playwright.sync_api import Locator, Page, expect

from holdfast_service.background.registry import OPERATION_KINDS
from holdfast_service.operations.controller import reconcile
from tests.support.rank import Job, answer
from tests.support.service import RunningService
from tests.web.screens import settled
from tests.web.seeded_catalog import SeededCatalog, trains

MOST_CLICKS = 4


class Walk:
    """Clicks, and counts the clicks. The page is settled then: a click may miss what still moves."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.clicks = 0

    def click(self, target: Locator) -> None:
        self.clicks += 1
        assert self.clicks <= MOST_CLICKS
        expect(target).to_be_visible()
        settled(self.page)
        target.click()

    def screen(self, name: str) -> None:
        self.click(self.page.get_by_role("navigation", name="Screens").get_by_role("link", name=name, exact=True))

    def live_run(self, name: str) -> None:
        self.click(self.page.get_by_role("grid", name="Runs").get_by_role("link", name=name, exact=True))


@pytest.fixture(scope="module")
def catalog() -> SeededCatalog:
    return SeededCatalog()


@pytest.fixture(scope="module")
def seed(catalog: SeededCatalog) -> Callable[[RunningService], None]:
    """The catalog; demo/doctor, whose tensors are real, is live too, and has a metric."""

    def fill(service: RunningService) -> None:
        catalog.fill(service)
        http = service.http()
        for checkpoint, loss in ((catalog.whole_before, 0.25), (catalog.whole, 0.75)):
            metrics = {"metrics": {"loss": {"value": loss}}}
            answer(http.patch(f"/v1/checkpoints/{checkpoint}", json=metrics, headers={"If-Match": "*"}))
        trains(Job(http, "demo/doctor", after=2), 3)

    return fill


@pytest.fixture
def walk(signed_in: Page) -> Walk:
    settled(signed_in)
    return Walk(signed_in)


def test_why_a_run_resumed_so_many_steps_back(walk: Walk) -> None:
    walk.live_run("gpt")
    drawn = walk.page.get_by_test_id("timeline")
    expect(drawn).to_contain_text("Attempt 1: failed at step 450")
    expect(drawn).to_contain_text("Attempt 2 resumed from step 200")
    attempts = walk.page.get_by_role("grid", name="Attempts").get_by_role("row")
    expect(attempts.filter(has_text="killed by signal 9")).to_be_visible()
    expect(attempts.filter(has_text="200 #1")).to_be_visible()


def test_bytes_are_freed_safely(walk: Walk) -> None:
    page = walk.page
    walk.screen("Retention and cost")
    walk.click(page.get_by_role("link", name="Usage and cost", exact=True))
    walk.click(page.get_by_role("link", name="Prune bert", exact=True))
    page.get_by_label("Before step").fill("20")
    page.get_by_label("Before step").press("Enter")
    move = page.get_by_role("button", name="Move 1 to the trash")
    expect(page.get_by_text("by the collection after their purge")).to_be_visible()
    walk.click(move)
    expect(page.get_by_role("dialog").get_by_label("to go on")).to_be_focused()
    page.keyboard.type("1")
    page.keyboard.press("Enter")
    done = page.get_by_role("status").filter(has_text="1 checkpoint went to the trash.")
    expect(done).to_contain_text("can be taken back until")


def test_last_weeks_best_is_proven_restorable(walk: Walk, service: RunningService, catalog: SeededCatalog) -> None:
    page = walk.page
    walk.live_run("doctor")
    since = page.get_by_label("Committed from")
    since.fill((datetime.now(UTC) - timedelta(days=7)).date().isoformat())
    since.press("Enter")
    expect(page).to_have_url(re.compile("since="))
    best = page.get_by_text(re.compile("^Least loss"))
    expect(best).to_contain_text("0.25 at step 1 #1; greatest: 0.75 at step 2 #2")
    walk.click(best.get_by_role("link", name="step 1 #1"))
    walk.click(page.get_by_role("button", name="Drill", exact=True))
    walk.click(page.get_by_role("dialog").get_by_role("button", name="Start the drill"))
    drills = page.get_by_role("list", name="Drills of this checkpoint")
    expect(drills).to_contain_text("from the primary store alone")
    reconcile(service.context, kinds=OPERATION_KINDS)
    expect(drills).to_contain_text("each byte verified")
    proven = answer(service.http().get("/v1/operations", params={"kind": "drill"}))["items"]
    assert [each["result"]["checkpoint_id"] for each in proven] == [catalog.whole_before]


def test_who_deleted_what(walk: Walk) -> None:
    page = walk.page
    walk.screen("Operations")
    walk.click(page.get_by_role("navigation", name="Operations").get_by_role("link", name="Audit"))
    walk.click(page.get_by_label("Deletions only"))
    told = page.get_by_role("grid", name="Audit events").get_by_role("row")
    trashed = told.filter(has_text="of a branch that was left")
    expect(trashed).to_contain_text("checkpoint.trash")
    expect(trashed).to_contain_text("gpt, step 400")
    expect(told.filter(has_text="project.create")).to_have_count(0)


def test_the_trash_leads_to_who_put_a_checkpoint_there(walk: Walk) -> None:
    page = walk.page
    walk.screen("Retention and cost")
    walk.click(page.get_by_role("link", name="Trash", exact=True))
    walk.click(page.get_by_role("link", name="Who moved step 400 of attempt 1 to the trash"))
    changes = page.get_by_role("region", name="Who changed what")
    expect(changes).to_contain_text("checkpoint trash, because of a branch that was left")


def test_which_run_costs_most(walk: Walk) -> None:
    page = walk.page
    walk.screen("Retention and cost")
    walk.click(page.get_by_role("link", name="Usage and cost", exact=True))
    expect(page.get_by_role("heading", name="By run, the dearest first")).to_be_visible()
    dearest = page.get_by_role("grid", name="Runs and their costs").get_by_role("row").nth(1)
    expect(dearest).to_contain_text("doctor")
