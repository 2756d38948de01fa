"""What a person starts: a pass of the collector now, and a sweep. Each is an operation of the catalog, which a worker
carries out."""

from __future__ import annotations

from typing import Any

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.service import OperationView
from holdfast_protocol.states import Scope, StoreRole
from holdfast_protocol.stores import CollectionPass, StartSweep, SweepReport
from holdfast_service.attached_stores.attached import AttachedStore
from holdfast_service.auth.principal import Principal
from holdfast_service.collect.controller import collect
from holdfast_service.collect.orphans import sweep_store
from holdfast_service.context import ServiceContext
from holdfast_service.copies.stored_bytes import sweeps_of
from holdfast_service.errors import ProblemError
from holdfast_service.operations.queue import OperationRun, start_operation
from holdfast_service.stores.base import StoreError

COLLECT = "collect"
SWEEP = "sweep"


def start_collection(context: ServiceContext, caller: Principal, key: str | None) -> OperationView:
    with context.database.transaction() as session:
        return start_operation(session, caller, COLLECT, project_id=None, arguments={}, key=key)


def run_collection(context: ServiceContext, run: OperationRun) -> dict[str, Any]:
    run.progress(note="looking at every copy")
    report = collect(context, whole=True, on_step=lambda copies: run.progress(done=copies))
    return CollectionPass(
        deleted_copies=report.done,
        deleted_bytes=report.deleted_bytes,
        kept_copies=report.failed,
        forgotten_chunks=report.forgotten_chunks,
        problems=[*report.skipped_stores, *([report.error] if report.failed and report.error else [])],
    ).model_dump(mode="json")


def start_sweep(context: ServiceContext, caller: Principal, request: StartSweep, key: str | None) -> OperationView:
    """Raises `forbidden` for `force` without the scope `admin`; `invalid_request` for a store that is not attached."""
    if request.force:
        caller.check_scope(Scope.ADMIN)
    _wanted(context, request.store)
    arguments = request.model_dump(mode="json")
    with context.database.transaction() as session:
        return start_operation(session, caller, SWEEP, project_id=None, arguments=arguments, key=key)


def run_sweep(context: ServiceContext, run: OperationRun) -> dict[str, Any]:
    """A store that cannot be swept keeps no other from it; if none could be, the operation has failed."""
    request = StartSweep.model_validate(run.arguments)
    stores, problems, looked_at = [], [], 0

    def on_listed(objects: int) -> None:
        nonlocal looked_at
        looked_at += objects
        run.progress(done=looked_at)

    failure: ProblemError | StoreError | None = None
    for attached in _wanted(context, request.store):
        run.progress(note=f"listing the {attached.role.value} store")
        try:
            stores.append(
                sweep_store(
                    context,
                    attached,
                    dry_run=request.dry_run,
                    force=request.force,
                    actor=run.actor,
                    on_listed=on_listed,
                )
            )
        except (ProblemError, StoreError) as error:
            failure = error
            problems.append(f"{attached.role.value} store: {error}")
    if failure is not None and not stores:
        raise failure
    return SweepReport(stores=stores, problems=problems).model_dump(mode="json")


def last_sweeps(context: ServiceContext) -> SweepReport:
    """What the last sweep of each store found."""
    with context.database.read() as session:
        return SweepReport(stores=sweeps_of(session, context))


def _wanted(context: ServiceContext, role: StoreRole | None) -> list[AttachedStore]:
    if role is None:
        return list(context.stores)
    attached = context.attached(role)
    if attached is None:
        there = ", ".join(each.role.value for each in context.stores)
        raise ProblemError(
            ProblemCode.INVALID_REQUEST,
            f"The service has no {role.value} store. Name one of {there}.",
            store=role.value,
        )
    return [attached]
