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
    """Used by the training thread of rank 0; saves end on background threads, in any order, and some of them fail."""

    def __init__(self, policy: Best, known: KnownBest) -> None:
        self.policy = policy
        self._known = known
        self._asked = False
        self._best: float | None = None
        """Of what can be restored."""
        self._on_the_way: dict[Future[Any], float] = {}
        self._lock = threading.Lock()

    def forget(self) -> None:
        """The state was loaded anew, perhaps from before the best: what counts is what the service then says."""
        with self._lock:
            self._asked, self._best = False, None
            self._on_the_way.clear()

    def beaten_by(self, metrics: Metrics) -> bool:
        """Whether this step is better. Raises TypeError for what is no number; never what asking the service meets."""
        number = number_of(self.policy.metric, metrics[self.policy.metric])
        if not math.isfinite(number):
            return False
        if not self._asked:
            found = self._known(self.policy)
            with self._lock:
                self._asked = True
                self._keep(found)
        with self._lock:
            return all(self._is_better(number, than) for than in (self._best, *self._on_the_way.values()))

    def saving(self, metrics: Metrics | None, committed: Future[Any]) -> None:
        """A save of this step has begun: it counts, unless it is not committed."""
        if metrics is None or self.policy.metric not in metrics:
            return
        number = number_of(self.policy.metric, metrics[self.policy.metric])
        if not math.isfinite(number):
            return
        with self._lock:
            self._on_the_way[committed] = number
        committed.add_done_callback(self._settle)

    def _settle(self, committed: Future[Any]) -> None:
        with self._lock:
            number = self._on_the_way.pop(committed, None)
            if committed.exception() is None:
                self._keep(number)

    def _keep(self, number: float | None) -> None:
        if number is not None and self._is_better(number, self._best):
            self._best = number

    def _is_better(self, number: float, than: float | None) -> bool:
        if than is None:
            return True
        return number < than if self.policy.mode == "min" else number > than
