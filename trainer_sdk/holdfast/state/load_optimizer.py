"""Load one optimizer: exactly the slots of the index, in place where they are there already. Below load.py.

step() is never called, nor load_state_dict(), which casts slots to the parameter's dtype.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.state.arrivals import Arrivals
from holdfast.state.capture import TensorCollector, encode_component
from holdfast.state.components import Component
from holdfast.state.destinations import Filler, Wants, fits
from holdfast.state.errors import StateMismatchError
from holdfast.state.optimizers import open_optimizer, parameter_names
from holdfast.state.tree import TensorRef, decode_tree, tensor_refs
from holdfast_protocol.index_documents import TensorEntry

_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options that say how this process computes, not what: they stay as the live optimizer has them."""
_OF_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"})


def plan_optimizer(
    component: Component,
    encoded: Any,
    known: Mapping[int, str],
    wants: Wants,
    *,
    strict: bool,
    excludes: Callable[[str], bool],
) -> list[Callable[[Arrivals], None]]:
    """The steps that load the optimizer. Raises StateMismatchError when its groups hold other parameters (strict)."""
    params, groups, slots = open_optimizer(component.key, encoded)
    optimizer: torch.optim.Optimizer = component.target
    names = parameter_names(optimizer, known)
    if strict:
        _check_groups(component.key, names, params)
        _check_kind(component.key, optimizer, groups)
    collector = TensorCollector(component)
    encode_component(component, known, collector)
    steps: list[Callable[[Arrivals], None]] = []
    for group, options in zip(optimizer.param_groups, groups, strict=False):
        steps.append(_plan_options(group, options, collector.live, wants))
    for group, group_names in zip(optimizer.param_groups, names, strict=True):
        for parameter, name in zip(group["params"], group_names, strict=True):
            if not excludes(name):
                slots_of_one = _Slots(parameter, group, collector.live, wants)
                steps.append(slots_of_one.plan(optimizer, slots.get(name)))
    return steps


def _check_groups(key: str, live: list[list[str]], saved: list[list[str]]) -> None:
    remedy = "build the optimizer over the same parameters in the same groups, or take the weights alone"
    if len(live) != len(saved):
        raise StateMismatchError(key, f"{len(saved)} parameter groups were saved and it has {len(live)}", remedy)
    for at, (now, then) in enumerate(zip(live, saved, strict=True)):
        if other := sorted(set(now) ^ set(then)):
            where = "the checkpoint" if other[0] in then else "the optimizer"
            raise StateMismatchError(f"{key}/param_groups[{at}]", f"only {where} has {other[0]!r} in it", remedy)


def _check_kind(key: str, optimizer: torch.optim.Optimizer, groups: list[Any]) -> None:
    """Raises where both sides have an option that the other does not know: the slots of one kind of optimizer mean
    nothing to another. One that a later version of torch has added is on one side only."""
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


def _plan_options(
    group: dict[str, Any], encoded: Any, live: Mapping[str, torch.Tensor], wants: Wants
) -> Callable[[Arrivals], None]:
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

    def plan(self, optimizer: torch.optim.Optimizer, saved: list[Any] | None) -> Callable[[Arrivals], None]:
        """The step that makes this parameter's state exactly `saved`; without one there is no state afterwards."""
        slots = [(decode_tree(slot), tree) for slot, tree in saved or ()]
        fillers = {ref.name: self._filler(slot, ref) for slot, tree in slots for ref in tensor_refs(tree)}

        def load(arrivals: Arrivals) -> None:
            optimizer.state.pop(self._parameter, None)
            if saved is not None:
                optimizer.state[self._parameter] = {
                    slot: decode_tree(tree, resolve_tensor=lambda ref: fillers[ref.name](arrivals))
                    for slot, tree in slots
                }

        return load

    def _filler(self, slot: Any, ref: TensorRef) -> Filler:
        entry, live, parameter = self._wants.entry(ref.name), self._live.get(ref.name), self._parameter
        device = self._device(slot, ref, entry)
        placed_alike = slot == "step" or isinstance(live, DTensor) == isinstance(parameter, DTensor)
        if live is not None and fits(entry, live) and placed_alike and live.device == device:
            return self._wants.into(ref.name, live)
        if slot != "step" and entry.shape == tuple(parameter.shape):
            return self._wants.like(ref.name, parameter)
        return self._wants.new(ref.name, device)

    def _device(self, slot: Any, ref: TensorRef, entry: TensorEntry) -> torch.device:
        host, beside = torch.device("cpu"), self._parameter.device
        if slot == "step":
            # torch keeps it on the device for fused and capturable implementations, else on the host.
            return beside if self._group.get("fused") or self._group.get("capturable") else host
        return host if ref.device == "cpu" and not entry.shape else beside
