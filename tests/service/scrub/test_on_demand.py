"""`holdfast scrubs start`, `chunks impact`, `copies list-bad`: the operation, what bad chunks mean, who may ask."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import update
from typer.testing import CliRunner

import holdfast_service.operations.controller
from holdfast_client import Client, ClientSettings, errors
from holdfast_client.cli.main import app
from holdfast_protocol.copies import ScrubMode, ScrubResult
from holdfast_protocol.service import OperationView
from holdfast_protocol.states import CopyState, Proof, Scope, StoreRole
from holdfast_service.background.registry import OPERATION_KINDS
from holdfast_service.copies.corruption import mark_cold
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Copy
from holdfast_service.scrub import impact as impacts
from holdfast_service.scrub import on_demand as run_scrub
from holdfast_service.scrub import repair
from holdfast_service.tiers.cool import CONTROLLER
from tests.service.conftest import Clock
from tests.support.rank import Job, digest_of
from tests.support.rot import attached, copies_of, copy_to_second, cut, flip, key_of, remove
from tests.support.service import RunningService

SHARED = b"frozen base of two runs" * 500


@pytest.fixture
def client(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    token = service.token()
    monkeypatch.setenv("HOLDFAST_URL", service.url)
    monkeypatch.setenv("HOLDFAST_TOKEN", token)
    with Client(ClientSettings(url=service.url, token=token)) as connected:
        yield connected


def result_of(service: RunningService, client: Client, started: OperationView) -> ScrubResult:
    holdfast_service.operations.controller.reconcile(service.context, kinds=OPERATION_KINDS)
    ended = client.operations.get(started.id)
    assert ended.error is None
    return ScrubResult.model_validate(ended.result)


def save_steps(service: RunningService, run: str, steps: dict[int, bytes]) -> dict[int, dict[str, Any]]:
    job = Job(service.http(), run)
    return {step: job.save(step, content=content) for step, content in steps.items()}


def test_a_run_is_scrubbed_on_demand_repaired_and_told(service: RunningService, client: Client) -> None:
    save_steps(service, "demo/gpt", {1: b"one", 2: b"two", 3: b"three"})
    other = save_steps(service, "demo/other", {1: b"of another run"})
    copy_to_second(service)
    store, second = service.context.store, attached(service, StoreRole.SECOND).store
    flip(store, key_of(service, b"one"))
    remove(store, key_of(service, b"two"))
    cut(store, key_of(service, b"three"))
    remove(second, key_of(service, b"three", StoreRole.SECOND))
    flip(store, key_of(service, b"of another run"))
    found = result_of(service, client, client.scrubs.run("demo", "gpt"))
    assert found.model_dump() == {
        "mode": ScrubMode.READ,
        "copies": 12,
        "good": 8,
        "bad": 2,
        "missing": 2,
        "read_bytes": found.read_bytes,
        "repaired": 2,
        "lost": 1,
        "cold": 0,
        "unread": 0,
        "problems": {},
        "marked": ["demo/gpt@3#1"],
    }
    assert copies_of(service, b"of another run")[0].state == CopyState.VERIFIED, "only that run was read"
    assert client.checkpoints.get(other[1]["id"]).health == "ok"
    # What was lost is sent anew: the next one finds all of it good, and takes the mark back.
    Job(service.http(), after=1).save(4, content=b"three")
    again = result_of(service, client, client.scrubs.run("demo", "gpt"))
    assert (again.lost, again.marked, again.bad, again.missing) == (0, [], 1, 1)
    assert client.checkpoints.select("demo", "gpt", "3#1").health == "ok"


def test_one_that_was_cut_off_does_not_read_again_what_it_has_read(
    service: RunningService, client: Client, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    saved = save_steps(service, "demo/gpt", {1: b"one", 2: b"two"})
    remove(service.context.store, key_of(service, b"two"))
    started = client.scrubs.checkpoint(saved[2]["id"])
    with monkeypatch.context() as broken:
        broken.setattr(run_scrub, "unmark", lambda *_: (_ for _ in ()).throw(SystemExit))
        with pytest.raises(SystemExit):
            holdfast_service.operations.controller.reconcile(service.context, kinds=OPERATION_KINDS)
    clock.advance(service.context.settings.lease_seconds + 60)
    found = result_of(service, client, started)
    assert (found.copies, found.good, found.missing, found.lost, found.read_bytes) == (2, 1, 1, 1, 0)
    assert found.marked == ["demo/gpt@2#1"]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_the_cheap_mode_finds_what_is_missing_or_cut_and_postpones_no_scrub(
    service: RunningService, client: Client
) -> None:
    save_steps(service, "demo/gpt", {1: b"one", 2: b"two", 3: b"three"})
    remove(service.context.store, key_of(service, b"one"))
    cut(service.context.store, key_of(service, b"two"))
    flip(service.context.store, key_of(service, b"three"))
    before = copies_of(service, b"index three")[0].verified_at
    found = result_of(service, client, client.scrubs.run("demo", "gpt", ScrubMode.METADATA))
    assert (found.copies, found.good, found.bad, found.missing, found.lost) == (6, 4, 1, 1, 2)
    assert found.read_bytes == len(b"tw"), "only what seemed wrong was read"
    assert copies_of(service, b"index three")[0].verified_at == before
    assert result_of(service, client, client.scrubs.run("demo", "gpt")).bad == 2, "reading finds the rest"


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_what_cannot_be_read_now_is_told_and_marks_nothing(
    service: RunningService, client: Client, tmp_path: Path
) -> None:
    save_steps(service, "demo/gpt", {1: b"one", 2: b"two"})
    copy_to_second(service)
    with service.context.database.transaction() as session:
        (cold,) = copies_of(service, b"two")
        session.execute(update(Copy).where(Copy.id == cold.id).values(state=CopyState.COLD))
    (tmp_path / "second").rename(tmp_path / "unavailable")
    found = result_of(service, client, client.scrubs.run("demo", "gpt"))
    assert (found.copies, found.good, found.cold, found.unread, found.lost) == (8, 3, 1, 4, 0)
    assert list(found.problems) == ["second"]
    assert found.marked == []


def test_a_bad_chunk_names_what_it_concerns_and_the_nearest_good_steps(service: RunningService, client: Client) -> None:
    gpt = save_steps(service, "demo/gpt", {10: b"a", 20: SHARED, 30: b"b", 40: SHARED, 50: b"c"})
    save_steps(service, "demo/side", {1: SHARED})
    remove(service.context.store, key_of(service, SHARED))
    save_steps(service, "other/gpt", {1: SHARED})
    marked = result_of(service, client, client.scrubs.checkpoint(gpt[20]["id"])).marked
    assert marked == ["demo/gpt@20#1", "demo/gpt@40#1", "demo/side@1#1"], "whoever needs the chunk, by name"
    scoped = ClientSettings(url=service.url, token=service.token(Scope.READ, project="demo"))
    with Client(scoped) as reader:
        impact = reader.scrubs.impact_of_chunk(digest_of(SHARED))
        bad = list(reader.scrubs.all_bad_copies("demo"))
    assert impact.lost
    (chunk,) = impact.chunks
    assert (chunk.project, chunk.lost, [copy.finding for copy in chunk.copies]) == (
        "demo",
        True,
        ["is not in the store"],
    )
    runs = {run.run: (run.checkpoints, run.lost_checkpoints) for run in impact.runs}
    assert runs == {"gpt": (2, 2), "side": (1, 1)}
    by_step = {(one.run, one.step): one for one in impact.checkpoints}
    assert {key: (one.health, one.lost) for key, one in by_step.items()} == {
        ("gpt", 40): ("corrupt", True),
        ("gpt", 20): ("corrupt", True),
        ("side", 1): ("corrupt", True),
    }
    good = {key: (one.good_before, one.good_after) for key, one in by_step.items()}
    steps = {
        key: tuple(None if each is None else each.step for each in (before, after))
        for key, (before, after) in good.items()
    }
    assert steps == {("gpt", 20): (10, 30), ("gpt", 40): (30, 50), ("side", 1): (None, None)}
    (of_gpt,) = (run for run in impact.runs if run.run == "gpt")
    assert (of_gpt.good_before, of_gpt.good_after) == (by_step["gpt", 20].good_before, by_step["gpt", 40].good_after)
    assert [(one.digest, one.lost, one.checkpoints, one.store) for one in bad] == [
        (digest_of(SHARED), True, 3, StoreRole.PRIMARY)
    ]
    # The other project's copy is a copy of its own, and nobody has read it.
    assert not client.scrubs.impact_of_chunk(digest_of(SHARED)).chunks[1].lost
    of_checkpoint = client.scrubs.impact_of_checkpoint(gpt[40]["id"])
    assert [each.digest for each in of_checkpoint.chunks] == [digest_of(SHARED)]
    assert client.scrubs.impact_of_checkpoint(gpt[30]["id"]).chunks == []


def test_of_more_bad_chunks_than_are_shown_what_is_lost_comes_first(
    service: RunningService, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = save_steps(service, "demo/gpt", {1: b"one"})[1]
    copy_to_second(service)
    contents = (b"one", b"index one")
    kept, lost = sorted(contents, key=lambda content: copies_of(service, content)[0].chunk_id)
    bad = [*copies_of(service, kept), *copies_of(service, lost, None)]
    with service.context.database.transaction() as session:
        found = {"state": CopyState.BAD, "bad_at": database_now(session), "finding": "is not in the store"}
        session.execute(update(Copy).where(Copy.id.in_([each.id for each in bad])).values(**found))
    with monkeypatch.context() as few:
        few.setattr(impacts, "_SHOWN_CHUNKS", 1)
        impact = client.scrubs.impact_of_checkpoint(saved["id"])
        assert [(each.digest, each.lost) for each in impact.chunks] == [(digest_of(lost), True)]
        assert (impact.lost, impact.chunks_left_off) == (True, 1)
        told = CliRunner().invoke(app, ["checkpoints", "impact", "demo/gpt@1"]).output
        assert "and 1 bad chunk more" in told
    assert client.scrubs.impact_of_checkpoint(saved["id"]).chunks_left_off == 0


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_step_that_is_lost_as_well_is_no_good_step(service: RunningService, client: Client) -> None:
    """Before the copy is read again nothing is marked: all three are `ok`."""
    saved = save_steps(service, "demo/gpt", {10: b"a", 20: SHARED, 30: SHARED})
    (copy,) = copies_of(service, SHARED)
    with service.context.database.transaction() as session:
        session.execute(update(Copy).where(Copy.id == copy.id).values(state=CopyState.SUSPECT))
    impact = client.scrubs.impact_of_checkpoint(saved[30]["id"])
    good = {one.step: None if one.good_before is None else one.good_before.step for one in impact.checkpoints}
    assert good == {20: 10, 30: 10}
    assert {one.health for one in impact.checkpoints} == {"ok"}


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_what_only_another_attempt_may_rely_on_is_not_told_as_kept(service: RunningService, client: Client) -> None:
    """Nobody has read the copy that is left, and another attempt has sent it."""
    save_steps(service, "demo/gpt", {1: b"one"})
    Job(service.http(), "demo/other").save(1, content=b"two")
    (copy,), (of_another,) = copies_of(service, b"one"), copies_of(service, b"two")
    with service.context.database.transaction() as session:
        left = {"proof": Proof.UNPROVEN, "attempt_id": of_another.attempt_id}
        session.execute(update(Copy).where(Copy.id == copy.id).values(**left))
    told = CliRunner().invoke(app, ["checkpoints", "impact", "demo/gpt@1"]).output
    assert re.search(r"^lost +what is marked below", told, re.MULTILINE)


def test_what_another_attempt_has_sent_and_nobody_has_read_keeps_nothing(
    service: RunningService, client: Client
) -> None:
    saved = save_steps(service, "demo/gpt", {1: b"one"})[1]
    Job(service.http(), "demo/other").save(1, content=b"two")
    copy_to_second(service)
    primary, second = copies_of(service, b"one", None)
    of_another = {"proof": Proof.UNPROVEN, "attempt_id": copies_of(service, b"two")[0].attempt_id}
    with service.context.database.transaction() as session:
        session.execute(update(Copy).where(Copy.id == primary.id).values(state=CopyState.COLD))
        session.execute(update(Copy).where(Copy.id == second.id).values(**of_another))
        assert mark_cold(session, [primary.chunk_id], actor=CONTROLLER) == [saved["id"]]
        session.execute(update(Copy).where(Copy.id == primary.id).values(**of_another))
    (told,) = client.scrubs.impact_of_chunk(digest_of(b"one")).checkpoints
    assert (told.checkpoint_id, told.lost) == (saved["id"], True)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_token_of_another_project_sees_and_scrubs_nothing(service: RunningService, client: Client) -> None:
    saved = save_steps(service, "demo/gpt", {1: SHARED})
    service.make_project("other")
    with Client(ClientSettings(url=service.url, token=service.token(project="other"))) as stranger:
        for call in (
            lambda: stranger.scrubs.impact_of_chunk(digest_of(SHARED)),
            lambda: stranger.scrubs.impact_of_checkpoint(saved[1]["id"]),
            lambda: stranger.scrubs.checkpoint(saved[1]["id"]),
        ):
            with pytest.raises(errors.NotFound):
                call()
        for call in (lambda: stranger.scrubs.bad_copies("demo"), lambda: stranger.scrubs.run("demo", "gpt")):
            with pytest.raises(errors.TokenProblem):
                call()
    reader = service.http(token=service.token(Scope.READ))
    assert reader.post("/v1/projects/demo/runs/gpt/scrubs", json={}).status_code == 403


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_the_commands_print_it_in_both_forms(
    service: RunningService, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    save_steps(service, "demo/gpt", {1: b"one", 2: b"two"})
    remove(service.context.store, key_of(service, b"two"))

    def run(*arguments: str, exit_code: int = 0) -> str:
        done = CliRunner().invoke(app, list(arguments))
        assert done.exit_code == exit_code, done.stdout + done.stderr
        return done.stdout

    begun = json.loads(run("scrubs", "start", "demo/gpt", "--no-wait", "--json"))
    holdfast_service.operations.controller.reconcile(service.context, kinds=OPERATION_KINDS)
    assert client.operations.get(begun["id"]).state == "done"
    ended = threading.Event()

    def works() -> None:
        while not ended.wait(0.02):
            holdfast_service.operations.controller.reconcile(service.context, kinds=OPERATION_KINDS)

    worker = threading.Thread(target=works, daemon=True)
    worker.start()
    text = run("scrubs", "start", "demo/gpt@2", exit_code=6)
    assert re.search(r"^chunks lost +1$", text, re.MULTILINE)
    assert re.search(r"^corrupt +demo/gpt@2#1$", text, re.MULTILINE)
    assert json.loads(run("scrubs", "start", "demo/gpt@1", "--metadata", "--json"))["result"]["good"] == 2
    ended.set()
    worker.join()
    text = run("copies", "list-bad", "demo")
    assert digest_of(b"two")[:12] in text
    assert "is not in the store" in text
    assert "demo/gpt@2#1" in run("checkpoints", "impact", "demo/gpt@2")
    assert json.loads(run("chunks", "impact", digest_of(b"two"), "--json"))["lost"] is True
    assert "Nothing is known to be bad" in run("checkpoints", "impact", "demo/gpt@1")


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_metrics_tell_how_far_and_what_was_found(service: RunningService, client: Client, clock: Clock) -> None:
    save_steps(service, "demo/gpt", {1: b"one", 2: b"two"})
    copy_to_second(service)
    flip(service.context.store, key_of(service, b"two"))
    result_of(service, client, client.scrubs.run("demo", "gpt"))
    clock.advance(100)
    seen = {
        (sample.name, sample.labels["store"]): sample.value
        for family in text_string_to_metric_families(service.http().get("/metrics").text)
        for sample in family.samples
        if sample.name.startswith("holdfast_scrub_")
    }
    assert seen["holdfast_scrub_read_copies_total", "second"] == 4
    assert seen["holdfast_scrub_bad_copies_total", "primary"] == 1
    assert seen["holdfast_scrub_repaired_copies_total", "primary"] == 1
    assert seen["holdfast_scrub_read_bytes_total", "second"] == len(b"oneindex onetwoindex two")
    assert 100 <= seen["holdfast_scrub_oldest_seconds", "primary"] < 160
    assert repair.reconcile(service.context).idle
