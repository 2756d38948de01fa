"""The typed tree: every part of the state that is not a planned tensor, as JSON that gives back exact types.

Flow: capture encodes each component's state_dict with this; the index keeps it; apply decodes it and hands it whole to
load_state_dict. Nothing is pickled and nothing is imported by name, so a hostile index can build values only.

Form: null, booleans, text, integers below 2**53 and finite floats are themselves; a list is a JSON array; all else is
an object with one key, its tag (tree_tags.py): {"tuple": […]}, {"dict": [[key, value], …]}, {"tensor": {…}} and so on.
Shared sub-objects come back as equal copies (tied tensors stay tied, by their name); cycles are refused.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.state.errors import TreeFormatError, UnsupportedStateError
from holdfast.state.tree_tags import TAGS, TAGS_BY_TYPE, Tag

MAX_DEPTH = 100
"""Levels of nesting. Python's own recursion limit must never be what ends an encode or decode."""

MAX_PLAIN_INT = 2**53
"""Integers from here on are tagged: other JSON readers would round them."""


@dataclass(frozen=True)
class TensorRef:
    """A planned tensor's place in a tree. `device` is a type ("cpu", "cuda"): a rank's ordinal is its own affair."""

    name: str
    device: str = "cpu"
    requires_grad: bool = False
    parameter: bool = False


TensorNamer = Callable[[str, torch.Tensor], TensorRef]
"""(path in the tree, tensor) -> the reference that stands for it. Called once per occurrence."""

TensorResolver = Callable[[TensorRef], Any]


def encode_tree(value: Any, *, path: str = "", name_tensor: TensorNamer | None = None) -> Any:
    """`value` as plain JSON values. Does not change `value` and keeps no reference to its containers.

    `path` begins the key that messages name. Without `name_tensor` tensors are refused.
    Raises UnsupportedStateError with the path of the first thing that cannot be kept exactly.
    """
    return _Encoder(name_tensor).encode(value, path, 0)


def decode_tree(encoded: Any, *, resolve_tensor: TensorResolver | None = None) -> Any:
    """The inverse. Without `resolve_tensor` tensors come back as TensorRef. Raises TreeFormatError."""
    return _Decoder(resolve_tensor).decode(encoded, 0)


def tensor_refs(encoded: Any) -> list[TensorRef]:
    """Every tensor that an encoded tree refers to, in order, repeats included. Raises TreeFormatError."""
    found: list[TensorRef] = []
    decode_tree(encoded, resolve_tensor=found.append)
    return found


class _Encoder:
    def __init__(self, name_tensor: TensorNamer | None) -> None:
        self._name_tensor = name_tensor

    def encode(self, value: Any, path: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise UnsupportedStateError(
                path, f"it is nested more than {MAX_DEPTH} levels deep or contains itself", "flatten it"
            )
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is int and abs(value) < MAX_PLAIN_INT:
            return value
        if kind is float and math.isfinite(value):
            return value
        if kind is str and not any("\ud800" <= letter <= "\udfff" for letter in value):
            return value
        if kind is list:
            return [self.encode(item, f"{path}[{at}]", depth + 1) for at, item in enumerate(value)]
        if kind is TensorRef:
            return _encode_ref(value)
        if isinstance(value, torch.Tensor):
            return self._encode_tensor(value, path)
        tag = TAGS_BY_TYPE.get(kind)
        if tag is None:
            raise _refusal(value, path)
        return {tag.name: tag.encode(value, path, lambda child, step: self.encode(child, _join(path, step), depth + 1))}

    def _encode_tensor(self, value: torch.Tensor, path: str) -> Any:
        if self._name_tensor is None:
            raise UnsupportedStateError(path, "a tensor has no place here", "keep it as a value, not as a key")
        return _encode_ref(self._name_tensor(path, value))


class _Decoder:
    def __init__(self, resolve_tensor: TensorResolver | None) -> None:
        self._resolve = resolve_tensor

    def decode(self, encoded: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise TreeFormatError(f"a typed tree is nested more than {MAX_DEPTH} levels deep")
        if encoded is None or type(encoded) in (bool, int, float, str):
            return encoded
        if type(encoded) is list:
            return [self.decode(item, depth + 1) for item in encoded]
        if type(encoded) is not dict or len(encoded) != 1:
            raise TreeFormatError(f"a typed tree has a {type(encoded).__name__} that is not an object with one tag")
        [(name, payload)] = encoded.items()
        if name == "tensor":
            ref = _decode_ref(payload)
            return ref if self._resolve is None else self._resolve(ref)
        tag: Tag | None = TAGS.get(name)
        if tag is None:
            raise TreeFormatError(f"a typed tree has the unknown tag {name[:80]!r}; a newer holdfast may read it")
        try:
            return tag.decode(payload, lambda child: self.decode(child, depth + 1))
        except TreeFormatError:
            raise
        except Exception as error:  # whatever the bytes made a constructor raise, it is the index that is wrong
            raise TreeFormatError(f"a typed tree has a malformed {name!r}: {error}") from error


def _join(path: str, step: str) -> str:
    return path + (step.removeprefix(".") if path.endswith("/") else step)


def _encode_ref(ref: TensorRef) -> Any:
    return {"tensor": [ref.name, ref.device, ref.requires_grad, ref.parameter]}


def _decode_ref(payload: Any) -> TensorRef:
    if type(payload) is not list or [type(part) for part in payload] != [str, str, bool, bool]:
        raise TreeFormatError("a typed tree has a malformed tensor reference")
    return TensorRef(*payload)


def _refusal(value: Any, path: str) -> UnsupportedStateError:
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, tuple):
        remedy = "give a plain tuple or a dict: a named tuple's class cannot be kept without pickle"
    elif isinstance(value, torch.Generator):
        remedy = "give generator.get_state(), and set_state() it on restore"
    elif hasattr(value, "state_dict"):
        remedy = "give it a key of its own at the top of the state"
    elif callable(value):
        remedy = "leave functions and classes out, and set them up in code on every start"
    else:
        remedy = (
            "give plain values (numbers, text, bytes, lists, tuples, dicts, sets, numpy arrays, tensors), "
            "or an object with state_dict() and load_state_dict()"
        )
    return UnsupportedStateError(path, f"it is of type {name}", remedy)
