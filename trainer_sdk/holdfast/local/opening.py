"""The local tiers of all ranks, opened together: where one node's folder cannot be used, no rank waits for that one."""

from __future__ import annotations

from pathlib import Path

from holdfast.ranks import Ranks
from holdfast_client.local.tier import LocalTier
from holdfast_client.settings import ClientSettings


def open_local_tier(ranks: Ranks, settings: ClientSettings, path: str | Path | None) -> LocalTier | None:
    """Collective. This rank's, or None where nobody names a folder. All ranks raise what the lowest failing one met."""
    opened: list[LocalTier | None] = []
    try:
        ranks.together(lambda: opened.append(LocalTier.of(settings, path)))
    except BaseException:
        for tier in opened:
            if tier is not None:
                tier.close()
        raise
    return opened[0]
