"""What the user's `state` dict holds: one component per key, its kind, and whether ranks share it. Pure decisions.

Flow: capture.py and load.py both begin here, so that a component is named and declared alike in both directions.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import translate
from functools import cached_property
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from holdfast.state.errors import StateError, UnsupportedStateError
from holdfast_protocol.checkpoints import MAX_COMPONENTS

_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\Z")
_RANK = re.compile(r"\A@\d+")


class Kind(StrEnum):
    """How a component is captured."""

    MODULE = "module"
    OPTIMIZER = "optimizer"
    STATEFUL = "stateful"
    VALUE = "value"
    DCP = "dcp"
    """No key of a state: all that a dcp.save through ckpt.writer() was given."""


@dataclass(frozen=True)
class Declarations:
    """What the user says about components. The default of each kind is in `is_replicated`."""

    replicated: frozenset[str] = field(default_factory=frozenset)
    """The same on all ranks: stored once, given back to every rank on any world size."""
    per_rank: frozenset[str] = field(default_factory=frozenset)
    """Each rank's own: stored by each rank, given back to the same rank."""
    frozen: tuple[str, ...] = ()
    """Shell patterns over the paths of tensors (`model/base.*`): these do not change while this job runs."""

    @classmethod
    def of(
        cls, *, replicated: Iterable[str] = (), per_rank: Iterable[str] = (), frozen: Iterable[str] = ()
    ) -> "Declarations":
        """Raises StateError when a component is declared both ways, or patterns are not a list."""
        if isinstance(frozen, str):
            raise StateError(f"frozen={frozen!r} is one text; give a list of patterns: frozen=[{frozen!r}]")
        declared = cls(frozenset(replicated), frozenset(per_rank), tuple(frozen))
        if both := sorted(declared.replicated & declared.per_rank):
            raise StateError(f"component {both[0]!r} is declared both replicated and per rank; choose one")
        return declared

    def without(self, keys: Collection[str]) -> "Declarations":
        """For a state that has none of these components."""
        return Declarations(self.replicated.difference(keys), self.per_rank.difference(keys), self.frozen)

    def is_frozen(self, path: str) -> bool:
        """Whether the tensor at `path` (component and FQN, without a rank) is declared frozen."""
        return bool(self.frozen) and self._frozen.match(path) is not None

    @cached_property
    def _frozen(self) -> re.Pattern[str]:
        return re.compile("|".join(map(translate, self.frozen)))


@dataclass(frozen=True)
class Component:
    """One key of the state, ready to be captured or loaded. `target` is the object without its wrappers."""

    key: str
    kind: Kind
    target: Any
    replicated: bool
    rank: int
    declared: Declarations

    def tensor_name(self, path: str, tensor: torch.Tensor) -> str:
        """The checkpoint-wide name of the tensor at `path` (which begins with the key).

        Ranks must not meet in one name what they do not share; the ranks of a DTensor's mesh share it.
        """
        if self.replicated:
            return path
        rank = int(tensor.device_mesh.mesh.min()) if isinstance(tensor, DTensor) else self.rank
        return f"{self.key}@{rank}{path[len(self.key) :]}"


def path_of(name: str, component: str) -> str:
    """The path of the tensor that is stored by this name: without the rank whose own it is."""
    return component + _RANK.sub("", name[len(component) :])


def components_of(state: Mapping[str, Any], *, rank: int, declared: Declarations) -> tuple[Component, ...]:
    """The state's components in the order of its keys.

    Raises StateError for a key that cannot be a component's name or a declaration of a component that is not there,
    UnsupportedStateError for objects that cannot be captured.
    """
    if len(state) > MAX_COMPONENTS:
        raise StateError(f"the state has {len(state)} keys, and {MAX_COMPONENTS} are the most; put some into one dict")
    for key in state:
        if not (isinstance(key, str) and _KEY.match(key)):
            raise StateError(f"the state's key {key!r:.80} is not usable; use letters, digits, '_', '-' and '.'")
    if unknown := sorted((declared.replicated | declared.per_rank) - state.keys()):
        raise StateError(f"component {unknown[0]!r} is declared but not in the state; its keys are {sorted(state)}")
    return tuple(_component(key, value, rank, declared) for key, value in state.items())


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """The user's module inside DDP and torch.compile, whose names carry no `module.` or `_orig_mod.`."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif isinstance(inner, torch.nn.Module):
            module = inner
        else:
            return module


def _component(key: str, value: Any, rank: int, declared: Declarations) -> Component:
    if isinstance(value, torch.nn.Module):
        kind, value = Kind.MODULE, unwrap(value)
    elif isinstance(value, torch.optim.Optimizer):
        kind = Kind.OPTIMIZER
        if type(value).__name__ == "ZeroRedundancyOptimizer":
            raise UnsupportedStateError(
                key,
                "ZeroRedundancyOptimizer keeps each rank's part to itself",
                "use fully_shard with a plain optimizer",
            )
    elif callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        kind = Kind.STATEFUL
    else:
        kind = Kind.VALUE
    return Component(key, kind, value, _is_replicated(key, kind, value, declared), rank, declared)


def _is_replicated(key: str, kind: Kind, value: Any, declared: Declarations) -> bool:
    if key in declared.replicated:
        return True
    if key in declared.per_rank:
        return False
    # A data loader's position or a plain counter may differ between ranks, and taking one rank's for all is silent
    # damage; models and optimizers say by their tensors what is shared, and schedulers follow the optimizer.
    return kind in (Kind.MODULE, Kind.OPTIMIZER) or isinstance(value, LRScheduler)
