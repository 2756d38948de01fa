"""The service's background work, and the processes that do it.

`GET  /v1/controllers`                             -> Page[ControllerView]
`GET  /v1/controllers/{name}`                      -> ControllerView
`POST /v1/controllers/{name}/pause`  PauseController -> ControllerView
`POST /v1/controllers/{name}/resume`               -> ControllerView
`POST /v1/controllers/{name}/run`                  -> ControllerView
`GET  /v1/workers`                                 -> Page[WorkerView]

Controllers work for every project, so a token of one project may not call these.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from holdfast_protocol.base import Reply, Request


class PauseController(Request):
    reason: str = Field(min_length=1, max_length=500, description="For the people who find it paused.")


class ControllerView(Reply):
    """One controller, over all processes."""

    name: str
    interval_seconds: float = Field(description="The pause between two rounds.")
    paused_at: datetime | None
    paused_by: str | None
    pause_reason: str | None
    run_requested_at: datetime | None = Field(description="Somebody wants a round now, and it is not over yet.")
    run_answered_at: datetime | None = Field(description="The newest request that a round has answered.")
    due: int | None = Field(description="Rows that wait. null: its work is not in rows.")
    leased: int | None = Field(description="Rows that somebody works on.")
    lag_seconds: float | None = Field(description="How long the oldest row waits; 0 if none does.")
    done: int = Field(description="Rows that it has settled, since the catalog was made.")
    failed: int = Field(description="How often a row or a round failed; it stays due.")
    error: str | None = Field(description="The last failure; later rounds that go well leave it here.")
    error_at: datetime | None
    last_round_at: datetime | None = Field(
        description="The end of the last round anywhere; rounds without work are noted now and then."
    )
    report: dict[str, Any] | None = Field(description="What the last round that found work did.")
    report_at: datetime | None
    round_seconds: float | None = Field(description="How long that round took.")


class WorkerView(Reply):
    """A process of the service that has not said good-bye."""

    id: str
    kind: Literal["serve", "worker"]
    host: str
    pid: int
    version: str
    started_at: datetime
    seen_at: datetime
    silent: bool = Field(description="It was killed, cut off, or hangs: its leases run out.")
    stores: dict[str, int] = Field(
        default_factory=dict, description="The stores that it has attached, by role: their numbers in the catalog."
    )
    done: dict[str, int] = Field(description="Rows that it has settled, by controller.")
