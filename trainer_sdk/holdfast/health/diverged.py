"""Whether a state has diverged, by its tensors and by the user's rule on its metrics.

    planned -> copies begin -> FiniteCheck.look -> copied to the end -> FiniteCheck.found        on every rank
    step() -> HealthJudge.observe ... save() -> HealthJudge.judge                                on rank 0
    both -> the shard's verdict -> seal -> the service keeps the checkpoint as diverged, and offers it for no resume

`check_finite=`: each rank checks its part of models and optimizers (a save by DCP each tensor before it is copied,
dcp/writer.py). The check is queued behind the copies that staging has started: on CUDA they use the copy engine, and
the check the idle cores. Training waits only for one small read per device, at the end.

Values count that a training cannot go on from. NaN does, anywhere. Infinity does in trained tensors and in optimizer
state (an infinite second moment of Adam freezes a finite parameter for good). In buffers and frozen parameters it is
often meant, as in attention masks.
"""

from __future__ import annotations

import logging
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from holdfast.layout.plan import LocalPlan
from holdfast.staging.copy import boxes
from holdfast.state.components import path_of
from holdfast.state.tensors import TensorPiece
from holdfast_protocol.base import text_to_keep
from holdfast_protocol.checkpoints import HealthVerdict, MetricValue

log = logging.getLogger("holdfast")

_CONVERTED = 4 * 1024 * 1024
"""One-byte floats are checked in parts of so many elements, because torch compares few of their types, and copies are
made."""


class _Kind(NamedTuple):
    """Tensors that are checked in one go."""

    device: torch.device
    dtype: torch.dtype
    infinity_counts: bool


@dataclass(frozen=True)
class Looked:
    """Running reductions: for each device the names of tensors, and whether each of them is bad."""

    verdicts: list[tuple[list[str], torch.Tensor]]
    declared: frozenset[str]
    """The names that are declared frozen."""


class FiniteCheck:
    """One job's. Each rank checks the tensors that it stores, so that copies are checked once."""

    def __init__(self, *, demanded: bool = True) -> None:
        """Not `demanded`: only on GPUs, at next to no cost (ADR 0029), and no save fails for it."""
        self._demanded = demanded
        self._failed = False
        self._believed: set[str] = set()

    @classmethod
    def asked_for(cls, check_finite: bool | None) -> FiniteCheck | None:
        """By the Checkpointer's argument; None: no check."""
        return None if check_finite is False else cls(demanded=check_finite is True)

    def found(self, looked: Looked) -> list[str]:
        """The tensors that are not finite, each named once. Waits for the devices."""
        bad: dict[str, None] = {}
        for names, verdict in looked.verdicts:
            bad.update(dict.fromkeys(name for name, is_bad in zip(names, verdict.tolist(), strict=True) if is_bad))
        self._believed |= looked.declared - bad.keys()
        return list(bad)

    def forget(self) -> None:
        """The tensors were loaded again: check those that are declared frozen too."""
        self._believed.clear()

    def look(self, plan: LocalPlan, pieces: Iterable[TensorPiece], state: Mapping[str, Any]) -> Looked:
        """Queues the reductions of this rank's pieces. If the check is demanded it raises torch's errors, for example
        if a device has no memory left."""
        try:
            return self._look(plan, pieces, state)
        except Exception as error:
            self._could_not_look(error)
            return Looked([], frozenset())

    @torch.no_grad()
    def holds_nan(self, name: str, local: torch.Tensor) -> bool:
        """For a tensor of which only the name is known, so that infinity may be meant. Waits for the device, and raises
        as look() does."""
        if not self._is_to_see(local):
            return False
        try:
            _, bad = _bad(_Kind(local.device, local.dtype, infinity_counts=False), [(name, local)])
            return bool(bad.any())
        except Exception as error:
            self._could_not_look(error)
            return False

    def _could_not_look(self, error: Exception) -> None:
        """Called in an except block: raises the error again if the check is demanded."""
        if self._demanded:
            raise error
        if not self._failed:
            log.warning("the state could not be checked for NaN and infinity (%s); check_finite=True demands it", error)
        self._failed = True

    def _is_to_see(self, local: torch.Tensor) -> bool:
        has_floats = (local.is_floating_point() or local.is_complex()) and local.numel() > 0
        return has_floats and (self._demanded or local.is_cuda)

    @torch.no_grad()
    def _look(self, plan: LocalPlan, pieces: Iterable[TensorPiece], state: Mapping[str, Any]) -> Looked:
        stored = {piece.tensor for piece in plan.shard.pieces}
        watched = {key for key, value in state.items() if isinstance(value, (torch.nn.Module, torch.optim.Optimizer))}
        groups: dict[_Kind, list[tuple[str, torch.Tensor]]] = defaultdict(list)
        declared = set()
        for spec, local, _ in pieces:
            path = path_of(spec.name, spec.component)
            if spec.name not in stored or spec.component not in watched or path in self._believed:
                continue
            if not self._is_to_see(local):
                continue
            if spec.pack == "declared":
                declared.add(path)
            groups[_Kind(local.device, local.dtype, spec.pack == "trainable")].append((path, local))
        by_device: dict[torch.device, list[tuple[list[str], torch.Tensor]]] = defaultdict(list)
        for kind, tensors in groups.items():
            by_device[kind.device].append(_bad(kind, tensors))
        return Looked(
            [
                ([name for names, _ in verdicts for name in names], torch.cat([bad for _, bad in verdicts]))
                for verdicts in by_device.values()
            ],
            frozenset(declared),
        )


def _bad(kind: _Kind, tensors: list[tuple[str, torch.Tensor]]) -> tuple[list[str], torch.Tensor]:
    """For each tensor, or part of one, its name and whether it is bad."""
    # Extremes show both: they are NaN if an element is, else infinite if an element is.
    if kind.device.type == "cuda" and not kind.dtype.is_complex and kind.dtype.itemsize > 1:
        # One launch for many tensors.
        names = [name for name, _ in tensors]
        extremes = torch.stack(list(torch._foreach_norm([each for _, each in tensors], float("inf")))).unsqueeze(0)
    else:
        # On the CPU five to ten times as fast as isfinite() or a norm, which write a tensor of the same size. Part by
        # part: the copies of all one-byte floats would take four times their memory.
        names, found = [], []
        for name, tensor in tensors:
            for part in _parts(tensor):
                names.append(name)
                found.append(torch.stack(torch.aminmax(part)))
        extremes = torch.stack(found, dim=1)
    bad = ~torch.isfinite(extremes) if kind.infinity_counts else torch.isnan(extremes)
    return names, bad.any(dim=0)


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if tensor.is_complex():
        yield torch.view_as_real(tensor.resolve_conj().resolve_neg())
    elif tensor.element_size() > 1:
        yield tensor
    else:
        # float32 has each of their values.
        for start in range(0, tensor.numel(), _CONVERTED):
            for box in boxes(tensor, start, min(start + _CONVERTED, tensor.numel())):
                yield box.float()


_LOSS = re.compile(r"loss(?![_/. -]?scale)", re.IGNORECASE)
_LONGEST_REASON = 1000
_SHOWN = 5
_REASONS_SHOWN = 5


class HealthRule(Protocol):
    """`step`: the saved one. `metrics`: those of its save() or step(), as floats, also values that are not finite;
    empty if none were given. True: healthy. False, or a text that says why: diverged. Asked on rank 0, at saves only.

    A rule may also have `observe(step, metrics)`: called on rank 0 after every step() with metrics, with the given
    values. Do not read a device's tensor there, because each step would wait for it; keep it for the next save.
    """

    def __call__(self, step: int, metrics: Mapping[str, float], /) -> bool | str: ...


def losses_are_finite(step: int, metrics: Mapping[str, float], /) -> bool | str:
    """The default rule: no metric whose name says loss (`loss`, `val_loss`, `train/lm_loss`; not `loss_scale`) is NaN
    or infinite. Others may be: a gradient's norm is infinite whenever GradScaler skips a step."""
    bad = [f"{name} is {value}" for name, value in metrics.items() if _LOSS.search(name) and not math.isfinite(value)]
    return True if not bad else "the metric " + ", ".join(bad[:_SHOWN]) + (" and more" if len(bad) > _SHOWN else "")


class HealthJudge:
    """One job's. A rule's mistake never ends a training: it is logged, and the default rule takes its place."""

    def __init__(self, rule: HealthRule | None, *, asked: bool) -> None:
        """`asked`: on rank 0, which alone has the metrics."""
        self._rule: HealthRule = rule or losses_are_finite
        observe = getattr(rule, "observe", None) if asked else None
        self._observe: Callable[[int, Mapping[str, Any]], object] | None = observe if callable(observe) else None

    def observe(self, step: int, metrics: Mapping[str, Any] | None) -> None:
        """After every step; it costs nothing unless the rule observes. A step that measured nothing has no metrics."""
        if self._observe is not None and metrics:
            try:
                self._observe(step, metrics)
            except Exception as error:
                self._observe = None
                log.warning("%s, and it sees no more steps", _mistake(self._rule, step, error))

    def judge(self, step: int, metrics: Mapping[str, MetricValue] | None) -> HealthVerdict:
        """The rule's verdict on the state after `step`."""
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


def first_reasons(told: list[str]) -> str:
    """The defects of the ranks' parts in one text, which names a few of thousands of ranks."""
    shown = list(dict.fromkeys(told))[:_REASONS_SHOWN]
    more = sum(each not in shown for each in told)
    return "; ".join(shown) + (f"; and {more} more rank{'s' if more > 1 else ''}" if more else "")


def verdict_on(not_finite: list[str]) -> HealthVerdict | None:
    if not not_finite:
        return None
    more = f" and {len(not_finite) - 1} more" if len(not_finite) > 1 else ""
    return HealthVerdict(healthy=False, reason=f"{not_finite[0]:.500}{more} held NaN or infinity")


def both_verdicts(found: HealthVerdict, said: HealthVerdict) -> HealthVerdict:
    reasons = [each.reason for each in (found, said) if not each.healthy]
    return HealthVerdict(healthy=not reasons, reason="; ".join(reasons)[:1000])
