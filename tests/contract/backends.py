"""What a test file gives the contract suites: a store and how a client reaches it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

from holdfast_service.stores.base import ObjectKey, Store


@dataclass(frozen=True)
class Backend:
    """`hand_in` sends bytes under a key as a client does. `proves` says whether head() reports their SHA-256 then.
    `reopen` opens it as a starting service does. `outage` takes the store away for the length of a `with` block.
    `taken` is what a PUT to what is there already may be answered. `binds_headers`: a ticket's headers are signed.
    `enforces` is the digest that the store compares with the bytes that come in. `past_store` is the same store with a
    clock two hours behind."""

    store: Store
    hand_in: Callable[[ObjectKey, bytes], None]
    proves: bool
    reopen: Callable[[], Store]
    outage: Callable[[], AbstractContextManager[None]]
    enforces: Literal["sha256", "md5"] = "sha256"
    past_store: Store | None = None
    taken: frozenset[int] = frozenset({412})
    binds_headers: bool = True
    service_url: str = ""
