"""A module's named tensors, live: parameters and persistent buffers by FQN, and extra state. Used both ways.

Names are the user's: no `module.` of DDP, no `_orig_mod.` of torch.compile, wherever in the module they are. The
module's own state_dict() is not called: hooks and views of it are made for other formats.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from holdfast.state.components import unwrap
from holdfast.state.errors import UnsupportedStateError
from holdfast.state.tensors import Held


class ModuleTensor(NamedTuple):
    """One parameter or buffer under one of its names."""

    fqn: str
    tensor: torch.Tensor
    is_buffer: bool

    def held(self, *, replicated: bool) -> Held:
        """Buffers come from rank 0, as DDP does; frozen parameters never share a pack with trained ones."""
        if self.is_buffer:
            return Held(replicated, pack="buffer", owner=0 if replicated else None)
        return Held(replicated, pack="trainable" if self.tensor.requires_grad else "frozen")


def reshard_modules(key: str, module: torch.nn.Module) -> None:
    """Put every fully_shard module back to its sharded parameters. Changes no value.

    After an evaluation forward the root is left unsharded, and its parameters are other objects than the optimizer's.
    Raises UnsupportedStateError for FSDP1.
    """
    for name, part in module.named_modules():
        if isinstance(part, FullyShardedDataParallel):
            raise UnsupportedStateError(f"{key}/{name}", "it is wrapped by FullyShardedDataParallel", "use fully_shard")
        if isinstance(part, FSDPModule):
            part.reshard()


def module_tensors(key: str, module: torch.nn.Module) -> Iterator[ModuleTensor]:
    """Parameters and persistent buffers in definition order, a shared one under each of its names.

    Raises UnsupportedStateError for modules that write a state of their own making.
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


def extra_states(module: torch.nn.Module) -> dict[str, Any]:
    """What modules that define get_extra_state() keep beside their tensors, by the module's FQN."""
    return {
        prefix.removesuffix("."): part.get_extra_state()
        for prefix, part in _parts("", module)
        if type(part).get_extra_state is not torch.nn.Module.get_extra_state
    }


def set_extra_states(module: torch.nn.Module, states: dict[str, Any]) -> None:
    """Hand each extra state back to the module that gave it. Names without a module are left out."""
    for prefix, part in _parts("", module):
        if prefix.removesuffix(".") in states and type(part).set_extra_state is not torch.nn.Module.set_extra_state:
            part.set_extra_state(states[prefix.removesuffix(".")])


def _parts(prefix: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    module = unwrap(module)
    # Activation checkpointing wraps a block under this one name; FQNs are what they were without it.
    inner = module._modules.get("_checkpoint_wrapped_module")
    if inner is not None:
        yield from _parts(prefix, inner)
        return
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _parts(f"{prefix}{name}.", child)
