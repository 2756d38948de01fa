"""Operations: what runs and what is asked of it, what happened, who is told, and who may do what."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Locator, Page, expect
from sqlalchemy import update

import holdfast_service.webhooks.controller as webhooks
from holdfast_protocol.states import OperationState, QuotaKind
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.webhooks import WebhookDelivery
from holdfast_service.operations import queue
from holdfast_service.operations.controller import CANCELLED, claim_next, settle
from holdfast_service.settings import ServiceSettings
from tests.support.rank import answer
from tests.support.scripted_http import Reply, ScriptedServer
from tests.support.service import RunningService
from tests.web.axe import grave_violations
from tests.web.screens import audited, command, row, settled
from tests.web.seeded_catalog import SeededCatalog


@pytest.fixture(scope="module")
def receiver() -> Iterator[ScriptedServer]:
    """Of webhooks' calls: it fails until a test has it answer otherwise."""
    running = ScriptedServer(lambda _seen: Reply(500))
    yield running
    running.close()


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, receiver: ScriptedServer) -> ServiceSettings:
    hosts = receiver.url.removeprefix("http://")
    return ServiceSettings(data_dir=tmp_path_factory.mktemp("service"), port=0, webhook_allowed_hosts=hosts)


@pytest.fixture(scope="module")
def seed(catalog: SeededCatalog) -> Callable[[RunningService], None]:
    return catalog.fill


def button(inside: Page | Locator, name: str) -> Locator:
    return inside.get_by_role("button", name=name, exact=True)


def dialog(page: Page) -> Locator:
    return page.get_by_role("dialog")


def test_a_controller_is_paused_with_a_reason_resumed_and_run(screen: Callable[..., Page]) -> None:
    page = screen("operations/controllers")
    own = page.get_by_role("gridcell", name="scrub", exact=True)
    scrub = row(page, "Controllers").filter(has=own)
    button(page, "Pause scrub").click()
    dialog(page).get_by_label("Reason").fill("the array is being rebuilt")
    button(dialog(page), "Pause").click()
    expect(scrub).to_contain_text("paused")
    expect(scrub).to_contain_text("the array is being rebuilt")
    expect(button(page, "Run scrub now")).to_have_attribute("aria-disabled", "true")
    own.click()
    expect(page).to_have_url(re.compile("controller=scrub"))
    expect(dialog(page)).to_contain_text("the array is being rebuilt")
    assert not grave_violations(page)
    button(dialog(page), "Close").click()
    button(page, "Resume scrub").click()
    expect(page.get_by_text("scrub goes on.")).to_be_visible()
    button(page, "Run scrub now").click()
    expect(scrub).to_contain_text("run requested")


def test_a_running_operation_shows_its_progress_and_is_cancelled(
    screen: Callable[..., Page], service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "WRITTEN_EVERY_SECONDS", 0.0)
    answer(service.http().post("/v1/projects/demo/runs/doctor/drills", json={"selector": "latest", "store": "primary"}))
    run = claim_next(service.context, ["drill"], "a worker")
    assert run is not None
    run.progress(done=3, total=12, note="reads chunk 3")
    page = screen("operations/long?kind=drill")
    drill = row(page, "Long operations", "drill", "doctor")
    expect(drill).to_contain_text("running")
    expect(drill.get_by_role("progressbar", name="Progress of drill")).to_have_attribute("value", "3")
    expect(drill).to_contain_text("25.0 %")
    drill.get_by_role("gridcell").first.click()
    expect(dialog(page)).to_contain_text("reads chunk 3")
    expect(page).to_have_url(re.compile(f"operation={run.id}"))
    button(dialog(page), "Close").click()
    button(page, f"Cancel drill {run.id}").click()
    button(dialog(page), "Cancel the operation").click()
    expect(drill).to_contain_text("cancelling")
    with pytest.raises(queue.OperationCancelled):
        run.progress(done=4)
    assert settle(service.context, run, OperationState.CANCELLED, error=CANCELLED)
    expect(drill).to_contain_text("cancelled")
    page.get_by_role("combobox", name="State").select_option("failed")
    expect(page.get_by_text("None fits the filters")).to_be_visible()


def test_events_are_narrowed_by_type_run_and_time_and_come_by_themselves(
    screen: Callable[..., Page], catalog: SeededCatalog
) -> None:
    page = screen("operations/events")
    page.get_by_text("Every type").click()
    page.get_by_role("checkbox", name="checkpoint.committed").check()
    expect(page).to_have_url(re.compile("checkpoint.committed"))
    events = page.get_by_role("grid", name="Events")
    expect(events.get_by_text("attempt.failed")).to_have_count(0)
    page.get_by_role("textbox", name="Run", exact=True).fill("gpt")
    page.keyboard.press("Enter")
    expect(events.get_by_role("link", name="bert")).to_have_count(0)
    expect(events.get_by_role("link", name="gpt").first).to_be_visible()
    settled(page)
    catalog.job.save(370)
    newest = events.get_by_role("gridcell", name="370", exact=True)
    expect(newest).to_be_visible()
    button(page, "Last hour").click()
    expect(page).to_have_url(re.compile("since="))
    expect(newest).to_be_visible()
    page.get_by_label("Before", exact=True).fill("2020-01-01T00:00")
    page.get_by_label("Before", exact=True).press("Enter")
    expect(page.get_by_text("None fits the filters: widen them.")).to_be_visible()
    button(page, "Any time").click()
    expect(newest).to_be_visible()


def test_a_webhook_is_made_its_secret_shown_once_and_its_calls_followed(
    screen: Callable[..., Page], service: RunningService, receiver: ScriptedServer
) -> None:
    page = screen("operations/webhooks")
    button(page, "New webhook").click()
    dialog(page).get_by_label("URL").fill(f"{receiver.url}/hook")
    button(dialog(page), "Make the webhook").click()
    expect(dialog(page)).to_contain_text("It is shown once.")
    for _ in range(3):
        page.keyboard.press("Escape")
    secret = command(page, f"the secret of {receiver.url}/hook")
    assert secret.startswith("whsec_")
    button(dialog(page), "I have copied it").click()
    expect(dialog(page)).to_have_count(0)
    assert secret not in page.content()
    button(page, f"Test {receiver.url}/hook").click()
    call = row(page, "Calls", "webhook.test")
    expect(call).to_contain_text("waiting")
    webhooks.reconcile(service.context)
    expect(call).to_contain_text("retrying")
    expect(call).to_contain_text("500")
    receiver.answer = lambda _seen: Reply(204)
    with service.context.database.transaction() as session:
        session.execute(update(WebhookDelivery).values(next_try_at=database_now(session)))
    webhooks.reconcile(service.context)
    expect(call).to_contain_text("delivered")
    button(page, f"Delete {receiver.url}/hook").click()
    button(dialog(page), "Delete").click()
    expect(row(page, "Webhooks", receiver.url)).to_have_count(0)


def test_a_token_is_made_with_few_scopes_shown_once_and_revoked_by_its_name(
    screen: Callable[..., Page], service: RunningService
) -> None:
    page = screen("operations/tokens")
    button(page, "New token").click()
    dialog(page).get_by_role("textbox", name="Name").fill("ci reader")
    dialog(page).get_by_role("checkbox", name="read: see everything").check()
    dialog(page).get_by_role("combobox", name="Expires after").select_option("7 days")
    button(dialog(page), "Make the token").click()
    token = command(page, "the secret of ci reader")
    button(dialog(page), "I have copied it").click()
    expect(dialog(page)).to_have_count(0)
    assert token not in page.content()
    assert service.http(token=token).get("/v1/projects/demo").status_code == 200
    assert service.http(token=token).put("/v1/projects/demo", json={"quota_bytes": None}).status_code == 403
    made = row(page, "Tokens", "ci reader")
    expect(made).to_contain_text("valid")
    button(page, "Revoke ci reader").click()
    revoke = button(dialog(page), "Revoke")
    expect(revoke).to_be_disabled()
    dialog(page).get_by_label("to go on").fill("ci reader")
    revoke.click()
    expect(made).to_contain_text("revoked")
    assert service.http(token=token).get("/v1/projects/demo").status_code == 401


def test_a_project_is_made_its_quota_edited_and_it_is_deleted_and_taken_back(
    screen: Callable[..., Page], service: RunningService, refused: list[str]
) -> None:
    page = screen("operations/projects")
    button(page, "New project").click()
    dialog(page).get_by_role("textbox", name="Name").fill("fresh")
    dialog(page).get_by_role("textbox", name="Quota of bytes", exact=True).fill("1.5 TiB")
    button(dialog(page), "Make the project").click()
    expect(row(page, "Projects", "fresh")).to_contain_text("1.5 TiB")
    button(page, "Edit the quotas of fresh").click()
    wanted = {
        f"{soft}quota_{kind}": number
        for number, kind in enumerate(QuotaKind, 20)
        for soft, number in (("", 1000 * number), ("soft_", number))
    }
    for column, number in wanted.items():
        label = column.replace("quota_", "quota of ").replace("soft_", "soft ").capitalize()
        dialog(page).get_by_role("textbox", name=label, exact=True).fill(str(number))
    assert not grave_violations(page)
    button(dialog(page), "Set the quotas").click()
    expect(dialog(page)).to_have_count(0)
    quotas = answer(service.http().get("/v1/projects/fresh"))["quotas"]
    assert {f"quota_{each['kind']}": each["hard"] for each in quotas} | {
        f"soft_quota_{each['kind']}": each["soft"] for each in quotas
    } == wanted
    button(page, "Edit the quotas of fresh").click()
    expect(dialog(page).get_by_role("textbox", name="Quota of rows", exact=True)).to_have_value("24k")
    seen = answer(service.http().get("/v1/projects/fresh"))
    put = service.http().put("/v1/projects/fresh", json={"quota_bytes": 30_000}, headers={"If-Match": seen["etag"]})
    answer(put)
    dialog(page).get_by_role("textbox", name="Quota of bytes", exact=True).fill("2 TiB")
    button(dialog(page), "Set the quotas").click()
    expect(dialog(page).get_by_role("alert")).to_be_visible()
    assert [each.split()[:2] for each in refused] == [["412", "PUT"]]
    refused.clear()
    button(dialog(page), "Cancel").click()
    button(page, "Delete fresh").click()
    dialog(page).get_by_label("to go on").fill("fresh")
    button(dialog(page), "Delete the project").click()
    expect(row(page, "Projects", "fresh")).to_have_count(0)
    page.get_by_role("link", name="In the trash").click()
    button(page, "Take back fresh").click()
    expect(page.get_by_text("fresh is back, with its runs.")).to_be_visible()
    page.get_by_role("link", name="In use").click()
    expect(row(page, "Projects", "fresh")).to_have_count(1)


def test_the_audit_tells_who_deleted_what_and_each_event_is_a_link(screen: Callable[..., Page]) -> None:
    page = screen("operations/audit")
    action = page.get_by_role("combobox", name="Action begins with")
    action.fill("checkpoint.trash")
    action.press("Enter")
    trashed = row(page, "Audit events", "checkpoint.trash")
    expect(trashed).to_have_count(1)
    expect(trashed).to_contain_text("of a branch that was left")
    expect(trashed).to_contain_text("step 400")
    trashed.get_by_role("gridcell", name="checkpoint.trash").click()
    expect(dialog(page).get_by_role("table")).to_contain_text("state")
    assert not grave_violations(page)
    page.reload()
    expect(dialog(page)).to_contain_text("of a branch that was left")


def test_what_the_page_does_is_audited_under_the_name_of_its_token(
    screen: Callable[..., Page], service: RunningService
) -> None:
    page = screen("operations/controllers")
    button(page, "Run collect now").click()
    expect(page.get_by_text("collect: a process makes a pass now.")).to_be_visible()
    assert audited(service, "controller.")[0]["actor"].startswith("test train read")
