"""Which of the staged pieces need not be copied again: those that the user has declared frozen, while they are.

A declaration is believed, and looked after. A piece is left as it is staged only while its tensor is at the same place
with the same version, and at each save one of them, in turn, is compared bit for bit. A piece that has changed all the
same is named in the log and copied at every save from then on.
"""

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from holdfast.layout.plan import LocalPlan
from holdfast.staging.bits import same_bits
from holdfast.state.tensors import TensorPiece

log = logging.getLogger("holdfast")


class _Guard(NamedTuple):
    """What cannot stay the same when a tensor is replaced or changed by an operation that autograd sees."""

    device: torch.device
    address: int
    strides: tuple[int, ...]
    is_conj: bool
    is_neg: bool
    version: int | None
    """None for tensors made in inference mode: they have no version, and are compared each time."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Guard":
        version = None if tensor.is_inference() else tensor._version
        return cls(tensor.device, tensor.data_ptr(), tensor.stride(), tensor.is_conj(), tensor.is_neg(), version)


class FrozenPieces:
    """Of one plan in one slab. `distrusted` names what has changed before; it outlives the plan."""

    def __init__(self, plan: LocalPlan, views: Mapping[str, torch.Tensor], distrusted: set[str]) -> None:
        self._views = views
        self._distrusted = distrusted
        declared = {spec.name for spec in plan.specs if spec.pack == "declared"}
        self._chunks = {
            piece.tensor: [segment.ordinal for segment in piece.segments]
            for piece in plan.shard.pieces
            if piece.tensor in declared
        }
        self._pieces: dict[int, list[str]] = defaultdict(list)
        for name, ordinals in self._chunks.items():
            for ordinal in ordinals:
                self._pieces[ordinal].append(name)
        self._guards: dict[str, _Guard] = {}
        self._turn = 0
        self.digests: dict[int, str] = {}
        """Of the chunks that hold, byte for byte, what they held when they were hashed."""

    def changed(self, stored: Sequence[TensorPiece]) -> list[TensorPiece]:
        """The pieces that must be copied. They are taken for not staged until `staged` says so."""
        if not self._chunks:
            return list(stored)
        in_turn = self._next_in_turn()
        changed = [piece for piece in stored if not self._is_staged(piece, look=piece.spec.name == in_turn)]
        for piece in changed:
            self._guards.pop(piece.spec.name, None)
            for ordinal in self._chunks.get(piece.spec.name, ()):
                self.digests.pop(ordinal, None)
        return changed

    def staged(self, copied: Sequence[TensorPiece]) -> None:
        """These were copied, to the end."""
        for piece in copied:
            if piece.spec.name in self._chunks and piece.spec.name not in self._distrusted:
                self._guards[piece.spec.name] = _Guard.of(piece.local)

    def remember(self, digests: Sequence[str]) -> None:
        """`digests` of what is staged, by ordinal."""
        for ordinal, names in self._pieces.items():
            if all(name in self._guards for name in names):
                self.digests[ordinal] = digests[ordinal]

    def forget(self) -> None:
        """The tensors were loaded anew: stage them all again. A running upload may go on reading what is staged."""
        self._guards.clear()

    def _next_in_turn(self) -> str:
        names = list(self._chunks)
        self._turn = (self._turn + 1) % len(names)
        return names[self._turn]

    def _is_staged(self, piece: TensorPiece, *, look: bool) -> bool:
        name = piece.spec.name
        guard, now = self._guards.get(name), _Guard.of(piece.local)
        if guard is None:
            return False
        if guard == now and now.version is not None and not look:
            return True
        # Another place or version alone is no harm: DDP writes its buffers at each step, with the same bits.
        if same_bits(self._views[name].reshape(-1).view(torch.uint8), piece.local):
            self._guards[name] = now
            return True
        self._distrusted.add(name)
        log.error(
            "%r is declared frozen, and its bytes are not what they were. It is staged at every save from now on; "
            "checkpoints from before this one may hold older bytes of it. Take it out of frozen=[…].",
            name,
        )
        return False
