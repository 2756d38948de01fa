"""Whole runs and projects go to the trash, and are taken back from it (rule deleted-run-trash)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from holdfast_protocol.base import RunName
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.pruning import MAX_AT_ONCE, DeleteAll, Deletion, FreedBytes, TakenBack
from holdfast_protocol.states import CheckpointState
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import database_now
from holdfast_service.db.engine import refuse_if_went_back
from holdfast_service.db.tables.core import Checkpoint, Project, Run
from holdfast_service.errors import ProblemError, refuse_unless_seen
from holdfast_service.records.controller import write_at_once
from holdfast_service.records.documents import RecordKind, Subject, checkpoint_subject
from holdfast_service.records.history import settle_history
from holdfast_service.records.outbox import subject_changed
from holdfast_service.retention.plan import Fact
from holdfast_service.retention.prune import refusal, stays_of_all
from holdfast_service.retention.read_facts import read_facts
from holdfast_service.retention.show_plan import freed_bytes
from holdfast_service.retention.trash import Trashing, lock_run, move_to_trash, out_of_trash
from holdfast_service.runs.views import in_trash, project_named, refuse_if_deleted, run_named

# The entity tag of a run that is not living: if a person takes it back meanwhile, what was seen is not what is there.
_IS_DELETED = '"deleted"'


def delete_run(
    context: ServiceContext, caller: Principal, name: RunName, request: DeleteAll, if_match: str | None
) -> Deletion:
    """A person deletes a whole run: it is in no list from then on, takes no job, and waits in the trash (rule
    deleted-run-trash). Twice is fine: the second call only says that it is deleted.

    One transaction under the run's lock, which every write of a job passes: a save that began before refuses the
    deletion, and the deletion refuses a save that comes later. What is held, pinned or read refuses the deletion by
    name, and so does an active attempt.

    Raises `checkpoint_held` and `checkpoint_protected` for what must stay, `edit_needs_version` and `edit_conflict` if
    it is not as it was seen, and what finding the run raises.
    """
    block = context.database.read if request.dry_run else context.database.transaction
    with block() as session:
        _, found = run_named(session, caller, name.project, name.run, deleted=True)
        if not request.dry_run:
            found = lock_run(session, found.id)
        if found.deleted_at is None:
            gone = _may_go(session, found)
            etag = _etag(found, gone)
            if not request.dry_run:
                refuse_unless_seen("the run", etag, if_match, look="Ask for a dry run")
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
        if len(went) < len(portion):  # a person or a reader held, pinned or opened one meanwhile
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


_SHOWN = 20


def delete_project(
    context: ServiceContext, caller: Principal, name: str, request: DeleteAll, if_match: str | None
) -> Deletion:
    """A person deletes a project whose runs are all deleted (rule deleted-run-trash). Twice is fine. Raises
    `checkpoint_protected` while it has a run that is not deleted, `edit_needs_version` and `edit_conflict`, and
    `project_not_found`.

    Runs go one by one before it, each with what it refuses for: a project of a thousand runs is then no transaction of
    minutes, and the same call continues a deletion that died half way.
    """
    block = context.database.read if request.dry_run else context.database.transaction
    with block() as session:
        project = project_named(session, caller, name, deleted=True)
        if not request.dry_run:
            # A caller that makes a run in it waits, and sees afterwards that it is deleted.
            session.refresh(project, with_for_update=True)
        etag = f'"project-{project.id}"'
        if project.deleted_at is None:
            _refuse_if_in_use(session, project)
            if not request.dry_run:
                refuse_unless_seen("the project", etag, if_match, look="Ask for a dry run")
                _delete(session, project, Trashing.with_its_run(context, Actor.person(caller), request.reason))
        told = in_trash(project)
    return Deletion(
        project=name,
        dry_run=request.dry_run,
        etag=etag,
        checkpoints=0,
        logical_bytes=0,
        freed=FreedBytes(bytes=0),
        in_trash=told,
    )


def _refuse_if_in_use(session: Session, project: Project) -> None:
    living = (Run.project_id == project.id, Run.deleted_at.is_(None))
    names = session.scalars(select(Run.name).where(*living).order_by(Run.name).limit(_SHOWN)).all()
    if not names:
        return
    count = session.scalar(select(func.count()).where(*living)) or 0
    more = f" and {count - len(names)} more" if count > len(names) else ""
    raise ProblemError(
        ProblemCode.CHECKPOINT_PROTECTED,
        f"{project.name} has runs: {', '.join(names)}{more}. Delete them first; `holdfast projects delete "
        f"{project.name}` does both, run by run.",
        runs=list(names),
        count=count,
    )


def _delete(session: Session, project: Project, trashing: Trashing) -> None:
    mark_deleted(session, project, trashing)
    record_event(
        session,
        trashing.actor,
        "project.delete",
        project_id=project.id,
        reason=trashing.reason or None,
        after={"purge_at": None if project.purge_at is None else project.purge_at.isoformat()},
    )
    subject_changed(session, RecordKind.PROJECT, project.id, project.id)


_GOING = (CheckpointState.DELETING, CheckpointState.DELETED)


def undelete_run(context: ServiceContext, caller: Principal, project: str, run: str) -> TakenBack:
    """Takes a deleted run back, with what went to the trash with it and is not being purged yet; what was in the trash
    before stays there. A run that is not deleted stays as it is. Raises `project_not_found` also if the project is
    deleted, `run_not_found` once the run is purged, and `catalog_went_back`.

    The records say so at once, the run's and those of the newest checkpoints: a rebuild would put it into the trash."""
    settle_history(context)
    with context.database.transaction() as session:
        refuse_if_went_back(session)
        owner, found = run_named(session, caller, project, run, deleted=True)
        # A deletion of the project waits until this run lives again, and then is refused; or was first. A negotiation,
        # which holds the run's row and locks the project's for its quota, does not wait for this.
        session.refresh(owner, with_for_update={"read": True, "key_share": True})
        refuse_if_deleted(owner)
        if lock_run(session, found.id).purged_at is not None:
            refuse_if_deleted(owner, found)
        theirs = (Checkpoint.run_id == found.id, Checkpoint.trashed_by == "run")
        trashed = session.scalars(
            select(Checkpoint)
            .where(*theirs, Checkpoint.state == CheckpointState.TRASHED)
            .order_by(Checkpoint.id)
            .with_for_update(),
            execution_options={"populate_existing": True},
        ).all()
        newest_first = sorted(trashed, key=lambda each: (each.attempt_number, each.step), reverse=True)
        subjects = [Subject(RecordKind.RUN, owner.id, found.id)]
        subjects += [checkpoint_subject(owner.id, each.id) for each in newest_first]
        purged = session.scalar(select(func.count()).where(*theirs, Checkpoint.state.in_(_GOING))) or 0
        for checkpoint in trashed:
            out_of_trash(checkpoint)
            before = {"state": CheckpointState.TRASHED.value}
            after = {"state": CheckpointState.COMMITTED.value}
            _tell(session, caller, found, "checkpoint.undelete", before, after, checkpoint_id=checkpoint.id)
        if found.deleted_at is not None:
            back = {"checkpoints": len(trashed), "purged": purged}
            _tell(session, caller, found, "run.undelete", _deletion(found), back)
            _unmark(found)
            subject_changed(session, RecordKind.RUN, found.id, found.project_id)
    write_at_once(context, subjects)
    return TakenBack(project=project, run=run, checkpoints=len(trashed), purged=purged)


def undelete_project(context: ServiceContext, caller: Principal, name: str) -> TakenBack:
    """Its runs are taken back one by one. Its record says so at once, as that of a run does. Raises `project_not_found`
    once it is purged."""
    with context.database.transaction() as session:
        project = project_named(session, caller, name, deleted=True)
        session.refresh(project, with_for_update=True)
        if project.purged_at is not None:
            refuse_if_deleted(project)
        if project.deleted_at is not None:
            record_event(
                session, Actor.person(caller), "project.undelete", project_id=project.id, before=_deletion(project)
            )
            _unmark(project)
            subject_changed(session, RecordKind.PROJECT, project.id, project.id)
        subject = Subject(RecordKind.PROJECT, project.id, project.id)
    write_at_once(context, [subject])
    return TakenBack(project=name, checkpoints=0, purged=0)


def _unmark(found: Project | Run) -> None:
    found.deleted_at = found.deleted_by = found.delete_reason = found.purge_at = None


def _deletion(found: Project | Run) -> dict[str, str | None]:
    return {
        "deleted_by": found.deleted_by,
        "purge_at": None if found.purge_at is None else found.purge_at.isoformat(),
    }


def _tell(  # noqa: PLR0917 (the parts of one event)
    session: Session,
    caller: Principal,
    run: Run,
    action: str,
    before: Mapping[str, str | None],
    after: Mapping[str, str | int],
    *,
    checkpoint_id: str | None = None,
) -> None:
    record_event(
        session,
        Actor.person(caller),
        action,
        project_id=run.project_id,
        run_id=run.id,
        checkpoint_id=checkpoint_id,
        before=dict(before),
        after=dict(after),
    )
