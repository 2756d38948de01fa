"""A stored optimizer -> the steps that load it: exactly the index's slots, in place if they exist.

Flow: plan_load -> **plan_optimizer** -> arrivals -> fetch, verify -> the steps. What nothing needs before a step of the
optimizer can be loaded after all else: LateSlots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.errors import StateMismatchError
from holdfast.state.capture import TensorCollector, encode_component, open_optimizer
from holdfast.state.components import Component, parameter_names, state_may_come_late
from holdfast.state.destinations import Arrivals, Filler, Wants, fits
from holdfast.state.tensors import torch_dtype
from holdfast.state.tree import TensorRef, check_known, decode_tree, rebuilt, refs_within, tensor_refs
from holdfast.state.wrappers import WrappedTensor, refuse_other_shards, row_beside
from holdfast_protocol.index_documents import TensorEntry

Step = Callable[[Arrivals], None]
"""Called once the tensors that it needs have arrived: writes them."""

_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options for how this process computes, not what: they stay as in the live optimizer."""
_OF_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"})


def plan_optimizer(
    component: Component,
    encoded: Any,
    known: Mapping[int, str],
    wants: Wants,
    *,
    strict: bool,
    excludes: Callable[[str], bool],
    late: list[LateSlots] | None = None,
) -> list[Step]:
    """The steps that load one optimizer: exactly the index's slots, in place if they exist. Neither step() nor
    `load_state_dict()` is called; the latter casts slots to the parameter's dtype. Raises StateMismatchError if its
    groups hold other parameters (strict).

    `late` gets, in place of a step, the slots that nothing needs before the optimizer's own step."""
    params, groups, slots = open_optimizer(component.key, encoded)
    optimizer: torch.optim.Optimizer = component.target
    names = parameter_names(optimizer, known)
    if strict:
        _check_groups(component.key, names, params)
        _check_kind(component.key, optimizer, groups)
    collector = TensorCollector(component)
    encode_component(component, known, collector)
    steps: list[Step] = []
    for group, options in zip(optimizer.param_groups, groups, strict=False):
        steps.append(_plan_options(group, options, collector.live, wants))
    for group, group_names in zip(optimizer.param_groups, names, strict=True):
        for parameter, name in zip(group["params"], group_names, strict=True):
            if excludes(name):
                continue
            with wants.late() as slot_names:
                make = _Slots(parameter, group, collector.live, wants).plan(slots.get(name))
            slots_of_one = LateSlots(optimizer, parameter, frozenset(slot_names), make)
            if late is not None and state_may_come_late(optimizer, group):
                late.append(slots_of_one)
            else:
                wants.needed_first.update(slot_names)
                steps.append(slots_of_one.put)
    return steps


@dataclass(frozen=True, eq=False)
class LateSlots:
    """The state of one parameter in its optimizer, which can be loaded after all else."""

    optimizer: torch.optim.Optimizer = field(repr=False)
    parameter: torch.Tensor = field(repr=False)
    names: frozenset[str]
    """The tensors that `make` takes from the arrivals, and makes slots of."""
    make: Callable[[Arrivals], dict[Any, Any] | None] = field(repr=False)
    """The slots, or None if the checkpoint has none. It changes no more than live slots that are filled in place."""

    def drop(self) -> None:
        """The optimizer has no state for the parameter any more."""
        self.optimizer.state.pop(self.parameter, None)

    def put(self, arrivals: Arrivals) -> None:
        self.drop()
        made = self.make(arrivals)
        if made is not None:
            self.optimizer.state[self.parameter] = made


def _check_groups(key: str, live: list[list[str]], saved: list[list[str]]) -> None:
    remedy = "build the optimizer over the same parameters in the same groups, or take the weights alone"
    if len(live) != len(saved):
        raise StateMismatchError(key, f"{len(saved)} parameter groups were saved and it has {len(live)}", remedy)
    for at, (now, then) in enumerate(zip(live, saved, strict=True)):
        if other := sorted(set(now) ^ set(then)):
            where = "the checkpoint" if other[0] in then else "the optimizer"
            raise StateMismatchError(f"{key}/param_groups[{at}]", f"only {where} has {other[0]!r} in it", remedy)


def _check_kind(key: str, optimizer: torch.optim.Optimizer, groups: list[Any]) -> None:
    """Raises if both sides have an option that the other lacks: one kind of optimizer cannot read another's slots. An
    option that a later version of torch has added is on one side only."""
    for group, encoded in zip(optimizer.param_groups, groups, strict=True):
        options = decode_tree(encoded)
        saved, own = options.keys() - _OF_SCHEDULERS - _IMPLEMENTATION, optimizer.defaults.keys() - _IMPLEMENTATION
        if (unknown := sorted(saved - group.keys())) and (lacking := sorted(own - saved)):
            raise StateMismatchError(
                key,
                f"it was saved by another kind of optimizer, with {unknown[0]!r}, and is now a "
                f"{type(optimizer).__name__}, with {lacking[0]!r}",
                "build the same kind; to go on with another one, begin a new run from the weights alone",
            )


def _plan_options(group: dict[str, Any], encoded: Any, live: Mapping[str, torch.Tensor], wants: Wants) -> Step:
    fillers = {ref.name: wants.referred(ref, live.get(ref.name)) for ref in tensor_refs(encoded)}

    def load(arrivals: Arrivals) -> None:
        options = decode_tree(encoded, resolve_tensor=lambda ref: fillers[ref.name](arrivals))
        group.update({k: v for k, v in options.items() if not (k in _IMPLEMENTATION and k in group) and k != "params"})

    return load


class _Slots:
    def __init__(
        self, parameter: torch.Tensor, group: Mapping[str, Any], live: Mapping[str, torch.Tensor], wants: Wants
    ) -> None:
        self._parameter = parameter
        self._group = group
        self._live = live
        self._wants = wants

    def plan(self, saved: list[Any] | None) -> Callable[[Arrivals], dict[Any, Any] | None]:
        """Makes this parameter's state exactly `saved`; None leaves no state."""
        slots = [(decode_tree(slot), tree) for slot, tree in saved or ()]
        fillers: dict[str, Filler] = {}
        for slot, tree in slots:
            check_known(tree)
            fillers |= {ref.name: self._filler(slot, ref, within) for ref, within in refs_within(tree)}

        def make(arrivals: Arrivals) -> dict[Any, Any] | None:
            if saved is None:
                return None
            return {
                slot: decode_tree(tree, resolve_tensor=lambda ref: fillers[ref.name](arrivals), rebuild=rebuilt)
                for slot, tree in slots
            }

        return make

    def _filler(self, slot: Any, ref: TensorRef, within: WrappedTensor | None) -> Filler:
        entry, live, parameter = self._wants.entry(ref.name), self._live.get(ref.name), self._parameter
        device = self._device(slot, ref, entry)
        placed_alike = slot == "step" or isinstance(live, DTensor) == isinstance(parameter, DTensor)
        in_place = live is not None and fits(entry, live) and placed_alike and live.device == device
        if live is not None and in_place and self._wants.may_fill(ref.name, live):
            return self._wants.into(ref.name, live)
        if within is not None:
            new = self._inside(ref.name, entry, within, device)
        elif slot != "step" and entry.shape == tuple(parameter.shape):
            new = self._wants.like(ref.name, parameter)
        elif slot != "step" and entry.shape and isinstance(parameter, DTensor):
            new = self._wants.beside(ref.name, parameter)  # a save takes no plain tensor there
        else:
            new = self._wants.new(ref.name, device)
        # An optimizer may keep the parameter itself as a slot, and update it there.
        return self._wants.shared_or(new, ref.name, live) if live is not None and in_place else new

    def _inside(self, name: str, entry: TensorEntry, within: WrappedTensor, device: torch.device) -> Filler:
        """A new tensor for the inside of a tensor subclass."""
        if within.whole is None:
            return self._wants.new(name, device)
        if not isinstance(self._parameter, DTensor):
            refuse_other_shards(name)
        return self._wants.like(name, row_beside(name, entry.shape, torch_dtype(entry.dtype), self._parameter))

    def _device(self, slot: Any, ref: TensorRef, entry: TensorEntry) -> torch.device:
        host, beside = torch.device("cpu"), self._parameter.device
        if slot == "step":
            # torch keeps it on the device for fused and capturable implementations, else on the host.
            return beside if self._group.get("fused") or self._group.get("capturable") else host
        return host if ref.device == "cpu" and not entry.shape else beside
