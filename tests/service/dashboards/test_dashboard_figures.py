"""The views of a catalog that jobs have filled, beside what REST says of it."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text, update

from holdfast_protocol.attempts import AttemptView
from holdfast_protocol.checkpoints import CheckpointView
from holdfast_protocol.events import EventView
from holdfast_protocol.runs import MetricsHistory, ProjectView, RunView
from holdfast_protocol.usage import UsageView
from holdfast_service.dashboards.definition import Kind
from holdfast_service.db.tables.core import Attempt, Checkpoint, Run
from tests.support.dashboards import VIEWS, read_view, sample_now
from tests.support.rank import Job, answer
from tests.support.retention import prune, undelete
from tests.support.service import RunningService
from tests.support.tallies import take_up


@pytest.fixture
def filled(service: RunningService) -> RunningService:
    """Everything that can become of a checkpoint: on the line and off it, in the trash and back, corrupt, aborted,
    under way; runs that train, have failed, and are in the trash."""
    http = service.http()
    job = Job(http, "demo/gpt", create=True, environment={"torch": "2.13.0"})
    saved = [job.save(step, metrics={"loss": {"value": 1 / step}}) for step in (100, 200, 300, 400)]
    job.heartbeat(400, first_step=1, steps_run=400, steps_per_second=2.0, save_blocked_seconds=1.5, saves_begun=4)
    job.heartbeat(400, metrics={"loss": [[step, 1 / step] for step in range(50, 401, 50)], "lr": [[100, 0.1]]})
    job.end("failed", detail="CUDA error", error_type="RuntimeError", error_rank=0)
    again = Job(http, "demo/gpt", after=1)
    again.resumed_from(saved[1]["id"], rollback=True)
    again.heartbeat(250, metrics={"loss": [[210, 0.5], [220, "nan"], [230, "-inf"], [240, 0.25]]})
    saved += [again.save(step) for step in (250, 350, 450)]
    again.begin(500).abort("a rank has gone")
    again.begin(550)
    prune(service, checkpoint_ids=[saved[0]["id"], saved[4]["id"]], dry_run=False)
    undelete(service, saved[0]["id"])
    with service.context.database.transaction() as session:
        bad = {"health": "corrupt", "health_reason": "a chunk is lost", "version": Checkpoint.version + 1}
        session.execute(update(Checkpoint).where(Checkpoint.id == saved[6]["id"]).values(bad))
    other = Job(http, "other/bert", create=True)
    other.save(7)
    other.heartbeat(7, metrics={"loss": [[7, 1.5]]})
    other.end("finished")
    gone = Job(http, "demo/gone", create=True)
    gone.save(1)
    gone.end("finished")
    answer(http.request("DELETE", "/v1/projects/demo/runs/gone", json={"reason": "a try"}, headers={"If-Match": "*"}))
    take_up(service)
    sample_now(service)
    return service


def rows(service: RunningService, subject: str, where: str = "true", **values: Any) -> list[dict[str, Any]]:
    with service.context.database.read() as session:
        return read_view(session, subject, where, **values)


def test_projects(filled: RunningService) -> None:
    shown = {row["project"]: row for row in rows(filled, "projects")}
    assert set(shown) == {"demo", "other"}
    for name, row in shown.items():
        view = ProjectView.model_validate(answer(filled.http().get(f"/v1/projects/{name}")))
        usage = UsageView.model_validate(answer(filled.http().get(f"/v1/projects/{name}/usage")))
        assert (row["project_id"], row["created_at"], row["quota_bytes"]) == (
            view.id,
            view.created_at,
            view.quota_bytes,
        )
        assert row["runs"] == view.runs
        for column in ("logical_bytes", "deduplicated_bytes", "stored_bytes", "committed_bytes", "trashed_bytes"):
            assert row[column] == getattr(usage, column), column
        assert row["committed_bytes"] > 0
        assert row["arriving_bytes"] == usage.arriving_bytes
        assert row["pending_collection_bytes"] == usage.pending_collection_bytes
        parts = ("committed_bytes", "arriving_bytes", "trashed_bytes", "pending_collection_bytes")
        assert sum(row[part] for part in parts) == row["stored_bytes"]
    assert shown["demo"]["trashed_bytes"] > 0


def test_runs_and_their_restore_points(filled: RunningService) -> None:
    shown = {row["run"]: row for row in rows(filled, "runs")}
    assert set(shown) == {"gpt", "bert", "gone"}
    points = {row["run"]: row for row in rows(filled, "restore_points")}
    for project, run in (("demo", "gpt"), ("other", "bert")):
        view = RunView.model_validate(answer(filled.http().get(f"/v1/projects/{project}/runs/{run}")))
        row = shown[run]
        assert (row["project"], row["run_id"], row["deleted_at"]) == (project, view.id, None)
        same = ("created_at", "latest_attempt", "last_step", "last_heard_at", "committed_checkpoints", "newest_step")
        for column in (*same, "logical_bytes", "deduplicated_bytes", "status"):
            assert row[column] == getattr(view, column), column
        point = view.restore_point
        assert point is not None
        assert {name: points[run][name] for name in type(point).model_fields} == point.model_dump()
    assert (shown["gpt"]["status"], points["gpt"]["step"], points["gpt"]["newer_checkpoints"]) == ("training", 350, 2)
    (deleted,) = answer(filled.http().get("/v1/projects/demo/runs", params={"deleted": "true"}))["items"]
    trash = RunView.model_validate(deleted).in_trash
    assert trash is not None
    assert points["gone"]["checkpoint_id"] is None, "they are in the trash with it"
    gone = shown["gone"]
    assert (gone["deleted_at"], gone["deleted_by"], gone["purge_at"]) == (
        trash.deleted_at,
        trash.deleted_by,
        trash.purge_at,
    )


def test_attempts(filled: RunningService) -> None:
    shown = {row["attempt"]: row for row in rows(filled, "attempts", "run = 'gpt'")}
    assert set(shown) == {1, 2}
    for number, row in shown.items():
        view = AttemptView.model_validate(answer(filled.http().get(f"/v1/projects/demo/runs/gpt/attempts/{number}")))
        for column in [each.name for each in VIEWS["attempts"].columns][5:]:
            assert row[column] == getattr(view, column), column
    assert (shown[1]["outcome"], shown[1]["environment"]) == ("failed", {"torch": "2.13.0"})


def test_checkpoints(filled: RunningService) -> None:
    shown = {row["checkpoint_id"]: row for row in rows(filled, "checkpoints")}
    assert len(shown) == 11
    assert {row["state"] for row in shown.values()} == {"committed", "trashed", "aborted", "uploading"}
    assert {row["health"] for row in shown.values()} == {"ok", "corrupt"}
    for checkpoint_id, row in shown.items():
        reply = answer(filled.http().get(f"/v1/checkpoints/{checkpoint_id}"))
        view = CheckpointView.model_validate(reply)
        assert (row["project"], row["run"]) == (view.project, view.run)
        for column in [each.name for each in VIEWS["checkpoints"].columns][5:]:
            if column == "metrics":
                values = {name: each.value for name, each in view.metrics.items()}
                assert {name: each["value"] for name, each in row["metrics"].items()} == values
            else:
                assert row[column] == getattr(view, column), column


def test_events(filled: RunningService) -> None:
    listed = answer(filled.http().get("/v1/events", params={"limit": 200}))["items"]
    shown = {row["event_id"]: row for row in rows(filled, "events")}
    assert len(listed) == len(shown) > 10
    for each in listed:
        event = EventView.model_validate(each)
        row = shown[event.id]
        assert (row["type"], row["happened_at"]) == (event.type, event.timestamp)
        for column in type(event.data).model_fields:
            assert row[column] == getattr(event.data, column), column


def test_the_points_of_curves_are_those_of_the_lineage(filled: RunningService) -> None:
    shown = rows(filled, "curve_points", "run = 'gpt' ORDER BY metric, step")
    of_loss = [
        (row["step"], row["attempt"], row["value"], row["nonfinite"]) for row in shown if row["metric"] == "loss"
    ]
    assert of_loss[:4] == [(step, 1, 1 / step, None) for step in (50, 100, 150, 200)]
    assert of_loss[4:] == [(210, 2, 0.5, None), (220, 2, None, "nan"), (230, 2, None, "-inf"), (240, 2, 0.25, None)]
    told = MetricsHistory.model_validate(answer(filled.http().get("/v1/projects/demo/runs/gpt/metrics-history")))
    assert [(row["metric"], row["step"], row["attempt"], row["value"], row["nonfinite"]) for row in shown] == [
        (curve.name, at.step, at.attempt, at.value, at.nonfinite) for curve in told.metrics for at in curve.points
    ]


def test_the_last_day_of_usage_is_what_rest_shows(filled: RunningService) -> None:
    by_run = {row["run"]: row for row in rows(filled, "usage_by_day")}  # all of it happened today, or about midnight
    for project, run in (("demo", "gpt"), ("other", "bert")):
        view = RunView.model_validate(answer(filled.http().get(f"/v1/projects/{project}/runs/{run}")))
        assert by_run[run]["kept_checkpoints"] == view.committed_checkpoints
        assert by_run[run]["kept_logical_bytes"] == view.logical_bytes
    assert by_run["gone"]["kept_checkpoints"] == 0


def _at(day: str, clock: str = "12:00") -> datetime:
    return datetime.fromisoformat(f"{day} {clock}").replace(tzinfo=UTC)


def test_usage_day_by_day(filled: RunningService) -> None:
    """Saved on the 1st, around a midnight, and removed on the 4th; the rest stands until today."""
    committed = {100: _at("2026-03-01"), 200: _at("2026-03-01", "23:59"), 300: _at("2026-03-02", "00:01")}
    with filled.context.database.transaction() as session:
        run = session.query(Run).where(Run.name == "gpt").one()
        first = session.query(Checkpoint).where(Checkpoint.run_id == run.id, Checkpoint.attempt_number == 1).all()
        size = {each.step: each.logical_bytes for each in first}
        sent = {each.step: each.uploaded_bytes for each in first}
        for step, at in committed.items():
            of_step = update(Checkpoint).where(Checkpoint.run_id == run.id, Checkpoint.step == step)
            session.execute(of_step.values(committed_at=at))
        second = update(Checkpoint).where(Checkpoint.run_id == run.id, Checkpoint.step == 200)
        trashed = {"state": "trashed", "trashed_at": _at("2026-03-04"), "trashed_by": "policy"}
        session.execute(second.values(trashed | {"purge_at": _at("2026-03-11"), "version": Checkpoint.version + 1}))
        aborted = update(Checkpoint).where(Checkpoint.run_id == run.id, Checkpoint.state == "aborted")
        session.execute(aborted.values(aborted_at=_at("2026-03-03")))
    shown = {row["day"]: row for row in rows(filled, "usage_by_day", "run = 'gpt'")}
    begin = date(2026, 3, 1)
    days = [begin + timedelta(days=n) for n in range(len(shown))]
    assert sorted(shown) == days, "no day is left out"
    assert len(days) > 100
    told = [
        tuple(
            shown[day][column]
            for column in (
                "committed_checkpoints",
                "aborted_checkpoints",
                "removed_checkpoints",
                "kept_checkpoints",
            )
        )
        for day in days[:5]
    ]
    assert told == [(2, 0, 0, 2), (1, 0, 0, 3), (0, 1, 0, 3), (0, 0, 1, 2), (0, 0, 0, 2)]
    assert shown[begin]["committed_logical_bytes"] == size[100] + size[200]
    assert shown[begin]["uploaded_bytes"] == sent[100] + sent[200]
    assert shown[days[3]]["removed_logical_bytes"] == size[200]
    assert shown[days[4]]["kept_logical_bytes"] == size[100] + size[300]


def test_goodput_of_an_attempt_that_runs_over_midnight(filled: RunningService) -> None:
    """From 22:00 to 04:00 it trained: a step in each of 21,600 seconds, of which the run has kept half. Then nothing
    for two days, until the run goes on."""
    opened = _at("2026-03-01", "22:00")
    with filled.context.database.transaction() as session:
        run = session.query(Run).where(Run.name == "gpt").one()
        from_id = session.query(Attempt).where(Attempt.run_id == run.id, Attempt.number == 2).one().resumed_from_id
        session.execute(update(Checkpoint).where(Checkpoint.id == from_id).values(step=10_800))
        of_first = update(Attempt).where(Attempt.run_id == run.id, Attempt.number == 1)
        told = {"first_step": 1, "last_step": 21_600, "steps_run": 21_600, "save_blocked_seconds": 0.0}
        lived = {"first_step_at": opened + timedelta(seconds=1), "progressed_at": opened + timedelta(hours=6)}
        ended = {"opened_at": opened, "ended_at": opened + timedelta(hours=6), "outcome": "failed"}
        session.execute(of_first.values(told | lived | ended))
        of_second = update(Attempt).where(Attempt.run_id == run.id, Attempt.number == 2)
        until = opened + timedelta(hours=54)
        session.execute(of_second.values(opened_at=until, ended_at=until, outcome="finished", last_step=10_800))
    shown = {row["day"]: row for row in rows(filled, "goodput_by_day", "run = 'gpt'")}
    first, second, third, fourth = (shown[date(2026, 3, day)] for day in (1, 2, 3, 4))
    assert len(shown) == 4
    for row, hours in ((first, 2), (second, 4)):
        assert row["productive_seconds"] == pytest.approx(hours * 1800, abs=2)
        assert row["lost_seconds"] == pytest.approx(hours * 1800, abs=2)
        assert row["steps_run"] == pytest.approx(hours * 3600, abs=1)
        assert row["steps_lost"] == pytest.approx(hours * 1800, abs=1)
    assert (first["wall_seconds"], first["goodput"]) == (pytest.approx(7200), pytest.approx(0.5, abs=0.001))
    assert second["restarting_seconds"] == pytest.approx(20 * 3600, abs=2)
    assert second["goodput"] == pytest.approx(2 / 24, abs=0.001)
    assert (third["restarting_seconds"], third["goodput"]) == (pytest.approx(86400), 0)
    assert fourth["wall_seconds"] == pytest.approx(4 * 3600)


def test_a_clock_that_was_ahead_makes_no_day_to_come(filled: RunningService) -> None:
    later = datetime.now(UTC) + timedelta(days=3)
    with filled.context.database.transaction() as session:
        run = session.query(Run).where(Run.name == "bert").one()
        session.execute(update(Checkpoint).where(Checkpoint.run_id == run.id).values(committed_at=later))
        session.execute(update(Attempt).where(Attempt.run_id == run.id).values(ended_at=later))
    usage, goodput = (rows(filled, subject, "run = 'bert'") for subject in ("usage_by_day", "goodput_by_day"))
    today = datetime.now(UTC).date()
    assert max(row["day"] for row in usage) <= today
    assert 0 < len(goodput) <= 2
    assert max(row["day"] for row in goodput) <= today
    assert usage[-1]["kept_checkpoints"] == 1, "as REST shows it"


_SQLITE_TYPES = {
    Kind.TEXT: {"text"},
    Kind.INTEGER: {"integer"},
    Kind.NUMBER: {"real", "integer"},
    Kind.BOOLEAN: {"integer"},
    Kind.MOMENT: {"text"},
    Kind.DAY: {"text"},
    Kind.DOCUMENT: {"text"},
}


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_sqlite_writes_each_column_as_its_kind(filled: RunningService) -> None:
    with filled.context.database.read() as session:
        for view in VIEWS.values():
            for column in view.columns:
                found = session.scalars(text(f"SELECT DISTINCT typeof({column.name}) FROM {view.name}")).all()
                assert set(found) <= {*_SQLITE_TYPES[column.kind], "null"}, (view.name, column.name)


def test_what_is_purged_is_in_no_view(filled: RunningService) -> None:
    with filled.context.database.transaction() as session:
        now = datetime.now(UTC)
        session.execute(update(Run).where(Run.name == "gone").values(purged_at=now, name=Run.name + "~" + Run.id))
    for subject in set(VIEWS) - {"projects", "project_samples", "events"}:
        there = {"gpt"} if subject == "run_samples" else {"gpt", "bert"}  # bert has ended
        assert {row["run"] for row in rows(filled, subject)} == there, subject
