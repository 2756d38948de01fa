"""Committed -> trashed: the one way in which a checkpoint expires, for policies and for people (protocol rule 26).

The caller holds the run's row FOR UPDATE, so no commit, no new attempt and no "resumed from" changes what it has
decided. What has its own lock is looked at again here: the checkpoints' rows are locked, in order, and a LATER
statement leaves out each that was changed since (its version says so), is held or pinned by now, or has a reader.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from holdfast_protocol.retention import Reason
from holdfast_protocol.states import CheckpointState
from holdfast_service.catalog.audit import Actor, record_event
from holdfast_service.catalog.tables import Checkpoint, Run
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.retention.facts import Fact
from holdfast_service.retention.in_force import must_stay

TrashedBy = Literal["policy", "person", "run"]


@dataclass(frozen=True)
class Trashing:
    """Who, and why. `keep_for`: until the purge."""

    by: TrashedBy
    actor: Actor
    reason: str
    keep_for: timedelta

    @classmethod
    def by_policy(cls, context: ServiceContext, actor: Actor, reason: str) -> Trashing:
        return cls("policy", actor, reason, timedelta(seconds=context.settings.trash_policy_seconds))

    @classmethod
    def by_person(cls, context: ServiceContext, actor: Actor, reason: str) -> Trashing:
        return cls("person", actor, reason, timedelta(seconds=context.settings.trash_person_seconds))

    @classmethod
    def with_its_run(cls, context: ServiceContext, actor: Actor, reason: str) -> Trashing:
        """By this it is told from what was in the trash before the run was deleted."""
        return cls("run", actor, reason, timedelta(seconds=context.settings.trash_person_seconds))


def lock_run(session: Session, run_id: str) -> Run:
    """FOR UPDATE, as opening an attempt has it: what is read in later statements stays so until the end."""
    return session.execute(
        select(Run).where(Run.id == run_id).with_for_update(), execution_options={"populate_existing": True}
    ).scalar_one()


def move_to_trash(
    session: Session,
    run: Run,
    facts: Sequence[Fact],
    trashing: Trashing,
    reasons: Mapping[str, Sequence[Reason]] | None = None,
) -> tuple[set[str], datetime]:
    """The ids of those that went, and when their purge may begin. `reasons` go into each one's event."""
    versions = {fact.id: fact.version for fact in facts}
    free = _free(session, versions)
    now = database_now(session)
    purge_at = now + trashing.keep_for
    session.execute(
        update(Checkpoint)
        .where(Checkpoint.id.in_(free))
        .values(
            state=CheckpointState.TRASHED,
            trashed_at=now,
            trashed_by=trashing.by,
            trash_reason=trashing.reason,
            purge_at=purge_at,
            version=Checkpoint.version + 1,
        ),
        execution_options={"synchronize_session": False},
    )
    for fact in facts:
        if fact.id in free:
            said = "; ".join(reason.detail for reason in (reasons or {}).get(fact.id, ()))
            record_event(
                session,
                trashing.actor,
                "checkpoint.expire" if trashing.by == "policy" else "checkpoint.trash",
                project_id=run.project_id,
                run_id=run.id,
                checkpoint_id=fact.id,
                reason=": ".join(part for part in (trashing.reason, said) if part) or None,
                before={"state": CheckpointState.COMMITTED.value},
                after={"state": CheckpointState.TRASHED.value, "step": fact.step, "purge_at": purge_at.isoformat()},
            )
    return free, purge_at


def _free(session: Session, versions: Mapping[str, int]) -> set[str]:
    ids: Collection[str] = sorted(versions)
    session.execute(select(Checkpoint.id).where(Checkpoint.id.in_(ids)).order_by(Checkpoint.id).with_for_update()).all()
    rows = session.execute(
        select(Checkpoint.id, Checkpoint.version).where(
            Checkpoint.id.in_(ids), Checkpoint.state == CheckpointState.COMMITTED, ~must_stay(session)
        )
    )
    return {row.id for row in rows if row.version == versions[row.id]}
