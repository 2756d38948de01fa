"""`catalog check` as an operation: a person starts it, and a worker carries it out."""

from __future__ import annotations

from typing import Any

from holdfast_protocol.operations import OperationView
from holdfast_protocol.stores import CheckCatalog
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.operation_run import OperationRun
from holdfast_service.catalog.operations import start_operation
from holdfast_service.compare.adopt import attached_with
from holdfast_service.compare.check import check_catalog
from holdfast_service.context import ServiceContext

CHECK = "catalog.check"


def start_check(context: ServiceContext, caller: Principal, request: CheckCatalog) -> OperationView:
    """Raises `forbidden` for a token of one project, and `invalid_request` for a store that is not attached."""
    caller.check_every_project()
    if request.store is not None:
        attached_with(context, request.store)
    arguments = request.model_dump(mode="json")
    with context.database.transaction() as session:
        return start_operation(session, caller, CHECK, project_id=None, arguments=arguments)


def run_check(context: ServiceContext, run: OperationRun) -> dict[str, Any]:
    request = CheckCatalog.model_validate(run.arguments)
    found = check_catalog(
        context,
        request.store,
        run.actor,
        lambda done, note: run.progress(done=done, note=note),
        deep=request.deep,
        confirm_missing=request.confirm_missing,
    )
    return found.model_dump(mode="json")
