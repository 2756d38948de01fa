"""A person deletes a whole run: it is in no list from then on, takes no job, and waits in the trash (protocol rule 46).

One transaction under the run's lock, which every write of a job passes: a save that began before it refuses it, one
that comes later is refused. What is held, pinned or read refuses the deletion by name, and so does an active attempt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from holdfast_protocol.deletion import DeleteAll, Deletion
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.pruning import MAX_AT_ONCE
from holdfast_protocol.selectors import RunName
from holdfast_protocol.states import CheckpointState
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.audit import Actor, record_event
from holdfast_service.catalog.in_trash import in_trash
from holdfast_service.catalog.record_names import RecordKind
from holdfast_service.catalog.record_outbox import subject_changed
from holdfast_service.catalog.resolve import run_named
from holdfast_service.catalog.tables import Checkpoint, Project, Run
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError
from holdfast_service.retention.facts import Fact
from holdfast_service.retention.freed import freed_bytes
from holdfast_service.retention.prune import refusal, stays_of_all
from holdfast_service.retention.read_facts import read_facts
from holdfast_service.retention.trash import Trashing, lock_run, move_to_trash

# That of no living run: if somebody takes it back meanwhile, what was seen is not what is there.
_IS_DELETED = '"deleted"'


def delete_run(
    context: ServiceContext, caller: Principal, name: RunName, request: DeleteAll, if_match: str | None
) -> Deletion:
    """Of one that is deleted already it only says so: twice is fine. Raises `checkpoint_held` and
    `checkpoint_protected` for what must stay, `edit_needs_version` and `edit_conflict` where it is not as it was seen,
    and what finding the run raises."""
    block = context.database.read if request.dry_run else context.database.transaction
    with block() as session:
        _, found = run_named(session, caller, name.project, name.run, deleted=True)
        if not request.dry_run:
            found = lock_run(session, found.id)
        if found.deleted_at is None:
            gone = _may_go(session, found)
            etag = _etag(found, gone)
            if not request.dry_run:
                check_seen(etag, if_match)
                _move(session, found, gone, Trashing.with_its_run(context, Actor.person(caller), request.reason))
            ids, logical_bytes = [fact.id for fact in gone], sum(fact.logical_bytes for fact in gone)
        else:
            etag, (ids, logical_bytes) = _IS_DELETED, _in_trash_with(session, found)
        told = in_trash(found)
    with context.database.read() as session:
        freed = freed_bytes(session, ids)
    return Deletion(
        project=name.project,
        run=name.run,
        dry_run=request.dry_run,
        etag=etag,
        checkpoints=len(ids),
        logical_bytes=logical_bytes,
        freed=freed,
        in_trash=told,
    )


def check_seen(etag: str, if_match: str | None) -> None:
    """Raises `edit_needs_version` and `edit_conflict`."""
    if if_match is None:
        raise ProblemError(
            ProblemCode.EDIT_NEEDS_VERSION,
            "To delete all of it, say what was seen. Ask for a dry run, and send its `etag` as the header If-Match.",
            etag=etag,
        )
    if if_match not in (etag, "*"):
        raise ProblemError(
            ProblemCode.EDIT_CONFLICT,
            "It has changed since it was looked at, and nothing was deleted. Ask for a dry run again and decide anew.",
            etag=etag,
        )


def mark_deleted(session: Session, found: Project | Run, trashing: Trashing) -> None:
    """The caller has its lock."""
    now = database_now(session)
    found.deleted_at, found.purge_at = now, now + trashing.keep_for
    found.deleted_by, found.delete_reason = trashing.actor.name, trashing.reason or None
    session.flush()


def _may_go(session: Session, run: Run) -> Sequence[Fact]:
    facts = read_facts(session, run, None)
    stays = stays_of_all(facts)
    left = [fact for fact in facts.facts if fact.id in stays]
    if left:
        raise refusal(left, stays)
    return facts.facts


def _etag(run: Run, gone: Sequence[Fact]) -> str:
    """Another one after each attempt, each commit, and each checkpoint that went by itself."""
    seen = [run.id, str(run.latest_attempt), *sorted(fact.id for fact in gone)]
    return f'"run-{hashlib.sha256(" ".join(seen).encode()).hexdigest()[:32]}"'


def _move(session: Session, run: Run, gone: Sequence[Fact], trashing: Trashing) -> None:
    for first in range(0, len(gone), MAX_AT_ONCE):
        portion = gone[first : first + MAX_AT_ONCE]
        went, _ = move_to_trash(session, run, portion, trashing)
        if len(went) < len(portion):  # somebody held, pinned or opened one until its lock was taken
            raise ProblemError(
                ProblemCode.EDIT_CONFLICT,
                "A checkpoint of it was changed at this very moment, and nothing was deleted. Look again.",
            )
    mark_deleted(session, run, trashing)
    record_event(
        session,
        trashing.actor,
        "run.delete",
        project_id=run.project_id,
        run_id=run.id,
        reason=trashing.reason or None,
        after={
            "checkpoints": len(gone),
            "logical_bytes": sum(fact.logical_bytes for fact in gone),
            "purge_at": None if run.purge_at is None else run.purge_at.isoformat(),
        },
    )
    subject_changed(session, RecordKind.RUN, run.id, run.project_id)


def _in_trash_with(session: Session, run: Run) -> tuple[list[str], int]:
    """The ids of those that are in the trash with their run, and their logical bytes."""
    theirs = (
        Checkpoint.run_id == run.id,
        Checkpoint.state == CheckpointState.TRASHED,
        Checkpoint.trashed_by == "run",
    )
    size = session.scalar(select(func.sum(Checkpoint.logical_bytes)).where(*theirs))
    return list(session.scalars(select(Checkpoint.id).where(*theirs))), int(size or 0)
