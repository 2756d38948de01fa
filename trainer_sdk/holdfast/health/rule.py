"""`healthy=`: the user's word on whether a state should be resumed from. Asked on rank 0, at saves only.

Flow: step() -> observe (rules that want it) ... save: the metrics' values -> **HealthJudge.judge** -> the seal ->
the service keeps the checkpoint as diverged, and offers it for no resume.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from holdfast_protocol.base import text_to_keep
from holdfast_protocol.checkpoints import HealthVerdict, MetricValue

log = logging.getLogger("holdfast")

_LOSS = re.compile(r"loss(?![_/. -]?scale)", re.IGNORECASE)
_LONGEST_REASON = 1000
_SHOWN = 5


class HealthRule(Protocol):
    """`step` is the one that is saved; `metrics` are those of its save() or step(), as floats, not finite ones among
    them; empty where none were given. True: healthy. False, or a text that says why: diverged.

    A rule may also have `observe(step, metrics)`: called on rank 0 after every step() that has metrics, with the values
    as they were given. To read a tensor of a device there would make each step wait for it; keep it for the next save.
    """

    def __call__(self, step: int, metrics: Mapping[str, float], /) -> bool | str: ...


def losses_are_finite(step: int, metrics: Mapping[str, float], /) -> bool | str:
    """The rule without `healthy=`: no metric whose name says loss (`loss`, `val_loss`, `train/lm_loss`; not
    `loss_scale`) is NaN or infinite. Others may be: a gradient's norm is infinite whenever GradScaler skips a step."""
    bad = [f"{name} is {value}" for name, value in metrics.items() if _LOSS.search(name) and not math.isfinite(value)]
    return True if not bad else "the metric " + ", ".join(bad[:_SHOWN]) + (" and more" if len(bad) > _SHOWN else "")


class HealthJudge:
    """Of one job. No rule's mistake ends a training: it is told, and the default rule takes its place."""

    def __init__(self, rule: HealthRule | None, *, asked: bool) -> None:
        """`asked`: on rank 0, which alone has the metrics."""
        self._rule: HealthRule = rule or losses_are_finite
        observe = getattr(rule, "observe", None) if asked else None
        self._observe: Callable[[int, Mapping[str, Any]], object] | None = observe if callable(observe) else None

    def observe(self, step: int, metrics: Mapping[str, Any] | None) -> None:
        """After every step; without a rule that wants to see them it costs nothing."""
        if self._observe is not None and metrics is not None:
            try:
                self._observe(step, metrics)
            except Exception as error:
                self._observe = None
                log.warning("%s, and it sees no more steps", _mistake(self._rule, step, error))

    def judge(self, step: int, metrics: Mapping[str, MetricValue] | None) -> HealthVerdict:
        """What the rule says of the state after `step`."""
        values = {name: _as_float(value) for name, value in (metrics or {}).items()}
        try:
            said = self._rule(step, values)
            if not isinstance(said, (bool, str)):
                raise TypeError(f"it returned {said!r:.80}, not True, False or a text")
        except Exception as error:
            log.warning("%s, so only the losses are looked at", _mistake(self._rule, step, error))
            said = losses_are_finite(step, values)
        if said is True:
            return HealthVerdict(healthy=True)
        reason = said if said else f"the rule {_name(self._rule)} says so"
        return HealthVerdict(healthy=False, reason=text_to_keep(str(reason), _LONGEST_REASON))


def _as_float(value: MetricValue) -> float:
    return float(value.nonfinite or math.nan) if value.value is None else value.value


def _mistake(rule: HealthRule, step: int, error: Exception) -> str:
    return f"healthy={_name(rule)} failed at step {step} ({type(error).__name__}: {error})"


def _name(rule: HealthRule) -> str:
    return str(getattr(rule, "__name__", type(rule).__name__))
