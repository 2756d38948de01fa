"""The views say of any run what the service says of it: restore points and goodput of catalogs that are made up."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime

import pytest
from sqlalchemy import update

from holdfast_protocol.runs import Latest
from holdfast_protocol.states import CheckpointState
from holdfast_service.db.tables.core import Checkpoint, Run
from holdfast_service.db.tables.curves import Curve, CurvePoint
from holdfast_service.insights.goodput import attempt_histories, goodput_of
from holdfast_service.lineage.restore_choice import choose_restore_point, line_of_run, newest_restore_points
from tests.support.dashboards import read_view
from tests.support.random_catalogs import fill
from tests.support.service import RunningService

PARTS = ("wall", "productive", "lost", "saving", "restoring", "restarting", "idle")


def test_restore_points_are_those_of_rest(service: RunningService) -> None:
    with service.context.database.transaction() as session:
        runs = fill(session, runs=150, seed=1)
    with service.context.database.read(snapshot=True) as session:
        shown = {row["run_id"]: row for row in read_view(session, "restore_points")}
        listed = newest_restore_points(session, runs)
        assert set(shown) == set(runs)
        for run in runs:
            chosen = choose_restore_point(session, run, Latest()).restore_point
            assert chosen == listed.get(run)
            row = shown[run]
            if chosen is None:
                assert {value for name, value in row.items() if not name.startswith(("project", "run"))} == {None}
                continue
            assert {name: row[name] for name in chosen.__class__.model_fields} == chosen.model_dump()
            assert row["age_seconds"] == pytest.approx(
                (datetime.now(UTC) - chosen.committed_at).total_seconds(), abs=60
            )
            assert row["newer_checkpoints"] == (
                session.query(Checkpoint)
                .where(Checkpoint.run_id == run, Checkpoint.state == CheckpointState.COMMITTED)
                .where(Checkpoint.step > chosen.step)
                .count()
            )
    found = [row for row in shown.values() if row["checkpoint_id"] is not None]
    assert 30 < len(found) < 130, "the catalog must have both"
    assert any(row["newer_checkpoints"] for row in found)


def test_points_of_curves_are_those_on_the_lineage_of_rest(service: RunningService) -> None:
    with service.context.database.transaction() as session:
        runs = fill(session, runs=150, seed=2)
    shown = defaultdict(list)
    on_lineage = defaultdict(list)
    with service.context.database.read(snapshot=True) as session:
        for row in read_view(session, "curve_points"):
            shown[row["run_id"]].append((row["metric"], row["attempt"], row["step"], row["value"]))
        lines = {run: line_of_run(session, run, also_uncommitted=True) for run in runs}
        columns = (Curve.run_id, Curve.name, CurvePoint.attempt, CurvePoint.step, CurvePoint.value)
        told = session.query(*columns).join(CurvePoint, CurvePoint.curve_id == Curve.id).all()
        for run, *point in told:
            if (point[1], point[2]) in lines[run]:
                on_lineage[run].append(tuple(point))
    assert {run: sorted(points) for run, points in shown.items()} == {
        run: sorted(points) for run, points in on_lineage.items()
    }
    assert 0 < sum(map(len, shown.values())) < len(told)
    assert any(len({attempt for _, attempt, _, _ in points}) > 2 for points in shown.values())


def test_goodput_is_that_of_rest_and_its_days_add_up(service: RunningService) -> None:
    with service.context.database.transaction() as session:
        runs = fill(session, runs=100, seed=3)
        session.execute(update(Run).where(Run.id.in_(runs[::7])).values(forked_from={"run": "another"}))
    with service.context.database.read(snapshot=True) as session:
        shown = {(row["run_id"], row["attempt"]): row for row in read_view(session, "attempt_goodput")}
        days = read_view(session, "goodput_by_day")
        histories = attempt_histories(session, runs)
    now = max(row["last_alive_at"] for row in shown.values() if row["outcome"] is None)
    by_run = defaultdict(list)
    for row in days:
        by_run[row["run_id"]].append(row)
    assert sum(map(len, histories.values())) == len(shown) > 200
    for run, history in histories.items():
        told = goodput_of(history, now)
        for each in told.attempts:
            row = shown[run, each.attempt]
            for part in PARTS:
                assert row[f"{part}_seconds"] == pytest.approx(getattr(each, f"{part}_seconds"), abs=0.01), part
            assert (row["step_seconds"] is None) == (each.step_seconds is None)
            assert (row["step_seconds"] or 0) == pytest.approx(each.step_seconds or 0, rel=1e-6, abs=1e-3)
            assert (row["steps_run"], row["steps_kept"], row["steps_lost"]) == (
                each.steps_run,
                each.steps_kept,
                each.steps_lost,
            )
        # The two queries have each a now of their own on SQLite.
        for part in PARTS:
            whole = sum(row[f"{part}_seconds"] for row in by_run[run])
            assert whole == pytest.approx(getattr(told, f"{part}_seconds"), abs=30), part
        for name in ("steps_run", "steps_kept", "steps_lost"):
            assert sum(row[name] for row in by_run[run]) == pytest.approx(getattr(told, name), abs=0.01)
        assert any(row["goodput"] is not None for row in by_run[run]) == (told.goodput is not None)
    for row in days:
        assert row["wall_seconds"] <= 86400.001
        assert sum(row[f"{part}_seconds"] for part in PARTS[1:]) == pytest.approx(row["wall_seconds"], abs=0.01)
        assert row["goodput"] is None or -1e-9 <= row["goodput"] <= 1 + 1e-9
    assert len({row["day"] for row in days}) > 15
    assert any(each.lost_seconds for each in (goodput_of(history, now) for history in histories.values()))
