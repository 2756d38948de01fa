"""Starts a drill: an operation, which any worker carries out."""

from __future__ import annotations

from holdfast_protocol.copies import StartDrill
from holdfast_protocol.operations import OperationView
from holdfast_protocol.problems import ProblemCode
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.operations import start_operation
from holdfast_service.catalog.points import point_of
from holdfast_service.catalog.resolve import run_named
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError

KIND = "drill"


def start_drill(
    context: ServiceContext, caller: Principal, project: str, run: str, request: StartDrill
) -> OperationView:
    """Raises `forbidden`, `project_not_found`, `run_not_found`, and `invalid_request` for a selector that is none and a
    store that the service does not have."""
    point_of(request.selector)
    if context.attached(request.store) is None:
        raise ProblemError(
            ProblemCode.INVALID_REQUEST,
            f"This service has no {request.store} store. Set HOLDFAST_{request.store.upper()}_STORE, or drill another.",
            store=request.store.value,
        )
    with context.database.transaction() as session:
        owner, found = run_named(session, caller, project, run)
        return start_operation(
            session, caller, KIND, project_id=owner.id, run_id=found.id, arguments=request.model_dump(mode="json")
        )
