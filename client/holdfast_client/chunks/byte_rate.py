"""A limit on bytes per second, as a schedule: each slice gets the moment at which it may move. Pure; `pace` waits."""

from __future__ import annotations

BURST_SECONDS = 0.25
"""What was not used is kept for so long: a pause is no licence to flood the line afterwards."""

SLICES_PER_SECOND = 64
"""A slice is at most this part of a second's bytes, so that none of many transfers is silent for so long that the store
hangs up."""
SMALLEST_SLICE_BYTES = 4096


class ByteRate:
    def __init__(self, bytes_per_second: int, now: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._free_at = now
        self.slice_bytes = max(SMALLEST_SLICE_BYTES, bytes_per_second // SLICES_PER_SECOND)

    def spend(self, count_bytes: int, now: float) -> float:
        """How many seconds from now on the bytes may move. Whoever asks first goes first."""
        begin = max(self._free_at, now - BURST_SECONDS)
        self._free_at = begin + count_bytes / self._bytes_per_second
        return max(0.0, begin - now)
