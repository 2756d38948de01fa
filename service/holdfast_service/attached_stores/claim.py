"""The attached stores as people see them, and their claim."""

from __future__ import annotations

from sqlalchemy import select

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import StoreRole
from holdfast_protocol.stores import ClaimStore, StoreView
from holdfast_protocol.text import without_secrets
from holdfast_service.attached_stores.attached import AttachedStore
from holdfast_service.attached_stores.epoch import claim_store
from holdfast_service.audit.record import Actor
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.db.tables.core import Store as StoreRow
from holdfast_service.errors import ProblemError
from holdfast_service.stores.base import StoreError


def list_stores(context: ServiceContext, caller: Principal) -> list[StoreView]:
    """Raises `forbidden` for a token of one project."""
    caller.check_every_project()
    return [_view(context, attached) for attached in context.stores]


def claim(context: ServiceContext, caller: Principal, role: StoreRole, request: ClaimStore) -> StoreView:
    """Repeatable. Raises `forbidden`, `invalid_request` for a store that is not attached, and `store_foreign` without a
    check in this epoch that allows it."""
    caller.check_every_project()
    attached = attached_with(context, role)
    claim_store(context, attached, Actor.person(caller), accept_loss=request.accept_loss)
    return _view(context, attached)


def attached_with(context: ServiceContext, role: StoreRole) -> AttachedStore:
    attached = context.attached(role)
    if attached is None:
        raise ProblemError(
            ProblemCode.INVALID_REQUEST,
            f"No {role} store is attached to this service. `holdfast stores list` shows those that are.",
            store=role.value,
        )
    return attached


def _view(context: ServiceContext, attached: AttachedStore) -> StoreView:
    with context.database.read() as session:
        row = session.execute(select(StoreRow).where(StoreRow.id == attached.store_id)).scalar_one()
    try:
        problem = attached.watch.ownership.problem()
    except StoreError as error:
        problem = str(error)
    enforced = attached.store.capabilities
    return StoreView(
        role=attached.role,
        kind=row.kind,
        url=without_secrets(row.url),
        claimed=problem is None,
        problem=problem,
        checked_at=row.checked_at,
        checked_epoch=row.checked_epoch,
        checked_whole=row.checked_whole,
        probed_at=None if enforced is None else enforced.probed_at,
        changed_at=None if enforced is None else enforced.changed_at,
        weaknesses=[] if enforced is None else enforced.weaknesses,
    )
