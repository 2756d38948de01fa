"""Which stores each process of a catalog has attached: asked where one says that it is alive, and by /readyz.

Every process is to have the same. One that lacks a store cannot read what is only there: it heals nothing from it,
sends no reader to it, and does not find what is bad in it. That costs and is said, but refuses nothing.
"""

from __future__ import annotations

from sqlalchemy import exists, select
from sqlalchemy.orm import Session

from holdfast_protocol.states import CopyState, StoreRole
from holdfast_service.attached_store import SETTING_OF_ROLE
from holdfast_service.catalog.copies import KEPT
from holdfast_service.catalog.custody_tables import Worker
from holdfast_service.catalog.processes import SILENT_AFTER
from holdfast_service.catalog.tables import Copy
from holdfast_service.catalog.tables import Store as StoreRow
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext

_REMEDY = "Give every process of a catalog the same stores."


def attached_here(context: ServiceContext) -> dict[str, int]:
    """The stores' rows, by role."""
    return {attached.role.value: attached.store_id for attached in context.stores}


def weaknesses_of(context: ServiceContext) -> list[str]:
    """A sentence for each thing that an attached store does not enforce, and should."""
    return [
        f"{SETTING_OF_ROLE[attached.role]}: {told}"
        for attached in context.stores
        if attached.store.capabilities is not None
        for told in attached.store.capabilities.weaknesses
    ]


def what_differs(session: Session, context: ServiceContext) -> list[str]:
    """A sentence for each setting that another process which is alive has otherwise, and for each store with copies
    that none of them has. Empty where all is the same. It names no process: /readyz is open."""
    own = attached_here(context)
    others = session.scalars(
        select(Worker.stores).where(
            Worker.id != context.process_id,
            Worker.ended_at.is_(None),
            Worker.seen_at > database_now(session) - SILENT_AFTER,
        )
    ).all()
    told = []
    for role in StoreRole:
        here, setting = own.get(role.value), SETTING_OF_ROLE[role]
        if all(other.get(role.value) == here for other in others):
            continue
        if here is None:
            told.append(f"{setting} is not set here, but for another process. {_REMEDY}")
        elif any(other.get(role.value) not in (here, None) for other in others):
            told.append(f"{setting} names another store than for another process. {_REMEDY}")
        else:
            told.append(f"{setting} is set here, but not for another process. {_REMEDY}")
    attached = {store_id for stores in (own, *others) for store_id in stores.values()}
    return told + [
        f"No process has store {store_id} of the catalog attached, and copies are in it. They count as there while "
        "nobody reads them: attach it again."
        for store_id in _holding_copies(session, attached)
    ]


def _holding_copies(session: Session, attached: set[int]) -> list[int]:
    there = exists().where(Copy.store_id == StoreRow.id, Copy.state.in_((*KEPT, CopyState.SUSPECT)))
    query = select(StoreRow.id).where(StoreRow.id.not_in(attached), there).order_by(StoreRow.id)
    return list(session.scalars(query))
