"""Overview: what needs somebody comes first, and each line leads to where one acts on it; then live runs and trends."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta

import pytest
from playwright.sync_api import Page, expect
from sqlalchemy import update

from holdfast_protocol.events import EventType
from holdfast_protocol.states import StoreRole
from holdfast_service.background.registry import OPERATION_KINDS
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Attempt, Checkpoint, Copy
from holdfast_service.events.announce import announce
from holdfast_service.operations.controller import reconcile
from tests.support.rank import Job, answer, digest_of
from tests.support.rot import attached, flip, key_of
from tests.support.service import RunningService
from tests.support.tallies import take_up
from tests.web.screens import command, figure, heading, part, row
from tests.web.seeded_catalog import seed_samples, trains

_LOST = b"the weights of spoiled at step 7"
TROUBLE = [
    # state, subject, the screen that it leads to
    ("corrupt", "Lost chunks", "Storage"),
    ("unavailable", "Store: primary", "Storage"),
    ("crash loop", "loops, step 200", "loops"),
    ("corrupt", "spoiled, step 7", "demo/spoiled@7#1"),
    ("stalled", "stuck", "stuck"),
    ("failed", "spoiled", "spoiled"),
    ("unprotected", "bare", "bare"),
    ("RPO missed", "Second store", "Storage"),
    ("drill failed", "Drill of spoiled", "Storage"),
    ("scrub late", "Scrub", "Controllers"),
    ("quota near", "Project demo", "Retention and cost"),
]


@pytest.fixture(scope="module")
def seed() -> Callable[[RunningService], None]:
    """Each kind of trouble, and a run that trains well."""

    def fill(service: RunningService) -> None:
        http = service.http()
        spoiled = Job(http, "demo/spoiled", create=True)
        spoiled_id = spoiled.save(7, content=_LOST)["id"]
        flip(attached(service, StoreRole.PRIMARY).store, key_of(service, _LOST))
        seen = {"digest": digest_of(_LOST), "problem": "mismatch"}
        answer(http.post(f"/v1/checkpoints/{spoiled_id}/chunk-reports", json=seen))
        spoiled.end("failed", detail="the loss is NaN", error_type="ValueError")
        _crash_loop(service)
        _stall(service)
        bare = Job(http, "demo/bare")
        bare.save(1, finite=False)
        trains(bare, 2)
        well = Job(http, "demo/well")
        well.save(50)
        trains(well, 60)
        tell_store(service, EventType.STORE_UNAVAILABLE, "the mount does not answer")
        _miss_objectives(service)
        seed_samples(service)
        take_up(service)
        found = answer(http.get("/v1/projects/demo"))
        quota = {"quota_bytes": int(found["quota_used_bytes"] / 0.95)}
        answer(http.put("/v1/projects/demo", json=quota, headers={"If-Match": found["etag"]}))

    return fill


def _crash_loop(service: RunningService) -> None:
    first = Job(service.http(), "demo/loops")
    for step in (100, 200):
        first.save(step)
    for number in range(1, 4):
        job = Job(service.http(), "demo/loops", after=number)
        job.resumed_from(job.opened["restore_point"]["checkpoint_id"])
        job.heartbeat(203)
        job.end("failed", error_type="RuntimeError")
    Job(service.http(), "demo/loops", after=4).end("finished")


def _stall(service: RunningService) -> None:
    """As the liveness controller marks it after half an hour, which no test waits for."""
    stuck = Job(service.http(), "demo/stuck")
    stuck.save(5)
    trains(stuck, 6)
    with service.context.database.transaction() as session:
        marked = update(Attempt).where(Attempt.launch_id == stuck.launch_id).values(stalled_at=database_now(session))
        session.execute(marked)


def _miss_objectives(service: RunningService) -> None:
    """As if an hour had passed since loops saved, and the days of a whole scrub since any byte was read."""
    http = service.http()
    objectives = {"document": {"rpo_seconds": 1800}}
    answer(http.put("/v1/projects/demo/policies/objectives", json=objectives))
    drill = {"selector": "latest", "store": "primary"}
    answer(http.post("/v1/projects/demo/runs/spoiled/drills", json=drill))
    assert reconcile(service.context, kinds=OPERATION_KINDS).failed == 1
    loops_id = answer(http.get("/v1/projects/demo/runs/loops"))["id"]
    with service.context.database.transaction() as session:
        now = database_now(session)
        saved = update(Checkpoint).where(Checkpoint.run_id == loops_id)
        session.execute(saved.values(committed_at=now - timedelta(hours=1)))
        late = timedelta(days=service.context.settings.scrub_days + 2)
        session.execute(update(Copy).where(Copy.verified_at.is_not(None)).values(verified_at=now - late))


def tell_store(service: RunningService, event: EventType, reason: str) -> None:
    """As a process tells it that has had no answer from the primary store for long, or has one again."""
    with service.context.database.transaction() as session:
        now = database_now(session)
        announce(session, event, None, now, project_id=None, store=StoreRole.PRIMARY, reason=reason)


def test_what_needs_somebody_comes_first_and_leads_to_where_one_acts(
    screen: Callable[..., Page], refused: list[str]
) -> None:
    page = screen("?project=demo")
    headings = page.get_by_role("heading", level=2)
    expect(headings).to_have_text(["Needs attention", "Live runs", "Bytes and cost", "The last week"])
    lines = part(page, "Needs attention").get_by_role("listitem")
    expect(lines).to_have_count(len(TROUBLE))
    for at, (state, subject, _) in enumerate(TROUBLE):
        expect(lines.nth(at)).to_contain_text(state)
        expect(lines.nth(at).get_by_role("link")).to_have_text(subject)
    expect(lines.nth(2)).to_contain_text("Attempts 2, 3, 4 crashed from step 200")
    expect(lines.nth(7)).to_contain_text("1 run with states that lack a copy")
    expect(lines.nth(7)).to_contain_text("of 30 min. The service has no second store.")
    expect(lines.nth(8)).to_contain_text("From the primary store alone: demo/spoiled has nothing")
    expect(lines.nth(9)).to_contain_text("again 2 d")
    for at, (_, _, leads_to) in enumerate(TROUBLE):
        lines.nth(at).get_by_role("link").click()
        expect(heading(page, leads_to)).to_be_visible()
        page.go_back()
        expect(lines).to_have_count(len(TROUBLE))
    assert {each.split()[0] for each in refused} <= {"404", "422"}, "there are few policies, and few saves to forecast"
    refused.clear()


def test_live_runs_show_the_age_of_their_restore_point_and_goodput(screen: Callable[..., Page]) -> None:
    page = screen("?project=demo")
    live = part(page, "Live runs")
    expect(live.get_by_role("columnheader")).to_contain_text(["Run", "Restore point", "Its age", "Goodput"])
    well = row(live, "Runs", "well")
    expect(well.get_by_role("gridcell", name="50", exact=True)).to_be_visible()
    expect(well.locator("time")).to_contain_text(" s")
    expect(well).to_contain_text(re.compile("%|unknown"))
    expect(row(live, "Runs", "bare").get_by_text("none").first).to_be_attached()
    expect(row(live, "Runs", "spoiled")).to_have_count(0)


def test_bytes_cost_and_the_trends_of_a_week_are_told_in_words_lines_and_tables(screen: Callable[..., Page]) -> None:
    page = screen("?project=demo")
    figures = part(page, "Bytes and cost")
    expect(figure(figures, "Stored, in all stores")).to_contain_text("B")
    expect(figure(figures, "Per month, as stored now")).to_contain_text("USD")
    figures.get_by_text(re.compile("^Prices as of")).click()
    used = figures.get_by_role("list", name="Prices of a GiB and month")
    expect(used).to_contain_text("The primary store (posix, the default class)")
    expect(figures.get_by_text("These are the defaults.")).to_be_visible()
    assert command(page, "the command that puts the prices") == "holdfast prices put --file prices.json"
    week = part(page, "The last week")
    for title, told in (("Goodput", "% of the time"), ("Stored bytes", "GiB"), ("Cost a month", "USD")):
        drawn = week.get_by_role("figure", name=title, exact=True)
        expect(drawn.locator("canvas")).to_be_attached()
        expect(week.get_by_text(told).first).to_be_visible()
        drawn.get_by_text(f"{title} as a table").click()
        expect(drawn.get_by_role("table", name=title).get_by_role("row")).not_to_have_count(0)


def test_a_store_that_is_back_leaves_the_list_without_a_reload(
    screen: Callable[..., Page], service: RunningService
) -> None:
    page = screen("?project=demo")
    away = part(page, "Needs attention").get_by_role("link", name="Store: primary")
    expect(away).to_be_visible()
    tell_store(service, EventType.STORE_AVAILABLE, "")
    expect(away).to_have_count(0)
