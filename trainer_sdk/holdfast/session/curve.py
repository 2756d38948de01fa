"""What the script measures at its steps: taken on the training thread, told with the heartbeats.

step(metrics=…) -> MetricCurve.take()  ·  heartbeat -> unsent() … the service has answered -> sent()

The training thread alone asks a device, because another thread's query of an event invalidates a CUDA graph that is
being captured. The heartbeat's thread gets numbers.

A report that is lost is told again with the next one: the service keeps each point once. What was measured since the
last report dies with the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import operator
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from holdfast_protocol.base import text_to_keep
from holdfast_protocol.runs import MOST_CURVES, MOST_POINTS_TOLD, Measured, ToldPoint, thinned
from holdfast_protocol.text import is_text

log = logging.getLogger("holdfast")

_MOST_TAKEN = 20_000
"""Values that no report has looked at yet. A job that measures more between two heartbeats thins them itself."""
_MOST_KEPT = 4 * MOST_POINTS_TOLD
"""Points, of all metrics together, that no report has told yet: a service may be away for hours."""
_MOST_IN_FLIGHT = 256
"""Copies that one device has not made yet, each into a block of pinned memory. A step begins one for each type of
number."""
_MOST_READ = 8
"""Copies of one device that a step reads: more than it begins."""
_MOST_WARNED = 200
"""Names. A job may measure under new ones at each step."""


class _Copy(NamedTuple):
    """`values` hold what `names` were at the step once `arrived` has happened."""

    step: int
    names: list[str]
    values: torch.Tensor
    arrived: Any


class MetricCurve:
    """One process's; `takes` on rank 0, which alone tells."""

    def __init__(self, *, takes: bool) -> None:
        self._takes = takes
        self.generation = 0
        """Counts begin(), so that a late answer to an earlier attempt's report is known."""
        self._taken: deque[tuple[str, int, float]] = deque()
        """Metric, step, value. The training thread appends; who holds the lock pops."""
        self._untold: dict[str, list[Measured]] = {}
        self._lock = threading.Lock()
        """For `_untold`. The training thread takes it only to thin, and when an attempt begins."""
        self._left_out: set[object] = set()
        """The run has no room for these, the job measures more than a run may have, or they cannot be copied."""
        # Only the training thread uses these.
        self._thread: int | None = None
        self._in_flight: dict[torch.device, deque[_Copy]] = {}
        self._failed: set[torch.device] = set()
        self._is_behind = False
        self._names: set[object] = set()
        """Those that a report has told or will tell."""
        self._warned: set[object] = set()

    def begin(self) -> None:
        """An attempt begins: what was not told belongs to the one before."""
        with self._lock:
            self.generation += 1
            self._in_flight.clear()
            self._taken.clear()
            self._untold.clear()

    def take(self, step: int, metrics: Mapping[str, Any] | None) -> None:
        """On the training thread, after each step. It never raises and never waits. A number costs a microsecond or
        two. A device's tensors cost one stack, one copy and one event, all together; a later step reads the copy."""
        if self._in_flight:
            self.take_arrived(at_most=_MOST_READ)
        if not self._takes or not metrics:
            return
        step = operator.index(step)
        on_devices: dict[tuple[torch.device, torch.dtype], dict[str, torch.Tensor]] = {}
        for name, value in metrics.items():
            if value is None or name in self._left_out:  # None: not measured at this step
                continue
            if name not in self._names and len(self._warned) >= _MOST_WARNED:
                continue
            try:
                number = _plain(value) if isinstance(value, torch.Tensor) else float(value)
                if step < 0:
                    raise ValueError
            except Exception:  # of a tensor's own type, for example: no reason to end a training
                self._warn(
                    name,
                    f"give a number or a plain one-element tensor at a step from 0; this is a {type(value).__name__}",
                )
                continue
            if name not in self._names and not self._has_room(name):
                continue
            if isinstance(number, float):
                self._taken.append((name, step, number))
            else:
                on_devices.setdefault((number.device, number.dtype), {})[name] = number
        for (device, _), values in on_devices.items():
            self._copy(device, step, values)
        if len(self._taken) > _MOST_TAKEN:
            with self._lock:
                self._look()

    def take_arrived(self, *, at_most: int | None = None) -> None:
        """Reads what the devices have given by now: `at_most` so many copies of each. It never raises and never waits.
        On another thread than take() it does nothing."""
        if threading.get_ident() != self._thread:
            return
        for device, copies in list(self._in_flight.items()):
            try:
                if _is_capturing(device):
                    continue
                for _ in range(len(copies) if at_most is None else min(at_most, len(copies))):
                    if not copies[0].arrived.query():
                        break
                    step, names, values, _ = copies.popleft()
                    self._taken.extend(
                        (name, step, float(value)) for name, value in zip(names, values.tolist(), strict=True)
                    )
            except Exception as error:  # after an error of CUDA each of its calls raises it
                self._failed.add(device)
                _never_free(self._in_flight.pop(device))
                _say(
                    "what %s measures is no longer in the run's curves, because it has failed (%s)",
                    device, type(error).__name__,
                )  # fmt: skip
            else:
                if not copies:
                    del self._in_flight[device]

    def unsent(self) -> dict[str, list[ToldPoint]]:
        """For the next report: at most MOST_POINTS_TOLD points, thinned if there are more. Never raises, and asks no
        device."""
        with self._lock:
            self._look()
            self._thin(MOST_POINTS_TOLD)
            return {name: [point.told for point in points] for name, points in self._untold.items()}

    def sent(self, told: Mapping[str, Sequence[ToldPoint]], left_out: Sequence[str] = (), *, generation: int) -> None:
        """The service has answered the report with these points, of the attempt with that `generation`. `left_out`:
        metrics for which the run has no room."""
        with self._lock:
            if generation == self.generation:
                self._forget(told)
        if new := set(left_out) - self._left_out:
            self._left_out |= new
            _say("the run has %d metric curves, and gets no more: %s", MOST_CURVES, ", ".join(map(repr, sorted(new))))

    def _copy(self, device: torch.device, step: int, values: dict[str, torch.Tensor]) -> None:
        """Begins the copy of these values, all of one device and type."""
        self._thread = threading.get_ident()
        if device in self._failed:
            return
        copies = self._in_flight.get(device, deque())
        if len(copies) >= _MOST_IN_FLIGHT:
            if not self._is_behind:
                self._is_behind = True
                _say("%s is %d copies of metrics behind: until it has caught up, what it measures is not in the run's "
                     "curves", device, len(copies))  # fmt: skip
            return
        try:
            if _is_capturing(device):  # there is no value until the graph is replayed
                return
            copies.append(_Copy(step, list(values), *_begin_copy(list(values.values()))))
            self._in_flight[device] = copies
        except torch.OutOfMemoryError:  # passes
            return
        except Exception as error:  # no events, or a type that cannot be stacked
            for name in values:
                self._left_out.add(name)
                self._warn(name, f"it cannot be copied from {device} without a wait ({type(error).__name__})")

    def _has_room(self, name: Any) -> bool:
        """Whether this new name may have a curve; then it has one."""
        if not isinstance(name, str) or not 1 <= len(name) <= 100 or not is_text(name, one_line=True):
            why = "its name must have 1 to 100 letters, on one line"
        elif len(self._names) >= MOST_CURVES:
            why = f"the job measures more than {MOST_CURVES}"
        else:
            self._names.add(name)
            return True
        self._left_out.add(name)
        self._warn(name, why)
        return False

    def _warn(self, name: Any, why: str) -> None:
        if name in self._warned:
            return
        self._warned.add(name)
        with contextlib.suppress(Exception):  # of the name's own repr
            _say("the metric %s is not in the run's curves: %s", text_to_keep(repr(name), 120), why)
        if len(self._warned) == _MOST_WARNED:
            _say("%d metrics are not in the run's curves: from now on no new name gets one", _MOST_WARNED)

    def _look(self) -> None:
        """Moves what was taken. The training thread may add all the time."""
        for _ in range(len(self._taken)):
            name, step, value = self._taken.popleft()
            if name not in self._left_out:
                self._untold.setdefault(name, []).append(Measured(0, step, value))
        if sum(map(len, self._untold.values())) > _MOST_KEPT:
            self._thin(_MOST_KEPT // 2)

    def _forget(self, told: Mapping[str, Sequence[ToldPoint]]) -> None:
        for name, points in told.items():
            steps = {step for step, _ in points}
            if left := [point for point in self._untold.get(name, ()) if point.step not in steps]:
                self._untold[name] = left
            else:
                self._untold.pop(name, None)

    def _thin(self, most: int) -> None:
        """The shortest curve comes first: what it leaves of its share goes to the longer ones."""
        if sum(map(len, self._untold.values())) <= most:
            return
        names = sorted(self._untold, key=lambda name: len(self._untold[name]))
        for done, name in enumerate(names):
            self._untold[name] = thinned(self._untold[name], most // (len(names) - done))
            most -= len(self._untold[name])


def _never_free(copies: deque[_Copy]) -> None:
    """PyTorch frees used pinned memory with a call of CUDA. After an error of CUDA that call ends the process, before
    the error is reported and the staged save is uploaded. A list would not do: at its exit Python drops what modules
    hold."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(copies))


def _plain(value: torch.Tensor) -> torch.Tensor | float:
    """The tensor, if it is on a device; its value, if it is on the host. Raises TypeError for a tensor of another type:
    to read a DTensor is a collective."""
    if type(value) is not torch.Tensor or value.numel() != 1 or value.is_complex():
        raise TypeError
    return float(value.detach().item()) if value.device.type == "cpu" else value.detach()


def _is_capturing(device: torch.device) -> bool:
    """Whether this thread captures a graph; then it may ask for no event."""
    asks = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return asks is not None and bool(asks())


def _begin_copy(values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Any]:
    """A tensor of the host with these values, in order, and the event after which it has them. `values`: one element
    each, all of one device and type. Their owner may write the next ones into them."""
    device = values[0].device
    module = torch.get_device_module(device)
    event = module.Event()  # first: without events the copy would be waited for, and thrown away
    copy = torch.stack([value.reshape(()) for value in values]).to("cpu", non_blocking=True)  # into pinned memory
    if hasattr(module, "current_stream"):  # of the values' device, which need not be the current one
        event.record(module.current_stream(device))
    else:
        event.record()
    return copy, event


def _say(message: str, *values: object) -> None:
    with contextlib.suppress(Exception):  # of the script's log handler
        log.warning(message, *values)
