"""How often a run should save, and why.

`GET /v1/projects/{project}/runs/{run}/advice` -> AdviceView
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from holdfast_protocol.base import Reply


class AdviceSource(StrEnum):
    """Whose past told it: the nearest that has one."""

    RUN = "run"
    PROJECT = "project"
    FLEET = "fleet"
    """All runs of this service."""
    DEFAULT = "default"
    """Nobody's yet."""


class AdviceBound(StrEnum):
    """Why it is another interval than the one that would lose the least."""

    UNMEASURED = "unmeasured"
    """The run itself has saved nothing yet."""
    SHORTEST = "shortest"
    LONGEST = "longest"
    STORE = "store"
    """Saves would not be durable before the next one is due."""


class AdviceOutlook(Reply):
    """What is expected to be lost at one interval."""

    interval_seconds: float
    lost_share: float = Field(description="Of the time of training, 0 to 1: saves, and work that is done again.")


class AdviceView(Reply):
    project: str
    run: str
    interval_seconds: float = Field(description="From the end of a save's blocking to the next save.")
    steps: int | None = Field(description="The same in steps, at the rate of the newest attempt; null: not known.")
    best_seconds: float | None = Field(description="What would lose the least, without bounds; null: no save measured.")
    bound: AdviceBound | None = Field(description="Why the interval is another than the best; null: it is not.")
    between_interruptions_seconds: float = Field(description="The mean uptime until an attempt loses work.")
    interruptions_source: AdviceSource
    run_interruptions: int
    run_uptime_seconds: float
    blocked_seconds: float | None = Field(description="A save holds training up for so long, on its slowest rank.")
    durable_seconds: float | None = Field(description="From a save's begin to its commit.")
    saves_measured: int
    saves_source: AdviceSource
    restart_seconds: float | None = Field(
        description="From an interruption until the next attempt trains. Lost whatever the interval; null: none seen."
    )
    outlook: list[AdviceOutlook] = Field(description="At half the interval, at it, at twice it; empty: not known.")
    reasons: list[str] = Field(description="How it comes about, in sentences for people.")
