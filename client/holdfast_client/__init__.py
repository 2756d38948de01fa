"""Holdfast's client: the control plane (`client`), the data plane (`chunks`) and the CLI (`cli`).

`Client` has one method per operation of the protocol; `errors` says what each failure asks of the caller.
"""

from holdfast_client.client import Client
from holdfast_client.errors import HoldfastError
from holdfast_client.settings import ClientSettings

__all__ = ["Client", "ClientSettings", "HoldfastError"]
