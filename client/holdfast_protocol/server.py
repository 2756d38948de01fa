"""What the service tells of itself.

`GET /v1/server` -> ServerInfo   (any valid token)
`GET /healthz`   -> alive; `GET /readyz` -> Readiness   (no token)
`GET /metrics`   -> Prometheus text   (scope `metrics`)
"""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import Field

from holdfast_protocol.base import Reply
from holdfast_protocol.states import Scope


class ServerInfo(Reply):
    version: str
    protocol: str
    catalog_id: str
    epoch: int
    now: datetime
    store_kind: str
    codecs: list[str] = Field(
        default=["raw"], description="How chunks may be offered. A service that does not say takes them raw."
    )
    store_asks_md5: bool = Field(description="The store enforces MD5 and not SHA-256: offer it with each chunk.")
    token_name: str
    token_project: str | None
    token_scopes: list[Scope]


class ReadinessCheck(Reply):
    name: Literal["database", "migrations", "store"]
    ok: bool
    detail: str


class Readiness(Reply):
    ready: bool
    checks: list[ReadinessCheck]
    warnings: list[str] = Field(
        default_factory=list,
        description="What is to be mended though the service works: processes whose stores differ, and weak stores.",
    )
    weaknesses: list[str] = Field(
        default_factory=list, description="Those of the warnings that tell what a store does not enforce and should."
    )
