"""Store URL -> store. Opening does no network I/O, so an unavailable store degrades the service and does not stop it.

The caller keeps what `store.probe()` found (in the catalog) and gives it back as `capabilities` at the next start.
"""

from __future__ import annotations

from importlib import import_module
from typing import cast
from urllib.parse import urlsplit

from holdfast_service.stores.base import Capabilities, Credentials, Opening, Store, StoreRefused, StoreUrlError

# The scheme of a store's URL -> the module that opens it. Only that one is imported: vendors' libraries are large.
MODULES = {"posix": "posix.posix_store", "s3": "s3.s3_store", "gs": "gcs.gcs_store", "az": "azure.azure_store"}
_MEANT = {"gcs": "gs", "azure": "az"}
_EXAMPLE = "posix:///var/lib/holdfast/store"


def open_store(
    url: str,
    signing_key: bytes,
    credentials: Credentials | None = None,
    *,
    group: int | None = None,
    capabilities: Capabilities | None = None,
) -> Store:
    """The arguments are those of `Opening`. StoreUrlError for a wrong URL, StoreRefused if there are no credentials at
    all, a vendor's library is not installed, or a posix folder is open to others."""
    scheme = urlsplit(url).scheme
    if scheme in _MEANT:
        raise StoreUrlError(url, f"the scheme of such a store is {_MEANT[scheme]}://", f"{_MEANT[scheme]}://…")
    if scheme not in MODULES:
        *others, last = MODULES
        raise StoreUrlError(url, f"it begins with {scheme!r}, not with {', '.join(others)} or {last}", _EXAMPLE)
    try:
        module = import_module(f"holdfast_service.stores.{MODULES[scheme]}")
    except ModuleNotFoundError as error:
        folder = MODULES[scheme].partition(".")[0]
        raise StoreRefused(f"the {folder} store needs {error.name}; install holdfast[{folder}]") from error
    return cast(Store, module.open_store(url, Opening(signing_key, credentials, group, capabilities)))
