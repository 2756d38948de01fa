"""When a call that failed is made again. Pure."""

from __future__ import annotations

import random

MOST_TRIES = 12
_FIRST_SECONDS = 5.0
_FACTOR = 4.0
_LONGEST_SECONDS = 4 * 3600.0


def pause_seconds(tries: int, jitter: float | None = None) -> float | None:
    """After so many tries; None: it is given up, a day after the first. Each waits up to a fifth longer, or less:
    what failed together should not come back together. `jitter`: from -1 to 1."""
    if tries >= MOST_TRIES:
        return None
    if jitter is None:
        jitter = random.uniform(-1, 1)  # noqa: S311
    return min(_LONGEST_SECONDS, _FIRST_SECONDS * _FACTOR ** (tries - 1)) * (1 + jitter / 5)
