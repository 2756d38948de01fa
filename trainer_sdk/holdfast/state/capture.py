"""The user's state -> pieces to plan and trees to index. Never changes training, bit for bit.

Flow: ckpt.step -> **capture** -> plan -> stage -> hash -> upload. Nothing is stepped, drawn, created on a device or
kept: the trees are copies, the pieces refer to live tensors until staging has copied them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch

from holdfast.layout.pieces import PieceSpec
from holdfast.state.components import Component, Declarations, Kind, components_of
from holdfast.state.errors import StateError
from holdfast.state.modules import extra_states, module_tensors, reshard_modules
from holdfast.state.optimizers import encode_optimizer, parameter_names
from holdfast.state.tensors import Held, TensorPiece, TieBook, describe
from holdfast.state.tree import TensorRef, encode_tree


@dataclass(frozen=True)
class CapturedState:
    """One rank's state. Stage `pieces` before training goes on."""

    components: tuple[str, ...]
    pieces: tuple[TensorPiece, ...]
    trees: Mapping[str, Any]
    """Encoded, per component that is this rank's own: for ShardIndex.trees."""
    replicated_trees: Mapping[str, Any]
    """Encoded, per component that all ranks share: for ShardIndex.replicated_trees of rank 0; other ranks drop it."""

    @property
    def specs(self) -> list[PieceSpec]:
        """For build_local_plan."""
        return [piece.spec for piece in self.pieces]


class TensorCollector:
    """Names the tensors of one component and describes each once. `live` finds the object behind a name again."""

    def __init__(self, component: Component) -> None:
        self._component = component
        self._ties = TieBook()
        self.pieces: list[TensorPiece] = []
        self.live: dict[str, torch.Tensor] = {}

    def add(self, path: str, tensor: torch.Tensor, held: Held) -> TensorRef:
        """The reference to `tensor`. Paths may repeat ({"a.b": …} beside {"a": {"b": …}}): names do not."""
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
        if piece is not None:
            self.pieces.append(piece)
        return TensorRef(
            name, tensor.device.type, tensor.requires_grad and tensor.is_leaf, isinstance(tensor, torch.nn.Parameter)
        )


def capture(
    state: Mapping[str, Any], *, rank: int, world_size: int, declared: Declarations | None = None
) -> CapturedState:
    """Everything that `state` holds. Call it on the training thread, between steps, on every rank alike.

    Raises UnsupportedStateError naming the first key that cannot be saved exactly; nothing is changed by then.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in a world of {world_size}")
    components = components_of(state, rank=rank, declared=declared or Declarations())
    known = parameters_by_id(components)
    _refuse_trained(components, known)
    pieces: list[TensorPiece] = []
    trees: dict[str, Any] = {}
    replicated_trees: dict[str, Any] = {}
    for component in components:
        collector = TensorCollector(component)
        encoded = encode_component(component, known, collector)
        (replicated_trees if component.replicated else trees)[component.key] = [component.kind.value, encoded]
        pieces.extend(collector.pieces)
    return CapturedState(tuple(component.key for component in components), tuple(pieces), trees, replicated_trees)


def parameters_by_id(components: tuple[Component, ...]) -> dict[int, str]:
    """id(parameter) -> "component/fqn", over all modules of the state; the first name of a shared one counts.

    Reshards fully_shard modules first: only then are their parameters the ones that optimizers hold.
    """
    known: dict[int, str] = {}
    for component in components:
        if component.kind is Kind.MODULE:
            reshard_modules(component.key, component.target)
            for named in module_tensors(component.key, component.target):
                known.setdefault(id(named.tensor), f"{component.key}/{named.fqn}")
    _check_optimizers_follow(components, known)
    return known


def _check_optimizers_follow(components: tuple[Component, ...], known: Mapping[int, str]) -> None:
    own = {component.key for component in components if component.kind is Kind.MODULE and not component.replicated}
    for component in components:
        if component.kind is not Kind.OPTIMIZER or not component.replicated:
            continue
        for name in chain.from_iterable(parameter_names(component.target, known)):
            if name.split("/")[0] in own:
                raise StateError(
                    f"{component.key!r} optimizes {name!r}, which is declared per rank; "
                    f"declare {component.key!r} per rank as well"
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
        for named in module_tensors(key, target):
            collector.add(f"{key}/{named.fqn}", named.tensor, named.held(replicated=component.replicated))
        extras = extra_states(target)
        return encode_tree(extras, path=f"{key}/extra_state", name_tensor=plain) if extras else None
    value = target.state_dict() if component.kind is Kind.STATEFUL else target
    return encode_tree(value, path=f"{key}/", name_tensor=plain)
