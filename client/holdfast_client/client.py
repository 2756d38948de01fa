"""The client: one typed method per operation of the protocol. The SDK, the CLI and `chunks` all stand on it.

    with Client() as client:
        decision = client.restores.restore_point("demo", "gpt")

Thread-safe. Methods raise HoldfastError (see errors.py) and nothing else.
"""

from __future__ import annotations

import copy
import threading
import time
from types import TracebackType
from typing import Self

from holdfast_client.chunks.connections import TransferPool
from holdfast_client.chunks.mounted_files import MountAccess
from holdfast_client.resources.attempts import AttemptOperations
from holdfast_client.resources.checkpoints import CheckpointOperations, RestoreOperations
from holdfast_client.resources.insights import AdviceOperations, GoodputOperations
from holdfast_client.resources.retention import HoldOperations, PolicyOperations, RetentionOperations
from holdfast_client.resources.runs import RunOperations
from holdfast_client.resources.service import (
    ControllerOperations,
    EventOperations,
    LongOperations,
    ServerOperations,
    WebhookOperations,
)
from holdfast_client.resources.stores import (
    CollectionOperations,
    CopyOperations,
    SampleOperations,
    ScrubOperations,
    StoreOperations,
    TierOperations,
    UsageOperations,
)
from holdfast_client.settings import ClientSettings
from holdfast_client.transport import Transport
from holdfast_protocol.codecs import Codec
from holdfast_protocol.service import ServerInfo

_ASK_SERVER_AGAIN_SECONDS = 600.0


class Client(
    AdviceOperations,
    AttemptOperations,
    CheckpointOperations,
    CollectionOperations,
    ControllerOperations,
    CopyOperations,
    EventOperations,
    GoodputOperations,
    HoldOperations,
    LongOperations,
    PolicyOperations,
    RestoreOperations,
    RetentionOperations,
    RunOperations,
    SampleOperations,
    ScrubOperations,
    ServerOperations,
    StoreOperations,
    UsageOperations,
    TierOperations,
    WebhookOperations,
):
    """`transfers` and `mount` are what the data plane needs; every uploader and fetcher of a client shares them."""

    def __init__(self, settings: ClientSettings | None = None) -> None:
        self.settings = settings if settings is not None else ClientSettings()
        self.transport = Transport(self.settings)
        self.transfers = TransferPool(self.settings, self.transport.tls)
        self.mount = MountAccess(self.mount_proof, enabled=self.settings.direct_files)
        self._server: ServerInfo | None = None
        self._server_asked_at = 0.0

    def store_asks_md5(self) -> bool:
        """Whether chunks must be offered with their MD5. Asked now and then: a store may change meanwhile."""
        return self._known_server().store_asks_md5

    def encodes_chunks(self) -> bool:
        """Whether chunks are compressed before they are sent: it is set so, and the service takes them so."""
        return self.settings.compress == "zstd" and set(Codec) <= set(self._known_server().codecs)

    def with_retry_deadline(self, retry_seconds: float, stop: threading.Event) -> Self:
        """This client, but calls and transfers are tried again for so long; calls end with TransferStopped when `stop`
        is set. It shares connections and pace with this one, and is closed with it."""
        other = copy.copy(self)
        other.transport = self.transport.with_retry_deadline(retry_seconds, stop)
        other.settings = other.transport.settings
        other.transfers = self.transfers.with_retry_deadline(retry_seconds)
        other.mount = MountAccess(other.mount_proof, enabled=self.settings.direct_files)
        return other

    def _known_server(self) -> ServerInfo:
        if self._server is None or time.monotonic() - self._server_asked_at > _ASK_SERVER_AGAIN_SECONDS:
            self._server, self._server_asked_at = self.server_info(), time.monotonic()
        return self._server

    def close(self) -> None:
        self.transport.close()
        self.transfers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
