"""The recommended interval of a run, what it was worked out from, and what is expected to be lost at it."""

from __future__ import annotations

from holdfast_protocol.advice import AdviceOutlook, AdviceView
from holdfast_service.advise.explain import explain
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.resolve import run_named
from holdfast_service.context import ServiceContext


def show_advice(context: ServiceContext, caller: Principal, project: str, run: str) -> AdviceView:
    """Raises `forbidden`, `project_not_found`, `run_not_found`."""
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
