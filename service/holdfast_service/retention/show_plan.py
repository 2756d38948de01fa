"""The plan for people, with the bytes that would go."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    MetaData,
    Select,
    Table,
    Text,
    and_,
    cast,
    exists,
    func,
    insert,
    or_,
    select,
    text,
)
from sqlalchemy.orm import Session

from holdfast_protocol.policies.policy import PolicyError, PolicyKind, PolicyView, read_policy
from holdfast_protocol.policies.retention import Reason, ReasonKind, RetentionPolicy
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.pruning import (
    FreedBytes,
    LeftCheckpoint,
    PlannedCheckpoint,
    PlanRetention,
    PrunedCheckpoint,
    RetentionPlan,
)
from holdfast_protocol.states import CheckpointState, CopyState
from holdfast_protocol.text import counted
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Checkpoint, ChunkListEntry, Copy, Shard, ShardChunk, Store
from holdfast_service.db.tables.operations import Controller
from holdfast_service.errors import ProblemError
from holdfast_service.holds.held import is_held
from holdfast_service.policies.policies import StoredPolicy, effective_policy
from holdfast_service.retention.plan import Decision, Fact, make_plan, only_for_want_of_a_metric, policy_digest
from holdfast_service.retention.read_facts import read_facts
from holdfast_service.retention.trash import is_pinned
from holdfast_service.runs.views import run_named

CONTROLLER = "retention"
"""It applies policies by itself."""

_THERE = (CopyState.VERIFIED, CopyState.COLD, CopyState.THAWING, CopyState.SUSPECT, CopyState.BAD)
# Only for this session, and gone with its transaction: 50,000 checkpoints are more than a statement has parameters, and
# what the planner guesses of the chunks between two joins is wrong by a thousand times.
_OWN = MetaData()
_EXPIRING = Table("expiring_checkpoints", _OWN, Column("checkpoint_id", Text, primary_key=True), prefixes=["TEMPORARY"])
# Without an index: two million rows come in the order of a hash.
_THEIRS = Table("their_chunks", _OWN, Column("chunk_id", BigInteger, nullable=False), prefixes=["TEMPORARY"])
_WORK_MEMORY = "256MB"


def freed_bytes(session: Session, checkpoint_ids: Collection[str]) -> FreedBytes:
    """The bytes that the stores would have less without some checkpoints, net of sharing with everything that stays.
    `session` is one of Database.read(), and asked once: what is made for this is gone with it.

    A chunk goes if a checkpoint that expires needs it and nothing that stays does. What stays: whatever else is
    committed or uploading in the project, of any run; and of the trash only what is held or pinned, for nothing else of
    it is there for long. A chunk that an expiring checkpoint shares with the trash counts here: without this plan it
    would stay.

    Counted are the copies that are there, as they are stored, in all stores. What is only expected (an upload under
    way) or on its way out already is not.

    Two steps, with figures for the planner in between: the chunks that the expiring checkpoints need, and of these the
    copies that nothing needs which stays. A plan that expires one checkpoint of a large project is then quick, too.
    """
    if not checkpoint_ids:
        return FreedBytes(bytes=0)
    connection = session.connection()
    if connection.dialect.name == "postgresql":
        # A hash of millions of chunks is worth the memory of one backend; it spills if that is not enough.
        connection.execute(text(f"SET LOCAL work_mem = '{_WORK_MEMORY}'"))
    _OWN.create_all(connection, checkfirst=False)
    _fill(connection, checkpoint_ids)
    _count(connection, _EXPIRING)
    connection.execute(insert(_THEIRS).from_select(["chunk_id"], _their_chunks()))
    _count(connection, _THEIRS)
    rows = connection.execute(
        select(Store.url, func.sum(Copy.stored_bytes))
        .join(Store, Store.id == Copy.store_id)
        .join(_THEIRS, _THEIRS.c.chunk_id == Copy.chunk_id)
        .where(Copy.state.in_(_THERE), ~_needed_by_what_stays(session), _THEIRS.c.chunk_id.not_in(_relied_on()))
        .group_by(Store.url)
        .order_by(Store.url)
    )
    by_store = {url: int(total) for url, total in rows}
    return FreedBytes(bytes=sum(by_store.values()), by_store=by_store)


def _fill(connection: Connection, checkpoint_ids: Collection[str]) -> None:
    """In one statement: row by row, 100,000 would take longer than the rest of the plan."""
    ids = list(checkpoint_ids)
    if connection.dialect.name == "postgresql":
        each: Select[Any] = select(func.unnest(cast(ids, ARRAY(Text))))
    else:
        each = select(func.json_each(json.dumps(ids)).table_valued("value").c.value)
    connection.execute(insert(_EXPIRING).from_select(["checkpoint_id"], each))


def _count(connection: Connection, table: Table) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"ANALYZE {table.name}"))


def _their_chunks() -> Select[Any]:
    """What the expiring checkpoints need, each chunk once."""
    return (
        select(ChunkListEntry.chunk_id)
        .join(Shard, Shard.chunk_list_id == ChunkListEntry.chunk_list_id)
        .join(_EXPIRING, _EXPIRING.c.checkpoint_id == Shard.checkpoint_id)
        .distinct()
    )


def _needed_by_what_stays(session: Session) -> ColumnElement[bool]:
    """Over `their_chunks`: by whatever else is there, or is held or pinned in the trash."""
    stays = or_(
        Checkpoint.state.in_((CheckpointState.UPLOADING, CheckpointState.COMMITTED)),
        and_(Checkpoint.state == CheckpointState.TRASHED, or_(is_held(session), is_pinned(session))),
    )
    expires = exists().where(_EXPIRING.c.checkpoint_id == Checkpoint.id)
    return exists().where(
        ChunkListEntry.chunk_id == _THEIRS.c.chunk_id,
        Shard.chunk_list_id == ChunkListEntry.chunk_list_id,
        Checkpoint.id == Shard.checkpoint_id,
        stays,
        ~expires,
    )


def _relied_on() -> Select[Any]:
    """The chunks that an upload under way has been told of: they are there, and need not be sent."""
    return (
        select(ShardChunk.chunk_id)
        .join(Shard, Shard.id == ShardChunk.shard_id)
        .join(Checkpoint, Checkpoint.id == Shard.checkpoint_id)
        .where(Checkpoint.state == CheckpointState.UPLOADING)
    )


# What became of what was asked for: what went to the trash, what stays and why, and the bytes.

CHANGED = (Reason(ReasonKind.CHANGED, "it was changed at this very moment; look again"),)


def pruned_views(facts: Iterable[Fact]) -> list[PrunedCheckpoint]:
    return [
        PrunedCheckpoint(
            checkpoint_id=fact.id,
            step=fact.step,
            attempt=fact.attempt,
            health=fact.health,
            logical_bytes=fact.logical_bytes,
        )
        for fact in facts
    ]


def left_views(facts: Iterable[Fact], reasons: Mapping[str, Sequence[Reason]]) -> list[LeftCheckpoint]:
    """The checkpoints that stay, with their reasons; one without a reason was changed meanwhile."""
    return [
        LeftCheckpoint(
            checkpoint_id=fact.id, step=fact.step, attempt=fact.attempt, reasons=list(reasons.get(fact.id, CHANGED))
        )
        for fact in facts
    ]


def freed_of(context: ServiceContext, facts: Sequence[Fact]) -> FreedBytes:
    """Looked up by itself, and not under the run's lock: it reads every chunk of the project."""
    with context.database.read() as session:
        return freed_bytes(session, [fact.id for fact in facts])


def when(purge_at: datetime, facts: Sequence[Fact]) -> datetime | None:
    return purge_at if facts else None


def show_plan(
    context: ServiceContext, caller: Principal, project: str, run: str, request: PlanRetention
) -> RetentionPlan:
    """The plan for people: keep or expire, with every reason, and the bytes that would go. It changes nothing. Raises
    `forbidden`, `project_not_found`, `run_not_found`, and `invalid_request` for what is no policy."""
    with context.database.read() as session:
        owner, found = run_named(session, caller, project, run)
        stored = effective_policy(session, PolicyKind.RETENTION, owner.id, found.id)
        rules = _rules(stored, request.policy)
        decisions = make_plan(rules, read_facts(session, found, rules))
        expiring = [each.fact.id for each in decisions if not each.keep]
        return RetentionPlan(
            project=owner.name,
            run=found.name,
            policy=None if stored is None else _view(stored, owner.name, found.name),
            # What was only asked about cannot be applied.
            policy_digest=policy_digest(stored) if stored is not None and request.policy is None else None,
            rules=None if rules is None else rules.rules(),
            planned_at=database_now(session),
            kept=len(decisions) - len(expiring),
            expired=len(expiring),
            freed=freed_bytes(session, expiring),
            notes=[*_notes(rules, decisions), *_paused(session, rules)],
            checkpoints=_shown(decisions, request.show),
        )


def stored_rules(stored: StoredPolicy) -> RetentionPolicy:
    """Raises PolicyError for what a newer version has put: then nothing may be done by it."""
    rules = read_policy(PolicyKind.RETENTION, stored.document)
    assert isinstance(rules, RetentionPolicy)
    return rules


def _rules(stored: StoredPolicy | None, asked: dict[str, Any] | None) -> RetentionPolicy | None:
    try:
        if asked is None:
            return None if stored is None else stored_rules(stored)
        rules = read_policy(PolicyKind.RETENTION, asked)
    except PolicyError as error:
        raise ProblemError(ProblemCode.INVALID_REQUEST, f"{error} Correct the policy.") from None
    assert isinstance(rules, RetentionPolicy)
    return rules


def _shown(decisions: Sequence[Decision], show: str) -> list[PlannedCheckpoint]:
    wanted = {"all": (True, False), "keep": (True,), "expire": (False,), "none": ()}[show]
    # Made of the catalog's own values: they need no second look, and there may be a hundred thousand.
    return [
        PlannedCheckpoint.model_construct(
            checkpoint_id=each.fact.id,
            step=each.fact.step,
            attempt=each.fact.attempt,
            at=each.fact.at,
            state=each.fact.state,
            health=each.fact.health,
            labels=list(each.fact.labels),
            logical_bytes=each.fact.logical_bytes,
            keep=each.keep,
            reasons=list(each.reasons),
        )
        for each in decisions
        if each.keep in wanted
    ]


def _notes(rules: RetentionPolicy | None, decisions: Sequence[Decision]) -> list[str]:
    if rules is None:
        return ["There is no retention policy for this run, so nothing ever expires."]
    notes = []
    if unjudged := only_for_want_of_a_metric(decisions):
        metrics = ", ".join(sorted({best.metric for best in rules.keep_best}))
        notes.append(
            f"{unjudged} of {counted(len(decisions), 'checkpoint')} stay only because they have no finite value of "
            f"{metrics}. "
            "Report the metric at every save, or prune them yourself."
        )
    return notes


def _paused(session: Session, rules: RetentionPolicy | None) -> list[str]:
    """A plan looks like something that will happen."""
    stopped = Controller.paused_at.is_not(None)
    paused = session.scalar(select(Controller).where(Controller.name == CONTROLLER, stopped))
    if rules is None or paused is None:
        return []
    return [
        f"{paused.paused_by} has paused the controller {CONTROLLER} ({paused.pause_reason}): nothing expires by itself "
        "before it is resumed."
    ]


def _view(policy: StoredPolicy, project: str, run: str) -> PolicyView:
    return PolicyView(
        kind=policy.kind,
        project=project,
        run=run if policy.level == "run" else None,
        level=policy.level,
        document=policy.document,
        version=policy.version,
        etag=policy.etag,
        updated_at=policy.updated_at,
        updated_by=policy.updated_by,
    )
