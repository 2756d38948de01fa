"""Which checkpoint would be restored now, and why not a newer one. The choice itself is catalog.restore_choice."""

from __future__ import annotations

from holdfast_protocol.restore import RestoreDecision
from holdfast_protocol.selectors import Best, Latest
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.doubts import without_doubt
from holdfast_service.catalog.history import settle_history
from holdfast_service.catalog.points import point_of
from holdfast_service.catalog.reach import reach_of
from holdfast_service.catalog.resolve import run_named
from holdfast_service.catalog.restore_choice import choose_restore_point
from holdfast_service.context import ServiceContext


def find_restore_point(
    context: ServiceContext,
    caller: Principal,
    project: str,
    run: str,
    *,
    selector: str,
    before_step: int | None,
    diverged: bool,
) -> RestoreDecision:
    """Raises `forbidden`, `project_not_found`, `run_not_found`, `invalid_request`; for a step or an id that was named,
    `checkpoint_not_found` and `no_restore_point`; for another, `catalog_went_back`; `commits_unknown` as
    opening an attempt does.
    """
    point = point_of(selector)
    if isinstance(point, Latest | Best):  # a step that a person names can be read all the same
        settle_history(context)
    reach = reach_of(context)
    with context.database.read() as session:
        _, found = run_named(session, caller, project, run)
        decision = choose_restore_point(
            session, found.id, point, before_step=before_step, reach=reach, diverged=diverged
        )
        return without_doubt(session, project, run, decision)
