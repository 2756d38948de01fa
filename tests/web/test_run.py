"""A run: its attempts over steps with the metric above, the restore point and why nothing newer, and what differs."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.support.rank import Job, answer
from tests.support.service import RunningService
from tests.web.axe import grave_violations
from tests.web.screens import audited, command, figure, heading, part, row, settled, state_of
from tests.web.seeded_catalog import SeededCatalog, trains


@pytest.fixture(scope="module")
def seed(catalog: SeededCatalog) -> Callable[[RunningService], None]:
    def fill(service: RunningService) -> None:
        catalog.fill(service)
        first = Job(service.http(), "demo/back")
        kept = [first.save(step) for step in (10, 20, 30)]
        trains(first, 35)
        again = Job(service.http(), "demo/back", after=1, rolls_back=1)
        again.resumed_from(kept[0]["id"], rollback=True)
        again.save(15)
        over = Job(service.http(), "demo/over")
        for step in (1, 2):
            over.save(step)
        over.end("finished")

    return fill


def drawn(page: Page, *titles: str) -> None:
    """The timeline has these signs: each says in words what it shows."""
    for title in titles:
        expect(page.get_by_test_id("timeline").locator("title", has_text=re.compile(f"^{title}$"))).to_have_count(1)


def attempt(page: Page, number: int) -> Locator:
    """Its row in the table of attempts."""
    return row(page, "Attempts").filter(has=page.get_by_role("link", name=f"#{number}", exact=True))


def test_lanes_show_saves_kills_lost_steps_and_the_lineage(screen: Callable[..., Page]) -> None:
    page = screen("runs/gpt")
    drawn(
        page,
        "Attempt 1: failed at step 450. killed by signal 9",
        "Steps 1 to 200 are on the lineage",
        "Steps 201 to 450 are lost: 250",
        "Step 100: committed",
        "Step 400: deleted",
        "Attempt 2 resumed from step 200",
        "Steps 201 to 360 are on the lineage",
        "Step 300: restore point",
        "Step 350: unhealthy",
    )
    killed = attempt(page, 1)
    expect(killed).to_contain_text("failed")
    expect(killed).to_contain_text("250")
    expect(killed).to_contain_text("SIGKILL: killed by signal 9")
    expect(attempt(page, 2).get_by_role("link", name="200 #1")).to_be_visible()
    signs = page.get_by_role("list", name="Signs of the timeline")
    expect(signs).to_contain_text("lost steps")


def test_a_rollback_is_told_from_a_kill(screen: Callable[..., Page]) -> None:
    page = screen("runs/back")
    drawn(
        page, "Attempt 1: rolled back at step 35.*", "Steps 11 to 35 are lost: 25", "Attempt 2 rolled back to step 10"
    )
    expect(attempt(page, 1)).to_contain_text("rolled back")


def test_a_sign_of_the_timeline_opens_its_checkpoint(screen: Callable[..., Page]) -> None:
    page = screen("runs/gpt")
    sign = page.get_by_test_id("timeline").locator("a", has=page.locator("title", has_text="Step 250: committed"))
    sign.locator("circle").first.click(force=True)
    expect(heading(page, "demo/gpt@250#2")).to_be_visible()


def test_the_restore_point_says_why_nothing_newer_is_one(screen: Callable[..., Page], catalog: SeededCatalog) -> None:
    page = screen("runs/gpt")
    point = part(page, "Restore point")
    expect(figure(point, "Step")).to_have_text("300")
    skipped = point.get_by_role("table").locator("tbody tr")
    expect(skipped).to_contain_text(["trashed", "diverged"])
    pull = command(page, "the command that fetches the restore point")
    assert pull == f"holdfast checkpoints pull demo/gpt@{catalog.restore_point} ./step-300"


def test_two_attempts_are_compared_by_configuration_and_environment(screen: Callable[..., Page]) -> None:
    page = screen("runs/gpt")
    compared = part(page, "Differences between attempts")
    cells(compared, "Configuration that differs", ["optimizer.lr", "0.001", "0.0005"])
    cells(compared, "Environment that differs", ["host", "node-1", "node-2"], ["torch", "2.7", "2.8"])
    compared.get_by_label("Attempt", exact=True).fill("2")
    compared.get_by_label("with attempt").fill("1")
    compared.get_by_role("button", name="Compare").click()
    cells(compared, "Configuration that differs", ["optimizer.lr", "0.0005", "0.001"])
    for each in ("before=2", "after=1"):
        expect(page).to_have_url(re.compile(rf"[?&]{each}(&|$)"))


def cells(inside: Locator, table: str, *rows: list[str]) -> None:
    found = inside.get_by_role("table", name=table).locator("tbody tr")
    expect(found).to_have_count(len(rows))
    for at, texts in enumerate(rows):
        expect(found.nth(at).locator("th, td")).to_have_text(texts)


def test_the_metric_stands_over_the_same_steps_and_the_steps_can_be_narrowed(screen: Callable[..., Page]) -> None:
    page = screen("runs/gpt")
    over = part(page, "Attempts over steps")
    expect(over.get_by_role("combobox", name=re.compile("^Metric"))).to_have_value("loss")
    curve = over.get_by_role("figure", name="loss over steps")
    expect(curve.locator("canvas")).to_be_attached()
    curve.get_by_text("loss over steps as a table").click()
    expect(curve.get_by_role("row", name=re.compile("^300"))).to_contain_text("0.25")
    expect(curve.get_by_role("columnheader", name="loss, attempt 1, not on the lineage")).to_be_visible()
    expect(curve.get_by_role("row", name=re.compile("^440"))).to_contain_text("1000000")
    over.get_by_label("Steps from").fill("250")
    over.get_by_role("button", name="Show").click()
    expect(page).to_have_url(re.compile("from=250"))
    listed = part(page, "Checkpoints")
    expect(listed.get_by_text("Of steps 250 to the last")).to_be_visible()
    expect(row(listed, "Checkpoints", "#1").get_by_role("link", name="200", exact=True)).to_have_count(0)
    over.get_by_role("link", name="All steps").click()
    expect(row(listed, "Checkpoints", "#1").get_by_role("link", name="200", exact=True)).to_be_visible()


def test_goodput_says_what_was_lost_and_how_often_to_save(screen: Callable[..., Page]) -> None:
    page = screen("runs/gpt")
    spent = part(page, "Goodput and what was lost")
    expect(figure(spent, "Steps lost")).not_to_have_text("0")
    expect(spent.get_by_text("in steps that were lost")).to_be_visible()
    expect(spent.get_by_text(re.compile("^Save every"))).to_be_visible()


def test_goodput_bytes_and_the_age_of_the_restore_point_are_drawn_hour_by_hour(screen: Callable[..., Page]) -> None:
    page = screen("runs/gpt")
    hours = part(page, "Hour by hour")
    for title, told in (
        ("Goodput by the hour", "% of the time"),
        ("Bytes by the hour", "18.6 GiB"),
        ("Age of the restore point", "1 h 20 min at most"),
    ):
        drawn = hours.get_by_role("figure", name=title, exact=True)
        expect(drawn.locator("canvas")).to_be_attached()
        expect(hours.get_by_text(told).first).to_be_visible()
        drawn.get_by_text(f"{title} as a table").click()
        # The head, six hours, and the gap.
        expect(drawn.get_by_role("table", name=title).get_by_role("row")).to_have_count(8)


def test_the_filters_of_the_checkpoints_are_in_the_link(screen: Callable[..., Page]) -> None:
    page = screen("runs/gpt")
    listed = part(page, "Checkpoints")
    listed.get_by_role("combobox", name="State").select_option("trashed")
    steps = listed.get_by_role("gridcell").filter(has=page.locator("a[href*='/checkpoints/']"))
    expect(steps).to_have_text(["400"])
    page.reload()
    expect(steps).to_have_text(["400"])
    listed.get_by_role("button", name="Show all").click()
    listed.get_by_role("combobox", name="Health").select_option("diverged")
    expect(steps).to_have_text(["350"])
    listed.get_by_role("textbox", name="Label").fill("none-has-it")
    listed.get_by_role("button", name="Filter").click()
    expect(listed.get_by_text("Take a filter away, or show all.")).to_be_visible()
    page.go_back()
    page.go_forward()
    expect(listed.get_by_role("textbox", name="Label")).to_have_value("none-has-it")


def test_tags_and_a_note_are_edited_and_a_tag_leads_to_its_runs(screen: Callable[..., Page]) -> None:
    page = screen("runs/gpt")
    page.get_by_role("button", name="Edit the tags and the note").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Tags, with spaces").fill("paper baseline")
    dialog.get_by_label("Note").fill("Twice the data.")
    dialog.get_by_role("button", name="Save").click()
    expect(dialog).to_have_count(0)
    expect(page.get_by_text("Twice the data.")).to_be_visible()
    page.get_by_role("link", name="paper", exact=True).click()
    expect(heading(page, "Runs")).to_be_visible()
    expect(row(page, "Runs", "gpt")).to_contain_text("baseline, paper")
    expect(row(page, "Runs", "bert")).to_have_count(0)


def test_the_list_of_runs_is_narrowed_by_status(screen: Callable[..., Page]) -> None:
    page = screen("runs")
    expect(row(page, "Runs", "bert")).to_contain_text("failed")
    page.get_by_role("combobox", name="Status").select_option("training")
    expect(row(page, "Runs", "bert")).to_have_count(0)
    expect(row(page, "Runs", "gpt")).to_contain_text("training")
    page.get_by_role("combobox", name="Status").select_option("preempted")
    expect(page.get_by_text("No run is preempted")).to_be_visible()
    page.get_by_role("combobox", name="Status").select_option("")
    expect(row(page, "Runs", "gpt")).to_be_visible()
    settled(page)
    page.get_by_role("link", name="gpt").click()
    expect(heading(page, "gpt")).to_be_visible()
    settled(page)
    page.get_by_role("link", name="Retention and cost of this run").click()
    expect(page.get_by_role("combobox", name="Run", exact=True)).to_have_value("gpt")


def test_a_run_is_deleted_by_its_name_after_a_dry_run_and_taken_back(
    screen: Callable[..., Page], service: RunningService, refused: list[str]
) -> None:
    http = service.http()
    ids = [each["id"] for each in answer(http.get("/v1/projects/demo/runs/over/checkpoints"))["items"]]
    pin = f"/v1/checkpoints/{ids[0]}/pin"
    answer(http.put(pin, json={"reason": "figure 3"}, headers={"If-Match": "*"}))
    page = screen("runs/over")
    page.get_by_role("button", name="Delete run").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("listitem")).to_contain_text("step 2 of attempt 1: pinned")
    assert not grave_violations(page)
    assert [each.split()[:2] for each in refused] == [["409", "DELETE"]]
    refused.clear()
    answer(http.delete(pin, headers={"If-Match": "*"}))
    dialog.get_by_role("button", name="Look again").click()
    expect(dialog).to_contain_text("2 checkpoints go to the trash with the run")
    freed = answer(http.request("DELETE", "/v1/projects/demo/runs/over", json={"dry_run": True}))["freed"]["bytes"]
    expect(dialog).to_contain_text(f"frees {freed} B, net of what other runs share")
    remove = dialog.get_by_role("button", name="Delete the run")
    dialog.get_by_label("to go on").fill("ove")
    expect(remove).to_be_disabled()
    dialog.get_by_label("to go on").fill("over")
    dialog.get_by_label("Why").fill("a failed idea")
    remove.click()
    expect(page.get_by_role("status").filter(has_text="deleted this run: a failed idea")).to_be_visible()
    assert {state_of(service, each) for each in ids} == {"trashed"}
    assert [each["reason"] for each in audited(service, "run.delete")] == ["a failed idea"]
    page.get_by_role("link", name="Runs of demo", exact=True).click()
    expect(row(page, "Runs", "over")).to_have_count(0)
    page.get_by_role("link", name="Deleted runs").click()
    expect(row(page, "Deleted runs", "over")).to_contain_text("a failed idea")
    page.goto(f"{service.url}/ui/runs/over?project=demo")
    expect(page.get_by_role("button", name="Take the run back")).to_be_visible()
    settled(page)
    page.get_by_role("button", name="Take the run back").click()
    expect(page.get_by_text("The run is back, and 2 checkpoints are committed again.")).to_be_visible()
    assert {state_of(service, each) for each in ids} == {"committed"}
    assert {each.split()[0] for each in refused} == {"404"}, "what was asked about a deleted run"
    refused.clear()
