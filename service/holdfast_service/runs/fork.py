"""A run that begins with another run's checkpoint, and no byte is copied (docs/adr/0085).

    the new run's row -> the source's checkpoint, chosen and locked -> attempt 1, which ends as it begins
    -> a committed checkpoint of that attempt -> its shards, with the chunk lists of the source's

All of it is one transaction: a process that dies in between has made nothing. What it makes is a checkpoint like any
other, so retention, the collector, records, rebuilds, replication and reads know nothing of forks. The one exception is
the name of the run in the ranks' indexes, which are the source's: `saved_in` tells it.
"""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Any

from sqlalchemy import exists, func, insert, literal, select
from sqlalchemy.orm import Session

from holdfast_protocol.base import RunName
from holdfast_protocol.checkpoints import ForkedFrom
from holdfast_protocol.events import EventType
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.restores import RestorePoint
from holdfast_protocol.runs import AtStep, ById, ForkRun, Point, RunView
from holdfast_protocol.states import AttemptOutcome, CheckpointState, Health, QuotaKind, ShardState
from holdfast_protocol.text import counted
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.copies.predicates import PROVEN, is_readable_anywhere
from holdfast_service.db.dialect import Moment, database_now
from holdfast_service.db.engine import refuse_if_went_back
from holdfast_service.db.repeats import Repeatable, digest_of
from holdfast_service.db.tables.core import Attempt, Checkpoint, Chunk, ChunkListEntry, Copy, Run, Shard
from holdfast_service.errors import ProblemError
from holdfast_service.events.announce import announce
from holdfast_service.lineage.restore_choice import choose_restore_point, point_of
from holdfast_service.quotas.crossings import telling_refusals
from holdfast_service.quotas.limits import refuse_one_more
from holdfast_service.records.history import settle_history
from holdfast_service.runs.list_runs import run_views
from holdfast_service.runs.views import ensure_run, project_named, run_named


def fork_run(
    context: ServiceContext, caller: Principal, source: RunName, request: ForkRun, *, key: str | None = None
) -> tuple[RunView, bool]:
    """The new run, and whether this call has made it: the same fork again finds it. `key`: the client's
    Idempotency-Key.

    Raises `run_exists` for a name that is used otherwise; `no_restore_point`, `checkpoint_not_found` and
    `checkpoint_cold` for a checkpoint that no job could resume from, and `checkpoint_unproven` for one that is good for
    the attempt that saved it alone, so far; `quota_exceeded`, `idempotency_key_reused`, `catalog_went_back`, and what
    finding project and run raises.
    """
    repeat = Repeatable(caller.token_id, key, digest_of("fork", source.project, source.run, request=request))
    settle_history(context)
    with telling_refusals(context):
        return context.database.run(lambda session: _fork(session, caller, source, request, repeat))


def _fork(
    session: Session, caller: Principal, source: RunName, request: ForkRun, repeat: Repeatable
) -> tuple[RunView, bool]:
    point = point_of(request.selector)
    refuse_if_went_back(session)
    project = project_named(session, caller, source.project)
    earlier = repeat.earlier(session)
    if earlier is not None and (known := session.get(Run, earlier)) is not None and known.deleted_at is None:
        return run_views(session, [known])[0], False
    run, is_new = ensure_run(session, project, request.name, Actor.person(caller), within_quota=False)
    if not is_new:
        _refuse_unless_same(session, caller, source, run, point)
        repeat.made(session, run.id)
        return run_views(session, [run])[0], False
    _, parent = run_named(session, caller, source.project, source.run)
    saved = _locked_source(session, source, parent, point)
    told = _told(source, saved)
    now = database_now(session)
    run.forked_from = told.model_dump()
    run.latest_attempt = 1
    attempt = _attempt(session, run, saved, told, now)
    checkpoint = _checkpoint(session, attempt, saved, told, now)
    _take_shards(session, checkpoint, saved, now)
    _refuse_unreadable(session, checkpoint, saved, told)
    # Last: the jobs of the project wait for this lock, and must not wait for what is read above. Nobody who has it
    # waits for a committed checkpoint.
    for kind in (QuotaKind.RUNS, QuotaKind.CHECKPOINTS):
        refuse_one_more(session, project, kind)
    record_event(
        session,
        Actor.person(caller),
        "run.fork",
        project_id=project.id,
        run_id=run.id,
        checkpoint_id=checkpoint.id,
        after={"name": run.name, "step": saved.step, "forked_from": str(told), "source_id": saved.id},
    )
    announce(
        session,
        EventType.CHECKPOINT_COMMITTED,
        checkpoint.id,
        now,
        project_id=project.id,
        run_id=run.id,
        attempt=attempt.number,
        step=checkpoint.step,
        checkpoint_id=checkpoint.id,
        reason=f"forked from {told}",
    )
    repeat.made(session, run.id)
    session.flush()
    return run_views(session, [run])[0], True


def _refuse_unless_same(session: Session, caller: Principal, source: RunName, run: Run, point: Point) -> None:
    """Raises `run_exists` unless this very fork has made the run: a reply may be lost. A step or an id is compared by
    what the run says of itself, for its source may be deleted since. But a step that has another checkpoint by now,
    after a rollback or in a new run of the source's name, is another fork."""
    told = None if run.forked_from is None else ForkedFrom.model_validate(run.forked_from)
    if told is not None and told.run == source.run:
        if isinstance(point, AtStep):
            same = told.step == point.step and point.attempt in (None, told.attempt)
            same = same and _step_now(session, caller, source, point) in (None, told.checkpoint_id)
        elif isinstance(point, ById):
            same = told.checkpoint_id == point.checkpoint_id
        else:
            _, parent = run_named(session, caller, source.project, source.run)
            found = choose_restore_point(session, parent.id, point).restore_point
            same = found is not None and told.checkpoint_id == found.checkpoint_id
        if same:
            return
    made = "" if told is None else f", forked from {told}"
    raise ProblemError(
        ProblemCode.RUN_EXISTS,
        f"There is a run {source.project}/{run.name} already{made}. A fork makes a new run: give another name.",
        project=source.project,
        run=run.name,
    )


def _step_now(session: Session, caller: Principal, source: RunName, point: AtStep) -> str | None:
    """The id of the checkpoint that the step means now; None if there is none that could be forked."""
    try:
        _, parent = run_named(session, caller, source.project, source.run)
        found = choose_restore_point(session, parent.id, point).restore_point
    except ProblemError:
        return None
    return None if found is None else found.checkpoint_id


def _locked_source(session: Session, source: RunName, parent: Run, point: Point) -> Checkpoint:
    """The checkpoint, FOR SHARE until the fork is committed: until then it goes to no trash, no process finds it
    corrupt and its chunks move to no colder place. So its shards refer to the chunk lists until those of the fork do,
    and the collector finds a reference at every moment."""
    chosen = _chosen(session, source, parent, point)
    saved = session.execute(
        select(Checkpoint).where(Checkpoint.id == chosen.checkpoint_id).with_for_update(read=True),
        execution_options={"populate_existing": True},
    ).scalar_one_or_none()
    # Asked again in a later statement, behind the lock: it may have expired while the lock was waited for.
    _chosen(session, source, parent, ById(chosen.checkpoint_id))
    assert saved is not None
    return saved


def _chosen(session: Session, source: RunName, parent: Run, point: Point) -> RestorePoint:
    """As a restore chooses it: what no job could resume from is no beginning of a run."""
    decision = choose_restore_point(session, parent.id, point)
    if decision.restore_point is not None:
        return decision.restore_point
    why = " ".join(each.detail for each in decision.skipped[:3]) or "Nothing of it is committed."
    raise ProblemError(
        ProblemCode.NO_RESTORE_POINT,
        f"{source} has no checkpoint that can be forked as {point}. {why}",
        selector=str(point),
        skipped=[each.model_dump(mode="json") for each in decision.skipped],
    )


def _told(source: RunName, saved: Checkpoint) -> ForkedFrom:
    before = saved.forked_from
    return ForkedFrom(
        project=source.project,
        run=source.run,
        checkpoint_id=saved.id,
        attempt=saved.attempt_number,
        step=saved.step,
        saved_in=source.run if before is None else before["saved_in"],
    )


def _attempt(session: Session, run: Run, saved: Checkpoint, told: ForkedFrom, now: datetime) -> Attempt:
    """Attempt 1, in whose name the checkpoint stands. It ends as it begins, and has run no step: a launch opens attempt
    2, and the time and the steps of the source are not this run's. Environment and configuration are those that the
    state was saved with, because a launch is compared with them."""
    saved_by = session.get_one(Attempt, saved.attempt_id)
    attempt = Attempt(
        run_id=run.id,
        number=run.latest_attempt,
        launch_id=f"fork-{uuid.uuid4().hex}",
        world_size=saved.world_size,
        host="",
        environment=dict(saved_by.environment),
        config=saved_by.config,
        opened_at=now,
        heartbeat_at=now,
        steps_run=0,
        ended_at=now,
        outcome=AttemptOutcome.FINISHED,
        outcome_detail=f"forked from {told}",
        cut_at=now,
    )
    session.add(attempt)
    session.flush()
    return attempt


_AS_SAVED = (
    "step",
    "kind",
    "world_size",
    "digest",
    "logical_bytes",
    "chunk_bytes",
    "metrics",
    "components",
    "missing_components",
)
"""Not what people said of the source: labels, pins, holds."""
_AS_STORED = (
    "tier",
    "cold_class",
    "readable_until",
    "thawed_until",
    "thaw_requested_at",
    "thaw_expected_at",
    "thaw_speed",
    "thaw_days",
)
"""The same chunks are in the same places: what was thawed gets cold again at the same moment."""


def _checkpoint(session: Session, attempt: Attempt, saved: Checkpoint, told: ForkedFrom, now: datetime) -> Checkpoint:
    same: dict[str, Any] = {name: getattr(saved, name) for name in (*_AS_SAVED, *_AS_STORED)}
    checkpoint = Checkpoint(
        **same,
        id=f"ck_{uuid.uuid4().hex}",
        run_id=attempt.run_id,
        attempt_id=attempt.id,
        attempt_number=attempt.number,
        forked_from=told.model_dump(),
        sealed_ranks=saved.world_size,
        state=CheckpointState.COMMITTED,
        health=Health.OK,
        labels=[],
        created_at=now,
        deadline_at=now,
        committed_at=now,
    )
    session.add(checkpoint)
    session.flush()
    return checkpoint


_OF_THE_LIST = (
    select(func.coalesce(func.sum(Chunk.bytes), 0))
    .join(ChunkListEntry, ChunkListEntry.chunk_id == Chunk.id)
    .where(ChunkListEntry.chunk_list_id == Shard.chunk_list_id)
    .correlate(Shard)
    .scalar_subquery()
)
_SAID_BY_ITS_RANK = (
    Shard.rank,
    Shard.digest,
    Shard.chunk_list_id,
    Shard.index_ordinal,
    Shard.layout_ordinal,
    Shard.logical_bytes,
    Shard.components,
    Shard.metrics,
    Shard.finite,
    Shard.verdict,
    Shard.dropped_components,
)
"""Not what was measured of the save: it blocked no training of this run."""


def _take_shards(session: Session, checkpoint: Checkpoint, saved: Checkpoint, now: datetime) -> None:
    """Nothing is sent for any of them. Raises `chunk_gone` where the chunks of a rank are not known."""
    session.execute(
        insert(Shard).from_select(
            [
                Shard.checkpoint_id,
                Shard.state,
                Shard.sealed_at,
                Shard.uploaded_bytes,
                Shard.deduplicated_bytes,
                *_SAID_BY_ITS_RANK,
            ],
            select(
                literal(checkpoint.id),
                literal(ShardState.SEALED.value),
                literal(now, Moment),
                literal(0),
                _OF_THE_LIST,
                *_SAID_BY_ITS_RANK,
            ).where(Shard.checkpoint_id == saved.id, Shard.chunk_list_id.is_not(None)),
        )
    )
    shards, not_sent = session.execute(
        select(func.count(), func.coalesce(func.sum(Shard.deduplicated_bytes), 0)).where(
            Shard.checkpoint_id == checkpoint.id
        )
    ).one()
    if shards != saved.world_size:
        raise ProblemError(
            ProblemCode.CHUNK_GONE,
            f"The chunks of only {shards} of {counted(saved.world_size, 'rank')} of step {saved.step} are known. Fork "
            "another one.",
            checkpoint_id=saved.id,
        )
    checkpoint.deduplicated_bytes = int(not_sent)


def _refuse_unreadable(session: Session, checkpoint: Checkpoint, saved: Checkpoint, told: ForkedFrom) -> None:
    """A copy that only its client has hashed is good for the attempt that sent it, and for no other (rule
    reuse-only-hashed). Raises `checkpoint_unproven`, and `chunk_gone` for what is not even good for the source."""
    now = database_now(session)

    def lacking(attempt_id: int) -> str | None:
        readable = exists().where(Copy.chunk_id == ChunkListEntry.chunk_id, is_readable_anywhere(attempt_id, until=now))
        return session.scalar(
            select(Chunk.digest)
            .join(ChunkListEntry, ChunkListEntry.chunk_id == Chunk.id)
            .join(Shard, Shard.chunk_list_id == ChunkListEntry.chunk_list_id)
            .where(Shard.checkpoint_id == checkpoint.id, ~readable)
            .limit(1)
        )

    digest = lacking(checkpoint.attempt_id)
    if digest is None:
        return
    if lacking(saved.attempt_id) is not None:
        raise ProblemError(
            ProblemCode.CHUNK_GONE,
            f"The chunk {digest} of {told} cannot be read now. Try again once it is repaired, or fork another one.",
            checkpoint_id=saved.id,
            digest=digest,
        )
    # What is read while a ticket can overwrite it must be read again (rule no-ticket-reuse): nothing makes that faster.
    until = session.scalar(
        select(func.max(Copy.overwritable_until))
        .join(ChunkListEntry, ChunkListEntry.chunk_id == Copy.chunk_id)
        .join(Shard, Shard.chunk_list_id == ChunkListEntry.chunk_list_id)
        .where(Shard.checkpoint_id == checkpoint.id, Copy.proof.not_in(PROVEN), Copy.overwritable_until > now)
    )
    reads = (
        f"reads them by itself, and at once with `holdfast scrubs start {told}`"
        if until is None
        else f"reads them by itself once no upload can overwrite them any more, after {until:%Y-%m-%d %H:%M:%S} UTC"
    )
    raise ProblemError(
        ProblemCode.CHECKPOINT_UNPROVEN,
        f"{told} has chunks that only its own job has hashed, so no other run may begin with them yet. The service "
        f"{reads}. Fork it again then.",
        checkpoint_id=saved.id,
        digest=digest,
    )
