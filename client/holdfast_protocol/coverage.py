"""Whether a tensor's boxes are the whole tensor, each element once. Pure, and linear in the number of boxes.

A restore counts the bytes that its reads fill: it refuses a hole, and boxes that overlap. So no checkpoint is written
or believed that has either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from math import prod

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and shape, in elements."""

_FACES_PER_BOX = 64
"""Six dimensions that are all cut, in the worst way. A grid, however fine, needs four."""


def tiles(shape: tuple[int, ...], boxes: Iterable[Box]) -> bool:
    """Whether the boxes, which lie within the shape, cover it and do not overlap. The same box may come twice: several
    ranks stored it. False also for what is cut in so many dimensions that it would take long to tell.
    """
    filled = {box for box in boxes if prod(box[1])}
    if prod(shape) == 0:
        return True
    if sum(prod(size) for _, size in filled) != prod(shape):
        return False
    cut = [axis for axis, whole in enumerate(shape) if any(size[axis] != whole for _, size in filled)]
    if len(cut) == 1:  # as nearly every sharding does: end to end
        spans = sorted((offsets[cut[0]], size[cut[0]]) for offsets, size in filled)
        return all(begin + length == following for (begin, length), (following, _) in pairwise(spans))
    return _cancels(shape, filled, cut)


def _cancels(shape: tuple[int, ...], filled: set[Box], cut: list[int]) -> bool:
    """Whether the boxes' corners, taken with alternating signs, are those of the whole: only then is the sum of the
    boxes the whole. Dimension by dimension, as where two boxes meet their faces cancel at once.
    """
    faces: Counter[Box] = Counter(filled)
    faces[(0,) * len(shape), shape] -= 1
    for axis in cut:
        met: Counter[Box] = Counter()
        for (offsets, size), sign in faces.items():
            flat = (*size[:axis], shape[axis], *size[axis + 1 :])
            begin, end = offsets[axis], offsets[axis] + size[axis]
            met[(*offsets[:axis], begin, *offsets[axis + 1 :]), flat] += sign
            met[(*offsets[:axis], end, *offsets[axis + 1 :]), flat] -= sign
        faces = Counter({face: sign for face, sign in met.items() if sign})
        if len(faces) > _FACES_PER_BOX * len(filled):
            return False
    return not any(faces.values())
