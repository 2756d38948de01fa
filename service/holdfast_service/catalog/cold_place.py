"""What a copy's place makes of it: where nobody is sent to before a thaw, a good copy is cold. What lies in the cold
store the service itself can read nevertheless, and does: so it is scrubbed like any other."""

from __future__ import annotations

from sqlalchemy import ColumnElement, and_, false, or_

from holdfast_protocol.states import CopyState, StoreRole
from holdfast_protocol.tiers import ARCHIVED
from holdfast_service.catalog.tables import Copy
from holdfast_service.context import ServiceContext

_AT_HAND = (CopyState.VERIFIED, CopyState.SUSPECT)


def in_cold_store(context: ServiceContext, store_id: int) -> bool:
    cold = context.attached(StoreRole.COLD)
    return cold is not None and cold.store_id == store_id


def kept_state(context: ServiceContext, store_id: int, storage_class: str | None) -> CopyState:
    """What a copy there is when it is good."""
    cold = in_cold_store(context, store_id) or storage_class in ARCHIVED
    return CopyState.COLD if cold else CopyState.VERIFIED


def can_be_read(context: ServiceContext, copy: Copy) -> bool:
    """Whether the service may read it back as it is."""
    if copy.state in _AT_HAND:
        return True
    cold = copy.state == CopyState.COLD and in_cold_store(context, copy.store_id)
    return cold and copy.storage_class not in ARCHIVED


def is_read_back(context: ServiceContext) -> ColumnElement[bool]:
    """The same over `copies`."""
    cold = context.attached(StoreRole.COLD)
    in_cold = false() if cold is None else and_(Copy.state == CopyState.COLD, Copy.store_id == cold.store_id)
    at_once = or_(Copy.storage_class.is_(None), Copy.storage_class.not_in(ARCHIVED))
    return or_(Copy.state.in_(_AT_HAND), and_(in_cold, at_once))
