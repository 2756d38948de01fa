"""Tensor subclasses around plain tensors: quantized weights, 8-bit states of optimizers, weights cast to float8.

`__tensor_flatten__` gives the tensors inside, which are stored as tensors, and metadata for the typed tree. Nothing is
pickled or imported. The tree has the name of the class, and only classes of torch's own allow list are made again:
`torch.serialization.add_safe_globals()`, where libraries enter theirs.

Around such a tensor a DTensor has other tensors inside on each shard, and they are not parts of one: a block of a
quantized tensor has its own scale. Each is stored as one row of a tensor with a row per shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from math import prod
from typing import Any, NamedTuple, NoReturn

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.serialization import get_safe_globals
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, is_traceable_wrapper_subclass_type

from holdfast.errors import StateMismatchError, TreeFormatError, UnsupportedStateError
from holdfast.layout.reshard import row_major_strides
from holdfast.state.tensors import dtensor_around


class Whole(NamedTuple):
    """The DTensor around a wrapper: its size and strides, and per mesh dimension the sharded one or None."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dims: tuple[int | None, ...]


class WrappedTensor(NamedTuple):
    """A wrapper, taken apart."""

    kind: str
    """Its class: an entry of torch's allow list."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    whole: Whole | None
    metadata: Any
    """As `__tensor_flatten__` told it, or encoded."""
    requires_grad: bool
    parameter: bool
    inner: Mapping[str, Any]
    """Attribute -> the tensor there. In a DTensor: a DTensor with a row per shard."""

    @property
    def frame(self) -> tuple[object, ...]:
        """All that must be equal for its tensors to be filled in place."""
        return self.kind, self.size, self.stride, self.whole, self.metadata, sorted(self.inner)


def take_apart(path: str, tensor: torch.Tensor) -> WrappedTensor | None:
    """None for any other tensor. Raises UnsupportedStateError for a wrapper that could not be made again."""
    outer = tensor if isinstance(tensor, DTensor) else None
    local: Any = tensor
    if outer is not None:
        with torch.no_grad():
            local = outer.to_local()
    if not is_traceable_wrapper_subclass(local) or getattr(local, "is_nested", False):
        return None
    name = _allowed_name(type(local))
    if name is None:
        raise UnsupportedStateError(path, *_not_allowed(type(local)))
    attributes, metadata = local.__tensor_flatten__()
    whole = None if outer is None else _whole(path, outer)
    inner = {each: getattr(local, each) for each in attributes}
    if outer is not None:
        inner = {each: _row(value, outer) for each, value in inner.items()}
    return WrappedTensor(
        name,
        tuple(local.shape),
        tuple(local.stride()),
        whole,
        metadata,
        tensor.requires_grad and tensor.is_leaf,
        isinstance(tensor, torch.nn.Parameter),
        inner,
    )


def put_together(taken: WrappedTensor) -> torch.Tensor:
    """The inverse, around the tensors of `inner`. `metadata`: as `__tensor_flatten__` told it."""
    kind: Any = known_wrapper(taken.kind)
    whole, inner = taken.whole, dict(taken.inner)
    mesh = None
    if whole is not None:
        mesh = next(iter(inner.values())).device_mesh
        inner = {name: value.to_local().squeeze(0) for name, value in inner.items()}
    made: torch.Tensor = kind.__tensor_unflatten__(inner, taken.metadata, torch.Size(taken.size), taken.stride)
    if whole is not None and mesh is not None:
        placements = [Replicate() if dim is None else Shard(dim) for dim in whole.dims]
        made = dtensor_around(made, mesh, placements, whole.size, whole.stride)
    if taken.parameter:
        return torch.nn.Parameter(made, requires_grad=taken.requires_grad)
    return made.requires_grad_() if taken.requires_grad else made


def leaves(path: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensor itself at its path, or those inside at theirs."""
    taken = take_apart(path, tensor)
    if taken is None:
        yield path, tensor
        return
    for name, inner in taken.inner.items():
        yield from leaves(inner_path(path, name), inner)


def inner_path(path: str, attribute: str) -> str:
    return f"{path}:{attribute}"


def outer_paths(path: str) -> Iterator[str]:
    """The path itself, and those of the tensors that it may be inside of."""
    while path:
        yield path
        path = path.rpartition(":")[0]


def row_beside(path: str, shape: tuple[int, ...], dtype: torch.dtype, parameter: DTensor) -> DTensor:
    """An empty tensor with a row for each shard of `parameter`, of which this rank has its own. Raises
    StateMismatchError if another number of shards was saved."""
    empty = _row(torch.empty(shape[1:], dtype=dtype, device=parameter.device), parameter)
    if empty.shape != shape:
        refuse_other_shards(path)
    return empty


def refuse_other_shards(path: str) -> NoReturn:
    raise StateMismatchError(
        path,
        "each shard was saved as a tensor subclass of its own, and there were more or fewer shards",
        "restore on as many ranks as saved it",
    )


def _row(inner: torch.Tensor, outer: DTensor) -> DTensor:
    placements: list[Placement] = [Shard(0) if isinstance(each, Shard) else Replicate() for each in outer.placements]
    mesh = outer.device_mesh
    rows = prod(size for size, each in zip(mesh.shape, placements, strict=True) if isinstance(each, Shard))
    shape = (rows, *inner.shape)
    # Not a copy on another device: a restore fills it in place.
    return dtensor_around(inner.detach().unsqueeze(0), mesh, placements, shape, row_major_strides(shape, 1))


def _whole(path: str, outer: DTensor) -> Whole:
    parts = dict.fromkeys(range(outer.ndim), 1)
    for size, placement in zip(outer.device_mesh.shape, outer.placements, strict=True):
        if type(placement) is Shard:
            parts[placement.dim] *= size
        elif not isinstance(placement, Replicate):
            raise UnsupportedStateError(
                path, f"its DTensor placement is {placement}, around a tensor subclass", "shard it with plain Shard"
            )
    if any(size % parts[dim] for dim, size in enumerate(outer.shape)):
        raise UnsupportedStateError(
            path,
            f"its shards are of different sizes, around a tensor subclass ({tuple(outer.shape)})",
            "shard a dimension that all ranks share evenly",
        )
    dims = tuple(each.dim if isinstance(each, Shard) else None for each in outer.placements)
    return Whole(tuple(outer.shape), tuple(outer.stride()), dims)


def fields_of(value: Any, path: str) -> tuple[str, Any] | None:
    """For an enum's member, a dataclass or a named tuple in metadata: the name of its class, and its content as text or
    a dict. None for any other value. Raises UnsupportedStateError if its class is not on torch's allow list, and for
    flags that the class has no one name for."""
    kind: Any = type(value)
    if isinstance(value, Enum):
        content: Any = value.name
        if kind.__members__.get(content) is not value:
            raise UnsupportedStateError(
                path, f"it is, or has in its metadata, {value!r}, and no member of its class is that", "name it there"
            )
    elif is_dataclass(value):
        content = {each.name: getattr(value, each.name) for each in fields(value)}
    elif isinstance(value, tuple) and hasattr(kind, "_fields"):
        content = dict(zip(kind._fields, value, strict=True))
    else:
        return None
    name = _allowed_name(kind)
    if name is None:
        raise UnsupportedStateError(path, *_not_allowed(kind))
    return name, content


def of_fields(name: str, content: Any) -> Any:
    """The inverse. No code of the class runs, except a named tuple's `__new__`. Raises StateMismatchError for a class
    that this process does not know, and ValueError, TypeError or KeyError for content that is not its."""
    of_list = known_class(name)
    kind: Any = of_list
    if issubclass(kind, Enum):
        return kind[content]
    if is_dataclass(kind):
        if {each.name for each in fields(kind)} != content.keys():
            raise ValueError(f"a {name[:200]} has other fields")
        made: Any = object.__new__(of_list)
        for field, value in content.items():
            object.__setattr__(made, field, value)
        return made
    if issubclass(kind, tuple):
        return kind(**content)
    raise TypeError(f"{name[:200]} is no enum, dataclass or named tuple")


def known_wrapper(name: str) -> type:
    """Raises as known_class, and TreeFormatError for a class of no such tensor."""
    kind = known_class(name)
    if not is_traceable_wrapper_subclass_type(kind):
        raise TreeFormatError(f"{name[:200]!r} is no tensor subclass that can be made of the tensors inside it")
    return kind


def known_class(name: str) -> type:
    """Raises StateMismatchError unless it is on torch's allow list in this process."""
    for kind, given in _allowed():
        if (given or _name(kind)) == name:
            return kind
    raise StateMismatchError(
        name[:200],
        "the checkpoint has a value of this class, and it is not on torch's list of classes that may be loaded",
        "import the library that it is of, or call torch.serialization.add_safe_globals(), before the restore",
    )


def _allowed() -> Iterator[tuple[type, str | None]]:
    """Each class, and its name if the list has one for it."""
    for entry in get_safe_globals():
        kind, given = entry if isinstance(entry, tuple) else (entry, None)
        if isinstance(kind, type):
            yield kind, given


def _allowed_name(kind: type) -> str | None:
    """A save asks for each tensor while training waits, and libraries list a hundred classes."""
    return min((given or _name(kind) for known, given in _allowed() if known is kind), default=None)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _not_allowed(kind: type) -> tuple[str, str]:
    return (
        f"it is, or has in its metadata, a {_name(kind)}, which is not on torch's list of classes that may be loaded",
        f"call torch.serialization.add_safe_globals([{kind.__qualname__}]) first, or convert it to a plain tensor",
    )
