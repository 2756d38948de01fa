"""How long statements wait for locks of others, sampled from pg_stat_activity."""

from __future__ import annotations

import threading
import time
from collections import Counter
from types import TracebackType

import psycopg

_SAMPLED_EVERY_SECONDS = 0.005
_WAITING = """
    SELECT left(regexp_replace(query, '\\s+', ' ', 'g'), 70), extract(epoch FROM clock_timestamp() - query_start)
    FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND state = 'active'
"""


class LockWaits:
    """While the block runs. `seconds`: of all statements together, by how they begin. `longest_seconds`: of one, with
    what it did before. The end of the block raises RuntimeError if sampling failed."""

    def __init__(self, connection: psycopg.Connection[tuple[object, ...]]) -> None:
        self.seconds: Counter[str] = Counter()
        self.longest_seconds = 0.0
        self._connection = connection
        self._failure: psycopg.Error | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="lock-waits", daemon=True)

    def __enter__(self) -> LockWaits:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        if self._failure is not None and error is None:
            raise RuntimeError(f"waits for locks could not be sampled: {self._failure}") from self._failure

    def _sample(self) -> None:
        sampled_at = time.monotonic()
        while not self._over.wait(_SAMPLED_EVERY_SECONDS):
            try:
                rows = self._connection.execute(_WAITING).fetchall()
            except psycopg.Error as failure:
                self._failure = failure
                return
            since, sampled_at = sampled_at, time.monotonic()
            for statement, waited in rows:
                self.seconds[str(statement)] += sampled_at - since  # type: ignore[assignment]
                self.longest_seconds = max(self.longest_seconds, float(str(waited)))
