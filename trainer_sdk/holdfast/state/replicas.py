"""Whether ranks really share the tensors of one name. Used by save/saver.py, when the ranks agree on a layout.

A tensor with one name on several ranks is stored once. Pipeline stages whose layers have the same names, and ranks that
never got one state, would lose values silently; so one element of each parameter is compared. For a shared optimizer
rank 0 lists the parameters: those of other stages could not be restored. Nor could a component that rank 0 lacks.
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
"""(name, offset) of the part -> its middle element, exactly."""


class Shared(NamedTuple):
    """One rank's message to the others."""

    marks: Marks
    optimized: Mapping[str, Any]
    """By optimizer that the ranks share, the names of its parameters."""
    components: frozenset[str]
    """Those that the ranks share."""


def shared_by(captured: CapturedState) -> Shared:
    trees = captured.replicated_trees.items()
    return Shared(
        _marks_of(captured.pieces),
        {key: tree["params"] for key, (kind, tree) in trees if kind == Kind.OPTIMIZER},
        frozenset(captured.replicated_trees),
    )


def _marks_of(pieces: Iterable[TensorPiece]) -> Marks:
    """Marks of this rank's parameters: one copy from each device and dtype, converted on the host, because not every
    device has float64. Buffers may differ: rank 0's are stored by rule. Numbers of one byte are left out, because torch
    supports few operations on them."""
    kinds: dict[tuple[torch.device, torch.dtype], dict[tuple[str, tuple[int, ...]], torch.Tensor]] = {}
    for spec, local, _ in pieces:
        if spec.pack != "buffer" and local.is_floating_point() and local.element_size() > 1 and local.numel():
            middle = local[tuple(size // 2 for size in local.shape)]
            kinds.setdefault((local.device, local.dtype), {})[spec.name, spec.offsets] = middle
    return {
        key: value.hex()
        for middles in kinds.values()
        for key, value in zip(middles, torch.stack(list(middles.values())).cpu().double().tolist(), strict=True)
    }


def first_difference(marks: Sequence[Marks]) -> tuple[str, int, int] | None:
    """`marks` of all ranks, in rank order -> a parameter, and two ranks that hold different values of it; else None."""
    seen: dict[tuple[str, tuple[int, ...]], tuple[int, str]] = {}
    for rank, own in enumerate(marks):
        for key, value in own.items():
            first, known = seen.setdefault(key, (rank, value))
            if value != known:
                return key[0], first, rank
    return None


def check_optimizers(optimized: Sequence[Mapping[str, Any]]) -> None:
    """`optimized` of all ranks, in rank order. Raises LayoutError if they differ."""
    seen: dict[str, tuple[int, Any]] = {}
    for rank, own in enumerate(optimized):
        for key, names in own.items():
            first, known = seen.setdefault(key, (rank, names))
            if names != known:
                raise LayoutError(
                    f"component {key!r} optimizes other parameters on rank {rank} than on rank {first}; "
                    "pipeline stages and their optimizers belong in components that are declared per rank"
                )


def check_components(shared: Sequence[frozenset[str]]) -> None:
    """`components` of all ranks, in rank order. Raises LayoutError if rank 0 lacks one: its index alone has what is no
    tensor of them."""
    for rank, own in enumerate(shared):
        if lacking := sorted(own - shared[0]):
            raise LayoutError(
                f"rank {rank} shares component {lacking[0]!r}, and rank 0, which stores it for all, has none; "
                "declare it per rank, or give it on rank 0 as well"
            )
