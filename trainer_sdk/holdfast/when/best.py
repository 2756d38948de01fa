"""The best so far of one metric, as rank 0 knows it: the best that can be restored, or is on its way there.

schedule.py asks at the steps whose metrics hold it. What earlier attempts saved counts, or a resumed run would save a
worse step as its best; so the service is asked once, at the first such step after a restore.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.metric_values import Metrics, number_of
from holdfast.when.policies import Best
from holdfast_client.client import Client
from holdfast_protocol.selectors import RunName

log = logging.getLogger("holdfast")

KnownBest = Callable[[Best], float | None]
"""The metric of the best checkpoint that can be restored; None where there is none."""


def known_best(client: Client, run: RunName, policy: Best) -> float | None:
    """`restore(at=…)` would load this very checkpoint. Where the service does not answer, nothing is known: the step is
    then saved, and at worst it is one save too many."""
    try:
        found = client.restore_point(run.project, run.run, policy.selector).restore_point
        metric = None if found is None else client.checkpoint(found.checkpoint_id).metrics.get(policy.metric)
    except HoldfastError as error:
        log.warning("which step had the best %r is not known, so the next one is saved: %s", policy.metric, error)
        return None
    return None if metric is None else metric.value


class BestSoFar:
    """Used by the training thread of rank 0; a save that fails takes its number back on a background thread."""

    def __init__(self, policy: Best, known: KnownBest) -> None:
        self.policy = policy
        self._known = known
        self._asked = False
        self._best: float | None = None
        self._lock = threading.Lock()

    def forget(self) -> None:
        """The state was loaded anew, perhaps from before the best: what counts is what the service then says."""
        with self._lock:
            self._asked, self._best = False, None

    def beaten_by(self, metrics: Metrics) -> bool:
        """Whether this step is better. Raises TypeError for what is no number; never what asking the service meets."""
        number = number_of(self.policy.metric, metrics[self.policy.metric])
        if not math.isfinite(number):
            return False
        if not self._asked:
            found = self._known(self.policy)
            with self._lock:
                self._asked = True
                if found is not None and self._is_better(found):
                    self._best = found
        return self._is_better(number)

    def saving(self, metrics: Metrics | None, committed: Future[Any]) -> None:
        """A save of this step has begun. If it is not committed, the best is what it was before."""
        if metrics is None or self.policy.metric not in metrics:
            return
        number = number_of(self.policy.metric, metrics[self.policy.metric])
        with self._lock:
            if not math.isfinite(number) or not self._is_better(number):
                return
            before, self._best = self._best, number
        committed.add_done_callback(lambda done: self._take_back(number, before, done))

    def _take_back(self, number: float, before: float | None, committed: Future[Any]) -> None:
        with self._lock:
            if committed.exception() is not None and self._best == number:
                self._best = before

    def _is_better(self, number: float) -> bool:
        if self._best is None:
            return True
        return number < self._best if self.policy.mode == "min" else number > self._best
