"""How long to wait before the next try: full-jitter back-off within a total time. Control and data plane use it.

Full jitter, because 64 ranks that fail in the same moment must not come back in the same moment.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping

FIRST_SECONDS = 0.2
LONGEST_SECONDS = 10.0

# Not the module's own generator: a training job draws from that one, and a retry must not change what it draws.
_jitter = random.Random()  # noqa: S311  (spreads load, guards nothing)


class Backoff:
    """One call's patience. `sleep` may be an Event's `wait`, so that a stopped transfer does not sit out its pause."""

    def __init__(self, total_seconds: float, sleep: Callable[[float], object] = time.sleep) -> None:
        self._ends = time.monotonic() + total_seconds
        self._sleep = sleep
        self.tries = 1

    def pause(self, at_least_seconds: float = 0.0) -> bool:
        """Sleeps before the next try. False, without sleeping, if that try would begin after the total time."""
        ceiling = min(LONGEST_SECONDS, FIRST_SECONDS * 2 ** min(self.tries - 1, 16))
        seconds = max(at_least_seconds, _jitter.uniform(0, ceiling))
        if time.monotonic() + seconds > self._ends:
            return False
        self._sleep(seconds)
        self.tries += 1
        return True


def retry_after_seconds(headers: Mapping[str, str]) -> float:
    """What the other side asks for in `Retry-After`, in its form of seconds; 0 if it does not ask."""
    text = headers.get("retry-after", "")
    return float(text) if text.isdecimal() and len(text) < 6 else 0.0
