"""The servers behind the stores, by the names that the demo and the end-to-end tests know them by."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Protocol

from tests.support.azurite import azurite_server
from tests.support.seaweedfs import seaweedfs_server


class StoreServer(Protocol):
    """`environment` has the credentials that `store_url` needs."""

    @property
    def store_url(self) -> str: ...

    @property
    def environment(self) -> dict[str, str]: ...

    @property
    def pid(self) -> int: ...


SERVERS: MappingProxyType[str, Callable[[], AbstractContextManager[StoreServer]]] = MappingProxyType(
    {"s3": seaweedfs_server, "azure": azurite_server}
)
STORES = ("posix", *SERVERS)
