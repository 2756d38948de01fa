"""Where the bytes of a load arrive, by wanted name: in live tensors themselves, or in new ones. Between plan and apply.

Flow: plan_load -> **arrivals** -> fetch (fills the `rooms()`, hashing what comes) -> LoadPlan.apply takes the tensors.
Nobody may believe a byte in here before the fetch has returned.
"""

from collections.abc import Iterable, Mapping

import torch
from torch.autograd.graph import increment_version

from holdfast.layout.reshard import WantedPiece
from holdfast.layout.scatter import Room
from holdfast.state.memory import apart, bytes_of, fresh, takes_bytes
from holdfast.state.on_device import OnDevice
from holdfast.state.tensors import torch_dtype

_HOST = torch.device("cpu")


class Arrivals:
    """For one load. Making it with live tensors says that they change from now on."""

    def __init__(
        self,
        pieces: Iterable[WantedPiece],
        live: Mapping[str, torch.Tensor],
        devices: Mapping[str, torch.device] | None = None,
    ) -> None:
        """`live`: those wanted pieces that arrive in place, from `in_place`. `devices`: where the new tensor of a piece
        is to be; else on the host."""
        # Before the first byte, and not after the last: whoever looks at versions must see what failed as well.
        increment_version([tensor.detach() for tensor in live.values()])
        self._live = frozenset(live)
        self._tensors = {
            piece.name: live[piece.name]
            if piece.name in live
            else fresh(piece.shape, torch_dtype(piece.dtype), (devices or {}).get(piece.name, _HOST))
            for piece in pieces
        }

    @property
    def touch_live_tensors(self) -> bool:
        return bool(self._live)

    def rooms(self) -> dict[str, Room]:
        """The room for each piece. Let go of them when the bytes are there: they keep every tensor alive."""
        return {name: room_in(tensor) for name, tensor in self._tensors.items()}

    def is_in_place(self, name: str) -> bool:
        """The live tensor has it already."""
        return name in self._live

    def shared(self, name: str) -> torch.Tensor:
        """The piece, to copy from: contiguous and of the stored dtype."""
        return self._tensors[name]

    def own(self, name: str) -> torch.Tensor:
        """The same, to keep or to let go: nobody else gets it. Once per name."""
        return self._tensors.pop(name)

    def let_go(self) -> None:
        """Of all that nobody has taken: an error that is kept somewhere must not keep a second state alive."""
        self._tensors.clear()


def room_in(tensor: torch.Tensor) -> Room:
    """The memory of a contiguous tensor."""
    return bytes_of(tensor) if tensor.device.type == "cpu" else OnDevice(tensor)


def in_place(
    pieces: Mapping[str, WantedPiece], live: Mapping[str, torch.Tensor], others: Iterable[torch.Tensor] = ()
) -> dict[str, torch.Tensor]:
    """Those of `live` whose memory can take its piece as it is: contiguous, of the stored dtype, and not shared with
    another tensor of this load (`others`: live tensors that are written too, in another way)."""
    alone = apart([*live.values(), *others])
    return {
        name: tensor
        for name, tensor in live.items()
        if id(tensor) in alone and takes_bytes(tensor, pieces[name].shape, torch_dtype(pieces[name].dtype))
    }
