"""Projects, runs, attempts and checkpoints: from names to rows, and from rows to what the wire shows.

Every look-up takes the caller: what a token may not see does not exist for it. `ensure_project` and `ensure_run` make
what is not there yet.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from sqlalchemy import ColumnElement, Select, and_, bindparam, case, exists, or_, select
from sqlalchemy.orm import Session

from holdfast_protocol.attempts import AttemptView, NoticeView
from holdfast_protocol.checkpoints import CheckpointView, Component, ForkedFrom, MetricValue
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.pruning import InTrash
from holdfast_protocol.restores import Skipped
from holdfast_protocol.states import (
    AbortCause,
    AttemptOutcome,
    CheckpointKind,
    CheckpointState,
    CopyState,
    Doing,
    Health,
    QuotaKind,
    RunStatus,
    ShardState,
    Tier,
)
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import database_now, insert_absent
from holdfast_service.db.pages import cut_page, decode_cursor
from holdfast_service.db.tables.core import Attempt, Checkpoint, Copy, Project, Run, Shard
from holdfast_service.errors import ProblemError
from holdfast_service.quotas.limits import refuse_one_more
from holdfast_service.records.documents import RecordKind
from holdfast_service.records.outbox import subject_changed

WHOLE = (CheckpointState.COMMITTED, CheckpointState.TRASHED)
"""Checkpoints that can be looked into: those that are wholly there."""


_PROJECT_NAMED = select(Project).where(Project.name == bindparam("project"))
_RUN_NAMED = (
    select(Project, Run)
    .outerjoin(Run, and_(Run.project_id == Project.id, Run.name == bindparam("run")))
    .where(Project.name == bindparam("project"))
)
"""Made once: most calls begin with one of them, and to make a statement takes longer than to run it."""


def project_named(session: Session, caller: Principal, name: str, *, deleted: bool = False) -> Project:
    """With `deleted` one that is in the trash and not purged will do. Raises `forbidden` for another project's token,
    and `project_not_found`."""
    caller.check_project_name(name)
    return _project_found(session.scalar(_PROJECT_NAMED, {"project": name}), name, deleted=deleted)


def _project_found(project: Project | None, name: str, *, deleted: bool) -> Project:
    if project is None:
        raise ProblemError(
            ProblemCode.PROJECT_NOT_FOUND,
            f"There is no project {name!r}. Correct the name, or make it with `holdfast projects create {name}`.",
            project=name,
        )
    if not deleted or project.purged_at is not None:
        refuse_if_deleted(project)
    return project


def run_named(
    session: Session, caller: Principal, project: str, run: str, *, deleted: bool = False
) -> tuple[Project, Run]:
    """With `deleted` one that is in the trash will do. Raises `forbidden`, `project_not_found` and `run_not_found`."""
    caller.check_project_name(project)
    row = session.execute(_RUN_NAMED, {"project": project, "run": run}).one_or_none()
    owner = _project_found(None if row is None else row[0], project, deleted=deleted)
    found = None if row is None else row[1]
    if found is None:
        raise ProblemError(
            ProblemCode.RUN_NOT_FOUND,
            f"There is no run {project}/{run}. Correct the name; `holdfast runs list {project}` lists them.",
            project=project,
            run=run,
        )
    if not deleted or found.purged_at is not None:
        refuse_if_deleted(owner, found)
    return owner, found


def refuse_if_deleted(project: Project, run: Run | None = None) -> None:
    """What is in the trash is in no list and takes no job, and its name is not free before it is purged: a job that
    comes back must not begin from nothing beside what can still be taken back. Raises `project_not_found` and
    `run_not_found`."""
    if project.deleted_at is not None:
        raise ProblemError(ProblemCode.PROJECT_NOT_FOUND, _deleted(project, project.name), project=project.name)
    if run is not None and run.deleted_at is not None:
        name = f"{project.name}/{run.name}"
        raise ProblemError(ProblemCode.RUN_NOT_FOUND, _deleted(run, name), project=project.name, run=run.name)


def _deleted(found: Project | Run, name: str) -> str:
    why = f" ({found.delete_reason})" if found.delete_reason else ""
    if found.purged_at is not None:
        return (
            f"{name} was deleted by {found.deleted_by}{why}, and is purged. Its name is free once that is told in "
            "every store that has a record of it: in a moment, or when one that does not answer, or was taken out of "
            "the settings, is back. Try again then, or take another name."
        )
    back = f"`holdfast runs undelete {name}`" if isinstance(found, Run) else f"`holdfast projects undelete {name}`"
    until = "" if found.purge_at is None else f" before {found.purge_at:%Y-%m-%d %H:%M} UTC"
    return (
        f"{name} was deleted by {found.deleted_by}{why}. To go on with it, take it back{until}: "
        f"{back}. To begin anew, take another name; this one is free once the purge is over."
    )


def attempt_numbered(session: Session, run: Run, number: int) -> Attempt:
    """Raises `attempt_not_found`."""
    attempt = session.scalar(select(Attempt).where(Attempt.run_id == run.id, Attempt.number == number))
    if attempt is None:
        raise ProblemError(
            ProblemCode.ATTEMPT_NOT_FOUND,
            f"The run {run.name!r} has no attempt {number}; its newest is {run.latest_attempt}. Correct the number; "
            "`holdfast attempts list` lists them.",
            attempt=number,
            latest_attempt=run.latest_attempt,
        )
    return attempt


def first_components(session: Session, run_id: str) -> list[str]:
    """The components that a run declares, by name: those of its first checkpoint that was ever committed, whatever
    became of it since; none while nothing is committed. Opening an attempt tells them to the trainer, and the commit
    compares with them. Without config and tokenizer of Hugging Face: no job restores these, and a trainer from before
    they were kept would be refused for their lack."""
    components = session.scalar(
        select(Checkpoint.components)
        .where(Checkpoint.run_id == run_id, Checkpoint.committed_at.is_not(None))
        .order_by(Checkpoint.step, Checkpoint.id)
        .limit(1)
    )
    return sorted(set(components or ()) - {"hf_files"})


def checkpoint_by_id(session: Session, caller: Principal, checkpoint_id: str) -> tuple[Project, Run, Checkpoint]:
    """Raises `checkpoint_not_found`, also for one of a project that the caller may not see: no existence oracle."""
    row = session.execute(
        select(Project, Run, Checkpoint)
        .join(Run, Run.project_id == Project.id)
        .join(Checkpoint, Checkpoint.run_id == Run.id)
        .where(Checkpoint.id == checkpoint_id)
    ).one_or_none()
    if row is None or not caller.sees_project(row[0].id):
        raise no_checkpoint(checkpoint_id)
    return row[0], row[1], row[2]


def no_checkpoint(checkpoint_id: str) -> ProblemError:
    return ProblemError(
        ProblemCode.CHECKPOINT_NOT_FOUND, f"There is no checkpoint {checkpoint_id}.", checkpoint_id=checkpoint_id
    )


def refuse_unless_whole(checkpoint: Checkpoint) -> None:
    """Raises `incomplete_checkpoint`, `checkpoint_aborted`, and `chunk_gone` for one whose bytes are being deleted."""
    if checkpoint.state in WHOLE:
        return
    if checkpoint.state == CheckpointState.UPLOADING:
        raise ProblemError(
            ProblemCode.INCOMPLETE_CHECKPOINT,
            f"Step {checkpoint.step} is still uploading. Wait with GET /v1/checkpoints/{checkpoint.id}?wait=30.",
        )
    if checkpoint.state == CheckpointState.ABORTED:
        raise ProblemError(
            ProblemCode.CHECKPOINT_ABORTED,
            f"Step {checkpoint.step} was never complete: {checkpoint.abort_reason}. Read another checkpoint.",
        )
    raise ProblemError(
        ProblemCode.CHUNK_GONE, f"Step {checkpoint.step} was deleted, and so are its bytes. Read another checkpoint."
    )


def locked_checkpoint(session: Session, checkpoint_id: str) -> Checkpoint:
    """FOR UPDATE, as it is under the lock: whatever was read before may be over."""
    return session.execute(
        select(Checkpoint).where(Checkpoint.id == checkpoint_id).with_for_update(),
        execution_options={"populate_existing": True},
    ).scalar_one()


def page_of_projects(
    session: Session, caller: Principal, kind: str, cursor: str | None, limit: int, *, deleted: bool | None = False
) -> tuple[Sequence[Project], str | None]:
    """By name, those that the caller may see, and the cursor of the next page. With `deleted` those in the trash, and
    no others; None: all that there are bytes of, or may be. Raises `invalid_request`."""
    query = select(Project).order_by(Project.name).limit(limit + 1)
    if deleted is None:
        stored = exists().where(Copy.project_id == Project.id, Copy.state != CopyState.GONE)
        query = query.where(or_(Project.purged_at.is_(None), stored))
    else:
        query = query.where(Project.purged_at.is_(None))
        query = query.where(Project.deleted_at.is_not(None) if deleted else Project.deleted_at.is_(None))
    if caller.project_id is not None:
        query = query.where(Project.id == caller.project_id)
    if cursor is not None:
        (name,) = decode_cursor(kind, cursor, str)
        query = query.where(Project.name > name)
    return cut_page(kind, session.scalars(query).all(), limit, lambda project: (project.name,))


# Makes projects and runs where they are not there yet; the same again gives the row that is there.
#
# Only who made it is written down as its maker: of two at once, one. What is in the trash is refused by its name.


def ensure_project(session: Session, name: str, actor: Actor) -> Project:
    project_id = uuid.uuid4().hex
    row = {"id": project_id, "name": name, "quota_bytes": None, "created_at": database_now(session)}
    insert_absent(session, Project, [row])
    project = session.execute(select(Project).where(Project.name == name)).scalar_one()
    refuse_if_deleted(project)
    if project.id == project_id:
        record_event(session, actor, "project.create", project_id=project_id, after={"name": name})
        subject_changed(session, RecordKind.PROJECT, project_id, project_id)
    return project


def ensure_run(
    session: Session, project: Project, name: str, actor: Actor, *, within_quota: bool = True
) -> tuple[Run, bool]:
    """The run, and whether this call has made it: of two at once, one has. Without `within_quota` the caller asks
    refuse_one_more()."""
    run_id = uuid.uuid4().hex
    row = {
        "id": run_id,
        "project_id": project.id,
        "name": name,
        "latest_attempt": 0,
        "created_at": database_now(session),
    }
    insert_absent(session, Run, [row])
    run = session.execute(select(Run).where(Run.project_id == project.id, Run.name == name)).scalar_one()
    # The insert has waited for the project's deletion, whose rows are read anew.
    session.refresh(project)
    refuse_if_deleted(project, run)
    if run.id == run_id:
        if within_quota:
            refuse_one_more(session, project, QuotaKind.RUNS)
        record_event(session, actor, "run.create", project_id=project.id, run_id=run_id, after={"name": name})
        subject_changed(session, RecordKind.RUN, run_id, project.id)
    return run, run.id == run_id


# How a run fares, from its newest attempt: one rule, for one row and for a query.

_ENDED = {
    AttemptOutcome.FINISHED: RunStatus.FINISHED,
    AttemptOutcome.FAILED: RunStatus.FAILED,
    AttemptOutcome.PREEMPTED: RunStatus.PREEMPTED,
    AttemptOutcome.LOST: RunStatus.LOST,
}


def run_status() -> ColumnElement[str]:
    """Over `runs`, outer joined with their newest `attempts`."""
    return case(
        *((Attempt.outcome == outcome.value, status.value) for outcome, status in _ENDED.items()),
        (Attempt.stalled_at.is_not(None), RunStatus.STALLED.value),
        (Attempt.id.is_not(None) & Attempt.ended_at.is_(None), RunStatus.TRAINING.value),
        else_=RunStatus.IDLE.value,
    )


def status_detail(attempt: Attempt | None) -> str | None:
    """Why it is so, for people."""
    if attempt is None:
        return None
    if attempt.outcome is None and attempt.stalled_at is not None:
        return f"alive, and no progress since {attempt.stalled_at:%Y-%m-%d %H:%M:%S} UTC"
    if attempt.error_rank is not None:
        return f"rank {attempt.error_rank}: {attempt.outcome_detail}"
    return attempt.outcome_detail


# What is told of a run or a project that was deleted.

PURGED = "(purged)"


def in_trash(found: Project | Run) -> InTrash | None:
    """How it can be taken back; None for what is not deleted."""
    if found.deleted_at is None or found.deleted_by is None or found.purge_at is None:
        return None
    return InTrash(
        deleted_at=found.deleted_at,
        deleted_by=found.deleted_by,
        reason=found.delete_reason,
        purge_at=found.purge_at,
    )


MOST_RUNS_TOLD = 100
"""So many runs have metrics of their own: a scrape stays short, and Prometheus has no label for each run for ever."""


def live_runs() -> Select[str, str, str]:
    """Id, project and name of the runs whose newest attempt has not ended: the MOST_RUNS_TOLD that were opened last."""
    return (
        select(Run.id, Project.name, Run.name)
        .join(Project, Project.id == Run.project_id)
        .join(Attempt, (Attempt.run_id == Run.id) & (Attempt.number == Run.latest_attempt))
        .where(Attempt.ended_at.is_(None))
        .order_by(Attempt.opened_at.desc(), Run.id)
        .limit(MOST_RUNS_TOLD)
    )


def project_label(name: str) -> str:
    """For metrics, by a project's name: all that are purged under one, or each would be a label for ever."""
    return PURGED if "~" in name else name


# From rows to what the wire shows. Each reply with a checkpoint or an attempt is built here.

MISSING_RANKS_SHOWN = 20
_RANKS_LOOKED_AT = 100


@dataclass(frozen=True)
class SealProgress:
    """How many ranks have sealed, and the first MISSING_RANKS_SHOWN that have not."""

    sealed_ranks: int
    missing_ranks: list[int] = field(default_factory=list)


def checkpoint_view(
    project_name: str, run_name: str, row: Checkpoint, sealed_ranks: int, missing_ranks: Sequence[int]
) -> CheckpointView:
    """`sealed_ranks` and `missing_ranks` come from `seal_progress`. It has a pin that is over, too."""
    return CheckpointView(
        id=row.id,
        project=project_name,
        run=run_name,
        attempt=row.attempt_number,
        step=row.step,
        kind=CheckpointKind(row.kind),
        world_size=row.world_size,
        state=CheckpointState(row.state),
        health=Health(row.health),
        health_reason=row.health_reason,
        tier=Tier(row.tier),
        digest=row.digest,
        logical_bytes=row.logical_bytes,
        chunk_bytes=row.chunk_bytes,
        uploaded_bytes=row.uploaded_bytes,
        deduplicated_bytes=row.deduplicated_bytes,
        metrics={name: MetricValue.model_validate(value) for name, value in row.metrics.items()},
        labels=list(row.labels),
        components={name: Component.model_validate(value) for name, value in row.components.items()},
        missing_components=list(row.missing_components or ()),
        created_at=row.created_at,
        committed_at=row.committed_at,
        aborted_at=row.aborted_at,
        abort_reason=row.abort_reason,
        abort_rank=row.abort_rank,
        pushed_by=row.pushed_by,
        detached=row.detached,
        pinned_at=row.pinned_at,
        pinned_by=row.pinned_by,
        pin_reason=row.pin_reason,
        pinned_until=row.pinned_until,
        trashed_at=row.trashed_at,
        trashed_by=row.trashed_by,
        trash_reason=row.trash_reason,
        purge_at=row.purge_at,
        deleted_at=row.deleted_at,
        forked_from=None if row.forked_from is None else ForkedFrom.model_validate(row.forked_from),
        abort_cause=None if row.abort_cause is None else AbortCause(row.abort_cause),
        blocked_seconds=row.blocked_seconds,
        sealed_ranks=sealed_ranks,
        missing_ranks=list(missing_ranks),
        etag=f'"{row.version}"',
    )


def seal_progress(session: Session, checkpoints: Iterable[Checkpoint]) -> dict[str, SealProgress]:
    """By checkpoint id. What was ever committed is known to be sealed; only the others are asked for."""
    progress: dict[str, SealProgress] = {}
    open_ones: dict[str, Checkpoint] = {}
    for checkpoint in checkpoints:
        if checkpoint.committed_at is not None:
            progress[checkpoint.id] = SealProgress(checkpoint.world_size)
        else:
            open_ones[checkpoint.id] = checkpoint
    if not open_ones:
        return progress
    sealed: dict[str, set[int]] = {checkpoint_id: set() for checkpoint_id in open_ones}
    for checkpoint_id, rank in session.execute(
        select(Shard.checkpoint_id, Shard.rank).where(
            Shard.checkpoint_id.in_([each.id for each in open_ones.values() if each.sealed_ranks]),
            Shard.rank < _RANKS_LOOKED_AT,
            Shard.state == ShardState.SEALED,
        )
    ):
        sealed[checkpoint_id].add(rank)
    for checkpoint_id, ranks in sealed.items():
        row = open_ones[checkpoint_id]
        progress[checkpoint_id] = SealProgress(
            row.sealed_ranks, missing_ranks(ranks, min(row.world_size, _RANKS_LOOKED_AT))
        )
    return progress


def _progress_of(session: Session, row: Checkpoint) -> SealProgress:
    """For a rank's call, of which a storm makes two for each rank."""
    if row.committed_at is not None:
        return SealProgress(row.world_size)
    if not row.sealed_ranks:
        return SealProgress(0, missing_ranks(set(), row.world_size))
    return SealProgress(row.sealed_ranks, ranks_not_sealed(session, row))


def ranks_not_sealed(session: Session, row: Checkpoint, *, of_all: bool = False) -> list[int]:
    """As `missing_ranks`; looked for among the first _RANKS_LOOKED_AT alone, or `of_all`: for a word that stays."""
    looked_at = row.world_size if of_all else min(row.world_size, _RANKS_LOOKED_AT)
    sealed = session.connection().execute(_SEALED_BELOW, {"checkpoint_id": row.id, "rank": looked_at}).scalars()
    return missing_ranks(set(sealed), looked_at)


_SEALED_BELOW = select(Shard.rank).where(
    Shard.checkpoint_id == bindparam("checkpoint_id"), Shard.rank < bindparam("rank"), Shard.state == ShardState.SEALED
)


def missing_ranks(sealed: set[int], world_size: int) -> list[int]:
    """The first MISSING_RANKS_SHOWN ranks of the world that are not among `sealed`."""
    missing: list[int] = []
    for rank in range(world_size):
        if rank not in sealed:
            missing.append(rank)
            if len(missing) == MISSING_RANKS_SHOWN:
                break
    return missing


def current_checkpoint_view(session: Session, project_name: str, run_name: str, row: Checkpoint) -> CheckpointView:
    """The view with its progress read in this session."""
    progress = _progress_of(session, row)
    view = checkpoint_view(project_name, run_name, row, progress.sealed_ranks, progress.missing_ranks)
    return view if view.pinned_until is None else without_ended_pin(view, database_now(session))


_NO_PIN = {"pinned_at": None, "pinned_by": None, "pin_reason": None, "pinned_until": None}


def without_ended_pin(view: CheckpointView, now: datetime) -> CheckpointView:
    """A pin that is over keeps nothing: shown as one, it would say that the checkpoint is safe. `now` is the
    database's."""
    is_over = view.pinned_until is not None and view.pinned_until <= now
    return view.model_copy(update=_NO_PIN) if is_over else view


def attempt_view(row: Attempt, *, listed: bool = False) -> AttemptView:
    return AttemptView(
        number=row.number,
        launch_id=row.launch_id,
        world_size=row.world_size,
        host=row.host,
        environment={} if listed else dict(row.environment),
        opened_at=row.opened_at,
        heartbeat_at=row.heartbeat_at,
        first_step=row.first_step,
        first_step_at=row.first_step_at,
        last_step=row.last_step,
        steps_run=row.steps_run,
        steps_per_second=row.steps_per_second,
        doing=None if row.doing is None else Doing(row.doing),
        progressed_at=row.progressed_at,
        stalled_at=row.stalled_at,
        restore_seconds=row.restore_seconds,
        saves_begun=row.saves_begun,
        save_blocked_seconds=row.save_blocked_seconds,
        ended_at=row.ended_at,
        outcome=None if row.outcome is None else AttemptOutcome(row.outcome),
        outcome_detail=row.outcome_detail,
        error_type=row.error_type,
        error_rank=row.error_rank,
        notice=None if row.notice is None else NoticeView.model_validate(row.notice),
        refused_at=row.refused_at,
        resumed_from=row.resumed_from_id,
        skipped=None if row.skipped is None else [Skipped.model_validate(each) for each in row.skipped],
        rolled_back_at=row.rolled_back_at,
    )


# One checkpoint, now. With `?wait=` the endpoint waits for the notifier in between.


def read_checkpoint(context: ServiceContext, caller: Principal, checkpoint_id: str) -> CheckpointView:
    """For tokens that read and for those that train: a job waits for its own commit. Raises `checkpoint_not_found`."""
    with context.database.read() as session:
        project, run, checkpoint = checkpoint_by_id(session, caller, checkpoint_id)
        return current_checkpoint_view(session, project.name, run.name, checkpoint)
