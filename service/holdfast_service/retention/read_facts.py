"""Reads what a plan rests on: a few statements for a whole run, and no entity per row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from sqlalchemy import func, literal, select
from sqlalchemy.orm import Session

from holdfast_protocol.policies.retention import RetentionPolicy
from holdfast_protocol.runs import Latest
from holdfast_protocol.states import AttemptOutcome, CheckpointState, Health
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Attempt, Checkpoint, ReadLease, Run
from holdfast_service.db.tables.operations import CheckpointCopy
from holdfast_service.holds.held import hold_reasons, is_held
from holdfast_service.lineage.best_and_proven import newest_proven
from holdfast_service.lineage.restore_choice import choose_restore_point, line_of_run
from holdfast_service.retention.plan import Fact, RunFacts, healthy_first
from holdfast_service.retention.trash import is_pinned

_LIVE = (CheckpointState.COMMITTED, CheckpointState.UPLOADING)


def read_facts(session: Session, run: Run, policy: RetentionPolicy | None) -> RunFacts:
    """Under the run's lock they hold until it is let go, but for what a checkpoint's own lock keeps: its pin, its
    holds, its health, its readers. A caller that acts on them compares `version` and looks for readers under that lock.
    """
    line = line_of_run(session, run.id)
    pins, leases = _pins(session, run.id), _read_until(session, run.id)
    holds, copied = _holds(session, run.id), _copied_to(session, run.id)
    resumed, running = _resumed(session, run)
    # Metrics are the largest part of a row, and most policies ask for none.
    metrics = Checkpoint.metrics if policy is not None and policy.keep_best else literal(None)
    rows = session.execute(
        select(
            Checkpoint.id,
            Checkpoint.step,
            Checkpoint.attempt_number,
            func.coalesce(Checkpoint.committed_at, Checkpoint.created_at).label("at"),
            Checkpoint.state,
            Checkpoint.health,
            Checkpoint.detached,
            Checkpoint.labels,
            metrics.label("metrics"),
            Checkpoint.logical_bytes,
            Checkpoint.version,
        ).where(Checkpoint.run_id == run.id, Checkpoint.state.in_(_LIVE))
    )
    facts = [
        Fact(
            id=row.id,
            step=row.step,
            attempt=row.attempt_number,
            at=row.at,
            state=CheckpointState(row.state),
            health=Health(row.health),
            on_line=line.has(row.id, row.attempt_number, row.step, detached=row.detached),
            labels=row.labels,
            metrics=row.metrics or {},
            logical_bytes=row.logical_bytes,
            version=row.version,
            held=holds.get(row.id, ()),
            pin=pins.get(row.id),
            read_until=leases.get(row.id),
            resumed_by=resumed.get(row.id, ()),
            copied_to=copied.get(row.id, ()),
        )
        for row in rows
    ]
    chosen = choose_restore_point(session, run.id, Latest()).restore_point
    proven = set(newest_proven(session, [fact.id for fact in healthy_first(facts)]))
    facts = [replace(fact, proven=fact.id in proven) for fact in facts]
    # Read last: no commit that the clock dates rightly is later.
    return RunFacts(facts, None if chosen is None else chosen.checkpoint_id, running, database_now(session))


def _pins(session: Session, run_id: str) -> dict[str, str]:
    """By id, who pinned it and why; only pins in force."""
    rows = session.execute(
        select(Checkpoint.id, Checkpoint.pinned_by, Checkpoint.pin_reason, Checkpoint.pinned_until).where(
            Checkpoint.run_id == run_id, is_pinned(session)
        )
    )
    said = {}
    for row in rows:
        until = "" if row.pinned_until is None else f" until {row.pinned_until:%Y-%m-%d %H:%M} UTC"
        said[row.id] = f"by {row.pinned_by}{until}: {row.pin_reason}"
    return said


def _read_until(session: Session, run_id: str) -> dict[str, datetime]:
    rows = session.execute(
        select(ReadLease.checkpoint_id, func.max(ReadLease.expires_at).label("until"))
        .join(Checkpoint, Checkpoint.id == ReadLease.checkpoint_id)
        .where(Checkpoint.run_id == run_id, ReadLease.expires_at > database_now(session))
        .group_by(ReadLease.checkpoint_id)
    )
    return {row.checkpoint_id: row.until for row in rows}


def _holds(session: Session, run_id: str) -> dict[str, list[str]]:
    held = session.scalars(select(Checkpoint.id).where(Checkpoint.run_id == run_id, is_held(session))).all()
    return hold_reasons(session, held) if held else {}


def _copied_to(session: Session, run_id: str) -> dict[str, list[int]]:
    rows = session.execute(
        select(CheckpointCopy.checkpoint_id, CheckpointCopy.store_id)
        .join(Checkpoint, Checkpoint.id == CheckpointCopy.checkpoint_id)
        .where(Checkpoint.run_id == run_id, CheckpointCopy.complete_at.is_not(None))
    )
    copied: dict[str, list[int]] = {}
    for row in rows:
        copied.setdefault(row.checkpoint_id, []).append(row.store_id)
    return copied


def _resumed(session: Session, run: Run) -> tuple[dict[str, list[int]], bool]:
    """By id, the attempts that stand on it; and whether any has not ended. One that is only thought lost may be cut off
    and come back, so what the newest one stands on stays."""
    attempts: Sequence[Any] = session.execute(
        select(Attempt.number, Attempt.resumed_from_id, Attempt.ended_at, Attempt.outcome).where(
            Attempt.run_id == run.id
        )
    ).all()
    resumed: dict[str, list[int]] = {}
    for row in attempts:
        lost = row.outcome == AttemptOutcome.LOST and row.number == run.latest_attempt
        if row.resumed_from_id is not None and (row.ended_at is None or lost):
            resumed.setdefault(row.resumed_from_id, []).append(row.number)
    return resumed, any(row.ended_at is None for row in attempts)
