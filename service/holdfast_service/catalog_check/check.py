"""`catalog check`: each store against the catalog, both ways, as an operation: a person starts it, and a worker carries
it out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import select, update

from holdfast_protocol.service import OperationView
from holdfast_protocol.states import StoreRole
from holdfast_protocol.stores import CatalogCheck, CheckCatalog, StoreCheck
from holdfast_service.attached_stores.attached import AttachedStore
from holdfast_service.attached_stores.epoch import attached_with
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog_check.compare_copies import CopyCheck, compare_copies
from holdfast_service.catalog_check.compare_records import compare_records
from holdfast_service.catalog_check.findings import Findings
from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import CatalogIdentity
from holdfast_service.db.tables.core import Store as StoreRow
from holdfast_service.operations.queue import OperationRun, start_operation
from holdfast_service.stores.base import StoreError

# How much was looked at, and what is looked at now.
Progress = Callable[[int, str], None]


def check_catalog(
    context: ServiceContext,
    role: StoreRole | None,
    actor: Actor,
    progress: Progress = lambda *_: None,
    *,
    deep: bool,
    confirm_missing: bool = False,
) -> CatalogCheck:
    """Every attached store, or the one with this role, against the catalog, both ways. A store that does not answer
    keeps no other from it; if it is the only one, its StoreError is raised. The result is kept with the store: only
    after a check in this epoch may it be claimed (rule fencing-token)."""
    wanted = [each for each in context.stores if role in (None, each.role)]
    stores: list[StoreCheck] = []
    unavailable: list[str] = []
    failure: StoreError | None = None
    done = 0
    for attached in wanted:

        def on_step(number: int, attached: AttachedStore = attached) -> None:
            nonlocal done
            done += number
            progress(done, f"comparing the {attached.role} store")

        try:
            check = CopyCheck(context, attached, Findings(), actor, on_step, confirm_missing)
            stores.append(_check_store(check, deep=deep))
        except StoreError as error:
            unavailable.append(f"The {attached.role} store was not compared: {error}")
            failure = error
    if failure is not None and not stores:
        raise failure
    with context.database.read() as session:
        went_back = session.scalar(select(CatalogIdentity.went_back))
    return CatalogCheck(epoch=context.epoch, stores=stores, unavailable=unavailable, went_back=went_back)


def _check_store(check: CopyCheck, *, deep: bool) -> StoreCheck:
    context, attached, findings = check.context, check.attached, check.findings
    copies = compare_copies(check, deep=deep)
    records = compare_records(context, attached, findings, check.on_step, deep=deep)
    found = findings.views()
    with context.database.transaction() as session:
        session.execute(
            update(StoreRow)
            .where(StoreRow.id == attached.store_id)
            .values(checked_at=database_now(session), checked_epoch=context.epoch, checked_whole=findings.whole),
            execution_options={"synchronize_session": False},
        )
        record_event(
            session,
            check.actor,
            "catalog.check",
            after={
                "store": attached.role,
                "epoch": context.epoch,
                "deep": deep,
                "whole": findings.whole,
                "findings": {each.kind: each.count for each in found},
            },
        )
    return StoreCheck(
        role=attached.role,
        objects=copies.objects,
        object_bytes=copies.object_bytes,
        copies=copies.copies,
        read_copies=copies.read_copies,
        records=records,
        whole=findings.whole,
        findings=found,
    )


CHECK = "catalog.check"


def start_check(context: ServiceContext, caller: Principal, request: CheckCatalog, key: str | None) -> OperationView:
    """Raises `invalid_request` for a store that is not attached."""
    if request.store is not None:
        attached_with(context, request.store)
    arguments = request.model_dump(mode="json")
    with context.database.transaction() as session:
        return start_operation(session, caller, CHECK, project_id=None, arguments=arguments, key=key)


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
