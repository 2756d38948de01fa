"""How often one token may call, and how many of its calls may be under way, in one process. Pure: no clock, no waiting,
no I/O; `web/admission.py` has the lock.

Seals, heartbeats and what ends something are neither counted nor refused: work was done for them already.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum
from math import ceil

from holdfast_service.web.fair_queue import SHARE, CallClass

_RETRY_SECONDS = (1, 30)
_MOST_KEPT = 10_000


class TokenLimit(StrEnum):
    """Why a call is refused, as metrics name it: the setting, in whose place a token may have a limit of its own."""

    RATE = "HOLDFAST_TOKEN_REQUESTS_PER_SECOND"
    CONCURRENT = "HOLDFAST_TOKEN_REQUESTS"


@dataclass(frozen=True)
class TokenRefusal:
    limit: TokenLimit
    most: float
    retry_after_seconds: int


@dataclass
class Bucket:
    """Fills at `per_second` up to `size`; each call takes one."""

    per_second: float
    size: float
    level: float
    at: float
    comes_again_at: float = 0.0
    """When the last one that was refused is to retry: each later one retries later."""

    def take(self, now: float) -> int | None:
        """None: the call may be made. Else in how many seconds it is to be made again."""
        self.level = min(self.size, self.level + (now - self.at) * self.per_second)
        self.at = now
        if self.level >= 1:
            self.level -= 1
            return None
        least, most = _RETRY_SECONDS
        next_at = max(now + (1 - self.level) / self.per_second, self.comes_again_at + 1 / self.per_second)
        self.comes_again_at = min(next_at, now + most)
        return max(least, ceil(self.comes_again_at - now))

    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        """What a reply says of it: how many calls at once, how many are left, and in how many seconds it is full."""
        told = {
            b"ratelimit-limit": int(self.size),
            b"ratelimit-remaining": int(self.level),
            b"ratelimit-reset": ceil((self.size - self.level) / self.per_second),
        }
        return tuple((name, str(value).encode()) for name, value in told.items())


class TokenLimits:
    """Not thread-safe. `burst_seconds`: a token that was quiet may make as many calls at once as in so long."""

    def __init__(self, burst_seconds: float) -> None:
        self._burst_seconds = burst_seconds
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()
        self._under_way: dict[str, int] = {}

    def bucket_of(self, token_id: str, per_second: float, now: float) -> Bucket | None:
        """None: a rate of 0, which is no limit."""
        if not per_second:
            return None
        bucket = self._buckets.get(token_id)
        if bucket is None:
            size = max(1.0, per_second * self._burst_seconds)
            bucket = self._buckets[token_id] = Bucket(per_second, size, size, now)
        self._buckets.move_to_end(token_id)
        if len(self._buckets) > _MOST_KEPT:
            self._buckets.popitem(last=False)
        return bucket

    def let_in(self, token_id: str, kind: CallClass, most: int) -> TokenRefusal | None:
        """None: the call counts from now on, until `leave`. As of a project, begins are refused first."""
        count = self._under_way.get(token_id, 0)
        if count >= SHARE[kind] * most:
            return TokenRefusal(TokenLimit.CONCURRENT, most, _RETRY_SECONDS[0])
        self._under_way[token_id] = count + 1
        return None

    def leave(self, token_id: str) -> None:
        self._under_way[token_id] -= 1
        if not self._under_way[token_id]:
            del self._under_way[token_id]
