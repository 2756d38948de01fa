"""The lineage of a run: which checkpoints led to where it is now, which of them can be restored, why not a newer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from sqlalchemy import Select, bindparam, exists, select, true
from sqlalchemy.orm import Session, aliased

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.restores import RestoreDecision, RestorePoint, Skipped, SkippedReason
from holdfast_protocol.runs import AtStep, Best, ById, Latest, Point, SelectorError, parse_point
from holdfast_protocol.states import CheckpointState, CopyState, Health, Tier
from holdfast_service.attached_stores.attached import ask_stores
from holdfast_service.context import ServiceContext, waiting_for_store
from holdfast_service.copies.cold import cold_problem, how_to_thaw, selector_of
from holdfast_service.copies.predicates import is_readable
from holdfast_service.db.dialect import database_now, dialect_of
from holdfast_service.db.tables.core import Attempt, Checkpoint, ChunkListEntry, Copy, Run, Shard
from holdfast_service.db.tables.records import RebuildDoubt
from holdfast_service.errors import ProblemError
from holdfast_service.lineage.best_and_proven import rank

# The lineage. Attempts form a tree by what they resumed from. `latest` follows one line through it and not the largest
# step: after a rollback to 500, a poisoned 1000 must never outrank 550 (rule latest-follows-lineage).


@dataclass(frozen=True)
class AttemptNode:
    """`resumed_from` is the attempt and step of the checkpoint that the ranks loaded; None for a fresh start.

    `cut` is True from the attempt's first commit or explicit rollback on. `parent_id` is that checkpoint's id.
    """

    number: int
    resumed_from: tuple[int, int] | None
    cut: bool
    parent_id: str | None = None


@dataclass(frozen=True)
class Segment:
    """The checkpoints of one attempt up to and with `max_step`; None: all of them."""

    attempt: int
    max_step: int | None


class Line:
    """Segments from the newest to the oldest; at most one per attempt. `parents`: ids of what they resumed from."""

    def __init__(self, segments: Iterable[Segment], parents: Collection[str] = ()) -> None:
        self.segments = tuple(segments)
        self._parents = frozenset(parents)
        self._max_step = {segment.attempt: segment.max_step for segment in self.segments}

    def __contains__(self, point: tuple[int, int]) -> bool:
        """Whether the checkpoint (attempt, step) lies on the line."""
        attempt, step = point
        if attempt not in self._max_step:
            return False
        limit = self._max_step[attempt]
        return limit is None or step <= limit

    def has(self, checkpoint_id: str, attempt: int, step: int, *, detached: bool) -> bool:
        """Whether this checkpoint lies on the line. A detached one does only as a parent: a person has named it, and
        the run has gone on from it."""
        return (attempt, step) in self and (not detached or checkpoint_id in self._parents)


def lineage(attempts: Iterable[AttemptNode]) -> Line:
    """The line of the newest attempt that has cut. The others leave the line as the older ones made it."""
    by_number = {attempt.number: attempt for attempt in attempts}
    newest = max((attempt.number for attempt in by_number.values() if attempt.cut), default=None)
    segments: list[Segment] = []
    parents: list[str] = []
    step: int | None = None
    while newest is not None and newest in by_number:
        segments.append(Segment(newest, step))
        parent = by_number[newest].resumed_from
        # Parents are older attempts; anything else would be a loop and ends the line.
        if parent is None or parent[0] >= newest:
            break
        if (parent_id := by_number[newest].parent_id) is not None:
            parents.append(parent_id)
        newest, step = parent
    return Line(segments, parents)


# What a request's selector means; the wire's grammar is holdfast_protocol.runs.


def point_of(selector: str) -> Point:
    """Raises `invalid_request`."""
    try:
        return parse_point(selector)
    except SelectorError as error:
        raise ProblemError(ProblemCode.INVALID_REQUEST, f"{error}.", selector=selector[:200]) from None


# What a rebuilt catalog does not know, and who has looked into it (rule rebuild-doubts).
#
# A bucket may hold objects that no checkpoint refers to, and documents that cannot be read. A commit may have been
# there: so of a run without one the service does not confirm that nothing was ever committed, until a person does. A
# catalog that was never rebuilt has no row here.

EVERY = ""
"""In place of a run's name: all of the project's. In place of a project's: all that the rebuild did not find."""

_DOUBTS = select(RebuildDoubt).where(
    RebuildDoubt.project.in_(bindparam("projects", expanding=True)),
    RebuildDoubt.run.in_(bindparam("runs", expanding=True)),
)


def why_in_doubt(session: Session, project: str, run: str) -> str | None:
    """A sentence; None where the rebuild saw everything, or a person has confirmed. The word on the run counts before
    that on its project, and that before the one on all unknown projects."""
    rows = session.scalars(_DOUBTS, {"projects": (project, EVERY), "runs": (run, EVERY)})
    doubts = {(row.project, row.run): row.reason for row in rows}
    for key in ((project, run), (project, EVERY), (EVERY, EVERY)):
        if key in doubts:
            return doubts[key]
    return None


def without_doubt(session: Session, project: str, run: str, decision: RestoreDecision) -> RestoreDecision:
    """The decision, with a word on what may be missing. Raises `commits_unknown` where it would say that nothing was
    ever committed, and the catalog cannot say."""
    why = why_in_doubt(session, project, run)
    if why is None:
        return decision
    if not decision.ever_committed:
        raise ProblemError(
            ProblemCode.COMMITS_UNKNOWN,
            f"The catalog was rebuilt, and something of {project} could not be known: {why} So the catalog cannot say "
            f"whether {project}/{run} ever had a checkpoint. If it is new, or may begin from nothing, confirm that: "
            f"`holdfast catalog confirm {project}/{run}`; for every run of the project: "
            f"`holdfast catalog confirm {project}`.",
            project=project,
            run=run,
        )
    told = (
        f"The catalog was rebuilt, and newer checkpoints may be missing: {why} This note ends with `holdfast catalog "
        f"confirm {project}/{run}`."
    )
    return decision.model_copy(update={"note": f"{decision.note} {told}".strip()})


# Which stores a reader can be sent to now, and whether a checkpoint is whole in them (rule store-outage-degrades).


@dataclass(frozen=True)
class AvailableStores:
    """`store_ids` are the stores that answer; `reason` is a sentence about those that do not."""

    store_ids: tuple[int, ...]
    reason: str


def available_stores(context: ServiceContext) -> AvailableStores | None:
    """None where every store answers, or has answered a moment ago: an older checkpoint costs training time, so no job
    is sent to one for a short silence. Never called inside a transaction: it may ask the stores."""
    with waiting_for_store():
        ask_stores(context)
    longest = context.settings.store_unavailable_seconds
    silent = [each for each in context.stores if each.watch.unavailable and each.watch.unavailable_seconds >= longest]
    if not silent or len(silent) == len(context.stores):
        return None
    named = " and ".join(f"the {each.role.value} store" for each in silent)
    seconds = round(max(each.watch.unavailable_seconds for each in silent))
    return AvailableStores(
        tuple(each.store_id for each in context.stores if each not in silent),
        f"{named[:1].upper()}{named[1:]} has not answered for {seconds} s.",
    )


def whole_in(session: Session, checkpoint_id: str, attempt_id: int, store_ids: Collection[int]) -> bool:
    """Whether each chunk of the checkpoint can be read from one of these stores now."""
    until = database_now(session)
    readable = exists().where(
        Copy.chunk_id == ChunkListEntry.chunk_id,
        Copy.state != CopyState.SUSPECT,
        is_readable(store_ids, attempt_id, until=until),
    )
    lacking = session.scalar(
        select(ChunkListEntry.chunk_id)
        .join(Shard, Shard.chunk_list_id == ChunkListEntry.chunk_list_id)
        .where(Shard.checkpoint_id == checkpoint_id, ~readable)
        .limit(1)
    )
    return lacking is None


# Which checkpoint can be restored now, and why not a newer one. Used by opening an attempt and by reading.
#
# The decision is pure (`choose`): it takes the run's checkpoints, newest first, and stops reading at the first that
# will do. `choose_restore_point` feeds it from the catalog.

SKIPPED_SHOWN = 50
_ROWS_PER_FETCH = 200
_TRIED_FIRST = 4
"""Of the newest checkpoints one mostly will do."""
_KNOWS_UNAVAILABLE = 2


@dataclass(frozen=True)
class Candidate:
    """What the choice looks at. `metrics` as the catalog keeps them: name -> {"value": …, "nonfinite": …}."""

    checkpoint_id: str
    attempt: int
    step: int
    world_size: int
    state: CheckpointState
    health: Health
    tier: Tier
    digest: str | None
    logical_bytes: int
    committed_at: datetime | None
    detached: bool = False
    abort_reason: str | None = None
    health_reason: str | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    unavailable: str | None = None
    """A sentence, where it cannot be read now because a store does not answer."""
    thaw: str = ""
    """What to do, where it is cold."""


def choose_restore_point(
    session: Session,
    run_id: str,
    point: Point,
    *,
    before_step: int | None = None,
    available: AvailableStores | None = None,
    strictly: bool = False,
    diverged: bool = False,
) -> RestoreDecision:
    """Only steps below `before_step` count, if it is given. `latest` and `best` may find nothing: then the restore
    point is None. A step or an id that was named and cannot be restored is `no_restore_point` or
    `checkpoint_not_found`: never another step instead.

    With `available`, `latest` and `best` are what is whole in the stores that answer; where nothing is, what they would
    be if all did, for that can be waited for; not if `strictly`. `diverged`: what has diverged will do as well.
    """
    line = line_of_run(session, run_id)
    chosen: Candidate | None
    skipped: list[Skipped] = []
    note = ""
    if isinstance(point, AtStep | ById):
        chosen = _named(session, _candidates(session, run_id, point, before_step), line, point, diverged=diverged)
    else:
        candidates = _candidates(session, run_id, point, before_step, available)
        chosen, skipped = choose(candidates, line, point, diverged=diverged)
        if available is not None and chosen is not None:
            note = f"{available.reason} Step {chosen.step} is whole in the stores that answer, and is read from there."
        elif available is not None and not strictly:
            candidates = _candidates(session, run_id, point, before_step)
            chosen, skipped = choose(candidates, line, point, diverged=diverged)
            note = f"{available.reason} No checkpoint is whole in the stores that answer." if chosen is not None else ""
    return RestoreDecision(
        note=note,
        restore_point=None if chosen is None else _restore_point(chosen),
        skipped=skipped,
        ever_committed=chosen is not None or _ever_committed(session, run_id),
    )


_ENVIRONMENT = select(Attempt.environment).where(
    Attempt.run_id == bindparam("run_id"), Attempt.number == bindparam("number")
)


def with_environment(session: Session, run_id: str, decision: RestoreDecision) -> RestoreDecision:
    """The decision, and what the attempt that saved the restore point ran with: a resumed job compares itself to it."""
    point = decision.restore_point
    if point is None:
        return decision
    saved_with = session.scalar(_ENVIRONMENT, {"run_id": run_id, "number": point.attempt})
    return decision.model_copy(update={"saved_with": saved_with})


def known_to(skipped: Sequence[Skipped], protocol_minor: int) -> list[Skipped]:
    """With the reasons that a client of this minor version has a word for: to an older one, what no store that answers
    holds is not readable now, as what is cold. The sentence says which it is. Pure."""
    if protocol_minor >= _KNOWS_UNAVAILABLE:
        return list(skipped)
    return [
        each.model_copy(update={"reason": SkippedReason.COLD}) if each.reason is SkippedReason.UNAVAILABLE else each
        for each in skipped
    ]


def choose(
    newest_first: Iterable[Candidate], line: Line, point: Latest | Best, *, diverged: bool = False
) -> tuple[Candidate | None, list[Skipped]]:
    """The restore point and what was skipped for it. Pure; `newest_first` is ordered by step, descending."""
    if isinstance(point, Best):
        return _best(newest_first, line, point, diverged=diverged)
    skipped: list[tuple[Candidate, Skipped]] = []
    for candidate in newest_first:
        reason = not_restorable(candidate, line, diverged=diverged)
        if reason is None:
            # An aborted first try of the very same step is not newer than what was then committed.
            return candidate, [seen for rejected, seen in skipped if rejected.step > candidate.step]
        if len(skipped) < SKIPPED_SHOWN:
            skipped.append((candidate, reason))
    return None, [seen for _, seen in skipped]


def not_restorable(candidate: Candidate, line: Line | None, *, diverged: bool = False) -> Skipped | None:
    """Why not this one; None if it can be restored. Without a line, an detached branch will do; with `diverged`, what
    has diverged."""
    reason, detail = None, ""
    name = f"Step {candidate.step} of attempt {candidate.attempt}"
    why = f": {candidate.health_reason}" if candidate.health_reason else ""
    if candidate.state == CheckpointState.UPLOADING:
        reason, detail = SkippedReason.UPLOADING, f"{name} is not complete: not all ranks have sealed."
    elif candidate.state == CheckpointState.ABORTED:
        reason = SkippedReason.ABORTED
        detail = f"{name} was never complete: {candidate.abort_reason or 'it was aborted'}"
    elif candidate.state != CheckpointState.COMMITTED:
        reason, detail = SkippedReason.TRASHED, f"{name} was deleted; its state is {candidate.state}."
    elif line is not None and not line.has(
        candidate.checkpoint_id, candidate.attempt, candidate.step, detached=candidate.detached
    ):
        reason = SkippedReason.DETACHED
        detail = f"{name} is not on the lineage: the run went on from an older checkpoint."
        if candidate.detached:
            detail = f"{name} was pushed late, when the run had gone on without it; name its attempt to restore it."
    elif candidate.health == Health.CORRUPT:
        reason, detail = SkippedReason.CORRUPT, f"{name} cannot be read whole{why}"
    elif candidate.health == Health.DIVERGED and not diverged:
        reason, detail = SkippedReason.DIVERGED, f"{name} diverged{why}"
    elif candidate.health == Health.QUARANTINED:
        reason, detail = SkippedReason.QUARANTINED, f"{name} is in quarantine{why}"
    elif candidate.tier != Tier.HOT:
        reason, detail = SkippedReason.COLD, f"{name} is {candidate.tier}. {candidate.thaw}".strip()
    elif candidate.unavailable is not None:
        reason, detail = (
            SkippedReason.UNAVAILABLE,
            f"{name} is not whole in the stores that answer. {candidate.unavailable}",
        )
    if reason is None:
        return None
    return Skipped(
        checkpoint_id=candidate.checkpoint_id,
        step=candidate.step,
        attempt=candidate.attempt,
        reason=reason,
        detail=detail if detail.endswith(".") else detail + ".",
    )


def _best(
    newest_first: Iterable[Candidate], line: Line, point: Best, *, diverged: bool
) -> tuple[Candidate | None, list[Skipped]]:
    """The best finite value of the metric; of equal ones the newest. Passed over: what is better and will not do."""
    chosen: tuple[float, Candidate] | None = None
    rejected: list[tuple[float, Skipped]] = []
    for candidate in newest_first:
        ranked = rank(candidate.metrics, point)
        if ranked is None:
            continue
        reason = not_restorable(candidate, line, diverged=diverged)
        if reason is not None:
            rejected.append((ranked, reason))
        elif chosen is None or ranked < chosen[0]:
            chosen = (ranked, candidate)
    better = sorted((item for item in rejected if chosen is None or item[0] < chosen[0]), key=lambda item: item[0])
    return None if chosen is None else chosen[1], [seen for _, seen in better[:SKIPPED_SHOWN]]


def _named(
    session: Session, newest_first: Iterable[Candidate], line: Line, point: AtStep | ById, *, diverged: bool
) -> Candidate:
    """Exactly that one, or a problem. A step alone means the one on the line; an attempt or an id may lie off it."""
    if isinstance(point, ById):
        matching = [each for each in newest_first if each.checkpoint_id == point.checkpoint_id]
        within = None
    else:
        matching = [each for each in newest_first if each.step == point.step and point.attempt in (None, each.attempt)]
        within = line if point.attempt is None else None
    reasons = []
    for candidate in matching:
        reason = not_restorable(candidate, within, diverged=diverged)
        if reason is None:
            return candidate
        reasons.append(reason)
    if not reasons:
        raise ProblemError(
            ProblemCode.CHECKPOINT_NOT_FOUND,
            f"This run has no checkpoint {point}. `holdfast checkpoints list` lists those that it has.",
            selector=str(point),
        )
    for reason in reasons:
        if reason.reason is SkippedReason.COLD:
            raise cold_problem(session, session.get_one(Checkpoint, reason.checkpoint_id))
    raise ProblemError(
        ProblemCode.NO_RESTORE_POINT,
        f"The checkpoint {point} cannot be restored. {' '.join(reason.detail for reason in reasons[:5])} "
        "Name another one, or take the latest.",
        selector=str(point),
        skipped=[reason.model_dump(mode="json") for reason in reasons],
    )


def newest_restore_points(session: Session, run_ids: Collection[str]) -> dict[str, RestorePoint]:
    """`latest` of each run that has one: two statements for all of them, and more only for a run of whose newest
    checkpoints none will do."""
    lines = _lines_of_runs(session, run_ids)
    points: dict[str, RestorePoint] = {}
    for run_id, newest in _newest_of_runs(session, run_ids).items():
        chosen, _ = choose((_candidate(session, row) for row in newest), lines[run_id], Latest())
        if chosen is not None:
            points[run_id] = _restore_point(chosen)
        elif len(newest) == _TRIED_FIRST:
            found = choose_restore_point(session, run_id, Latest()).restore_point
            points |= {} if found is None else {run_id: found}
    return points


_FIELDS = (
    Checkpoint.id,
    Checkpoint.attempt_number,
    Checkpoint.step,
    Checkpoint.world_size,
    Checkpoint.state,
    Checkpoint.health,
    Checkpoint.tier,
    Checkpoint.readable_until,
    Checkpoint.digest,
    Checkpoint.logical_bytes,
    Checkpoint.committed_at,
    Checkpoint.detached,
)
_ORDER = (Checkpoint.step.desc(), Checkpoint.attempt_number.desc(), Checkpoint.detached, Checkpoint.id)
_NEWEST = select(*_FIELDS).order_by(*_ORDER).limit(_TRIED_FIRST)
_NEWEST_OF_RUN = _NEWEST.where(Checkpoint.run_id == Run.id).correlate(Run).lateral("newest")
_NEWEST_OF_RUNS = (
    select(Run.id.label("run_id"), _NEWEST_OF_RUN)
    .join(_NEWEST_OF_RUN, true())
    .where(Run.id.in_(bindparam("run_ids", expanding=True)))
)
_RESUMED_FROM = aliased(Checkpoint)
_ATTEMPTS_OF_RUNS = (
    select(
        Attempt.run_id,
        Attempt.number,
        Attempt.cut_at,
        Attempt.last_step,
        _RESUMED_FROM.attempt_number,
        _RESUMED_FROM.step,
        _RESUMED_FROM.id,
    )
    .outerjoin(_RESUMED_FROM, _RESUMED_FROM.id == Attempt.resumed_from_id)
    .where(Attempt.run_id.in_(bindparam("run_ids", expanding=True)))
)
_OF_RUN = select(Checkpoint).where(Checkpoint.run_id == bindparam("run_id")).order_by(*_ORDER)
_FIRST_OF_RUN = _OF_RUN.limit(_TRIED_FIRST)
"""Made once: to make these takes as long as to run them."""


def _newest_of_runs(session: Session, run_ids: Collection[str]) -> dict[str, list[Any]]:
    """By run id, its newest checkpoints in the order of `_candidates`, those fields that a choice without a reason
    needs."""
    if dialect_of(session) == "sqlite":  # which has no LATERAL, and no way to it either
        return {run_id: list(session.execute(_NEWEST.where(Checkpoint.run_id == run_id))) for run_id in run_ids}
    found: dict[str, list[Any]] = {run_id: [] for run_id in run_ids}
    for row in session.execute(_NEWEST_OF_RUNS, {"run_ids": list(run_ids)}):
        found[row.run_id].append(row)
    for rows in found.values():
        rows.sort(key=lambda row: (-row.step, -row.attempt_number, row.detached, row.id))
    return found


def _candidate(session: Session, row: Any) -> Candidate:
    return Candidate(
        checkpoint_id=row.id,
        attempt=row.attempt_number,
        step=row.step,
        world_size=row.world_size,
        state=CheckpointState(row.state),
        health=Health(row.health),
        tier=_tier(session, row),
        digest=row.digest,
        logical_bytes=row.logical_bytes,
        committed_at=row.committed_at,
        detached=row.detached,
    )


def line_of_run(session: Session, run_id: str, *, also_uncommitted: bool = False) -> Line:
    """The run's lineage as it is now. `also_uncommitted`: that of the newest attempt that has resumed or run a step,
    whether it has committed or not."""
    return _lines_of_runs(session, [run_id], also_uncommitted=also_uncommitted)[run_id]


def _lines_of_runs(session: Session, run_ids: Collection[str], *, also_uncommitted: bool = False) -> dict[str, Line]:
    rows = session.execute(_ATTEMPTS_OF_RUNS, {"run_ids": list(run_ids)})
    nodes: dict[str, list[AttemptNode]] = {run_id: [] for run_id in run_ids}
    for run_id, number, cut_at, last_step, parent_attempt, step, parent_id in rows:
        resumed_from = None if step is None else (parent_attempt, step)
        has_begun = also_uncommitted and (last_step is not None or resumed_from is not None)
        nodes[run_id].append(AttemptNode(number, resumed_from, has_begun or cut_at is not None, parent_id))
    return {run_id: lineage(attempts) for run_id, attempts in nodes.items()}


def _candidates(
    session: Session, run_id: str, point: Point, before_step: int | None, available: AvailableStores | None = None
) -> Iterator[Candidate]:
    """Newest step first; of a step or an id those that it can mean."""
    statement: Select[Any] = _OF_RUN
    if before_step is not None:
        statement = statement.where(Checkpoint.step < before_step)
    if isinstance(point, AtStep):
        statement = statement.where(Checkpoint.step == point.step)
    elif isinstance(point, ById):
        statement = statement.where(Checkpoint.id == point.checkpoint_id)
    for row in _few_then_all(session, statement, run_id):
        yield replace(
            _candidate(session, row),
            thaw=_thaw(session, row),
            abort_reason=row.abort_reason,
            health_reason=row.health_reason,
            metrics=row.metrics,
            unavailable=_unavailable(session, row, available),
        )


def _few_then_all(session: Session, newest_first: Select[Any], run_id: str) -> Iterator[Checkpoint]:
    """The choice mostly needs the first few of many thousands, which one round trip brings. The rest comes in portions:
    that statement may see commits since, so it begins with the last step of the few, and not behind so many rows."""
    first = _FIRST_OF_RUN if newest_first is _OF_RUN else newest_first.limit(_TRIED_FIRST)
    few = session.scalars(first, {"run_id": run_id}).all()
    yield from few
    if len(few) < _TRIED_FIRST:
        return
    seen = {row.id for row in few}
    rest = newest_first.where(Checkpoint.step <= few[-1].step)
    rows = session.scalars(rest, {"run_id": run_id}, execution_options={"yield_per": _ROWS_PER_FETCH})
    try:
        yield from (row for row in rows if row.id not in seen)
    finally:
        rows.close()


def _tier(session: Session, row: Any) -> Tier:
    """What is thawed is hot until its end, also where no controller is there to write that down."""
    over = row.readable_until is not None and row.readable_until <= database_now(session)
    return Tier.COLD if row.tier == Tier.HOT and over else Tier(row.tier)


def _thaw(session: Session, row: Checkpoint) -> str:
    tier = _tier(session, row)
    if tier is Tier.HOT or row.state != CheckpointState.COMMITTED:
        return ""
    return how_to_thaw(tier, selector_of(session, row), row.thaw_expected_at)


def _unavailable(session: Session, row: Checkpoint, available: AvailableStores | None) -> str | None:
    """Asked only of what could be restored otherwise: it looks at every chunk."""
    if available is None or row.state != CheckpointState.COMMITTED or row.health not in (Health.OK, Health.DIVERGED):
        return None
    return None if whole_in(session, row.id, row.attempt_id, available.store_ids) else available.reason


def _ever_committed(session: Session, run_id: str) -> bool:
    """Also where the checkpoint has no row any more: a commit cuts the line, and a rebuild has the attempts."""
    committed = exists().where(Checkpoint.run_id == run_id, Checkpoint.committed_at.is_not(None))
    cut = exists().where(Attempt.run_id == run_id, Attempt.cut_at.is_not(None))
    return bool(session.scalar(select(committed | cut)))


def _restore_point(chosen: Candidate) -> RestorePoint:
    # What is committed has both.
    assert chosen.digest is not None
    assert chosen.committed_at is not None
    return RestorePoint(
        checkpoint_id=chosen.checkpoint_id,
        step=chosen.step,
        attempt=chosen.attempt,
        world_size=chosen.world_size,
        digest=chosen.digest,
        logical_bytes=chosen.logical_bytes,
        committed_at=chosen.committed_at,
    )
