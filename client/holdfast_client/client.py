"""The client: one typed method per operation of the protocol. The SDK, the CLI and `chunks` all use it.

    with Client() as client:
        decision = client.restores.restore_point("demo", "gpt")

Thread-safe. Methods raise HoldfastError (see errors.py) and nothing else.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from datetime import UTC
from types import TracebackType
from typing import Self

from holdfast_client.chunks.connections import TransferPool
from holdfast_client.chunks.transfer import MountAccess
from holdfast_client.resources.insights import Insights
from holdfast_client.resources.retention import Holds, Policies, Retention
from holdfast_client.resources.runs import Projects, Runs, Sessions, Tokens
from holdfast_client.resources.service import Audit, Controllers, Events, Operations, Service, Webhooks
from holdfast_client.resources.stores import (
    Catalog,
    Collections,
    Copies,
    Samples,
    Scrubs,
    Stores,
    Sweeps,
    Tiers,
    Usage,
)
from holdfast_client.resources.training import Attempts, Checkpoints, Restores
from holdfast_client.settings import ClientSettings
from holdfast_client.transport import Transport
from holdfast_protocol.codecs import Codec
from holdfast_protocol.service import ServerInfo

_ASK_SERVER_AGAIN_SECONDS = 600.0

log = logging.getLogger("holdfast.client")


def end_of_token(info: ServerInfo) -> str | None:
    """What to say of the caller's token, and what to do. None: it does not end soon."""
    if not info.token_ends_soon or info.token_expires_at is None:
        return None
    return (
        f"The token {info.token_name!r} ends at {info.token_expires_at.astimezone(UTC):%Y-%m-%d %H:%M} UTC. Have an "
        f"administrator replace it: `holdfast tokens rotate {info.token_id}`."
    )


@functools.cache
def _warn_once(text: str) -> None:
    """The clients of a process have one token, and each asks anew every ten minutes."""
    log.warning("%s", text)


class Client:
    """`transfers` and `mount` belong to the data plane; every uploader and fetcher of a client shares them.

    The calls are attributes, one for each noun: `client.checkpoints.seal(...)`, `client.runs.list(...)`. `list` gives
    one page, `all` every item, page by page.
    """

    def __init__(
        self,
        settings: ClientSettings | None = None,
        *,
        transport: Transport | None = None,
        transfers: TransferPool | None = None,
    ) -> None:
        """Makes no call. `transport` and `transfers`: another client's, whose connections this one shares."""
        self.settings = settings if settings is not None else ClientSettings()
        self.transport = transport if transport is not None else Transport(self.settings)
        self.transfers = transfers if transfers is not None else TransferPool.of(self.settings, self.transport.tls)
        self.attempts = Attempts(self.transport)
        self.audit = Audit(self.transport)
        self.catalog = Catalog(self.transport)
        self.checkpoints = Checkpoints(self.transport)
        self.collections = Collections(self.transport)
        self.controllers = Controllers(self.transport)
        self.copies = Copies(self.transport)
        self.events = Events(self.transport)
        self.holds = Holds(self.transport)
        self.insights = Insights(self.transport)
        self.operations = Operations(self.transport)
        self.policies = Policies(self.transport)
        self.projects = Projects(self.transport)
        self.restores = Restores(self.transport)
        self.retention = Retention(self.transport)
        self.runs = Runs(self.transport)
        self.samples = Samples(self.transport)
        self.scrubs = Scrubs(self.transport)
        self.service = Service(self.transport)
        self.sessions = Sessions(self.transport)
        self.stores = Stores(self.transport)
        self.sweeps = Sweeps(self.transport)
        self.tiers = Tiers(self.transport)
        self.tokens = Tokens(self.transport)
        self.usage = Usage(self.transport)
        self.webhooks = Webhooks(self.transport)
        self.mount = MountAccess(self.checkpoints.mount_proof, enabled=self.settings.direct_files)
        self._server: ServerInfo | None = None
        self._server_asked_at = 0.0

    def store_asks_md5(self) -> bool:
        """Whether chunks must be offered with their MD5. Asked now and then, because a store may change meanwhile."""
        return self._known_server().store_asks_md5

    def encodes_chunks(self) -> bool:
        """Whether chunks are compressed before they are sent: the settings say so, and the service accepts it."""
        return self.settings.compress == "zstd" and set(Codec) <= set(self._known_server().codecs)

    def with_retry_deadline(self, retry_seconds: float, stop: threading.Event) -> Client:
        """A client with another retry deadline, in seconds; its calls end with TransferStopped when `stop` is set. It
        shares connections and rate limit with this one, and is closed with it."""
        transport = self.transport.with_retry_deadline(retry_seconds, stop)
        transfers = self.transfers.with_retry_deadline(retry_seconds)
        return Client(transport.settings, transport=transport, transfers=transfers)

    def _known_server(self) -> ServerInfo:
        if self._server is None or time.monotonic() - self._server_asked_at > _ASK_SERVER_AGAIN_SECONDS:
            self._server, self._server_asked_at = self.service.info(), time.monotonic()
            if (ending := end_of_token(self._server)) is not None:
                _warn_once(ending)
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
