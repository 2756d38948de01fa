"""What a run would cost a month under a policy: what would stand there, times the prices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy.orm import Session

from holdfast_protocol.base import Request
from holdfast_protocol.policies import PolicyError, PolicyKind, read_policy
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.retention import RetentionPolicy
from holdfast_protocol.states import StoreRole
from holdfast_protocol.tiers import COLD_STORE, TierPolicy
from holdfast_protocol.usage import GIB, CostForecast, ForecastCost, ForecastLine, PriceList
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.policies import effective_policy
from holdfast_service.catalog.resolve import run_named
from holdfast_service.catalog.tables import Project, Run
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError
from holdfast_service.forecast.rhythm import Rhythm, read_rhythm
from holdfast_service.forecast.standing import Standing, standing
from holdfast_service.usage.cost import price_of
from holdfast_service.usage.prices import current_prices

_LIMITS = [
    "The run goes on as its newest saves did: as often, with as many bytes, the same labels and metrics in turn.",
    "A save that is kept alone takes as much as one beside its neighbours; where much changes slowly it takes more.",
    "One run alone is counted: what it shares with other runs, copies in a second store, pins and holds are not.",
    "Storing alone is counted: no requests, no reads, no transfer, no minimum storage time of a storage class.",
]

_Policy = TypeVar("_Policy", bound=Request)


@dataclass(frozen=True)
class _Given:
    rhythm: Rhythm
    retention: RetentionPolicy | None
    tiers: TierPolicy | None
    prices: PriceList


def forecast_cost(
    context: ServiceContext, caller: Principal, project: str, run: str, request: ForecastCost
) -> CostForecast:
    """Raises `forbidden`, `project_not_found`, `run_not_found`, and `invalid_request` for what is no policy and for a
    run with too few saves."""
    with context.database.read() as session:
        owner, found = run_named(session, caller, project, run)
        given = _Given(
            read_rhythm(session, found),
            _policy(session, owner, found, PolicyKind.RETENTION, RetentionPolicy, request.retention),
            _policy(session, owner, found, PolicyKind.TIERS, TierPolicy, request.tiers),
            current_prices(session).prices,
        )
    stands = standing(given.rhythm, given.retention, given.tiers)
    trashed = 0
    if given.retention is not None:
        trashed = round(context.settings.trash_policy_seconds / given.rhythm.interval_seconds)
    lines = _lines(context, given, stands, trashed)
    hot = next((line.per_gib_month for line in lines if line.storage_class is None), None) or 0.0
    return CostForecast(
        project=owner.name,
        run=found.name,
        retention=None if given.retention is None else given.retention.rules(),
        tiers=None if given.tiers is None else given.tiers.model_dump(mode="json", exclude_defaults=True),
        based_on_saves=len(given.rhythm.saves),
        save_interval_seconds=given.rhythm.interval_seconds,
        bytes_per_save=given.rhythm.bytes_per_save,
        shared_bytes=given.rhythm.shared_bytes,
        after_days=round(stands.after_days, 1),
        kept_checkpoints=stands.kept,
        trashed_checkpoints=trashed,
        lines=lines,
        currency=given.prices.currency,
        as_of=given.prices.as_of,
        per_month=sum(line.per_month for line in lines),
        grows_per_month=_growth(stands, lines, given.rhythm, hot),
        limits=list(_LIMITS),
    )


def _lines(context: ServiceContext, given: _Given, stands: Standing, trashed: int) -> list[ForecastLine]:
    """What all share is as hot as the newest, and so is what has just expired."""
    counts = {None: 0} | stands.by_target
    lines = []
    for target in sorted(counts, key=lambda each: each or ""):
        checkpoints = counts[target] + (trashed if target is None else 0)
        size = checkpoints * given.rhythm.bytes_per_save + (given.rhythm.shared_bytes if target is None else 0)
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


def _growth(stands: Standing, lines: list[ForecastLine], rhythm: Rhythm, hot: float) -> float:
    """What is old grows, so at the price of the coldest place that something is in."""
    coldest = [line for line in lines if line.checkpoints]
    price = min((line.per_gib_month for line in coldest if line.per_gib_month is not None), default=hot)
    return stands.grows_per_month * rhythm.bytes_per_save / GIB * price


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
