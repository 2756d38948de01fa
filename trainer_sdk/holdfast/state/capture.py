"""The user's state -> pieces to plan and trees to index. Never changes training, bit for bit.

Flow: ckpt.step -> **capture** -> plan -> stage -> hash -> upload. It never steps or draws,
keeps nothing, and creates nothing on a device: the trees are copies, the pieces refer to live tensors until staging has
copied them.

An optimizer is read without step() or state_dict(): torch's get_state_dict() steps an optimizer that has no state yet.
A save has the existing slots, and a load leaves exactly those. The modules in the state name the parameters, so that an
optimizer over several modules, or several optimizers, need no declaration. Encoded optimizer:
{"params": [[name, …] per group], "groups": [typed tree of the options per group],
 "slots": {name: [[slot, typed tree], …]}}
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from holdfast.errors import StateError, TreeFormatError, UnsupportedStateError
from holdfast.layout.plan import PieceSpec
from holdfast.state.components import (
    Component,
    Declarations,
    Kind,
    components_of,
    extra_states,
    module_tensors,
    parameter_names,
    parameters_by_id,
    stepped_parameters,
    steps_are_seen,
)
from holdfast.state.tensors import Held, TensorPiece, TieBook, describe, is_plain, mesh_copies, piece_of
from holdfast.state.tree import TensorRef, decode_tree, encode_ref, encode_tree
from holdfast.state.wrappers import WrappedTensor, take_apart

NameTensor = Callable[[str, torch.Tensor, Held], TensorRef]
"""(path, tensor, how it is held) -> its reference."""


def encode_optimizer(
    key: str, optimizer: torch.optim.Optimizer, known: Mapping[int, str], name_tensor: NameTensor
) -> dict[str, Any]:
    """The encoded form above. Reads `param_groups` and `state` only. Raises UnsupportedStateError by key."""
    names = parameter_names(optimizer, known)
    groups = []
    for at, group in enumerate(optimizer.param_groups):
        options = {name: value for name, value in group.items() if name != "params"}
        groups.append(
            encode_tree(
                options,
                path=f"{key}/param_groups[{at}]",
                name_tensor=lambda path, tensor: name_tensor(path, tensor, Held(replicated=True)),
            )
        )
    slots: dict[str, list[list[Any]]] = {}
    named = set()
    for group, group_names in zip(optimizer.param_groups, names, strict=True):
        guarded = steps_are_seen(optimizer, group)
        for parameter, name in zip(group["params"], group_names, strict=True):
            named.add(id(parameter))
            if parameter in optimizer.state:
                state = optimizer.state[parameter]
                slots[name] = _encode_slots(f"{key}/{name}", parameter, state, name_tensor, guarded=guarded)
    for owner in optimizer.state:
        if id(owner) not in named:
            raise UnsupportedStateError(
                key, f"it keeps state for {owner!r:.60}, which is in none of its param_groups", "remove that entry"
            )
    return {"params": names, "groups": groups, "slots": slots}


def open_optimizer(key: str, encoded: Any) -> tuple[list[list[str]], list[Any], dict[str, Any]]:
    """The parameters' names and the encoded options per group, and the encoded slots by parameter.

    Raises TreeFormatError unless it has the form above. The slots' values are checked when they are decoded.
    """
    match encoded:
        case {"params": list(params), "groups": list(groups), "slots": dict(slots)} if (
            len(encoded) == 3
            and len(params) == len(groups)
            and all(type(group) is list and all(type(name) is str for name in group) for group in params)
            and all(type(decode_tree(options)) is dict for options in groups)
            and slots.keys() <= {name for group in params for name in group}
            and all(_are_pairs(of_one) for of_one in slots.values())
        ):
            return params, groups, slots
    raise TreeFormatError(f"the index entry of optimizer {key[:200]!r} is malformed")


def open_module(key: str, encoded: Any) -> tuple[Any, dict[str, Any]]:
    """The encoded extra states or None, and the tensor subclasses among its tensors, by FQN.

    Raises TreeFormatError unless it is what encode_component makes of a module."""
    match encoded:
        case [extras, list(wrapped)] if _are_pairs(wrapped) and all(type(fqn) is str for fqn, _ in wrapped):
            of_fqn = dict(wrapped)
        case _:
            extras, of_fqn = encoded, {}
    if (extras is None or type(decode_tree(extras)) is dict) and all(
        isinstance(decode_tree(tree), WrappedTensor) for tree in of_fqn.values()
    ):
        return extras, of_fqn
    raise TreeFormatError(f"the index entry of model {key[:200]!r} is malformed")


def _are_pairs(value: Any) -> bool:
    return type(value) is list and all(type(pair) is list and len(pair) == 2 for pair in value)


def _encode_slots(
    path: str, parameter: torch.Tensor, state: Mapping[Any, Any], name_tensor: NameTensor, *, guarded: bool
) -> list[list[Any]]:
    def named(tensor_path: str, tensor: torch.Tensor, *, guarded: bool) -> TensorRef:
        return name_tensor(tensor_path, tensor, _held_beside(tensor_path, parameter, tensor, guarded=guarded))

    encoded = []
    beside_plain = is_plain(parameter)
    held = _GUARDED if guarded else _UNGUARDED
    for slot, value in state.items():
        slot_path = f"{path}/{slot}"
        if beside_plain and is_plain(value):  # most are, and training waits for this
            encoded.append([slot, encode_ref(name_tensor(slot_path, value, held))])
            continue
        # What a tensor subclass writes to the tensors inside it, no version may tell.
        is_apart = isinstance(value, torch.Tensor) and not is_plain(value) and take_apart(slot_path, value) is not None
        name_slot = partial(named, guarded=guarded and not is_apart)
        encoded.append([slot, encode_tree(value, path=slot_path, name_tensor=name_slot)])
    return encoded


def _held_beside(path: str, parameter: torch.Tensor, tensor: torch.Tensor, *, guarded: bool) -> Held:
    if isinstance(parameter, DTensor) and not isinstance(tensor, DTensor):
        if tensor.ndim > 0:
            raise UnsupportedStateError(
                path,
                "it is a plain tensor beside a sharded parameter, and nothing says which part of the whole it is",
                "use an optimizer that keeps DTensors",
            )
        copies = mesh_copies(parameter)
        return Held(replicated=True, replicas=copies or (), guarded=guarded)
    return _GUARDED if guarded else _UNGUARDED


_GUARDED, _UNGUARDED = Held(replicated=True, guarded=True), Held(replicated=True)


class Described(NamedTuple):
    """What was said of a plain tensor. A later save says the same, as long as the facts are the same."""

    facts: tuple[object, ...]
    spec: PieceSpec
    """Without a tie."""
    ref: TensorRef


_NOTHING_DESCRIBED: Mapping[str, Described] = MappingProxyType({})


@dataclass(frozen=True)
class CapturedState:
    """One rank's state. Stage `pieces` before training goes on."""

    components: tuple[str, ...]
    pieces: tuple[TensorPiece, ...]
    trees: Mapping[str, Any]
    """Encoded, per component that is this rank's own: for ShardIndex.trees."""
    replicated_trees: Mapping[str, Any]
    """Encoded, per component that all ranks share: rank 0's ShardIndex.replicated_trees; other ranks drop it."""
    described: Mapping[str, Described]
    """By path: for the next capture."""

    @property
    def specs(self) -> list[PieceSpec]:
        """For build_local_plan."""
        return [piece.spec for piece in self.pieces]


class TensorCollector:
    """Names the tensors of one component and describes each once. `live` finds the tensor of a name again."""

    def __init__(
        self,
        component: Component,
        stepped: Collection[int] = (),
        before: Mapping[str, Described] = _NOTHING_DESCRIBED,
    ) -> None:
        """`stepped`: id() of the parameters that only an optimizer's step changes. `before`: by path, what an earlier
        capture has described: training waits, and to compare takes half of the time."""
        self._component = component
        self._before = before
        self.stepped = stepped
        self._ties = TieBook()
        self.pieces: list[TensorPiece] = []
        self.live: dict[str, torch.Tensor] = {}
        self.described: dict[str, Described] = {}

    def add(self, path: str, tensor: torch.Tensor, held: Held) -> TensorRef:
        """The reference to `tensor`. Paths may repeat ({"a.b": …} beside {"a": {"b": …}}): names do not."""
        facts = self._facts(tensor, held) if is_plain(tensor) and not tensor.is_nested else None
        before = self._before.get(path)
        if before is not None and before.facts == facts and before.spec.name not in self.live:
            self.live[before.spec.name] = tensor
            self.described[path] = before
            self.pieces.append(piece_of(before.spec, tensor.detach(), tensor, held, self._ties))
            return before.ref
        name = base = self._component.tensor_name(path, tensor)
        repeat = 1
        while name in self.live:
            repeat += 1
            name = f"{base}~{repeat}"
        self.live[name] = tensor
        if not self._component.replicated:
            held = held._replace(replicated=False, owner=None, replicas=())
        if self._component.declared.is_frozen(path):
            held = held._replace(pack="declared")
        piece = describe(name, self._component.key, tensor, held, self._ties)
        ref = TensorRef(
            name,
            tensor.device.type,
            tensor.requires_grad and tensor.is_leaf,
            type(tensor) is not torch.Tensor and isinstance(tensor, torch.nn.Parameter),
        )
        if piece is not None:
            self.pieces.append(piece)
            if facts is not None and name == base:
                self.described[path] = Described(facts, piece.spec._replace(alias_of=None), ref)
        return ref

    def _facts(self, tensor: torch.Tensor, held: Held) -> tuple[object, ...]:
        """Of a plain tensor: all that its description depends on, besides its path and what is declared."""
        of_tensor = (type(tensor), tensor.dtype, tensor.layout, tensor.device, tensor.shape)
        return (*of_tensor, tensor.requires_grad and tensor.is_leaf, held, self._component.replicated)


def capture(
    state: Mapping[str, Any],
    *,
    rank: int,
    world_size: int,
    declared: Declarations | None = None,
    before: Mapping[str, Described] = _NOTHING_DESCRIBED,
) -> CapturedState:
    """The whole content of `state`. Call it on the training thread, between steps, on every rank alike. `before`: what
    an earlier capture with the same declarations has described.

    Raises UnsupportedStateError with the first key that cannot be saved exactly; nothing is changed by then.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in a world of {world_size}")
    components = components_of(state, rank=rank, declared=declared or Declarations())
    known = parameters_by_id(components)
    _refuse_trained(components, known)
    stepped = stepped_parameters(components)
    pieces: list[TensorPiece] = []
    described: dict[str, Described] = {}
    trees: dict[str, Any] = {}
    replicated_trees: dict[str, Any] = {}
    for component in components:
        collector = TensorCollector(component, stepped, before)
        encoded = encode_component(component, known, collector)
        (replicated_trees if component.replicated else trees)[component.key] = [component.kind.value, encoded]
        pieces.extend(collector.pieces)
        described.update(collector.described)
    return CapturedState(
        tuple(component.key for component in components), tuple(pieces), trees, replicated_trees, described
    )


def _refuse_trained(components: tuple[Component, ...], known: Mapping[int, str]) -> None:
    for component in components:
        if component.kind is not Kind.OPTIMIZER or not component.declared.frozen:
            continue
        names = chain.from_iterable(parameter_names(component.target, known))
        parameters = chain.from_iterable(group["params"] for group in component.target.param_groups)
        for name, parameter in zip(names, parameters, strict=True):
            slots = [f"{component.key}/{name}/{slot}" for slot in component.target.state.get(parameter, ())]
            declared = next(filter(component.declared.is_frozen, [name, *slots]), None)
            if declared is not None and parameter.requires_grad:
                raise StateError(
                    f"{declared!r} is declared frozen, and {component.key!r} trains it; "
                    "narrow the pattern, or freeze the parameter with requires_grad_(False)"
                )


def encode_component(component: Component, known: Mapping[int, str], collector: TensorCollector) -> Any:
    """The component's encoded tree; its tensors go to `collector`."""
    key, target = component.key, component.target
    if component.kind is Kind.OPTIMIZER:
        return encode_optimizer(key, target, known, collector.add)
    plain = partial(collector.add, held=Held(replicated=True))
    if component.kind is Kind.MODULE:
        wrapped = []
        for named in module_tensors(key, target):
            path, replicated = f"{key}/{named.fqn}", component.replicated
            if is_plain(named.tensor) or take_apart(path, named.tensor) is None:
                guarded = id(named.tensor) in collector.stepped
                collector.add(path, named.tensor, named.held(replicated=replicated, guarded=guarded))
            else:
                add = partial(collector.add, held=named.held(replicated=replicated))
                wrapped.append([named.fqn, encode_tree(named.tensor, path=path, name_tensor=add)])
        extras = extra_states(component)
        tree = encode_tree(extras, path=f"{key}/extra_state", name_tensor=plain) if extras else None
        return [tree, wrapped] if wrapped else tree
    value = target.state_dict() if component.kind is Kind.STATEFUL else target
    return encode_tree(value, path=f"{key}/", name_tensor=plain)
