"""What a run would cost a month under a policy, if it goes on as it has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from statistics import mean, median
from typing import Any, TypeVar

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.base import Request
from holdfast_protocol.policies.policy import PolicyError, PolicyKind, read_policy
from holdfast_protocol.policies.retention import RetentionPolicy
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import CheckpointKind, CheckpointState, Health, StoreRole
from holdfast_protocol.tiers import COLD_STORE, TierPolicy
from holdfast_protocol.usage import GIB, CostForecast, ForecastCost, ForecastLine, PriceList
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.copies.stored_bytes import stored_bytes_of_checkpoint
from holdfast_service.db.tables.core import Checkpoint, Project, Run
from holdfast_service.errors import ProblemError
from holdfast_service.policies.policies import effective_policy
from holdfast_service.retention.plan import Fact, RunFacts, make_plan
from holdfast_service.runs.views import run_named
from holdfast_service.tiers.rules import Subject, wishes
from holdfast_service.usage.cost import current_prices, price_of

_NEWEST = 200


@dataclass(frozen=True)
class Save:
    """What a rule may look at."""

    kind: CheckpointKind
    labels: Sequence[str]
    metrics: dict[str, Any]


@dataclass(frozen=True)
class SaveCadence:
    """`saves` in the order of their making; they are taken to repeat without an end."""

    saves: Sequence[Save]
    newest_at: datetime
    newest_step: int
    interval_seconds: float
    steps_between: int
    bytes_per_save: int
    shared_bytes: int


def read_cadence(session: Session, run: Run) -> SaveCadence:
    """How a run saves: how often, what each save adds to the store, and what all of them share. It counts the newest
    saves that were ever committed on the line, expired ones too. Raises `invalid_request` for fewer than two."""
    rows = session.execute(
        select(
            Checkpoint.id,
            Checkpoint.committed_at,
            Checkpoint.step,
            Checkpoint.uploaded_bytes,
            Checkpoint.kind,
            Checkpoint.labels,
            Checkpoint.metrics,
            Checkpoint.state,
        )
        .where(Checkpoint.run_id == run.id, Checkpoint.committed_at.is_not(None), ~Checkpoint.detached)
        .order_by(Checkpoint.committed_at.desc(), Checkpoint.id.desc())
        .limit(_NEWEST)
    ).all()[::-1]
    if len(rows) < 2:
        raise ProblemError(
            ProblemCode.INVALID_REQUEST,
            f"The run {run.name!r} has {len(rows)} committed checkpoints, and how it goes on is told by its saves. Ask "
            "again when it has at least two.",
        )
    times = [row.committed_at for row in rows]
    gaps = [(later - earlier).total_seconds() for earlier, later in pairwise(times)]
    steps = [later.step - earlier.step for earlier, later in pairwise(rows)]
    # The first one of all sends what later ones share; it would look like growth.
    per_save = round(mean(row.uploaded_bytes for row in rows[1:]))
    there = [row.id for row in rows if row.state == CheckpointState.COMMITTED]
    whole = stored_bytes_of_checkpoint(session, there[-1]) if there else per_save
    return SaveCadence(
        saves=[Save(CheckpointKind(row.kind), list(row.labels), dict(row.metrics)) for row in rows],
        newest_at=times[-1],
        newest_step=rows[-1].step,
        # The median: a job that was down for a night saves so often while it runs.
        interval_seconds=max(1.0, median(gaps)),
        steps_between=max(1, round(median(steps))),
        bytes_per_save=per_save,
        shared_bytes=max(0, whole - per_save),
    )


LONGEST_DAYS = 365.0
MOST_SAVES = 50_000
_APPLIED_EVERY = 500
_DAYS_OF_A_MONTH = 30.0
# Calendar periods begin and end: a checkpoint more or less is no growth.
_WOBBLE = 3


@dataclass(frozen=True)
class SteadyState:
    """`by_target`: how many of the kept checkpoints are where; None is hot. `expiring_share`: of the saves, 0 to 1."""

    after_days: float
    kept: int
    by_target: dict[str | None, int]
    grows_per_month: float
    expiring_share: float


def steady_state(cadence: SaveCadence, retention: RetentionPolicy | None, tiers: TierPolicy | None) -> SteadyState:
    """What is kept of a run that goes on as it has, once the policies have long been at work. Pure.

    The run is thought on, save after save; the retention policy is applied every so often and at the end, and then the
    tiers policy says where each kept one is. The rules are the verbs' own.
    """
    saves = min(MOST_SAVES, max(1, int(LONGEST_DAYS * 86400 / cadence.interval_seconds)))
    earlier_saves = saves * 3 // 4
    after_days = saves * cadence.interval_seconds / 86400
    kept: list[Fact] = []
    kept_earlier = apply_at = 0
    for number in range(1, saves + 1):
        kept.append(_save(cadence, number))
        if len(kept) > apply_at or number in (earlier_saves, saves):
            kept = _applied(retention, kept)
            # The more stay, the seldomer: else a policy that keeps all would be asked about all again and again.
            apply_at = 2 * len(kept) + _APPLIED_EVERY
        if number == earlier_saves:
            kept_earlier = len(kept)
    more = len(kept) - kept_earlier
    quarter_months = (saves - earlier_saves) * cadence.interval_seconds / 86400 / _DAYS_OF_A_MONTH
    grows = more / quarter_months if more > _WOBBLE and quarter_months > 0 else 0.0
    expiring_share = min(1.0, max(0.0, 1.0 - more / (saves - earlier_saves)))
    return SteadyState(after_days, len(kept), _places(cadence, tiers, kept), grows, expiring_share)


def _save(cadence: SaveCadence, number: int) -> Fact:
    like = cadence.saves[(number - 1) % len(cadence.saves)]
    return Fact(
        id=str(number),
        step=cadence.newest_step + number * cadence.steps_between,
        attempt=1,
        at=cadence.newest_at + timedelta(seconds=number * cadence.interval_seconds),
        labels=like.labels,
        metrics=like.metrics,
    )


def _applied(retention: RetentionPolicy | None, facts: list[Fact]) -> list[Fact]:
    if retention is None:
        return facts
    plan = make_plan(retention, RunFacts(facts, restore_point=facts[-1].id, running=True))
    return [decision.fact for decision in reversed(plan) if decision.keep]


def _places(cadence: SaveCadence, tiers: TierPolicy | None, kept: list[Fact]) -> dict[str | None, int]:
    subjects = [
        Subject(
            id=fact.id,
            step=fact.step,
            attempt=1,
            kind=cadence.saves[(int(fact.id) - 1) % len(cadence.saves)].kind,
            labels=fact.labels,
            committed_at=fact.at,
            health=Health.OK,
            on_line=True,
        )
        for fact in kept
    ]
    return dict(Counter(wish.target for wish in wishes(tiers, subjects, kept[-1].at).values()))


_LIMITS = [
    "The run goes on as its newest saves did: as often, with as many bytes, the same labels and metrics in turn.",
    "A save that is kept alone takes as much as one beside its neighbours; where much changes slowly it takes more.",
    "One run alone is counted: what it shares with other runs, copies in a second store, pins and holds are not.",
    "Storing alone is counted: no requests, no reads, no transfer, no minimum storage time of a storage class.",
]

_UNPRICED = "Bytes in a place without a price are not counted, nor is what grows there: `holdfast prices put` sets one."

_Policy = TypeVar("_Policy", bound=Request)


@dataclass(frozen=True)
class _Given:
    cadence: SaveCadence
    retention: RetentionPolicy | None
    tiers: TierPolicy | None
    prices: PriceList


def forecast_cost(
    context: ServiceContext, caller: Principal, project: str, run: str, request: ForecastCost
) -> CostForecast:
    """What a run would cost a month under a policy: what would stand there, times the prices. Raises `forbidden`,
    `project_not_found`, `run_not_found`, and `invalid_request` for what is no policy and for a run with too few saves.
    """
    with context.database.read() as session:
        owner, found = run_named(session, caller, project, run)
        given = _Given(
            read_cadence(session, found),
            _policy(session, owner, found, PolicyKind.RETENTION, RetentionPolicy, request.retention),
            _policy(session, owner, found, PolicyKind.TIERS, TierPolicy, request.tiers),
            current_prices(session).prices,
        )
    stands = steady_state(given.cadence, given.retention, given.tiers)
    # A policy that keeps every save has nothing in the trash.
    trashed = round(context.settings.trash_policy_seconds / given.cadence.interval_seconds * stands.expiring_share)
    lines = _lines(context, given, stands, trashed)
    unpriced = sum(line.bytes for line in lines if line.per_gib_month is None)
    hot = next((line.per_gib_month for line in lines if line.storage_class is None), None) or 0.0
    return CostForecast(
        project=owner.name,
        run=found.name,
        retention=None if given.retention is None else given.retention.rules(),
        tiers=None if given.tiers is None else given.tiers.model_dump(mode="json", exclude_defaults=True),
        based_on_saves=len(given.cadence.saves),
        save_interval_seconds=given.cadence.interval_seconds,
        bytes_per_save=given.cadence.bytes_per_save,
        shared_bytes=given.cadence.shared_bytes,
        after_days=round(stands.after_days, 1),
        kept_checkpoints=stands.kept,
        trashed_checkpoints=trashed,
        lines=lines,
        currency=given.prices.currency,
        as_of=given.prices.as_of,
        per_month=sum(line.per_month for line in lines),
        grows_per_month=_growth(stands, lines, given.cadence, hot),
        unpriced_bytes=unpriced,
        limits=[*_LIMITS, *([_UNPRICED] if unpriced else [])],
    )


def _lines(context: ServiceContext, given: _Given, stands: SteadyState, trashed: int) -> list[ForecastLine]:
    """What all share is as hot as the newest, and so is what has just expired."""
    counts = {None: 0} | stands.by_target
    lines = []
    for target in sorted(counts, key=lambda each: each or ""):
        checkpoints = counts[target] + (trashed if target is None else 0)
        size = checkpoints * given.cadence.bytes_per_save + (given.cadence.shared_bytes if target is None else 0)
        if target == COLD_STORE:
            cold = context.attached(StoreRole.COLD)
            kind, storage_class = (context.store if cold is None else cold.store).kind, None
        else:
            kind, storage_class = context.store.kind, target
        price = price_of(given.prices, kind, storage_class)
        lines.append(
            ForecastLine(
                store_kind=kind,
                storage_class=storage_class,
                checkpoints=checkpoints,
                bytes=size,
                per_gib_month=price,
                per_month=(price or 0.0) * size / GIB,
            )
        )
    return lines


def _growth(stands: SteadyState, lines: list[ForecastLine], cadence: SaveCadence, hot: float) -> float:
    """What is old grows, so at the price of the coldest place that something is in."""
    coldest = [line for line in lines if line.checkpoints]
    price = min((line.per_gib_month for line in coldest if line.per_gib_month is not None), default=hot)
    return stands.grows_per_month * cadence.bytes_per_save / GIB * price


def _policy(  # noqa: PLR0917 (who, of which kind, and what was asked)
    session: Session,
    project: Project,
    run: Run,
    kind: PolicyKind,
    model: type[_Policy],
    asked: dict[str, Any] | None,
) -> _Policy | None:
    document = asked
    if document is None:
        stored = effective_policy(session, kind, project.id, run.id)
        if stored is None:
            return None
        document = stored.document
    try:
        found = read_policy(kind, document)
    except PolicyError as error:
        raise ProblemError(ProblemCode.INVALID_REQUEST, str(error)) from None
    assert isinstance(found, model)
    return found
