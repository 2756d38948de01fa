"""How fast a process reads copies back: trainers need the stores more than this does.

All who read in this process (read-back, scrub, repair) share one rate limit. Each piece takes its turn, so each reader
gets the same share; a slower limit of its own comes on top.
"""

from __future__ import annotations

import threading
import time


class ReadRateLimit:
    """Thread-safe. `acquire` returns when the pieces so far would have taken this long at `bytes_per_second`."""

    def __init__(self, bytes_per_second: int) -> None:
        self._bytes_per_second = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = float("-inf")

    def acquire(self, read_bytes: int) -> None:
        with self._lock:
            now = time.monotonic()
            # Unused time is not saved up: a pause must not lead to a burst.
            self._free_at = max(self._free_at, now) + read_bytes / self._bytes_per_second
            ahead = self._free_at - now
        time.sleep(ahead)
