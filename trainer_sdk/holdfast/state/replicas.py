"""Whether ranks share what they are taken to share. Beside save/saver.py, when the ranks agree on a layout.

Of what has one name on several ranks one copy is stored. Pipeline stages whose layers have the same names, and ranks
that never were given one state, would lose theirs without a word; so one element of each parameter is compared. And of
an optimizer that ranks share, rank 0 says which parameters it has: other stages could not be restored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from holdfast.layout.plan import LayoutError
from holdfast.state.capture import CapturedState
from holdfast.state.components import Kind
from holdfast.state.tensors import TensorPiece

Marks = Mapping[tuple[str, tuple[int, ...]], str]
"""By name and offset of the part, its middle element, exactly."""


class Shared(NamedTuple):
    """What one rank tells the others."""

    marks: Marks
    optimized: Mapping[str, Any]
    """By optimizer that the ranks share, the names of its parameters."""


def shared_by(captured: CapturedState) -> Shared:
    trees = captured.replicated_trees.items()
    return Shared(
        _marks_of(captured.pieces), {key: tree["params"] for key, (kind, tree) in trees if kind == Kind.OPTIMIZER}
    )


def _marks_of(pieces: Iterable[TensorPiece]) -> Marks:
    """Of this rank's parameters: one copy from each device and dtype. Buffers may differ: they are rank 0's by rule.
    torch cannot do much with numbers of one byte."""
    kinds: dict[tuple[torch.device, torch.dtype], dict[tuple[str, tuple[int, ...]], torch.Tensor]] = {}
    for spec, local in pieces:
        if spec.pack != "buffer" and local.is_floating_point() and local.element_size() > 1 and local.numel():
            middle = local[tuple(size // 2 for size in local.shape)]
            kinds.setdefault((local.device, local.dtype), {})[spec.name, spec.offsets] = middle
    return {
        key: value.hex()
        for middles in kinds.values()
        for key, value in zip(middles, torch.stack(list(middles.values())).double().tolist(), strict=True)
    }


def first_difference(marks: Sequence[Marks]) -> tuple[str, int, int] | None:
    """Of all ranks' marks, in rank order: a parameter, and two ranks that hold other values of it."""
    seen: dict[tuple[str, tuple[int, ...]], tuple[int, str]] = {}
    for rank, own in enumerate(marks):
        for key, value in own.items():
            first, known = seen.setdefault(key, (rank, value))
            if value != known:
                return key[0], first, rank
    return None


def check_optimizers(optimized: Sequence[Mapping[str, Any]]) -> None:
    """Of all ranks, in rank order. Raises LayoutError."""
    seen: dict[str, tuple[int, Any]] = {}
    for rank, own in enumerate(optimized):
        for key, names in own.items():
            first, known = seen.setdefault(key, (rank, names))
            if names != known:
                raise LayoutError(
                    f"component {key!r} optimizes other parameters on rank {rank} than on rank {first}; "
                    "pipeline stages and their optimizers belong in components that are declared per rank"
                )
