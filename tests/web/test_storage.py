"""Storage: what proves that the bytes can be read back, in two stores and a cold one; what is lost, left over, and when
the quota is reached."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from holdfast_service.background.registry import OPERATION_KINDS
from holdfast_service.operations.controller import reconcile
from holdfast_service.settings import ServiceSettings
from tests.support.rank import answer
from tests.support.replicated import put_policy, replicate
from tests.support.service import RunningService
from tests.web.screens import figure, heading, part, row
from tests.web.seeded_catalog import SeededCatalog


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> ServiceSettings:
    folder = tmp_path_factory.mktemp("stores")
    stores = {f"{role}_store": f"posix://{folder / role}" for role in ("second", "cold")}
    return ServiceSettings(data_dir=folder / "service", port=0, **stores)


@pytest.fixture(scope="module")
def seed(catalog: SeededCatalog) -> Callable[[RunningService], None]:
    return catalog.fill


def start(page: Page, button: str, of: str) -> None:
    """Starts long work in a part of the screen, as its dialog asks."""
    part(page, of).get_by_role("button", name=button).click()
    page.get_by_role("dialog").get_by_role("button", name="Start").click()
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_each_store_says_whether_it_answers_and_what_is_bad(screen: Callable[..., Page]) -> None:
    page = screen("storage")
    for role in ("primary", "second", "cold"):
        expect(row(page, "Stores", role, "answers")).to_have_count(1)
    bad = part(page, "Bad copies")
    expect(row(bad, "Bad copies", "lost")).to_contain_text("primary")


def test_work_on_a_run_asks_for_the_run_first(screen: Callable[..., Page]) -> None:
    page = screen("storage")
    scrub = page.get_by_role("button", name="Scrub the run")
    expect(scrub).to_have_attribute("aria-disabled", "true")
    scrub.focus()
    expect(page.get_by_role("tooltip").first).to_contain_text("Choose a run at the top.")
    page.get_by_role("combobox", name="Run of drills, scrubs and tiers").select_option("doctor")
    expect(page.get_by_role("heading", name="Tiers of doctor")).to_be_visible()
    expect(scrub).not_to_have_attribute("aria-disabled", "true")


def test_a_scrub_reads_each_copy_again(screen: Callable[..., Page], service: RunningService) -> None:
    page = screen("storage?run=doctor")
    expect(figure(part(page, "Scrub"), "Copies due to be read again")).to_be_visible()
    start(page, "Scrub the run", "Scrub")
    expect(row(page, "Operations: scrub", "doctor", "queued")).to_have_count(1)
    reconcile(service.context, kinds=OPERATION_KINDS)
    expect(row(page, "Operations: scrub", "doctor", "done")).to_have_count(1)


def test_the_second_store_is_behind_until_it_is_whole_and_a_drill_of_it_tells_rto_and_rpo(
    screen: Callable[..., Page], service: RunningService
) -> None:
    page = screen("storage?run=doctor")
    expect(row(page, "Copies in the second store", "doctor", "no policy")).to_have_count(1)
    put_policy(service)
    page.reload()
    expect(row(page, "Copies in the second store", "doctor", "behind")).to_have_count(1)
    while replicate(service).done:
        pass
    page.reload()
    expect(row(page, "Copies in the second store", "doctor", "whole")).to_have_count(1)
    page.get_by_role("checkbox", name="Only runs that miss their objective (RPO)").check()
    expect(row(page, "Copies in the second store", "doctor")).to_have_count(0)
    page.get_by_role("combobox", name="From the store alone").select_option("second")
    start(page, "Start a drill", "Drills")
    reconcile(service.context, kinds=OPERATION_KINDS)
    drill = row(page, "Operations: drill", "doctor", "second", "done")
    expect(drill).to_have_count(1)
    result = answer(service.http().get("/v1/operations", params={"kind": "drill"}))["items"][0]["result"]
    assert result["rpo_seconds"] == 0
    headers = part(page, "Drills").get_by_role("columnheader")
    expect(headers).to_contain_text(["Restored in (RTO)", "Behind by (RPO)"])
    expect(drill.get_by_role("gridcell").nth(4)).to_have_text("0 s of 1 h met")


def test_orphans_are_looked_for_without_deleting_any(screen: Callable[..., Page], service: RunningService) -> None:
    page = screen("storage")
    orphans = part(page, "Orphans, and what waits for collection")
    orphans.get_by_role("button", name="Look for orphans").click()
    expect(orphans.get_by_text("The sweep deletes nothing.")).to_be_visible()
    while reconcile(service.context, kinds=OPERATION_KINDS).done:
        pass
    expect(row(orphans, "Operations: sweep", "done", "0, 0 B").first).to_contain_text("it only looks")
    expect(orphans.get_by_text("would be deleted now").first).to_be_visible()


def test_tiers_tell_where_each_checkpoint_moves_and_why_one_stays(
    screen: Callable[..., Page], service: RunningService
) -> None:
    document = {"rules": [{"after": "7d", "to": "cold"}]}
    where = "/v1/projects/demo/runs/bert"
    answer(service.http().put(f"{where}/policies/tiers", json={"document": document}))
    rows = answer(service.http().get(f"{where}/tiers/plan"))["rows"]
    assert [each for each in rows if each["target"] == "cold"]
    page = screen("storage?run=bert")
    for each in rows:
        step = page.get_by_role("gridcell", name=str(each["step"]), exact=True)
        shown = row(page, "Checkpoints and their tiers").filter(has=step)
        expect(shown).to_contain_text(each["target"] or each["stays"])


def test_the_forecast_says_when_the_quota_is_reached(screen: Callable[..., Page]) -> None:
    page = screen("storage")
    quota = part(page, "Quota")
    expect(figure(quota, "Quota of the primary store")).to_contain_text("% used")
    expect(figure(quota, "Added a day by the runs that train")).to_contain_text("B")
    expect(figure(quota, "Quota reached, if nothing expires, in")).not_to_be_empty()
    expect(heading(page, "Storage")).to_be_visible()
