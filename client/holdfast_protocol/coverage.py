"""Whether a layout's pieces cover every element of every tensor. Pure.

A restore finds a hole only when it wants that very tensor; a drill asks for all. Shards cut a tensor into boxes,
which may overlap where ranks hold the same; so the box grid is looked at, cell by cell, unless volumes already tell.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import product
from math import prod

from holdfast_protocol.index_documents import Layout

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and shape, in elements."""


def uncovered(layout: Layout) -> list[str]:
    """The names of the tensors of which an element is in no piece, sorted. A tied tensor is where its target is."""
    boxes: dict[str, set[Box]] = defaultdict(set)
    for shard in layout.shards:
        for piece in shard.pieces:
            boxes[piece.tensor].add((piece.offsets, piece.shape))
    return sorted(
        name
        for name, entry in layout.tensors.items()
        if entry.alias_of is None and not covers(entry.shape, boxes.get(name, set()))
    )


def covers(shape: tuple[int, ...], boxes: Iterable[Box]) -> bool:
    """Whether the boxes, which lie within the shape, cover all of it."""
    filled = {box for box in boxes if prod(box[1])}
    if prod(shape) == 0:
        return True
    if sum(prod(size) for _, size in filled) < prod(shape):
        return False
    if any(size == shape for _, size in filled):
        return True
    cuts = [
        sorted({0, length, *(o[axis] for o, _ in filled), *(o[axis] + s[axis] for o, s in filled)})
        for axis, length in enumerate(shape)
    ]
    places = [{cut: place for place, cut in enumerate(axis)} for axis in cuts]
    cells: set[tuple[int, ...]] = set()
    for offsets, size in filled:
        ranges = [
            range(places[axis][offsets[axis]], places[axis][offsets[axis] + size[axis]]) for axis in range(len(shape))
        ]
        cells.update(product(*ranges))
    return len(cells) == prod(len(axis) - 1 for axis in cuts)
