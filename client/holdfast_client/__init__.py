"""Holdfast's client: the control plane (`client`), the data plane (`chunks`) and the CLI (`cli`).

`Client` has one method per operation of the protocol; `errors` says what the caller must do about each failure.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast_client.client import Client
    from holdfast_client.errors import HoldfastError
    from holdfast_client.settings import ClientSettings

__all__ = ["Client", "ClientSettings", "HoldfastError"]

_PLACES = {"Client": "client", "ClientSettings": "settings", "HoldfastError": "errors"}


def __getattr__(name: str) -> Any:
    """Imported on use: `holdfast --help` needs none of it, and the HTTP stack takes half a second."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
