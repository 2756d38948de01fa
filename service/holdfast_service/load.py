"""What one process knows of its callers: whether calls of training wait, which project a checkpoint belongs to, and how
many samples each has made.

Kept in memory by each process for itself, and relied on for fairness alone. Thread-safe.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque

_MOST_CHECKPOINTS = 10_000
_SLICE_SECONDS = 0.5


class Load:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._projects: OrderedDict[str, str] = OrderedDict()
        self._samples: dict[str, deque[float]] = {}
        self._quiet = threading.Event()
        self._quiet.set()

    def set_busy(self, *, busy: bool) -> None:
        """Whether calls of training jobs wait for their turn."""
        if busy:
            self._quiet.clear()
        else:
            self._quiet.set()

    def yield_to_callers(self, most_seconds: float, stopping: threading.Event) -> None:
        """Returns as soon as no call of a training job waits, at the latest after that time, or when asked to stop."""
        ends = time.monotonic() + most_seconds
        while not stopping.is_set() and (left := ends - time.monotonic()) > 0:
            if self._quiet.wait(min(left, _SLICE_SECONDS)):
                return

    def note_checkpoint(self, checkpoint_id: str, project: str) -> None:
        with self._lock:
            self._projects[checkpoint_id] = project
            self._projects.move_to_end(checkpoint_id)
            if len(self._projects) > _MOST_CHECKPOINTS:
                self._projects.popitem(last=False)

    def project_of(self, checkpoint_id: str) -> str | None:
        """None: it was not begun in this process, or long ago."""
        with self._lock:
            return self._projects.get(checkpoint_id)

    def may_sample(self, owner: str, *, most: int, within_seconds: float) -> bool:
        """Whether the owner has made fewer samples of a store than `most` in that time; if so, it is one more."""
        now = time.monotonic()
        with self._lock:
            made = self._samples.setdefault(owner, deque())
            while made and made[0] < now - within_seconds:
                made.popleft()
            if len(made) >= most:
                return False
            made.append(now)
            return True
