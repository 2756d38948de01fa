"""Where the bytes of a load arrive, by wanted name: in live tensors themselves, or in new ones. Between plan and apply.

Flow: plan_load -> **arrivals** -> fetch (fills `memory()`, hashing what comes) -> LoadPlan.apply takes the tensors.
Nobody may believe a byte in here before the fetch has returned.
"""

from collections.abc import Iterable, Mapping

import torch
from torch.autograd.graph import increment_version

from holdfast.layout.reshard import WantedPiece
from holdfast.state.memory import apart, bytes_of, fresh, takes_bytes
from holdfast.state.tensors import torch_dtype


class Arrivals:
    """For one load. Making it with live tensors says that they change from now on."""

    def __init__(self, pieces: Iterable[WantedPiece], live: Mapping[str, torch.Tensor]) -> None:
        """`live`: those wanted pieces that arrive in place, from `in_place`."""
        # Before the first byte, and not after the last: whoever looks at versions must see what failed as well.
        increment_version([tensor.detach() for tensor in live.values()])
        self._live = frozenset(live)
        self._tensors = {
            piece.name: live[piece.name] if piece.name in live else fresh(piece.shape, torch_dtype(piece.dtype))
            for piece in pieces
        }

    @property
    def touch_live_tensors(self) -> bool:
        return bool(self._live)

    def memory(self) -> dict[str, memoryview]:
        """The room for each piece, row-major. Let go of it when the bytes are there: it keeps every tensor alive."""
        return {name: bytes_of(tensor) for name, tensor in self._tensors.items()}

    def is_in_place(self, name: str) -> bool:
        """The live tensor has it already."""
        return name in self._live

    def shared(self, name: str) -> torch.Tensor:
        """The piece, to copy from: contiguous, on the host, of the stored dtype."""
        return self._tensors[name]

    def own(self, name: str) -> torch.Tensor:
        """The same, to keep or to let go: nobody else gets it. Once per name."""
        return self._tensors.pop(name)


def in_place(
    pieces: Mapping[str, WantedPiece], live: Mapping[str, torch.Tensor], others: Iterable[torch.Tensor] = ()
) -> dict[str, torch.Tensor]:
    """Those of `live` whose memory can take its piece as it is: on the host, contiguous, of the stored dtype, and not
    shared with another tensor of this load (`others`: live tensors that are written too, in another way)."""
    alone = apart([*live.values(), *others])
    return {
        name: tensor
        for name, tensor in live.items()
        if id(tensor) in alone and takes_bytes(tensor, pieces[name].shape, torch_dtype(pieces[name].dtype))
    }
