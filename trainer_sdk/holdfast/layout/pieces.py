"""What the planner plans: a piece is the box of a tensor that one rank holds. Pure, no torch.

Flow: state/tensors.py describes each tensor as a PieceSpec; plan.py decides which rank stores it, and in which chunk.
"""

from math import prod
from typing import Literal, NamedTuple

from holdfast_protocol.index_documents import ITEM_BYTES

PackGroup = Literal["declared", "frozen", "trainable", "buffer"]
"""`declared`: the user says that it does not change. `frozen`: a parameter that asks for no gradient, which it may."""


class LayoutError(ValueError):
    """The ranks' pieces do not make one checkpoint: a disagreement, a gap, or a duplicate name. Names the tensor."""


class PieceSpec(NamedTuple):
    """One rank's box of one tensor, without its bytes. `offsets` and `shape` count elements of the global tensor."""

    name: str
    component: str
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    replicated: bool
    """Every rank holds the whole tensor, so one of them stores it."""
    pack: PackGroup = "trainable"
    """Small tensors are packed only with their like: what does not change must not share a chunk with what does."""
    owner: int | None = None
    """The rank that stores it, when that is not up to the hash (buffers come from rank 0, as DDP does)."""
    replicas: tuple[tuple[int, int], ...] = ()
    """(coordinate, size) of each mesh dimension that holds copies of this box."""
    alias_of: str | None = None
    """The tensor that this one is tied to: nothing is stored here."""

    @property
    def bytes(self) -> int:
        """Bytes of this box."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


def whole(name: str, component: str, dtype: str, shape: tuple[int, ...], *, replicated: bool) -> PieceSpec:
    """The spec of a tensor that is not sharded."""
    return PieceSpec(name, component, dtype, shape, (0,) * len(shape), shape, replicated)
