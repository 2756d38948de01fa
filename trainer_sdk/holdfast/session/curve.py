"""What the script measures at its steps: taken on the training thread, told with the heartbeats.

step(metrics=…) -> MetricCurve.take()  ·  heartbeat -> unsent() … the service has answered -> sent()

A report that is lost is told again with the next one: the service keeps each point once. What was measured since the
last report dies with the process.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from holdfast_protocol.base import text_to_keep
from holdfast_protocol.runs import MOST_CURVES, MOST_POINTS_TOLD, Measured, ToldPoint, thinned
from holdfast_protocol.text import is_text

log = logging.getLogger("holdfast")

_MOST_TAKEN = 20_000
"""Values that no report has looked at yet. A job that measures more between two heartbeats thins them itself."""
_MOST_KEPT = 4 * MOST_POINTS_TOLD
"""Points, of all metrics together, that no report has told yet: a service may be away for hours."""


class MetricCurve:
    """One process's; `takes` on rank 0, which alone tells."""

    def __init__(self, *, takes: bool) -> None:
        self._takes = takes
        self._taken: deque[tuple[str, int, Any, Any]] = deque()
        """Metric, step, value, and the event after which a device has given the value. Both threads pop from it."""
        self._untold: dict[str, list[Measured]] = {}
        self._lock = threading.Lock()
        """For `_untold`. The training thread takes it only to thin."""
        self._left_out: set[object] = set()
        """The run has no room for these, or the job measures more than a run may have."""
        self._warned: set[object] = set()

    def begin(self) -> None:
        """An attempt begins: what was not told belongs to the one before."""
        with self._lock:
            self._taken.clear()
            self._untold.clear()

    def take(self, step: int, metrics: Mapping[str, Any] | None) -> None:
        """On the training thread, after each step; a microsecond or two for each metric. It never raises and never
        waits: of a device's tensor it queues a copy, which a later report reads."""
        if not self._takes or not metrics:
            return
        for name, value in metrics.items():
            if value is None or name in self._left_out:  # None: not measured at this step
                continue
            try:
                self._taken.append((name, step, *_on_its_way(value)))
            except Exception:  # of a device or of a tensor's own type: no reason to end a training
                self._warn(name, value)
        if len(self._taken) > _MOST_TAKEN:
            with self._lock:
                self._look(at_most=len(self._taken))
                while len(self._taken) > _MOST_TAKEN:  # a device that has not come to them for so long
                    self._taken.popleft()

    def unsent(self) -> dict[str, list[ToldPoint]]:
        """For the next report: at most MOST_POINTS_TOLD points, thinned if there are more. Never waits for a device."""
        with self._lock:
            self._look(at_most=len(self._taken))
            self._thin(MOST_POINTS_TOLD)
            return {name: [point.told for point in points] for name, points in self._untold.items()}

    def sent(self, told: Mapping[str, Sequence[ToldPoint]], left_out: Sequence[str] = ()) -> None:
        """The service has answered the report with these points. `left_out`: metrics for which the run has no room."""
        with self._lock:
            for name, points in told.items():
                steps = {step for step, _ in points}
                if left := [point for point in self._untold.get(name, ()) if point.step not in steps]:
                    self._untold[name] = left
                else:
                    self._untold.pop(name, None)
        if new := set(left_out) - self._left_out:
            self._left_out |= new
            log.warning(
                "the run has %d metric curves, and gets no more: %s", MOST_CURVES, ", ".join(map(repr, sorted(new)))
            )

    def _look(self, *, at_most: int) -> None:
        """Moves what can be read without waiting. `at_most`: the training thread may add all the time."""
        for _ in range(at_most):
            try:
                name, step, value, ready = self._taken[0]
                if ready is not None and not ready.query():
                    break
                self._taken.popleft()
            except IndexError:
                break
            self._keep(name, step, value)
        if sum(map(len, self._untold.values())) > _MOST_KEPT:
            self._thin(_MOST_KEPT // 2)

    def _keep(self, name: Any, step: int, value: Any) -> None:
        if name in self._left_out:
            return
        try:
            usable = isinstance(name, str) and 1 <= len(name) <= 100 and is_text(name, one_line=True)
            point = Measured(0, int(step), float(value))
        except (TypeError, ValueError, OverflowError, RuntimeError):
            usable = False
        if not usable or point.step < 0:
            self._warn(name, value)
            return
        if name not in self._untold and len(self._untold) >= MOST_CURVES:
            self._left_out.add(name)
            self._warn(name, value)
            return
        self._untold.setdefault(name, []).append(point)

    def _warn(self, name: Any, value: Any) -> None:
        if name not in self._warned:
            self._warned.add(name)
            log.warning(
                "the metric %s is not in the run's curves: give a number or a plain one-element tensor under a name of "
                "1 to 100 letters, and at most %d of them; this is a %s",
                text_to_keep(repr(name), 120), MOST_CURVES, type(value).__name__,
            )  # fmt: skip

    def _thin(self, most: int) -> None:
        if sum(map(len, self._untold.values())) <= most:
            return
        share = most // len(self._untold)
        self._untold = {name: thinned(points, share) for name, points in self._untold.items()}


def _on_its_way(value: Any) -> tuple[Any, Any]:
    """The value, and the event after which it can be read; None: now. Of a tensor it is a copy, because its owner may
    write the next one into it. Raises TypeError for a tensor of another type: to read a DTensor is a collective."""
    if not isinstance(value, torch.Tensor):
        return value, None
    if type(value) is not torch.Tensor or value.numel() != 1:
        raise TypeError
    value = value.detach()
    if value.device.type == "cpu":
        return value.item(), None
    copy = value.to("cpu", non_blocking=True)  # into pinned memory, so nothing waits
    event = torch.get_device_module(value.device).Event()
    event.record()
    return copy, event
