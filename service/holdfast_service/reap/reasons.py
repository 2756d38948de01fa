"""Why the reaper gave a checkpoint up, in words for people. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast_service.catalog.views import MISSING_RANKS_SHOWN


def silent(missing_ranks: Sequence[int], idle_seconds: int) -> str:
    """`missing_ranks`: the first MISSING_RANKS_SHOWN that have not sealed."""
    more = ", …" if len(missing_ranks) == MISSING_RANKS_SHOWN else ""
    who = f"rank{'s' if len(missing_ranks) > 1 else ''} {', '.join(map(str, missing_ranks))}{more}"
    return f"{who} did not seal, and no rank has called for {idle_seconds} seconds"


def ended(attempt: int, outcome: str | None) -> str:
    return f"attempt {attempt} has ended ({outcome}) without completing it"


def not_heard(seconds: float) -> str:
    return f"not heard of for {seconds:g} seconds (HOLDFAST_LOST_AFTER_SECONDS)"
