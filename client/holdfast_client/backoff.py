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


def jittered_seconds(failures: int) -> float:
    """A pause after so many failures in a row: anything from nothing to a ceiling that doubles each time."""
    return _jitter.uniform(0, min(LONGEST_SECONDS, FIRST_SECONDS * 2 ** min(max(failures - 1, 0), 16)))


class Backoff:
    """One call's patience. `sleep` may be an Event's `wait`, so that a stopped transfer does not sit out its pause.

    `from_failure`: the total time begins with the first failure. For what nobody waits for, and for transfers: a slow
    one may take longer than that.
    """

    def __init__(
        self, total_seconds: float, sleep: Callable[[float], object] = time.sleep, *, from_failure: bool = False
    ) -> None:
        self._total_seconds = total_seconds
        self._ends = None if from_failure else time.monotonic() + total_seconds
        self._sleep = sleep
        self.tries = 1

    def leave_out(self, seconds: float) -> None:
        """Time in which nothing was tried, and not for want of the other side's answer."""
        if self._ends is not None:
            self._ends += seconds

    def pause(self, at_least_seconds: float = 0.0, before: Callable[[], object] | None = None) -> bool:
        """Sleeps before the next try. False, without sleeping, if that try would begin after the total time. `before`
        is called where there will be one, before the sleep."""
        now = time.monotonic()
        if self._ends is None:
            self._ends = now + self._total_seconds
        seconds = max(at_least_seconds, jittered_seconds(self.tries))
        if now + seconds > self._ends:
            return False
        if before is not None:
            before()
        self._sleep(seconds)
        self.tries += 1
        return True


def retry_after_seconds(headers: Mapping[str, str]) -> float:
    """What the other side asks for in `Retry-After`, in its form of seconds; 0 if it does not ask."""
    text = headers.get("retry-after", "")
    return float(text) if text.isdecimal() and len(text) < 6 else 0.0
