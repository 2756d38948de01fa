"""Retention and cost: a policy's effect is seen while it is edited, it is applied by the count, and what went is taken
back; pruning by a filter, and what each run costs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.support.rank import Job, answer
from tests.support.service import RunningService
from tests.web.axe import grave_violations
from tests.web.screens import audited, figure, part, row, settled, state_of
from tests.web.seeded_catalog import SeededCatalog

STEPS = range(1, 9)
SWEEPS = ("sweep-1", "sweep-2")


@pytest.fixture(scope="module")
def many() -> dict[int, str]:
    """The checkpoints of demo/many, by their steps."""
    return {}


@pytest.fixture(scope="module")
def seed(catalog: SeededCatalog, many: dict[int, str]) -> Callable[[RunningService], None]:
    def fill(service: RunningService) -> None:
        catalog.fill(service)
        job = Job(service.http(), "demo/many")
        many.update({step: str(job.save(step, metrics={"loss": {"value": 1 / step}})["id"]) for step in STEPS})
        job.end("finished")
        put_policy(service, 8)
        for run in SWEEPS:
            job = Job(service.http(), f"demo/{run}")
            # All of them begin with the same weights, which are stored once.
            job.save(1, content=b"the weights that both begin with")
            for step in (2, 3, 4):
                job.save(step)
            job.end("finished")

    return fill


def put_policy(service: RunningService, keep_last: int, etag: str | None = None) -> str:
    """Its etag. Of the run `many`."""
    headers = {} if etag is None else {"If-Match": etag}
    url = "/v1/projects/demo/runs/many/policies/retention"
    put = answer(service.http().put(url, json={"document": {"keep_last": keep_last}}, headers=headers))
    return str(put["etag"])


def planned(service: RunningService, run: str, **policy: Any) -> dict[str, Any]:
    """What the service would do under the policy."""
    url = f"/v1/projects/demo/runs/{run}/retention/plan"
    found: dict[str, Any] = answer(service.http().post(url, json={"policy": policy, "show": "all"}))
    return found


def rule(page: Page, name: str) -> Locator:
    return page.get_by_role("textbox", name=name, exact=True)


def test_an_edited_policy_shows_at_once_what_goes_why_and_what_that_saves(
    screen: Callable[..., Page], service: RunningService
) -> None:
    page = screen("retention?run=gpt")
    rule(page, "Newest").fill("1")
    expect(page.get_by_text("Edited, and not saved.")).to_be_visible()
    expected = planned(service, "gpt", keep_last=1)
    assert expected["expired"] > 0
    effect = part(page, "What is kept and what expires")
    expect(effect.get_by_role("button", name=f"Save the policy and expire {expected['expired']}")).to_be_visible()
    expect(figure(effect, "Kept")).to_have_text(str(expected["kept"]))
    expect(figure(effect, "Expire")).to_have_text(str(expected["expired"]))
    expect(figure(effect, "Bytes freed")).to_contain_text(f"{expected['freed']['bytes']} B")
    for cost in ("Cost a month now", "Cost a month, once it is freed", "In the long run, under this one"):
        expect(figure(effect, cost)).to_contain_text("USD")
    expect(effect.get_by_text(re.compile("^Prices as of"))).to_be_visible()
    for each in expected["checkpoints"]:
        shown = row(effect, "Checkpoints of gpt under this policy", "kept" if each["keep"] else "expires")
        texts = "; ".join(reason["detail"] for reason in each["reasons"])
        step = page.get_by_role("gridcell", name=str(each["step"]), exact=True)
        expect(shown.filter(has=step).filter(has_text=texts)).not_to_have_count(0)
    # The edit is in the link, and nobody else's until it is saved.
    page.reload()
    expect(rule(page, "Newest")).to_have_value("1")
    page.get_by_role("button", name="Discard the edit").click()
    expect(rule(page, "Newest")).to_have_value("3")
    assert answer(service.http().get("/v1/projects/demo/runs/gpt/policies/retention"))["document"] == {"keep_last": 3}


def test_a_policy_is_applied_by_its_count_and_undone(
    screen: Callable[..., Page], service: RunningService, catalog: SeededCatalog
) -> None:
    page = screen("retention?run=gpt")
    rule(page, "Newest").fill("1")
    expected = planned(service, "gpt", keep_last=1)
    going = [each["checkpoint_id"] for each in expected["checkpoints"] if not each["keep"]]
    page.get_by_role("button", name=f"Save the policy and expire {len(going)}").click()
    dialog = page.get_by_role("dialog")
    expire = dialog.get_by_role("button", name=f"Expire {len(going)}")
    dialog.get_by_label("to go on").fill(str(len(going) + 1))
    expect(expire).to_be_disabled()
    dialog.get_by_label("to go on").fill(str(len(going)))
    expire.click()
    done = page.get_by_role("status").filter(has_text="The policy is saved.")
    expect(done).to_contain_text("to the trash")
    assert {state_of(service, each) for each in going} == {"trashed"}
    done.get_by_role("button", name=re.compile("^Undo: take")).click()
    expect(done).to_contain_text("committed again")
    assert {state_of(service, each) for each in going} == {"committed"}


def test_a_projects_policy_is_told_run_by_run(screen: Callable[..., Page], service: RunningService) -> None:
    page = screen("retention")
    rule(page, "Newest").fill("1")
    expected = planned(service, "bert", keep_last=1)
    effect = part(page, "What is kept and what expires")
    expect(figure(effect, "Runs that it holds for")).to_contain_text("2 have their own")
    bert = row(effect, "Runs under this policy", "bert")
    expect(bert.get_by_role("gridcell")).to_contain_text(["bert", str(expected["expired"]), str(expected["kept"])])
    bert.get_by_role("button", name="List the checkpoints of bert").click()
    listed = part(page, "Checkpoints of bert")
    listed.get_by_role("combobox", name="Show").select_option("What is kept")
    kept = listed.get_by_role("grid").get_by_text("kept", exact=True)
    expect(kept).to_have_count(expected["kept"])


def test_another_persons_policy_is_told_before_anything_is_done(
    screen: Callable[..., Page], service: RunningService, refused: list[str]
) -> None:
    page = screen("retention?run=many")
    expect(page.get_by_text("As it is in force.")).to_be_visible()
    rule(page, "Newest").fill("2")
    count = planned(service, "many", keep_last=2)["expired"]
    page.get_by_role("button", name=f"Save the policy and expire {count}").click()
    dialog = page.get_by_role("dialog")
    etag = answer(service.http().get("/v1/projects/demo/runs/many/policies/retention"))["etag"]
    put_policy(service, 7, etag)
    dialog.get_by_label("to go on").fill(str(count))
    dialog.get_by_role("button", name=f"Expire {count}").click()
    expect(dialog.get_by_role("listitem")).to_have_text(re.compile("keep last: 8 .* 7"))
    assert [each.split()[:2] for each in refused] == [["412", "PUT"]]
    refused.clear()
    dialog.get_by_role("button", name="Reload, and go on from there").click()
    expect(dialog).to_have_count(0)
    expect(page.get_by_text("keep_last 7")).to_be_visible()
    assert set(committed(service)) == set(STEPS)


def committed(service: RunningService) -> dict[int, str]:
    """The checkpoints of demo/many that are committed, by their steps."""
    found = answer(service.http().get("/v1/projects/demo/runs/many/checkpoints", params={"state": "committed"}))
    return {each["step"]: each["id"] for each in found["items"]}


def test_a_rule_that_says_nothing_is_told_and_cannot_be_applied(
    screen: Callable[..., Page], refused: list[str]
) -> None:
    page = screen("retention?run=gpt")
    rule(page, "Every one within").fill("soon")
    expect(page.get_by_role("alert").first).to_contain_text("keep_within")
    expect(page.get_by_role("button", name=re.compile("^Save the policy"))).to_have_count(0)
    assert {each.split()[0] for each in refused} == {"422"}
    refused.clear()


def test_a_filter_prunes_what_is_chosen_of_its_dry_run(
    screen: Callable[..., Page], service: RunningService, many: dict[int, str]
) -> None:
    body = {"filter": {"before_step": 6}, "dry_run": True}
    dry = answer(service.http().post("/v1/projects/demo/runs/many/retention/prune", json=body))
    matches = len(dry["trashed"])
    assert matches > 1
    page = screen("retention?view=prune&run=many")
    rule(page, "From step").fill("one")
    page.get_by_role("button", name="Show what matches").click()
    expect(page.get_by_role("alert")).to_have_text("From step must be a whole number.")
    rule(page, "From step").fill("")
    rule(page, "Before step").fill("6")
    page.get_by_role("button", name="Show what matches").click()
    found = part(page, "What would expire")
    expect(figure(found, "Chosen")).to_have_text(f"{matches} of {matches}")
    out = next(each for each in dry["trashed"] if each["step"] > 1)  # each is of attempt 1
    step = page.get_by_role("gridcell", name=str(out["step"]), exact=True)
    row(found, "Checkpoints that would expire").filter(has=step).first.get_by_role("checkbox").click()
    expect(figure(found, "Chosen")).to_have_text(f"{matches - 1} of {matches}")
    expect(figure(found, "Bytes freed")).to_contain_text(re.compile(r"\d B"))
    found.get_by_role("button", name=f"Move {matches - 1} to the trash").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("to go on").fill(str(matches - 1))
    dialog.get_by_label("Why").fill("tried")
    dialog.get_by_role("button", name=f"Move {matches - 1} to the trash").click()
    expect(page.get_by_role("status").filter(has_text="to the trash.")).to_be_visible()
    states = {each["checkpoint_id"]: state_of(service, each["checkpoint_id"]) for each in dry["trashed"]}
    assert states.pop(out["checkpoint_id"]) == "committed"
    assert set(states.values()) == {"trashed"}
    assert {each["reason"] for each in audited(service, "checkpoint.trash")[: matches - 1]} == {"tried"}
    page.get_by_role("link", name="Open the trash").click()
    expect(page.get_by_role("checkbox", name="Select all that are loaded")).to_be_visible()
    settled(page)
    page.get_by_role("checkbox", name="Select all that are loaded").click()
    page.get_by_role("button", name=re.compile("^Take [1-9].* chosen checkpoints? back$")).click()
    expect(page.get_by_text("committed again")).to_be_visible()
    assert set(committed(service)) == set(many)


def test_a_filter_prunes_several_runs_after_one_dry_run(screen: Callable[..., Page], service: RunningService) -> None:
    page = screen("retention?view=prune")
    rule(page, "Runs whose name has").fill("SWEEP")
    rule(page, "Before step").fill("4")
    page.get_by_role("button", name="Show what matches").click()
    found = part(page, "What would expire")
    expect(figure(found, "Runs chosen")).to_have_text("2 of 2")
    expect(figure(found, "Checkpoints")).to_have_text("4")
    body = {"filter": {"before_step": 4}, "dry_run": True}
    dry = [answer(service.http().post(f"/v1/projects/demo/runs/{run}/retention/prune", json=body)) for run in SWEEPS]
    least = sum(each["freed"]["bytes"] for each in dry)
    expect(figure(found, "Bytes freed, at least")).to_contain_text(f"{least} B")
    for run in SWEEPS:
        expect(row(found, "Checkpoints that would expire", run, "before step 4")).to_have_count(2)
        kept = row(part(page, "What matches and is kept"), "Checkpoints that are kept", run)
        expect(kept.get_by_role("gridcell", name="3", exact=True)).to_have_count(1)
    expect(found.get_by_text(re.compile("^Prices as of"))).to_be_visible()
    # The dry run is a link.
    page.reload()
    expect(figure(found, "Checkpoints")).to_have_text("4")
    found.get_by_role("button", name="Move 4 to the trash").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("4 checkpoints of 2 runs go to the trash")
    expect(dialog).to_contain_text("Filter: before step 4.")
    dialog.get_by_label("to go on").fill("4")
    dialog.get_by_label("Why").fill("the sweep is over")
    dialog.get_by_role("button", name="Move 4 to the trash").click()
    done = page.get_by_role("status").filter(has_text="4 checkpoints went to the trash.")
    expect(done).to_be_visible()
    ids = [each["checkpoint_id"] for of_run in dry for each in of_run["trashed"]]
    assert {state_of(service, each) for each in ids} == {"trashed"}
    assert {each["reason"] for each in audited(service, "checkpoint.trash")[:4]} == {"the sweep is over"}
    done.get_by_role("button", name="Undo: take all 4 back").click()
    expect(done).to_contain_text("4 checkpoints are committed again")
    assert {state_of(service, each) for each in ids} == {"committed"}


def test_a_run_without_a_dry_run_is_named_and_takes_nothing_from_the_others(
    screen: Callable[..., Page], service: RunningService, refused: list[str]
) -> None:
    page = screen("retention?view=prune&allOfRun=true&filter=%7B%22before_step%22%3A2%7D")
    told = page.get_by_role("alert").filter(has_text="made no dry run")
    gpt = told.get_by_role("listitem").filter(has_text="gpt: An attempt of this run is active")
    expect(gpt).to_have_count(1)
    found = part(page, "What would expire")
    expect(row(found, "Runs that have what would expire", "sweep-1")).to_have_count(1)
    assert {each.split()[0] for each in refused} == {"409"}
    refused.clear()


def test_the_other_policies_are_edited_with_what_is_wrong_at_each_field(
    screen: Callable[..., Page], service: RunningService, refused: list[str]
) -> None:
    page = screen("retention?kind=objectives&run=gpt")
    expect(page.get_by_text("The project’s policy holds for this run")).to_be_visible()
    within = rule(page, "A restore must be done within (RTO)")
    expect(within).to_have_value("15min")
    within.fill("soon")
    save_policy(page, '"rto_seconds":"soon"', "RPO 1 h, RTO soon")
    expect(page.get_by_role("alert").filter(has_text="The service has not saved it.")).to_be_visible()
    expect(within).to_have_attribute("aria-invalid", "true")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(within).to_have_accessible_description(re.compile("valid integer"))
    assert not grave_violations(page)
    assert [each.split()[:2] for each in refused] == [["422", "PUT"]]
    refused.clear()
    within.fill("1h")
    save_policy(page, '"rto_seconds":3600', "RPO 1 h, RTO 1 h")
    expect(page.get_by_text("The policy is saved.")).to_be_visible()
    expect(page.get_by_text("The run’s own policy, version 1")).to_be_visible()
    url = "/v1/projects/demo/runs/gpt/policies/objectives"
    assert answer(service.http().get(url))["document"] == {"rpo_seconds": 3600, "rto_seconds": 3600}
    page.get_by_role("button", name="Delete the policy").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(page.get_by_text("The project’s policy holds for this run")).to_be_visible()
    assert answer(service.http().get(url))["level"] == "project"


def save_policy(page: Page, edit: str, words: str) -> None:
    """Once the edit has this in the address. The dialog says what the policy will be."""
    page.wait_for_url(lambda url: edit in unquote(url))
    page.get_by_role("button", name="Save the policy").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(words)
    dialog.get_by_role("button", name="Save").click()


def test_what_a_store_cannot_do_is_told_where_its_policy_is_edited(
    screen: Callable[..., Page], refused: list[str]
) -> None:
    page = screen("retention?kind=tiers&run=gpt")
    expect(page.get_by_text("Neither this run nor its project has a policy of tiers.")).to_be_visible()
    expect(page.get_by_text("There is no policy of tiers: all stay hot.")).to_be_visible()
    page.get_by_role("button", name="Add a rule").click()
    page.get_by_role("combobox", name="Moves to").select_option("rare")
    rule(page, "Longer ago than").fill("7d")
    assert not grave_violations(page)
    save_policy(page, '"after":"7d"', "after 7d: rare")
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("alert")).to_contain_text("has no storage class rare")
    dialog.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Discard the edit").click()
    page.get_by_role("navigation", name="Kinds of policies").get_by_role("link", name="Copies").click()
    page.get_by_role("button", name="Copy every checkpoint").click()
    dialog.get_by_role("button", name="Save").click()
    expect(dialog.get_by_role("alert")).to_contain_text("needs a second store")
    assert not grave_violations(page)
    assert {each.split()[0] for each in refused} == {"404", "422"}, "there is no policy, and none is put"
    refused.clear()


def test_the_dearest_run_comes_first_and_leads_to_its_policy(
    screen: Callable[..., Page], service: RunningService
) -> None:
    costs = {
        run["name"]: answer(service.http().get(f"/v1/projects/demo/runs/{run['name']}/cost"))
        for run in answer(service.http().get("/v1/projects/demo/runs"))["items"]
    }
    stored = {run: sum(line["stored_bytes"] for line in cost["lines"]) for run, cost in costs.items()}
    dearest = max(costs, key=lambda run: (costs[run]["per_month"], stored[run]))
    page = screen("retention?view=usage")
    first = page.get_by_role("grid", name="Runs and their costs").get_by_role("row").nth(1)
    expect(first).to_contain_text(dearest)
    expect(first).to_contain_text("USD")
    settled(page)
    first.get_by_role("link", name=f"The policy of {dearest}").click()
    expect(page.get_by_role("combobox", name="Run", exact=True)).to_have_value(dearest)
