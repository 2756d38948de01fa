"""Makes the tickets of one call: one after the other, or several at once where each waits for a remote signature.

A batch has up to a thousand chunks, and a signature over the network takes tens of milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from holdfast_service.stores.base import RemotelySignedStore, Store

_Item = TypeVar("_Item")
_Ticket = TypeVar("_Ticket")


def make_tickets(store: Store, make: Callable[[_Item], _Ticket], items: Sequence[_Item]) -> list[_Ticket]:
    """`make(item)` for each, in their order. Raises what the first failing one raises."""
    at_once = store.tickets_at_once if isinstance(store, RemotelySignedStore) else 1
    if at_once == 1 or len(items) < 2:
        return [make(item) for item in items]
    with ThreadPoolExecutor(min(at_once, len(items)), thread_name_prefix="holdfast-sign") as threads:
        return list(threads.map(make, items))
