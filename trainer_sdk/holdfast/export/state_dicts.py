"""Units as the state_dicts that stock code loads. Pure. Flow: tensors -> **state_dicts** -> the formats.

model.load_state_dict(…) and optimizer.load_state_dict(…) take them unchanged.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from holdfast.dcp.metadata import nested
from holdfast.export.contents import Unit
from holdfast.state.capture import open_module
from holdfast.state.components import Kind
from holdfast.state.tree import decode_tree, tensor_refs
from holdfast.state.wrappers import WrappedTensor

Tensors = Mapping[str, torch.Tensor]
"""By the layout's names."""

_ATOMS = (type(None), bool, int, float, complex, str, bytearray, torch.Size, torch.dtype, torch.device)
_SEQUENCES = (list, tuple, set)
_MAPPINGS = (dict, OrderedDict, Counter)


def flat(unit: Unit, tensors: Tensors) -> dict[str, torch.Tensor]:
    """Every tensor of the unit, by its name within it."""
    return {unit.key_of(name): tensors[name] for name in unit.tensors}


def state_dict_of(unit: Unit, tensors: Tensors, *, parameters_by_name: bool) -> dict[str, Any]:
    """The component's own state_dict(), or the argument of dcp.save. If that has values that stock loaders cannot read
    without pickle: its tensors by name. An optimizer's parameters are numbered, as in torch, or named, as in
    torch.distributed: by component and name if two of its modules share a name.
    """
    if unit.kind is Kind.DCP:
        values = {fqn: decode_tree(value) for fqn, value in unit.tree["values"].items()}
        if not parameters_by_name:  # DCP reads any type back. Others read plain ones, and the tree has the rest.
            values = {fqn: plain for fqn, value in values.items() if is_plain(plain := _plain(value))}
        return nested({**flat(unit, tensors), **values}, decode_tree(unit.tree["planner_data"]))
    if unit.kind is Kind.MODULE:
        tree, _ = open_module(unit.name, unit.tree)
        extras = _plain(decode_tree(tree, resolve_tensor=lambda ref: tensors[ref.name])) or {}
        within = {ref.name for ref in tensor_refs(tree)}
        own = {unit.key_of(name): tensors[name] for name in unit.tensors if name not in within}
        return {**own, **{_extra_key(fqn): value for fqn, value in extras.items()}}
    if unit.kind is Kind.OPTIMIZER:
        return _optimizer(unit.tree, tensors, parameters_by_name)
    if unit.kind is not None:
        whole = _plain(decode_tree(unit.tree, resolve_tensor=lambda ref: tensors[ref.name]))
        if isinstance(whole, dict) and is_plain(whole):
            return whole
    return dict(flat(unit, tensors))


def _extra_key(fqn: str) -> str:
    return f"{fqn}._extra_state" if fqn else "_extra_state"


def _optimizer(tree: Any, tensors: Tensors, by_name: bool) -> dict[str, Any]:
    def decode(encoded: Any) -> Any:
        return _plain(decode_tree(encoded, resolve_tensor=lambda ref: tensors[ref.name]))

    names = [name for group in tree["params"] for name in group]
    within = [name.partition("/")[2] or name for name in names]
    named = within if len(set(within)) == len(names) else names
    keys = dict(zip(names, named if by_name else range(len(names)), strict=True))

    return {
        "state": {keys[name]: {slot: decode(value) for slot, value in slots} for name, slots in tree["slots"].items()},
        "param_groups": [
            {**decode(options), "params": [keys[name] for name in group]}
            for options, group in zip(tree["groups"], tree["params"], strict=True)
        ],
    }


def _plain(value: Any) -> Any:
    """numpy's scalars and arrays as Python's and torch's, because stock loaders refuse them without pickle; tensor
    subclasses as the tensors inside."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return torch.from_numpy(value.copy())
    if isinstance(value, WrappedTensor):  # its class may not be here
        return _plain(value.inner)
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _plain(item)) for key, item in value.items())
    return value


def is_plain(value: Any) -> bool:
    """Whether torch.load(weights_only=True) reads it back."""
    if type(value) in _MAPPINGS:
        return all(is_plain(key) and is_plain(item) for key, item in value.items())
    if type(value) in _SEQUENCES:
        return all(is_plain(item) for item in value)
    if type(value) is bytes:
        return bool(value)  # pickle writes b"" as a call of `bytes`, which that refuses
    return isinstance(value, torch.Tensor) or type(value) in _ATOMS
