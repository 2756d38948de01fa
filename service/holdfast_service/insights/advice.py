"""The recommended interval in words: what was measured, where, and which bound it met."""

from __future__ import annotations

from holdfast_protocol.runs import AdviceBound, AdviceOutlook, AdviceSource, AdviceView
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.insights.save_interval import STORE_TIMES, Measured, Recommendation
from holdfast_service.runs.views import run_named

_WHOSE = {
    AdviceSource.RUN: "this run",
    AdviceSource.PROJECT: "this project's runs",
    AdviceSource.FLEET: "all runs of this service",
}


def explain(measured: Measured, advised: Recommendation) -> list[str]:
    return [
        _interruptions(measured, advised),
        _saves(measured),
        *_restart(measured),
        _interval(advised),
    ]


def _interruptions(measured: Measured, advised: Recommendation) -> str:
    count = sum(1 for each in measured.uptimes if each.interrupted)
    uptime = in_words(sum(each.seconds for each in measured.uptimes))
    seen = f"{count} {'interruption' if count == 1 else 'interruptions'} in {uptime} of training"
    mean = f"work is taken to be lost once in {in_words(advised.mean_seconds)}"
    if advised.mean_source is AdviceSource.RUN:
        return f"This run had {seen}: {mean}."
    if advised.mean_source is AdviceSource.DEFAULT:
        return f"This run had {seen}, and the others tell no more: {mean}, which is a guess."
    return f"This run had {seen}; mostly by what {_WHOSE[advised.mean_source]} went through, {mean}."


def _saves(measured: Measured) -> str:
    if measured.cost is None:
        return "No save was measured yet, so what one costs is not known."
    blocked, durable = in_words(measured.cost.blocked_seconds), in_words(measured.cost.durable_seconds)
    saves = "1 save" if measured.saves == 1 else f"{measured.saves} saves"
    by = f"by {saves} of {_WHOSE[measured.cost_source]}"
    return f"A save holds training up for {blocked} and is durable {durable} after its begin, {by}."


def _restart(measured: Measured) -> list[str]:
    if measured.restart_seconds is None:
        return []
    return [
        f"From an interruption to training again it takes {in_words(measured.restart_seconds)}, however often is saved."
    ]


def _interval(advised: Recommendation) -> str:
    best = "" if advised.unbounded_seconds is None else in_words(advised.unbounded_seconds)
    match advised.bound:
        case AdviceBound.UNMEASURED:
            return "Until this run's own saves are measured, the interval is at most the service's default."
        case AdviceBound.SHORTEST:
            return f"{best} would lose the least; the service's shortest interval is longer."
        case AdviceBound.LONGEST:
            return f"{best} would lose the least; the service's longest interval is shorter."
        case AdviceBound.STORE:
            return f"{best} would lose the least; the store bears one save in {STORE_TIMES:g} times its own time."
    return "This interval would have lost the least."


def in_words(seconds: float) -> str:
    """`12.3 s`, `7 min 12 s`, `5 h 40 min`, `3 d 4 h`."""
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    for size, name, small_size, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= size:
            large, rest = divmod(round(seconds / small_size) * small_size, size)
            return f"{large} {name} {rest // small_size} {small}" if rest else f"{large} {name}"
    raise AssertionError("unreachable")


def show_advice(context: ServiceContext, caller: Principal, project: str, run: str) -> AdviceView:
    """The recommended interval of a run, what it was worked out from, and what is expected to be lost at it. Raises
    `forbidden`, `project_not_found`, `run_not_found`."""
    with context.database.read() as session:
        owner, found = run_named(session, caller, project, run)
        measured, advised = context.save_advice.explained(session, found)
    interval, cost, rate = advised.interval_seconds, measured.cost, measured.steps_per_second
    shares = advised.lost_shares or ()
    return AdviceView(
        project=owner.name,
        run=found.name,
        interval_seconds=interval,
        steps=None if rate is None else max(1, round(interval * rate)),
        best_seconds=advised.unbounded_seconds,
        bound=advised.bound,
        between_interruptions_seconds=advised.mean_seconds,
        interruptions_source=advised.mean_source,
        run_interruptions=sum(1 for each in measured.uptimes if each.interrupted),
        run_uptime_seconds=sum(each.seconds for each in measured.uptimes),
        blocked_seconds=None if cost is None else cost.blocked_seconds,
        durable_seconds=None if cost is None else cost.durable_seconds,
        saves_measured=measured.saves,
        saves_source=measured.cost_source,
        restart_seconds=measured.restart_seconds,
        outlook=[
            AdviceOutlook(interval_seconds=interval * times, lost_share=share)
            for times, share in zip((0.5, 1.0, 2.0), shares, strict=False)
        ],
        reasons=explain(measured, advised),
    )
