"""Google Compute Engine: `instance/preempted`, some 30 seconds ahead, and `instance/maintenance-event`.

The first is waited for (`wait_for_change` with the ETag of the last answer), because 30 seconds leave no time for
polling. The second is polled in between; Google warns only machines that have asked for it before. An event that
migrates the running machine (MIGRATE_ON_HOST_MAINTENANCE) loses nothing and is left out. cloud.google.com/compute/docs:
"Spot VMs", "Query metadata server for maintenance event notices", "View and query VM metadata".
"""

from __future__ import annotations

from urllib.parse import quote

from holdfast.preemption.clouds.event import CloudEvent
from holdfast.preemption.clouds.metadata_server import MetadataError, MetadataReply, MetadataServer

_FLAVOR = "Metadata-Flavor"
_INSTANCE = "/computeMetadata/v1/instance/"
_HOLD_SECONDS = 5
_PREEMPTED_SECONDS = 30.0


class Gcp:
    name = "gcp"
    pause_seconds = 1.0  # on top of the time that the server holds its answer back

    def __init__(self, server: MetadataServer) -> None:
        self._server = server
        self._etag: str | None = None

    def look(self) -> list[CloudEvent]:
        maintenance = self._get("maintenance-event").text
        events = []
        if maintenance.startswith("TERMINATE"):
            events.append(CloudEvent(maintenance, f"host maintenance: {maintenance}", None))
        preempted = self._wait_for_preempted(0 if events else _HOLD_SECONDS)
        if preempted.text == "TRUE":
            events.append(CloudEvent("preempted", "the machine is preempted", _PREEMPTED_SECONDS))
        return events

    def _wait_for_preempted(self, hold_seconds: int) -> MetadataReply:
        query = ""
        if self._etag is not None and hold_seconds:
            query = f"?wait_for_change=true&last_etag={quote(self._etag)}&timeout_sec={hold_seconds}"
        # Forgotten until there is a new one: after an error it is unknown what was missed.
        self._etag = None
        reply = self._get("preempted" + query, hold_seconds + 2.0)
        self._etag = reply.headers["ETag"]
        return reply

    def _get(self, key: str, timeout_seconds: float = 2.0) -> MetadataReply:
        reply = self._server.ask(_INSTANCE + key, {_FLAVOR: "Google"}, timeout_seconds=timeout_seconds)
        reply.require_ok(_INSTANCE + key.partition("?")[0])
        if reply.headers[_FLAVOR] != "Google":
            raise MetadataError("the answering server is not Google's metadata server")
        return reply
