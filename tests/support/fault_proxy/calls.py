"""Which call of the protocol a request is, so that a test can say "the first seal" instead of a route."""

from __future__ import annotations

import json
import re
from typing import Any

_RUN = r"/v1/projects/[^/]+/runs/[^/]+"
_CHECKPOINT = r"/v1/checkpoints/[^/]+"
_ROUTES: tuple[tuple[str, str, str], ...] = (
    ("GET", rf"{_RUN}/attempts", "newest_attempt"),
    ("POST", rf"{_RUN}/attempts", "open"),
    ("POST", rf"{_RUN}/attempts/\d+/heartbeat", "heartbeat"),
    ("PUT", rf"{_RUN}/attempts/\d+/resumed-from", "resumed_from"),
    ("POST", rf"{_RUN}/attempts/\d+/end", "end"),
    ("POST", rf"{_RUN}/checkpoints", "begin"),
    ("GET", rf"{_RUN}/restore-point", "restore_point"),
    ("POST", rf"{_CHECKPOINT}/shards/\d+/chunks", "negotiate"),
    ("PUT", rf"{_CHECKPOINT}/shards/\d+", "seal"),
    ("PUT", rf"{_CHECKPOINT}/shards", "seal_together"),
    ("GET", _CHECKPOINT, "wait"),
    ("GET", rf"{_CHECKPOINT}/manifest", "manifest"),
    ("GET", rf"{_CHECKPOINT}/shards/\d+", "shard_chunks"),
    ("POST", rf"{_CHECKPOINT}/reads", "read_tickets"),
    ("POST", rf"{_CHECKPOINT}/chunk-reports", "report_chunk"),
    ("DELETE", r"/v1/read-leases/[^/]+", "release"),
    ("GET", r"/v1/service", "server"),
    # Everything else of the service's; what is left then is the store's.
    ("", r"/v1/(?!objects/).*|/readyz|/healthz", "other"),
    ("PUT", r".*", "put"),
    ("GET", r".*", "get"),
)
_PATTERNS = tuple((method, re.compile(route), name) for method, route, name in _ROUTES)


def calls_of(method: str, path: str, body: bytes | None) -> frozenset[str]:
    """The names of what the request asks for: one, or both `negotiate` and `finished` where it offers and reports.
    `fail` is the seal that reports a rank's failure. `body` is None where it was not read."""
    for wanted, pattern, name in _PATTERNS:
        if wanted in ("", method) and pattern.fullmatch(path):
            return _by_content(name, body)
    return frozenset({"other"})


def _by_content(name: str, body: bytes | None) -> frozenset[str]:
    if name not in ("negotiate", "seal") or not body:
        return frozenset({name})
    said: dict[str, Any] = json.loads(body)
    if name == "seal":
        return frozenset({"fail" if said.get("outcome") == "failed" else "seal"})
    parts = {"negotiate": said.get("chunks"), "finished": said.get("finished")}
    return frozenset(part for part, content in parts.items() if content) or frozenset({"negotiate"})
