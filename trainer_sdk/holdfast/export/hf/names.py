"""Which tensors of a checkpoint are the model's, and under which names its files have them. Pure.

Flow: contents -> **names** -> folder. A model that Holdfast has saved has the names of the user's module. Names that
other tools wrote, or before which a module of the user's own stands, may have more in front:

    _orig_mod  _fsdp_wrapped_module  _checkpoint_wrapped_module   taken away wherever they stand: only wrappers of torch
                                                                  are called so
    module.                                                       taken away if every name begins with it (DDP)
    anything else                                                 only if the user says it: `--prefix model.`
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.export.contents import Contents, Unit
from holdfast.state.capture import open_module
from holdfast.state.components import Kind
from holdfast.state.tree import decode_tree, tensor_refs
from holdfast_client.errors import ConfigurationError
from holdfast_protocol.index_documents import Layout
from holdfast_protocol.text import counted

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_DDP = "module."
_NAMES_SHOWN = 8


@dataclass(frozen=True)
class ModelTensors:
    component: str
    tensors: Mapping[str, str]
    """Name in the files -> the layout's, tied ones too, by name."""
    notes: tuple[str, ...]
    """What was done to the names, for the user."""

    def tied(self, layout: Layout) -> dict[str, str]:
        """Name -> the name of these that has its bytes: the one that the checkpoint stores, if it is among them."""
        stored = {tensor: name for name, tensor in self.tensors.items()}
        first: dict[str, str] = {}
        for name, tensor in self.tensors.items():
            kept = layout.tensors[tensor].alias_of or tensor
            first.setdefault(kept, stored.get(kept, name))
        kept_by = {name: first[layout.tensors[tensor].alias_of or tensor] for name, tensor in self.tensors.items()}
        return {name: kept for name, kept in kept_by.items() if kept != name}


def model_tensors(contents: Contents, *, only: Collection[str] = (), prefix: str | None = None) -> ModelTensors:
    """Raises ConfigurationError unless there is one model, with each name once."""
    component = _component(contents, only)
    found: dict[str, str] = {}
    notes: list[str] = []
    for name, tensor in _named(contents, component, prefix):
        if name in found:
            raise ConfigurationError(
                f"{component!r} is each rank's own, and more than one rank has {name!r:.200}, so they are no single "
                "model. --format safetensors gives each rank's."
            )
        found[name] = tensor
    if not found:
        raise ConfigurationError(f"{component!r} has no tensors, so it is no model.")
    found = _unwrapped(found, notes)
    if prefix is not None:
        found = _without_prefix(found, prefix, notes)
    return ModelTensors(component, {name: found[name] for name in sorted(found)}, tuple(notes))


def _component(contents: Contents, only: Collection[str]) -> str:
    kinds: dict[str, set[Kind | None]] = defaultdict(set)
    for unit in contents.units:
        kinds[unit.name.partition("@")[0]].add(unit.kind)
    known = ", ".join(sorted(kinds)) or "none"
    if len(set(only)) > 1:
        raise ConfigurationError("--format hf writes one model, and --only names several components. Name one.")
    if only:
        [asked] = set(only)
        if asked not in kinds:
            raise ConfigurationError(f"The checkpoint has no component {asked!r}. Its components are {known}.")
        if Kind.OPTIMIZER in kinds[asked]:
            raise ConfigurationError(f"{asked!r} is an optimizer, and --format hf writes a model.")
        return asked
    models = sorted(key for key, of in kinds.items() if of & {Kind.MODULE, Kind.DCP})
    if not models:
        raise ConfigurationError(
            f"The checkpoint has no model. Its components are {known}. If one of them has the weights, name it with "
            "--only, and say with --prefix what stands before their names."
        )
    if len(models) > 1:
        raise ConfigurationError(
            f"The checkpoint has {len(models)} models: {', '.join(models)}. Choose one of them with --only."
        )
    return models[0]


def _named(contents: Contents, component: str, prefix: str | None) -> Iterator[tuple[str, str]]:
    for unit in contents.units:
        if unit.name.partition("@")[0] != component:
            continue
        if unit.kind is Kind.DCP:
            yield from _of_dcp(unit, prefix)
            continue
        # What a module gave as extra state is no weight, and from_pretrained() has no place for it.
        extra: set[str] = set()
        if unit.kind is Kind.MODULE:
            tree, wrapped = open_module(unit.name, unit.tree)
            extra = {ref.name for ref in tensor_refs(tree)}
            if wrapped:
                raise ConfigurationError(
                    f"{min(wrapped)!r:.200} is a tensor subclass, of quantized weights for example, and --format hf "
                    "writes plain weights. --format torch writes the tensors inside."
                )
        yield from ((unit.key_of(tensor), tensor) for tensor in unit.tensors if tensor not in extra)


def _of_dcp(unit: Unit, prefix: str | None) -> Iterator[tuple[str, str]]:
    """The part `model` of what dcp.save() got, or all of it if it has no parts: `dcp.save(model.state_dict())`."""
    if prefix is not None:
        yield from ((tensor, tensor) for tensor in unit.tensors)
        return
    places = decode_tree(unit.tree["planner_data"])
    paths: dict[str, tuple[Any, ...]] = {
        tensor: places.get(tensor, (tensor,)) if isinstance(places, dict) else (tensor,) for tensor in unit.tensors
    }
    parts = sorted({str(path[0]) for path in paths.values() if len(path) > 1})
    if not parts:
        yield from ((tensor, tensor) for tensor in unit.tensors)
        return
    if "model" not in parts:
        raise ConfigurationError(
            f"A dcp.save() wrote this checkpoint, with the parts {', '.join(parts[:_NAMES_SHOWN])}. Say which is the "
            f"model: --prefix {parts[0]}."
        )
    for tensor, path in paths.items():
        if path[0] == "model" and len(path) > 1:
            yield ".".join(map(str, path[1:])), tensor


def _unwrapped(tensors: Mapping[str, str], notes: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    taken: set[str] = set()
    for name, tensor in tensors.items():
        parts = name.split(".")
        taken.update(_WRAPPERS.intersection(parts))
        bare = ".".join(part for part in parts if part not in _WRAPPERS)
        if found.setdefault(bare, tensor) != tensor:
            raise ConfigurationError(f"Without the names of wrappers two tensors would be called {bare!r:.200}.")
    while all(name.startswith(_DDP) for name in found):
        taken.add(_DDP.removesuffix("."))
        found = {name.removeprefix(_DDP): tensor for name, tensor in found.items()}
    if taken:
        notes.append(f"{', '.join(sorted(taken))}: of wrappers, so it is taken out of the tensors' names.")
    return found


def _without_prefix(tensors: Mapping[str, str], prefix: str, notes: list[str]) -> dict[str, str]:
    whole = prefix.rstrip(".") + "."
    found = {name.removeprefix(whole): tensor for name, tensor in tensors.items() if name.startswith(whole)}
    if not found:
        begins = sorted({name.partition(".")[0] + "." for name in tensors})
        raise ConfigurationError(f"No tensor's name begins with {whole!r}. They begin with {_some(begins)}.")
    if others := len(tensors) - len(found):
        notes.append(
            f"{counted(others, 'tensor')} without the prefix {whole!r} {'is' if others == 1 else 'are'} left out."
        )
    return found


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"


def common_prefix(names: Collection[str]) -> str | None:
    """`model.` if all names begin with it, and more follows."""
    firsts = {name.partition(".")[0] for name in names}
    return f"{next(iter(firsts))}." if len(firsts) == 1 and all("." in name for name in names) else None
