"""Values -> texts that are equal exactly when the values are. In the script: recorder -> **fingerprints**.

The state is walked by the same capture that a save uses, so the names are those of the checkpoint. Reads only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from holdfast.state.capture import capture
from holdfast.state.components import Declarations, Kind, capture_rng, path_of
from holdfast.state.tree import decode_tree

_DEPTH = 16
_TEXT = 80
"""Longer texts become digests."""


class _AmongThePieces:
    """Stands in a component's tree in place of a tensor."""


@torch.no_grad()
def tensor_digest(tensor: torch.Tensor) -> str:
    """Of dtype, shape and bits; for a DTensor, of this rank's part."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    host = local.detach().resolve_conj().resolve_neg().cpu().contiguous()
    hashed = hashlib.blake2b(f"{host.dtype}{tuple(host.shape)}".encode(), digest_size=16)
    hashed.update(host.reshape(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()


def flat(value: Any, path: str, depth: int = 0) -> Iterator[tuple[str, str]]:
    """(path, text) for each leaf of nested containers. A leaf without bits of its own counts by its type."""
    if isinstance(value, torch.Tensor):
        yield path, tensor_digest(value)
    elif isinstance(value, Mapping) and depth < _DEPTH:
        for key, item in value.items():
            yield from flat(item, f"{path}.{key}" if isinstance(key, str) else f"{path}[{key!r:.40}]", depth + 1)
    elif isinstance(value, list | tuple) and depth < _DEPTH:
        for at, item in enumerate(value):
            yield from flat(item, f"{path}[{at}]", depth + 1)
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield path, _digest(f"{value.dtype}{value.shape}".encode() + np.ascontiguousarray(value).tobytes())
    elif isinstance(value, set | frozenset):
        yield path, _short(repr(sorted(map(repr, value))))
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes | np.generic):
        yield path, _short(repr(value))
    else:
        # A repr may hold an address, which differs from launch to launch.
        yield path, type(value).__qualname__


def state_fingerprint(
    state: Mapping[str, Any], *, rank: int, world_size: int, declared: Declarations
) -> tuple[dict[str, str], list[str]]:
    """Every leaf of the state by its path, and which of them are tensors. Raises the errors of a save of it."""
    captured = capture(state, rank=rank, world_size=world_size, declared=declared)
    found: dict[str, str] = {}
    for piece in captured.pieces:
        if piece.spec.alias_of is None:
            found[path_of(piece.spec.name, piece.spec.component)] = tensor_digest(piece.local)
    tensors = list(found)
    for key, (kind, encoded) in {**captured.replicated_trees, **captured.trees}.items():
        found.update(_values(key, kind, encoded))
    return found, tensors


def rng_fingerprint() -> dict[str, str]:
    """The generators that Holdfast saves by itself."""
    states = decode_tree(capture_rng())
    found = {name: _digest(repr(states[name]).encode()) for name in ("python", "torch")}
    found["numpy"] = _digest("".join(f"{path}={text}" for path, text in flat(states["numpy"], "numpy")).encode())
    return found | {f"cuda:{at}": _digest(state) for at, state in enumerate(states["cuda"])}


def _values(key: str, kind: str, encoded: Any) -> Iterator[tuple[str, str]]:
    if kind == Kind.OPTIMIZER:
        for at, group in enumerate(encoded["groups"]):
            yield from _plain(group, f"{key}/param_groups[{at}]")
        for name, slots in encoded["slots"].items():
            for slot, value in slots:
                yield from _plain(value, f"{key}/{name}/{slot}")
    elif encoded is not None:
        yield from _plain(encoded, f"{key}/")


def _plain(encoded: Any, path: str) -> Iterator[tuple[str, str]]:
    value = decode_tree(encoded, resolve_tensor=lambda _: _AmongThePieces())
    for leaf, text in flat(value, path):
        if text != _AmongThePieces.__qualname__:
            yield leaf.replace("/.", "/", 1), text


def _short(text: str) -> str:
    return text if len(text) <= _TEXT else _digest(text.encode())


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
