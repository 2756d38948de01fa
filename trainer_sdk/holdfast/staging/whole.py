"""The whole shard staged at once: training goes on as soon as it is copied, however long the upload takes."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from holdfast.layout.plan import LocalPlan
from holdfast.staging.bits import Copier, bits_view, whole_copy
from holdfast.staging.frozen import FrozenPieces
from holdfast.staging.shard import StagedShard
from holdfast.staging.slab import Slab, on_page
from holdfast.state.tensors import TensorPiece, torch_dtype


@dataclass(frozen=True)
class WholeLayout:
    """A plan laid out over a slab: the views are made once and used by every save with that plan."""

    plan: LocalPlan
    slab: Slab
    starts: tuple[int, ...]
    views: Mapping[str, torch.Tensor]
    frozen: FrozenPieces

    @classmethod
    def over(cls, slab: Slab, plan: LocalPlan, distrusted: set[str]) -> Self:
        """The slab must be large enough, and zero where no tensor lies."""
        starts, _ = chunk_starts(plan)
        specs = {spec.name: spec for spec in plan.specs}
        views = {}
        for piece in plan.shard.pieces:
            spec = specs[piece.tensor]
            start = starts[piece.segments[0].ordinal] + piece.segments[0].offset
            views[piece.tensor] = bits_view(
                slab.tensor[start : start + spec.bytes], torch_dtype(spec.dtype), spec.shape
            )
        return cls(plan, slab, starts, views, FrozenPieces(plan, views, distrusted))

    def fill(self, copier: Copier, stored: Sequence[TensorPiece], meanwhile: Callable[[], object]) -> None:
        """Returns when everything is copied."""
        changed = self.frozen.changed(stored)
        copying = copier.start(whole_copy(self.views[piece.spec.name], piece.local) for piece in changed)
        try:
            meanwhile()
        finally:
            copying.wait()  # nothing else may use the slab before
        self.frozen.staged(changed)


class WholeShard(StagedShard):
    """Copied already: nothing here waits."""

    def __init__(self, layout: WholeLayout, give_back: Callable[[], None]) -> None:
        super().__init__(layout.plan)
        self._layout: WholeLayout | None = layout
        self._give_back = give_back

    @property
    def can_repeat(self) -> bool:
        return True

    def chunk(self, ordinal: int, stop: threading.Event | None = None) -> memoryview:
        if self._layout is None:
            raise RuntimeError("this save was released: its slab may hold another one by now")
        start = self._layout.starts[ordinal]
        return self._layout.slab.view[start : start + self.plan.shard.chunks[ordinal]].toreadonly()

    def digest(self, ordinal: int) -> str | None:
        return None if self._layout is None else self._layout.frozen.digests.get(ordinal)

    def hashed(self, digests: Sequence[str]) -> None:
        if self._layout is not None:
            self._layout.frozen.remember(digests)

    def done_with(self, ordinal: int) -> None:
        """Nothing to do: the slab is given back as a whole."""

    def give_up(self) -> None:
        """Nothing to do: training does not wait."""

    def release(self) -> None:
        layout, self._layout = self._layout, None
        if layout is not None:
            self._give_back()


def chunk_starts(plan: LocalPlan) -> tuple[tuple[int, ...], int]:
    """Where each chunk begins in a slab that holds them all, and the bytes of that slab."""
    # Chunks begin on a page, except where one goes on with the tensor of the chunk before: that is one copy.
    going_on = {segment.ordinal for piece in plan.shard.pieces for segment in piece.segments[1:]}
    starts, end = [], 0
    for ordinal, size in enumerate(plan.shard.chunks):
        start = end if ordinal in going_on else on_page(end)
        starts.append(start)
        end = start + size
    return tuple(starts), end
