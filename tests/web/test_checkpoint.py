"""A checkpoint: what it consists of, where its copies are, what keeps it, what became of it, and what differs from
another one."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Locator, Page, expect

from holdfast_protocol.states import Scope
from holdfast_service.background.registry import OPERATION_KINDS
from holdfast_service.operations.controller import reconcile
from tests.support.rank import answer
from tests.support.service import RunningService
from tests.web.screens import audited, checkpoint, command, figure, heading, part, row, settled, state_of
from tests.web.seeded_catalog import SeededCatalog, save_cut_tensor

OTHER_TOKEN = tuple(Scope)
"""As many scopes as without any, and another token: nobody releases a hold alone."""


@pytest.fixture(scope="module")
def seed(catalog: SeededCatalog) -> Callable[[RunningService], None]:
    def fill(service: RunningService) -> None:
        catalog.fill(service)
        catalog.cut = save_cut_tensor(service)

    return fill


def confirm(page: Page, action: str, **fields: str) -> None:
    """Fills the fields of the open dialog, and does it. The dialog is gone then."""
    dialog = page.get_by_role("dialog")
    for label, text in fields.items():
        dialog.get_by_label(label.replace("_", " ")).fill(text)
    dialog.get_by_role("button", name=action, exact=True).click()
    expect(dialog).to_have_count(0)


def line(inside: Locator, name: str) -> Locator:
    """The row of a table that begins with it."""
    return inside.get_by_role("row").filter(has=inside.page.get_by_role("rowheader", name=name))


def test_components_metrics_and_lineage_are_told(screen: Callable[..., Page]) -> None:
    page = screen("checkpoints/{restore_point}")
    expect(line(part(page, "Components"), "model")).to_contain_text("100.0 %")
    expect(line(part(page, "Metrics"), "loss")).to_contain_text("0.25")
    expect(page.get_by_role("list", name="Remarks")).to_contain_text("The run would resume from it now.")
    lineage = part(page, "Lineage")
    expect(figure(lineage, "Before it, in this attempt")).to_have_text("step 250")
    figure(lineage, "Attempt 2 went on from").get_by_role("link").click()
    expect(heading(page, "demo/gpt@200#1")).to_be_visible()
    expect(figure(lineage, "Attempts that resumed from it")).to_contain_text("attempt 2")


def test_the_commands_for_pull_restore_and_proof_are_copied(screen: Callable[..., Page]) -> None:
    page = screen("checkpoints/{restore_point}")
    pull = "holdfast checkpoints pull demo/gpt@300#2 out"
    assert command(page, "the command that pulls it") == pull
    assert command(page, "the command that pulls it as safetensors") == f"{pull} --format safetensors"
    assert command(page, "the call that restores it") == 'ckpt.restore(state, at="300#2")'
    assert command(page, "the command that reads its bytes again") == "holdfast scrubs start demo/gpt@300#2"


def test_a_pin_comes_and_goes(
    screen: Callable[..., Page], service: RunningService, catalog: SeededCatalog, refused: list[str]
) -> None:
    page = screen("checkpoints/{deletable}")
    keeping = part(page, "Pin and holds")
    keeping.get_by_role("button", name="Pin", exact=True).click()
    confirm(page, "Pin", Reason="for the paper", For_so_many_days="7")
    expect(keeping.get_by_text("for the paper")).to_be_visible()
    assert checkpoint(service, catalog.deletable)["pinned_until"] is not None
    page.get_by_role("button", name="See what would go").click()
    expect(part(page, "Delete").get_by_role("alert")).to_contain_text("for the paper")
    assert [each.split()[0] for each in refused] == ["409"]
    refused.clear()
    keeping.get_by_role("button", name="Unpin").click()
    confirm(page, "Unpin")
    expect(keeping.get_by_text("Not pinned")).to_be_visible()


def test_a_hold_is_released_by_another_token_and_never_by_its_own(
    screen: Callable[..., Page], refused: list[str]
) -> None:
    page = screen("checkpoints/{deletable}")
    keeping = part(page, "Pin and holds")
    keeping.get_by_role("button", name="Hold").click()
    confirm(page, "Place the hold", Reason="litigation 7")
    release = "Release the hold: litigation 7"
    keeping.get_by_role("button", name=release).click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Reason").fill("mine")
    dialog.get_by_role("button", name="Release", exact=True).click()
    expect(dialog.get_by_role("alert")).to_contain_text("token")
    assert [each.split()[:2] for each in refused] == [["403", "POST"]]
    refused.clear()
    other = screen("checkpoints/{deletable}", *OTHER_TOKEN)
    other.get_by_role("button", name=release).click()
    confirm(other, "Release", Reason="settled")
    expect(part(other, "Pin and holds").get_by_text("settled")).to_be_visible()
    expect(other.get_by_role("button", name=release)).to_have_count(0)


def test_an_edit_of_a_version_that_is_not_the_newest_is_told_and_done_again(
    screen: Callable[..., Page], service: RunningService, catalog: SeededCatalog, refused: list[str]
) -> None:
    page = screen("checkpoints/{whole}")
    page.get_by_role("button", name="Edit the labels").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Labels, with spaces").fill("release")
    seen = checkpoint(service, catalog.whole)
    edit = {"metrics": {"accuracy": {"value": 0.9}}}
    answer(service.http().patch(f"/v1/checkpoints/{catalog.whole}", json=edit, headers={"If-Match": seen["etag"]}))
    dialog.get_by_role("button", name="Save").click()
    expect(dialog.get_by_text("Changed since it was opened:")).to_be_visible()
    changed = dialog.get_by_role("status").get_by_role("listitem").filter(has_text="metrics.accuracy")
    expect(changed).to_have_text(re.compile("nothing .* 0.9"))
    assert [each.split()[:2] for each in refused] == [["412", "PATCH"]]
    refused.clear()
    dialog.get_by_role("button", name="Reload, and go on from there").click()
    confirm(page, "Save")
    assert checkpoint(service, catalog.whole)["labels"] == ["release"]


def test_a_metric_that_was_measured_later_is_written_and_found_by_best(screen: Callable[..., Page]) -> None:
    page = screen("checkpoints/{restore_point}")
    page.get_by_role("button", name="Add a metric").click()
    confirm(page, "Save", Name="eval_loss", Value="0.125")
    metrics = part(page, "Metrics")
    expect(line(metrics, "eval_loss")).to_contain_text("0.125")
    metrics.get_by_role("button", name="Edit eval_loss").click()
    confirm(page, "Save", Value="0.5")
    expect(line(metrics, "eval_loss")).to_contain_text("0.5")
    page.get_by_role("navigation", name="Screens").get_by_role("link", name="Checkpoints").click()
    page.get_by_label("Find a checkpoint").fill("demo/gpt@best:eval_loss")
    page.keyboard.press("Enter")
    expect(heading(page, "demo/gpt@300#2")).to_be_visible()
    settled(page)
    metrics.get_by_role("button", name="Edit eval_loss").click()
    confirm(page, "Save", Value="")
    expect(metrics.get_by_text("eval_loss")).to_have_count(0)


def test_a_selector_that_names_nothing_says_what_to_type(screen: Callable[..., Page], refused: list[str]) -> None:
    page = screen("checkpoints?find=what")
    expect(page.get_by_role("alert")).to_contain_text("Type project/run@selector")
    page.get_by_label("Find a checkpoint").fill("demo/gpt@7")
    page.get_by_role("button", name="Open").click()
    expect(page.get_by_role("alert")).to_contain_text("7")
    assert [each.split()[0] for each in refused] == ["404"]
    refused.clear()


def test_a_persons_word_on_its_health_decides_what_jobs_resume_from_and_stays_in_the_history(
    screen: Callable[..., Page], service: RunningService
) -> None:
    page = screen("checkpoints/{whole_before}")
    page.get_by_role("button", name="Quarantine").click()
    confirm(page, "Quarantine", Reason="spikes after it")
    expect(page.get_by_role("list", name="Remarks")).to_contain_text("spikes after it")
    page.get_by_role("button", name="Mark healthy").click()
    confirm(page, "Mark healthy")
    expect(page.get_by_role("list", name="Remarks")).to_have_count(0)
    page.get_by_role("link", name="History").click()
    health = part(page, "Health").get_by_role("listitem")
    expect(health.filter(has_text="spikes after it")).not_to_have_count(0)
    changed = part(page, "Who changed what").get_by_role("listitem")
    expect(changed.first).to_contain_text("test train read")
    assert audited(service, "checkpoint.")[0]["checkpoint_id"] is not None


def test_tensors_have_names_shapes_dtypes_and_a_shard_map(screen: Callable[..., Page]) -> None:
    page = screen("checkpoints/{cut}?part=tensors")
    tensor = row(page, "Tensors", "model/weight")
    expect(tensor.get_by_role("gridcell")).to_contain_text(["model/weight", "model", "float32", "[8, 4]", "128 B"])
    tensor.get_by_role("link").click()
    expect(page.get_by_role("img", name="The boxes of model/weight, axis 0")).to_be_visible()
    boxes = page.get_by_role("table").filter(has=page.get_by_role("columnheader", name="Begins at"))
    expect(boxes.locator("tbody tr")).to_have_text([re.compile(r"0\[0, 0\]\[4, 4\]"), re.compile(r"1\[4, 0\]\[4, 4\]")])
    expect(row(page, "Shards").locator("code")).to_have_count(2)
    page.get_by_label("Only names with").fill("bias")
    expect(page.get_by_text("1 of 2 tensors")).to_be_visible()
    page.get_by_label("Only names with").fill("zzz")
    expect(page.get_by_text("No tensor's name has “zzz” in it")).to_be_visible()
    expect(page).to_have_url(re.compile("filter=zzz"))


def test_copies_by_store_show_their_proof_and_are_read_again(
    screen: Callable[..., Page], service: RunningService, catalog: SeededCatalog
) -> None:
    page = screen("checkpoints/{whole}?part=copies")
    copies = part(page, "Copies by store")
    expect(copies.get_by_role("row").nth(1)).to_contain_text("primary")
    expect(copies.get_by_role("row").nth(1)).to_contain_text("verified")
    copies.get_by_role("button", name="Read every copy again").click()
    confirm(page, "Start the scrub")
    expect(copies.get_by_text("The scrub runs as operation")).to_be_visible()
    reconcile(service.context, kinds=OPERATION_KINDS)
    (scrub, *_) = answer(service.http().get("/v1/operations", params={"kind": "scrub"}))["items"]
    assert (scrub["state"], scrub["checkpoint_id"]) == ("done", catalog.whole)


def test_a_bad_copy_names_its_chunk_and_whom_it_concerns(screen: Callable[..., Page]) -> None:
    page = screen("checkpoints/{corrupt}?part=copies")
    bad = part(page, "Bad copies, and whom they concern")
    expect(bad).to_contain_text("a chunk is lost: no attached store has a good one.")
    expect(bad).to_contain_text("The nearest earlier good step is 30.")
    bad.get_by_role("link", name="30", exact=True).click()
    expect(heading(page, "demo/bert@30#1")).to_be_visible()


def test_two_checkpoints_are_compared_by_configuration_metrics_and_tensors(screen: Callable[..., Page]) -> None:
    page = screen("checkpoints/{restore_point}/compare")
    page.get_by_label("Compare with").fill("200#1")
    page.get_by_role("button", name="Compare").click()
    expect(line(page.get_by_role("table", name="Metrics"), "loss")).to_contain_text("+0.25")
    differ = page.get_by_role("table", name="Where the configurations differ")
    expect(line(differ, "optimizer.lr")).to_contain_text("0.00050.001")
    expect(line(page.get_by_role("table", name="Where the environments differ"), "torch")).to_contain_text("2.82.7")
    expect(page.get_by_text("0 of 1 shards are the same bytes.")).to_be_visible()
    settled(page)
    page.get_by_role("navigation", name="Screens").get_by_role("link", name="Checkpoints").click()
    page = screen("checkpoints/{whole}/compare")
    page.get_by_role("link", name="the one before it").click()
    expect(row(page, "Tensors by digest", "sample/bytes")).to_contain_text("differs")
    page.get_by_role("combobox", name="Only").select_option("differs")
    expect(page).to_have_url(re.compile("with=ck_"))


def test_the_tensors_of_two_checkpoints_are_measured(
    screen: Callable[..., Page], service: RunningService, catalog: SeededCatalog
) -> None:
    page = screen(f"checkpoints/{{whole}}/compare?with={catalog.whole_before}")
    values = part(page, "Tensors by value")
    expect(values).to_contain_text("Nobody has had them measured")
    values.get_by_role("button", name="Measure").click()
    confirm(page, "Start")
    expect(values).to_contain_text("waits for a worker")
    reconcile(service.context, kinds=OPERATION_KINDS)
    expect(row(page, "Tensors by value", "sample/bytes")).to_contain_text("0.7")
    expect(values).to_contain_text("128.0 KiB read, 1 tensor measured, 0 equal.")
    settled(page)


def test_what_is_in_the_trash_is_taken_back_where_it_is_looked_at(
    screen: Callable[..., Page], service: RunningService, catalog: SeededCatalog
) -> None:
    page = screen("checkpoints/{trashed}")
    page.get_by_role("button", name="Take it back").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Pin it").select_option("yes")
    dialog.get_by_role("button", name="Take it back").click()
    expect(page.get_by_role("button", name="Unpin")).to_be_visible()
    assert state_of(service, catalog.trashed) == "committed"
