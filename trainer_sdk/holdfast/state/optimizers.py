"""An optimizer's state, read and written without ever calling step() or state_dict(): slots by parameter name.

torch's get_state_dict() steps an optimizer that has no state yet. Here the slots that exist are saved, and on load
exactly the slots of the index are there afterwards. Parameters are named by the modules in the state, so an optimizer
over several modules, and several optimizers, need nothing said.

Encoded: {"params": [[name, …] per group], "groups": [typed tree of the options per group],
          "slots": {name: [[slot, typed tree], …]}}
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.state.errors import TreeFormatError, UnsupportedStateError
from holdfast.state.sharding import mesh_copies
from holdfast.state.tensors import Held
from holdfast.state.tree import TensorRef, decode_tree, encode_tree

NameTensor = Callable[[str, torch.Tensor, Held], TensorRef]
"""(path, tensor, how it is held) -> its reference."""


def parameter_names(optimizer: torch.optim.Optimizer, known: Mapping[int, str]) -> list[list[str]]:
    """The name of each parameter of each group. `known` maps id(parameter) to the module's name for it.

    A parameter that no module of the state holds is named by its place.
    """
    return [
        [known.get(id(parameter), f"group{at}[{place}]") for place, parameter in enumerate(group["params"])]
        for at, group in enumerate(optimizer.param_groups)
    ]


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
        for parameter, name in zip(group["params"], group_names, strict=True):
            named.add(id(parameter))
            if parameter in optimizer.state:
                slots[name] = _encode_slots(f"{key}/{name}", parameter, optimizer.state[parameter], name_tensor)
    for owner in optimizer.state:
        if id(owner) not in named:
            raise UnsupportedStateError(
                key, f"it keeps state for {owner!r:.60}, which is in none of its param_groups", "remove that entry"
            )
    return {"params": names, "groups": groups, "slots": slots}


def open_optimizer(key: str, encoded: Any) -> tuple[list[list[str]], list[Any], dict[str, Any]]:
    """The names of the parameters and the encoded options per group, and the encoded slots by parameter.

    Raises TreeFormatError unless it has the form above. What is in the slots is checked when it is decoded.
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


def _are_pairs(value: Any) -> bool:
    return type(value) is list and all(type(pair) is list and len(pair) == 2 for pair in value)


def _encode_slots(
    path: str, parameter: torch.Tensor, state: Mapping[Any, Any], name_tensor: NameTensor
) -> list[list[Any]]:
    def name_slot(slot_path: str, tensor: torch.Tensor) -> TensorRef:
        return name_tensor(slot_path, tensor, _held_beside(slot_path, parameter, tensor))

    return [[slot, encode_tree(value, path=f"{path}/{slot}", name_tensor=name_slot)] for slot, value in state.items()]


def _held_beside(path: str, parameter: torch.Tensor, tensor: torch.Tensor) -> Held:
    if isinstance(parameter, DTensor) and not isinstance(tensor, DTensor):
        if tensor.ndim > 0:
            raise UnsupportedStateError(
                path,
                "it is a plain tensor beside a sharded parameter, and nothing says which part of the whole it is",
                "use an optimizer that keeps DTensors",
            )
        copies = mesh_copies(parameter)
        return Held(replicated=True, replicas=copies or ())
    return Held(replicated=True)
