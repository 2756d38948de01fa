"""The user's `state` dict: one component per key, its kind, and whether ranks share it; the tensors of modules; RNG.

capture.py and load.py both begin here, so that a component is named and declared alike in both directions.
"""

from __future__ import annotations

import hashlib
import logging
import random
import re
from abc import ABC
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import translate
from functools import cache, cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from holdfast.data.torchdata_loader import shared_place
from holdfast.errors import StateError, StateMismatchError, TreeFormatError, UnsupportedStateError
from holdfast.state.tensors import Held
from holdfast.state.tree import decode_tree, encode_tree
from holdfast.state.wrappers import outer_paths
from holdfast_protocol.checkpoints import MAX_COMPONENTS
from holdfast_protocol.digests import canonical_bytes

HF_FILES = "hf_files"
"""The key under which a component, or a value in one, keeps config.json and tokenizer of a model of Hugging Face
(export/hf/model_files.py). A job needs none of it."""

_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\Z")
_RANK = re.compile(r"\A@\d+")


class Kind(StrEnum):
    """The ways to capture a component."""

    MODULE = "module"
    OPTIMIZER = "optimizer"
    STATEFUL = "stateful"
    VALUE = "value"
    DCP = "dcp"
    """Not a key of a state: the whole content of a dcp.save through ckpt.writer()."""


@dataclass(frozen=True)
class Declarations:
    """The user's declarations of components. The default of each kind is in `is_replicated`."""

    replicated: frozenset[str] = field(default_factory=frozenset)
    """The same on all ranks: stored once, loaded by every rank on any world size."""
    per_rank: frozenset[str] = field(default_factory=frozenset)
    """Each rank's own: stored by each rank, loaded by the same rank."""
    frozen: tuple[str, ...] = ()
    """Shell patterns over the paths of tensors (`model/base.*`) that do not change while this job runs."""

    @classmethod
    def of(
        cls, *, replicated: Iterable[str] = (), per_rank: Iterable[str] = (), frozen: Iterable[str] = ()
    ) -> Declarations:
        """Raises StateError for a component that is declared both ways, or for patterns that are not a list."""
        if isinstance(frozen, str):
            raise StateError(f"frozen={frozen!r} is one text; give a list of patterns: frozen=[{frozen!r}]")
        declared = cls(frozenset(replicated), frozenset(per_rank), tuple(frozen))
        if both := sorted(declared.replicated & declared.per_rank):
            raise StateError(f"component {both[0]!r} is declared both replicated and per rank; choose one")
        return declared

    def without(self, keys: Collection[str]) -> Declarations:
        """For a state without these components."""
        return Declarations(self.replicated.difference(keys), self.per_rank.difference(keys), self.frozen)

    def is_frozen(self, path: str) -> bool:
        """Whether the tensor at `path` (component and FQN, without a rank) is declared frozen, or a tensor subclass
        around it."""
        return bool(self.frozen) and any(self._frozen.match(each) for each in outer_paths(path))

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

        Two ranks' own tensors must never have one name; the ranks of a DTensor's mesh share its name.
        """
        if self.replicated:
            return path
        rank = int(tensor.device_mesh.mesh.min()) if isinstance(tensor, DTensor) else self.rank
        return f"{self.key}@{rank}{path[len(self.key) :]}"


def path_of(name: str, component: str) -> str:
    """The path of the tensor with this stored name: without the rank that owns it."""
    return component + _RANK.sub("", name[len(component) :])


def owner_of(name: str, component: str) -> int | None:
    """The rank in this stored name, or None for a tensor that all ranks share."""
    owner = _RANK.match(name[len(component) :])
    return int(owner[0][1:]) if owner else None


_SCHEDULERS = frozenset(
    {
        ("accelerate.scheduler", "AcceleratedScheduler"),
        ("timm.scheduler.scheduler", "Scheduler"),
        ("transformers.optimization", "GreedyLR"),
    }
)
"""Schedulers that are none of torch's, by Python module and class, because their packages may not be there."""


class FitsAnyWorld(ABC):  # noqa: B024 - others are registered or named, as they are not ours
    """A stateful object without a rank's place in the data: what all ranks saved alike, any number of ranks can load.
    A data loader is none: how far equal places are in the whole data depends on the number of ranks."""

    @classmethod
    def __subclasshook__(cls, kind: type) -> bool:
        if cls is FitsAnyWorld and any((each.__module__, each.__qualname__) in _SCHEDULERS for each in kind.__mro__):
            return True
        return super().__subclasshook__(kind)


FitsAnyWorld.register(LRScheduler)
FitsAnyWorld.register(torch.amp.GradScaler)


def components_of(state: Mapping[str, Any], *, rank: int, declared: Declarations) -> tuple[Component, ...]:
    """The state's components in the order of its keys.

    Raises StateError for a key that cannot be a component's name or a declaration of a missing component,
    UnsupportedStateError for objects that cannot be captured.
    """
    check_keys(state)
    if unknown := sorted((declared.replicated | declared.per_rank) - state.keys()):
        raise StateError(f"component {unknown[0]!r} is declared but not in the state; its keys are {sorted(state)}")
    return tuple(_component(key, value, rank, declared) for key, value in state.items())


def check_keys(state: Mapping[str, Any]) -> None:
    """Raises StateError unless each key can be a component's name."""
    if len(state) > MAX_COMPONENTS:
        raise StateError(f"the state has {len(state)} keys, and {MAX_COMPONENTS} are the most; put some into one dict")
    for key in state:
        if not (isinstance(key, str) and _KEY.match(key)):
            raise StateError(f"the state's key {key!r:.80} is not usable; use letters, digits, '_', '-' and '.'")


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """The user's module inside DDP and torch.compile, whose names carry no `module.` or `_orig_mod.`."""
    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif (inner := module._modules.get("_orig_mod")) is not None:
            module = inner
        else:
            return module


def _component(key: str, value: Any, rank: int, declared: Declarations) -> Component:
    if isinstance(value, torch.nn.Module):
        kind, value = Kind.MODULE, unwrap(value)
    elif isinstance(value, torch.optim.Optimizer):
        kind = Kind.OPTIMIZER
        _refuse_own_form(key, value)
    elif callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        kind, value = Kind.STATEFUL, shared_place(value) or value
    else:
        kind = Kind.VALUE
        if rank == 0 and isinstance(value, Mapping) and value.keys() == {"state", "param_groups"}:
            _warn_of_a_copy(key)
    return Component(key, kind, value, _is_replicated(key, kind, value, declared), rank, declared)


_ADDS_NOTHING = {
    "accelerate.optimizer": "optimizer",
    "bitsandbytes.optim.optimizer": "",
    "lightning.fabric.wrappers": "optimizer",
    "lightning.pytorch.core.optimizer": "",
    "lightning_fabric.wrappers": "optimizer",
    "pytorch_lightning.core.optimizer": "",
}
"""The Python modules of optimizers whose own state_dict() has only slots and groups -> the attribute with the optimizer
that they wrap, if they do. The step() of these wrappers writes nothing before that optimizer's."""


def _refuse_own_form(key: str, optimizer: torch.optim.Optimizer) -> None:
    """Raises UnsupportedStateError if its state_dict() may hold more than slots and groups, which alone are read."""
    kind = type(optimizer)
    if kind.__name__ == "ZeroRedundancyOptimizer":
        raise UnsupportedStateError(
            key,
            "ZeroRedundancyOptimizer keeps each rank's part to itself",
            "use fully_shard with a plain optimizer",
        )
    if kind.state_dict is torch.optim.Optimizer.state_dict:
        return
    if kind.state_dict.__module__ not in _ADDS_NOTHING:
        raise UnsupportedStateError(
            key,
            f"{kind.__qualname__} has a state_dict() of its own, and only an optimizer's slots and groups are read",
            "give the optimizer inside it, and the rest under keys of their own; or all of it through an object with "
            "state_dict() and load_state_dict() that is no Optimizer",
        )
    inner = _wrapped(optimizer, kind.state_dict)
    if inner is not None:
        _refuse_own_form(key, inner)


def _wrapped(optimizer: torch.optim.Optimizer, method: Callable[..., Any]) -> torch.optim.Optimizer | None:
    """The optimizer inside it, if `method` is of a wrapper of _ADDS_NOTHING."""
    attribute = _ADDS_NOTHING.get(method.__module__)
    inner = getattr(optimizer, attribute, None) if attribute else None
    return inner if isinstance(inner, torch.optim.Optimizer) else None


def _is_replicated(key: str, kind: Kind, value: Any, declared: Declarations) -> bool:
    if key in declared.replicated:
        return True
    if key in declared.per_rank:
        return False
    # A data loader's position or a plain counter may differ between ranks: one rank's for all would be silent damage.
    # Models and optimizers tell by their tensors what is shared, and schedulers follow the optimizer.
    return kind in (Kind.MODULE, Kind.OPTIMIZER) or isinstance(value, LRScheduler)


class ModuleTensor(NamedTuple):
    """One parameter or buffer under one of its names, which are the user's: without `module.` of DDP or `_orig_mod.` of
    torch.compile, wherever in the module they stand. The module's own state_dict() is not called, because its hooks and
    views are made for other formats."""

    fqn: str
    tensor: torch.Tensor
    is_buffer: bool

    def held(self, *, replicated: bool, guarded: bool = False) -> Held:
        """Buffers come from rank 0, as in DDP; frozen parameters never share a pack with trained ones."""
        if self.is_buffer:
            return Held(replicated, pack="buffer", owner=0 if replicated else None, guarded=guarded)
        return Held(replicated, pack="trainable" if self.tensor.requires_grad else "frozen", guarded=guarded)


def reshard_modules(key: str, module: torch.nn.Module) -> None:
    """Reshards every fully_shard module. Changes no value.

    After an evaluation forward the root is left unsharded: its parameters are then not the optimizer's objects.
    Raises UnsupportedStateError for FSDP1.
    """
    for name, part in module.named_modules():
        if isinstance(part, FullyShardedDataParallel):
            raise UnsupportedStateError(f"{key}/{name}", "it is wrapped by FullyShardedDataParallel", "use fully_shard")
        if isinstance(part, FSDPModule):
            part.reshard()


def module_tensors(key: str, module: torch.nn.Module) -> Iterator[ModuleTensor]:
    """Parameters and persistent buffers in definition order, a shared one under each of its names.

    Raises UnsupportedStateError for modules that write their state in a form of their own.
    """
    for prefix, part in _parts("", module):
        if type(part)._save_to_state_dict is not torch.nn.Module._save_to_state_dict:
            raise UnsupportedStateError(
                f"{key}/{prefix.removesuffix('.')}",
                f"{type(part).__qualname__} writes its state in a form of its own",
                "give its state_dict() through an object with state_dict() and load_state_dict()",
            )
        for name, parameter in part._parameters.items():
            if parameter is not None:
                yield ModuleTensor(prefix + name, parameter, is_buffer=False)
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield ModuleTensor(prefix + name, buffer, is_buffer=True)


log = logging.getLogger("holdfast")

_LEAVES_OUT_ONLY = ("lightning.fabric.", "lightning_fabric.", "torch.", "torchmetrics.", "torchtitan.")
"""The packages whose modules have a state_dict() of their own that adds nothing to parameters and buffers."""


def _check_own_form(component: Component, prefix: str, part: torch.nn.Module) -> None:
    """Of a part of a module about to be saved. Raises UnsupportedStateError for a persistent metric of torchmetrics,
    whose state is neither parameter nor buffer. Warns once of each other class with a state_dict() of its own: most of
    them only leave something out or rename it, but what they add is not saved."""
    own = type(part).state_dict
    if own is torch.nn.Module.state_dict:
        return
    if own.__module__ == "torchmetrics.metric" and any(getattr(part, "_persistent", {}).values()):
        raise UnsupportedStateError(
            f"{component.key}/{prefix}".rstrip("./"),
            f"{type(part).__qualname__} is a persistent metric, whose state is neither parameter nor buffer",
            "call its persistent(False), and give its state_dict() through an object with state_dict() and "
            "load_state_dict()",
        )
    if component.rank == 0 and not own.__module__.startswith(_LEAVES_OUT_ONLY):
        _warn_of_own_form(type(part).__qualname__)


@cache
def _warn_of_own_form(kind: str) -> None:
    log.warning(
        "%s has a state_dict() of its own, which is not called: its parameters, buffers and get_extra_state() are "
        "saved. If it adds more, give that under a key of its own.",
        kind,
    )


def parameter_names(optimizer: torch.optim.Optimizer, known: Mapping[int, str]) -> list[list[str]]:
    """The name of each parameter of each group. `known` maps id(parameter) to the module's name for it.

    A parameter that no module of the state holds is named by its position.
    """
    return [
        [known.get(id(parameter), f"group{at}[{place}]") for place, parameter in enumerate(group["params"])]
        for at, group in enumerate(optimizer.param_groups)
    ]


def parameters_by_id(components: tuple[Component, ...]) -> dict[int, str]:
    """id(parameter) -> "component/fqn", over all modules of the state; the first name of a shared one counts.

    Reshards fully_shard modules first, because only then do optimizers hold the modules' parameters.
    """
    known: dict[int, str] = {}
    for component in components:
        if component.kind is Kind.MODULE:
            reshard_modules(component.key, component.target)
            for named in module_tensors(component.key, component.target):
                known.setdefault(id(named.tensor), f"{component.key}/{named.fqn}")
    _check_optimizers_follow(components, known)
    return known


def stepped_parameters(components: tuple[Component, ...]) -> frozenset[int]:
    """id() of the parameters that an optimizer of the state trains, and that nothing else changes. Not those that do
    not require gradients: such a copy of a network (MoCo's key encoder) is moved by the script, in an optimizer or
    not."""
    groups = [
        (steps_are_seen(component.target, group), group["params"])
        for component in components
        if component.kind is Kind.OPTIMIZER
        for group in component.target.param_groups
    ]
    stepped = {id(each) for seen, those in groups if seen for each in those if each.requires_grad}
    return frozenset(stepped.difference(id(each) for seen, those in groups if not seen for each in those))


def steps_are_seen(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether torch calls its hooks before a step on this group writes anything. A CUDA graph with a `capturable` step
    is replayed without a call, and a class that does not call Optimizer.__init__ has no hooks. The optimizer that it
    wraps may have them, but only known classes write nothing before they call that."""
    if getattr(type(optimizer).step, "hooked", False) is True:
        return not group.get("capturable")
    inner = _wrapped(optimizer, type(optimizer).step)
    return inner is not None and steps_are_seen(inner, group)


def state_may_come_late(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether the first use of its state can be made to wait: its step calls torch's hooks, and its state is a dict
    that no other optimizer within it reads. What has state on a device has stepped there: the step may be captured in a
    CUDA graph by now, which is replayed without a hook, and SGD needs no `capturable` for that."""
    own = vars(optimizer)
    return (
        getattr(type(optimizer).step, "hooked", False) is True
        and not group.get("capturable")
        and type(own.get("state")) in (dict, defaultdict)
        and not any(isinstance(key, torch.Tensor) and key.device.type != "cpu" for key in own["state"])
        and not any(isinstance(value, torch.optim.Optimizer) for value in own.values())
    )


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


@cache
def _warn_of_a_copy(key: str) -> None:
    log.warning(
        "%r holds what an optimizer's state_dict() has returned: a copy, which does not follow the optimizer, and "
        "which no restore gives back to it. Put the optimizer itself into the state.",
        key,
    )


def extra_states(component: Component) -> dict[str, Any]:
    """The extra state of each module that defines get_extra_state(), by the module's FQN. For a save: raises
    UnsupportedStateError, and warns, of what modules may add to it in a state_dict() of their own."""
    found = {}
    # One walk for both: training waits for it, and a large model has tens of thousands of modules.
    for prefix, part in _parts("", component.target):
        _check_own_form(component, prefix, part)
        if type(part).get_extra_state is not torch.nn.Module.get_extra_state:
            found[prefix.removesuffix(".")] = part.get_extra_state()
    return found


def set_extra_states(module: torch.nn.Module, states: dict[str, Any]) -> None:
    """Gives each extra state back to its module. Names without a module are left out."""
    for prefix, part in _parts("", module):
        if prefix.removesuffix(".") in states and type(part).set_extra_state is not torch.nn.Module.set_extra_state:
            part.set_extra_state(states[prefix.removesuffix(".")])


def _parts(prefix: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    module = unwrap(module)
    # Activation checkpointing wraps a block under this one name; without it FQNs are the block's own.
    inner = module._modules.get("_checkpoint_wrapped_module")
    if inner is not None:
        yield from _parts(prefix, inner)
        return
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _parts(f"{prefix}{name}.", child)


def capture_rng() -> Any:
    """The generators of python, numpy, torch's CPU and each CUDA device, as an encoded typed tree. Draws nothing.

    CUDA is asked only if this process uses it already, and then for every visible device: the states lie in host
    memory, so no device gets a context by it. Asked earlier, CUDA would begin in a process that has no need of it.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    return encode_tree(
        {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
            "torch": _to_bytes(torch.get_rng_state()),
            "cuda": [_to_bytes(torch.cuda.get_rng_state(device)) for device in devices],
        },
        path="rng",
    )


_RNG_FORM = {"python": tuple, "numpy": dict, "torch": bytes, "cuda": list}


def restore_rng(encoded: Any) -> bool:
    """Sets every generator back; call it last, because building the model, the loaders and their iterators draws
    numbers. Returns False if CUDA's are left, because another number of devices is visible than was: derive them.

    Raises TreeFormatError for a malformed tree, and StateMismatchError if a generator of this process does not take its
    state: an older checkpoint's would fare no better. Nothing has changed then.
    """
    states = decode_tree(encoded)
    if (
        type(states) is not dict
        or {name: type(state) for name, state in states.items()} != _RNG_FORM
        or any(type(state) is not bytes for state in states["cuda"])
    ):
        raise TreeFormatError("the saved random number generators are malformed")
    same_devices = not states["cuda"] or len(states["cuda"]) == torch.cuda.device_count()
    if states["cuda"] and same_devices:
        # torch keeps what is set before CUDA has begun, and a seed that was set earlier would then come after it.
        torch.cuda.init()  # type: ignore[no-untyped-call]
    before = capture_rng()
    try:
        _set(states if same_devices else states | {"cuda": []})
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        _set(decode_tree(before))
        raise StateMismatchError(
            "the state of the random number generators",
            f"a generator of this process does not take it ({type(error).__name__}: {error})",
            "run it with the python, torch and numpy that saved it, and on GPUs that work",
        ) from error
    return same_devices


def generators_alike(saved: Sequence[Any]) -> frozenset[str]:
    """The generators whose states were equal on all of several ranks. `saved`: capture_rng() of each rank. Such ranks
    draw the same numbers on purpose: as parts of one tensor-parallel layer, or to skip the same layers. Of CUDA's
    devices the order does not count, because each rank uses another one."""
    first, *others = map(_by_generator, saved)
    if not others:
        return frozenset()
    return frozenset(name for name, state in first.items() if state and all(each.get(name) == state for each in others))


def _by_generator(encoded: Any) -> dict[str, Any]:
    """Empty for a malformed tree."""
    match encoded:
        case {"dict": list(pairs)} if all(type(pair) is list and len(pair) == 2 for pair in pairs):
            states = {str(name): state for name, state in pairs}
            if isinstance(cuda := states.get("cuda"), list):
                states["cuda"] = sorted(cuda, key=canonical_bytes)
            return states
    return {}


def derive_rng(run: str, step: int, rank: int, alike: Collection[str] = ()) -> None:
    """Seeds every generator from (run, step, rank): for another world size, because no rank's state fits. `alike`:
    generators that get rank 0's seed on every rank.

    The same three values always give the same numbers; other ranks and steps give unrelated ones.
    """

    def digest(generator: str) -> bytes:
        return _derived(run, step, 0 if generator in alike else rank)

    random.seed(digest("python"))
    np.random.seed(np.frombuffer(digest("numpy"), dtype=np.uint32))
    torch.manual_seed(_torch_seed(digest("torch")))  # of all devices; CUDA's come next
    torch.cuda.manual_seed_all(_torch_seed(digest("cuda")))


def derive_cuda_rng(run: str, step: int, rank: int) -> None:
    """Seeds the generators of CUDA's devices alone, as derive_rng does: for another number of visible devices."""
    torch.cuda.manual_seed_all(_torch_seed(_derived(run, step, rank)))


def _derived(run: str, step: int, rank: int) -> bytes:
    return hashlib.sha256(f"holdfast-rng-1\n{run}\n{step}\n{rank}\n".encode()).digest()


def _torch_seed(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big")


def _set(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(_to_tensor(states["torch"]))
    for device, state in enumerate(states["cuda"]):
        torch.cuda.set_rng_state(_to_tensor(state), device)


def _to_bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _to_tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
