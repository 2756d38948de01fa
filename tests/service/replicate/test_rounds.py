"""What a pass brings to the second store, as the policy asks for it: the newest first, again what was lost there, and
nothing of what is purged meanwhile (rules row-before-copy and record-outbox)."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import select, update
from typer.testing import CliRunner

import holdfast_service.copies.copy_chunk as copying
import holdfast_service.replicate.controller
import holdfast_service.replicate.copy_checkpoint
import holdfast_service.replicate.lag
from holdfast_client.cli.main import app
from holdfast_protocol.states import CheckpointState, CopyState, Proof, Scope
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Checkpoint, Copy, Project
from holdfast_service.db.tables.operations import AuditEvent, CheckpointCopy
from holdfast_service.db.tables.records import WrittenRecord
from holdfast_service.replicate import policy as rows
from holdfast_service.tallies.sums import copies_against_quota
from tests.service.conftest import Clock
from tests.support.rank import Job, answer
from tests.support.replicated import CONTENT, SECOND, file_of, put_policy, replicate
from tests.support.rot import attached, copies_of
from tests.support.service import RunningService


def row_of(service: RunningService, checkpoint_id: str) -> CheckpointCopy:
    with service.context.database.read() as session:
        return session.get_one(CheckpointCopy, (checkpoint_id, attached(service, SECOND).store_id))


def test_a_policy_brings_every_chunk_of_a_checkpoint_to_the_second_store(service: RunningService) -> None:
    saved = Job(service.http()).save(100, content=CONTENT)
    assert replicate(service).done == 0, "nobody asked for a copy"
    put_policy(service)
    report = replicate(service)
    assert (report.done, report.failed, report.error, report.whole) == (2, 0, None, (saved["id"],))
    (copy,) = copies_of(service, CONTENT, SECOND)
    (source,) = copies_of(service, CONTENT)
    assert (copy.state, copy.proof, copy.attempt_id) == (CopyState.VERIFIED, Proof.STORE_SHA256, source.attempt_id)
    assert copy.generation != source.generation
    assert file_of(service, SECOND, copy).read_bytes() == CONTENT
    row = row_of(service, saved["id"])
    assert (row.wanted, row.missing_bytes, row.complete_at is not None) == (True, 0, True)
    with service.context.database.read() as session:
        assert session.get(WrittenRecord, ("checkpoint", saved["id"], row.store_id)) is not None, "no record is due"
        event = session.execute(select(AuditEvent).where(AuditEvent.action == "checkpoint.copy")).scalar_one()
        assert (event.actor_kind, event.actor, event.checkpoint_id) == ("controller", "replicate", saved["id"])
    assert replicate(service).idle


@pytest.mark.rule("row-before-copy")
def test_a_second_store_that_is_unavailable_is_told_and_tried_again_and_blocks_nothing_else(
    service: RunningService, saved: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "second").rename(tmp_path / "not mounted")
    report = replicate(service)
    assert report.done == 0
    assert report.error is not None
    assert "second store" in report.error
    later = Job(service.http(), after=1).save(200, content=b"saved meanwhile")
    (tmp_path / "not mounted").rename(tmp_path / "second")
    attached = service.context.attached(SECOND)
    assert attached is not None
    attached.watch.reconcile()
    assert set(replicate(service).whole) == {saved["id"], later["id"]}


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_first_store_that_is_unavailable_is_told_by_the_pass_that_could_read_nothing(
    service: RunningService, saved: dict[str, Any], tmp_path: Path
) -> None:
    first = service.context.stores[0].watch
    (tmp_path / "store").rename(tmp_path / "not mounted")
    first.reconcile()
    report = replicate(service)
    assert report.error is not None
    assert "primary store is unavailable" in report.error
    assert row_of(service, saved["id"]).error == report.error
    (tmp_path / "not mounted").rename(tmp_path / "store")
    first.reconcile()
    report = replicate(service)
    assert (report.whole, report.error) == ((saved["id"],), None)
    assert row_of(service, saved["id"]).error is None


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_pass_whose_time_went_into_finding_its_work_does_some_of_it_nevertheless(
    service: RunningService, saved: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A catalog, or a machine, that answers slowly: each look at the clock is later than a whole pass."""
    slow = SimpleNamespace(monotonic=itertools.count(step=3600.0).__next__)
    monkeypatch.setattr(holdfast_service.replicate.controller, "time", slow)
    passes = [replicate(service) for _ in range(2)]
    assert [each.done for each in passes] == [1, 1], "the time was over before the first chunk, in each pass"
    assert passes[-1].whole == (saved["id"],)


def test_what_is_in_the_second_store_does_not_count_against_the_jobs_quota(
    service: RunningService, saved: dict[str, Any]
) -> None:
    assert replicate(service).whole == (saved["id"],)
    service.make_project("demo", quota_bytes=3 * len(CONTENT))
    Job(service.http(), after=1).save(200, content=b"w" * (len(CONTENT) // 3))
    # A process that lacks the second store counts the same.
    lacking = replace(service.context, stores=service.context.stores[:1])
    with service.context.database.read() as session:
        projects = session.scalars(select(Project.id)).all()
        counted = [copies_against_quota(session, each, projects) for each in (service.context, lacking)]
    assert counted[0] == counted[1]
    shown = answer(service.http().get("/v1/projects/demo"))
    assert shown["quota_used_bytes"] == counted[0][shown["id"]].bytes < shown["stored_bytes"]
    assert answer(service.http().get("/v1/projects"))["items"] == [shown]


def test_the_newest_checkpoint_goes_first_and_only_its_own_chunks_move(
    service: RunningService, saved: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    second = Job(service.http(), after=1).save(200, content=b"newer")
    order: list[str] = []
    real = holdfast_service.replicate.controller.copy_checkpoint

    def noted(context: Any, target: Any, checkpoint_id: str, **kwargs: Any) -> Any:
        order.append(checkpoint_id)
        return real(context, target, checkpoint_id, **kwargs)

    monkeypatch.setattr(holdfast_service.replicate.controller, "copy_checkpoint", noted)
    replicate(service)
    assert order == [second["id"], saved["id"]]
    assert replicate(service).idle


def test_a_chunk_that_the_second_store_lost_is_copied_there_again(
    service: RunningService, saved: dict[str, Any]
) -> None:
    replicate(service)
    _lose(service)
    report = replicate(service)
    assert (report.reopened, report.done, report.whole) == (1, 1, (saved["id"],))
    assert copies_of(service, CONTENT, SECOND)[-1].state == CopyState.VERIFIED


def test_a_copy_that_failed_while_the_clock_was_ahead_is_tried_again(
    service: RunningService, saved: dict[str, Any]
) -> None:
    rows.judge(service.context, attached(service, SECOND).store_id)
    with service.context.database.transaction() as session:
        by_that_clock = database_now(session) + timedelta(days=400)
        session.execute(update(CheckpointCopy).values(retry_at=by_that_clock))
    assert replicate(service).whole == (saved["id"],)


def test_the_lag_counts_what_must_be_copied_there_again(service: RunningService, saved: dict[str, Any]) -> None:
    replicate(service)
    _lose(service)
    assert rows.reopen_damaged(service.context, attached(service, SECOND).store_id) == 1
    behind = answer(service.http().get("/v1/projects/demo/runs/gpt/copies"))
    assert (behind["waiting"], behind["lag_bytes"]) == (1, len(CONTENT)), "and not all of the checkpoint"


def _lose(service: RunningService) -> None:
    """The copy of CONTENT in the second store, as the scrub tells it."""
    (copy,) = copies_of(service, CONTENT, SECOND)
    file_of(service, SECOND, copy).unlink()
    with service.context.database.transaction() as session:
        lost = {"state": CopyState.BAD, "bad_at": database_now(session), "finding": "is not in the store"}
        session.execute(update(Copy).where(Copy.id == copy.id).values(**lost))


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_what_is_lost_there_for_good_keeps_no_other_from_being_due_again(
    service: RunningService, saved: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More is lost, in both stores, than one pass looks at."""
    monkeypatch.setattr(rows, "_ROWS", 1)
    Job(service.http(), "demo/other").save(1)
    put_policy(service)
    for _ in range(4):
        replicate(service)
    store_id = attached(service, SECOND).store_id
    with service.context.database.transaction() as session:
        session.execute(update(Copy).values(state=CopyState.BAD, bad_at=database_now(session)))
    assert [rows.reopen_damaged(service.context, store_id) for _ in range(3)] == [1, 1, 0]
    with service.context.database.read() as session:
        assert session.scalars(select(CheckpointCopy.complete_at)).all() == [None, None]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.rule("record-outbox")
def test_a_checkpoint_that_is_purged_while_it_is_copied_leaves_no_record_there(
    service: RunningService, saved: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def purged(context: Any, task: Any, on_bytes: Any) -> bool:
        with context.database.transaction() as session:
            gone = {"state": CheckpointState.DELETING}
            session.execute(update(Checkpoint).where(Checkpoint.id == saved["id"]).values(**gone))
        return copying.copy_now(context, task, on_bytes)

    monkeypatch.setattr(holdfast_service.replicate.copy_checkpoint, "copy_now", purged)
    assert replicate(service).whole == ()
    with service.context.database.read() as session:
        assert session.get(WrittenRecord, ("checkpoint", saved["id"], attached(service, SECOND).store_id)) is None
    replicate(service)
    with service.context.database.read() as session:
        assert session.get(CheckpointCopy, (saved["id"], attached(service, SECOND).store_id)) is None


def test_another_ones_metric_that_is_corrected_makes_this_one_the_best(service: RunningService) -> None:
    def score(view: dict[str, Any], value: float) -> dict[str, Any]:
        edit, seen = {"metrics": {"accuracy": {"value": value}}}, {"If-Match": view["etag"]}
        return dict(answer(service.http().patch(f"/v1/checkpoints/{view['id']}", json=edit, headers=seen)))

    job = Job(service.http())
    mistaken, good = (score(job.save(step, content=b"%d" % step), value) for step, value in ((100, 0.99), (200, 0.9)))
    put_policy(service, best={"metric": "accuracy", "mode": "max", "n": 1})
    assert replicate(service).whole == (mistaken["id"],)
    score(mistaken, 0.5)
    assert replicate(service).whole == (good["id"],)
    assert not row_of(service, mistaken["id"]).wanted


def test_a_policy_that_changes_its_mind_keeps_what_is_there_and_begins_nothing_new(service: RunningService) -> None:
    put = {"kinds": ["final"], "labels": ["milestone"], "every_steps": 1000}
    job = Job(service.http())
    put_policy(service, **put)
    plain, thousandth = job.save(100, content=b"a"), job.save(2000, content=b"b")
    assert replicate(service).whole == (thousandth["id"],)
    edited = service.http().patch(
        f"/v1/checkpoints/{plain['id']}", json={"labels": ["milestone"]}, headers={"If-Match": plain["etag"]}
    )
    assert edited.is_success, edited.text
    assert replicate(service).whole == (plain["id"],), "a label that was given later counts"
    put_policy(service, labels=["release"])
    job.save(3000, content=b"c")
    assert replicate(service).done == 0
    assert not row_of(service, thousandth["id"]).wanted
    assert copies_of(service, b"b", SECOND)[0].state == CopyState.VERIFIED


def test_an_objective_counts_what_no_policy_wants_copied(service: RunningService, clock: Clock) -> None:
    http = service.http()
    job = Job(http)
    job.save(100, content=b"a")
    answer(http.put("/v1/projects/demo/policies/objectives", json={"document": {"rpo_seconds": 60, "rto_seconds": 9}}))
    clock.advance(120)

    def behind() -> tuple[float, float]:
        found = answer(http.get("/v1/projects/demo/runs/gpt/copies"))
        return found["lag_seconds"], found["rpo_seconds"]

    assert behind()[0] == 0 < 120 <= behind()[1], "nothing is wanted, and nothing is safe"
    put_policy(service, every_steps=100)
    replicate(service)
    assert behind() == (0, 0)
    job.save(150, content=b"b")
    clock.advance(30)
    replicate(service)
    assert behind()[0] == 0 < 30 <= behind()[1] < 120


def test_the_runs_that_miss_their_objective_are_listed_apart(
    service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    http = service.http()
    for run in ("a", "b", "c", "d"):
        Job(http, f"demo/{run}").save(100, content=run.encode())

    def listed(**params: Any) -> list[str]:
        """By name, from pages of one run."""
        names: list[str] = []
        asked = params | {"limit": 1}
        while True:
            page = answer(http.get("/v1/projects/demo/copies", params=asked))
            names += [each["run"] for each in page["items"]]
            if page["next_cursor"] is None:
                return names
            asked["cursor"] = page["next_cursor"]

    clock.advance(120)
    assert listed(late=True) == [], "there is no objective"
    answer(http.put("/v1/projects/demo/policies/objectives", json={"document": {"rpo_seconds": 60}}))
    answer(http.put("/v1/projects/demo/runs/b/policies/objectives", json={"document": {"rpo_seconds": 3600}}))
    monkeypatch.setattr(holdfast_service.replicate.lag, "_RUNS_AT_ONCE", 2)
    assert listed(late=True) == ["a", "c", "d"]
    assert listed() == ["a", "b", "c", "d"]
    monkeypatch.setenv("HOLDFAST_URL", service.url)
    monkeypatch.setenv("HOLDFAST_TOKEN", service.token(Scope.READ))
    told = CliRunner().invoke(app, ["copies", "list", "demo", "--late", "--json"])
    assert [each["run"] for each in json.loads(told.output)] == ["a", "c", "d"]
    assert "demo/b misses no objective" in CliRunner().invoke(app, ["copies", "list", "demo/b", "--late"]).output
    put_policy(service)
    report = replicate(service)
    assert listed(late=True) == [], report


def test_a_copy_of_what_has_diverged_hides_no_lag(
    service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest goes there first, and no launch would resume from it."""
    http = service.http()
    job = Job(http)
    job.save(100, content=b"a")
    diverged = job.save(200, content=b"b")
    edit = {"health": "diverged", "health_reason": "the loss is NaN"}
    answer(http.patch(f"/v1/checkpoints/{diverged['id']}", json=edit, headers={"If-Match": diverged["etag"]}))
    put_policy(service)
    answer(http.put("/v1/projects/demo/policies/objectives", json={"document": {"rpo_seconds": 60}}))
    clock.advance(120)

    def behind() -> tuple[int, float, float]:
        found = answer(http.get("/v1/projects/demo/runs/gpt/copies"))
        return found["copied_step"], found["lag_seconds"], found["rpo_seconds"]

    with monkeypatch.context() as slow:
        slow.setattr(holdfast_service.replicate.controller, "_CHECKPOINTS_AT_ONCE", 1)
        assert replicate(service).whole == (diverged["id"],)
    step, lag, exposed = behind()
    assert step == 200
    assert lag >= 120
    assert exposed >= 120
    replicate(service)
    assert behind() == (200, 0, 0)


@pytest.mark.rule("database-clock")
@pytest.mark.parametrize("back_at_once", [True, False])
def test_a_clock_that_goes_back_between_two_commits_hides_no_lag(
    service: RunningService, clock: Clock, back_at_once: bool
) -> None:
    """It was ahead at the first one, or stands back at the second one and is right again afterwards."""
    http = service.http()
    job, jump = Job(http), 10 * 86400
    put_policy(service)
    answer(http.put("/v1/projects/demo/policies/objectives", json={"document": {"rpo_seconds": 60}}))
    clock.advance(jump if back_at_once else 0)
    job.save(100, content=b"a")
    replicate(service)
    clock.advance(-jump)
    job.save(200, content=b"b")
    clock.advance(120 if back_at_once else jump + 120)
    behind = answer(http.get("/v1/projects/demo/runs/gpt/copies"))
    assert behind["lag_seconds"] >= 120
    assert behind["rpo_seconds"] >= 120
    assert (behind["newest_step"], behind["copied_step"], behind["lag_steps"]) == (200, 100, 100)
    replicate(service)
    even = answer(http.get("/v1/projects/demo/runs/gpt/copies"))
    assert (even["lag_seconds"], even["copied_step"]) == (0, 200)


def test_the_lag_is_told_before_any_controller_has_looked(
    service: RunningService, saved: dict[str, Any], clock: Clock
) -> None:
    http = service.http()
    clock.advance(120)
    behind = answer(http.get("/v1/projects/demo/runs/gpt/copies"))
    assert behind["lag_seconds"] >= 120
    assert behind["rpo_objective_seconds"] is None
    objectives = "/v1/projects/demo/runs/gpt/policies/objectives"
    assert http.put(objectives, json={"document": {"rpo": 60}}).json()["code"] == "invalid_request"
    answer(http.put(objectives, json={"document": {"rpo_seconds": 60}}))
    compared = answer(http.get("/v1/projects/demo/runs/gpt/copies"))
    assert compared["rpo_objective_seconds"] == 60 < compared["rpo_seconds"]
    assert (behind["waiting"], behind["copied_step"], behind["newest_step"]) == (1, None, 100)
    assert behind["lag_bytes"] == len(CONTENT) * 2 + len(b"index ")
    metrics = http.get("/metrics").text
    assert 'holdfast_copy_lag_seconds{project="demo",run="gpt"} 1' in metrics
    replicate(service)
    (even,) = answer(http.get("/v1/projects/demo/copies"))["items"]
    assert (even["lag_seconds"], even["lag_steps"], even["lag_bytes"], even["copied_step"]) == (0, 0, 0, 100)
    service.make_project("other")
    stranger = service.http(token=service.token(Scope.READ, Scope.OPERATE, project="other"))
    assert stranger.get("/v1/projects/demo/copies").status_code in (403, 404)
    assert stranger.post("/v1/projects/demo/runs/gpt/drills", json={}).status_code in (403, 404)
    reader = service.http(token=service.token(Scope.READ))
    assert reader.post("/v1/projects/demo/runs/gpt/drills", json={}).status_code == 403
