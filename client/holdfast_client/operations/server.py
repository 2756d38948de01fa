"""What the service tells of itself. See holdfast_protocol.server."""

from __future__ import annotations

from holdfast_client.operations.base import Operations
from holdfast_client.transport import path
from holdfast_protocol.server import Readiness, ServerInfo


class ServerOperations(Operations):
    def server_info(self) -> ServerInfo:
        return self.transport.call("GET", path("server"), ServerInfo)

    def healthy(self) -> bool:
        """Whether the service's process is alive. One try."""
        return self.transport.reachable("/healthz")

    def ready(self) -> Readiness:
        """Whether database, migrations and stores answer. One try; "not ready" is an answer and not an error."""
        return self.transport.call("GET", "/readyz", Readiness, retry_seconds=0, also_good={503})
