"""Where the bytes of a load arrive, by wanted name: in live tensors in place, or in new ones like them.

Flow: plan_load -> **arrivals** -> fetch (fills the `rooms()` and hashes the bytes) -> LoadPlan.apply takes the tensors.
Planning a destination changes nothing, and fails on any misfit. The bytes are unproven until the fetch has returned;
destinations are filled after that. Bytes in a live tensor, or in a tensor that can be the new one, are not copied
again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from holdfast.errors import StateMismatchError, TreeFormatError
from holdfast.layout.reshard import Room, WantedPiece, row_major_strides
from holdfast.state.on_device import OnDevice
from holdfast.state.tensors import (
    TakenMemory,
    apart,
    box_at,
    bytes_of,
    dtensor_around,
    flat,
    fresh,
    is_row_major,
    local_box,
    mesh_copies,
    placements_beside,
    takes_bytes,
    torch_dtype,
)
from holdfast.state.tree import TensorRef
from holdfast_protocol.index_documents import Layout, TensorEntry

_HOST = torch.device("cpu")


class Arrivals:
    """The destinations of one load. If any is a live tensor, making this marks it as changed."""

    def __init__(
        self,
        pieces: Iterable[WantedPiece],
        live: Mapping[str, torch.Tensor],
        devices: Mapping[str, torch.device] | None = None,
    ) -> None:
        """`live`: the wanted pieces that arrive in place, from `in_place`. `devices`: the device of a piece's new
        tensor; default: the host."""
        # Before the first byte, not after the last: a reader of the versions must see failed loads too.
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
        """The room for each piece. Release them when the bytes are there: they keep every tensor alive."""
        return {name: room_in(tensor) for name, tensor in self._tensors.items()}

    def is_in_place(self, name: str) -> bool:
        """Whether the live tensor has it already."""
        return name in self._live

    def shared(self, name: str) -> torch.Tensor:
        """The piece, to copy from: contiguous and of the stored dtype."""
        return self._tensors[name]

    def own(self, name: str) -> torch.Tensor:
        """The piece, to keep or to release: no other caller gets it. Once per name."""
        return self._tensors.pop(name)

    def let_go(self) -> None:
        """Releases all tensors that were not taken: a kept error must not keep a second state alive."""
        self._tensors.clear()


def room_in(tensor: torch.Tensor) -> Room:
    """The memory of a contiguous tensor."""
    return bytes_of(tensor) if tensor.device.type == "cpu" else OnDevice(tensor)


def in_place(
    pieces: Mapping[str, WantedPiece], live: Mapping[str, torch.Tensor], others: Iterable[torch.Tensor] = ()
) -> dict[str, torch.Tensor]:
    """The members of `live` that can take their piece in place: contiguous, of the stored dtype, and memory shared with
    no other tensor of this load (`others`: live tensors that are written in another way)."""
    alone = apart([*live.values(), *others])
    return {
        name: tensor
        for name, tensor in live.items()
        if id(tensor) in alone and takes_bytes(tensor, pieces[name].shape, torch_dtype(pieces[name].dtype))
    }


Filler = Callable[[Arrivals], torch.Tensor]
"""Called after verification, once: writes and returns the tensor."""


class Wants:
    """The wanted pieces of one load, by name; one name may have several destinations."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.pieces: dict[str, WantedPiece] = {}
        self._uses: Counter[str] = Counter()
        self._live: list[tuple[str, torch.Tensor]] = []
        self._memory = TakenMemory()
        self._filled: set[int] = set()
        """The id() of each tensor that is filled in place."""
        self.checks: list[Callable[[Arrivals], None]] = []
        """To call once all has arrived, before the first filler: what only the values can tell is refused there."""
        self.parted: list[str] = []
        """Values that shared memory here with what else is filled, and get memory of their own."""
        self._devices: dict[str, torch.device] = {}
        self.needed_first: set[str] = set()
        """The names that a step of the load takes which is not late."""
        self._late: set[str] | None = None

    @contextmanager
    def late(self) -> Iterator[set[str]]:
        """The set gets the names that the block wants, for a step that may be late."""
        self._late = late = set[str]()
        try:
            yield late
        finally:
            self._late = None

    def arrivals(self, *, into_live: bool) -> Arrivals:
        """Room for all wanted pieces, once everything is planned. `into_live`: the bytes arrive in live tensors, which
        change before anything was verified, or in new ones on their final device. Without it they arrive on the
        host."""
        if not into_live:
            return Arrivals(self.pieces.values(), {})
        devices = {name: device for name, device in self._devices.items() if self._uses[name] == 1}
        alone = {name: tensor for name, tensor in self._live if self._uses[name] == 1}
        others = [tensor for name, tensor in self._live if self._uses[name] > 1]
        return Arrivals(self.pieces.values(), in_place(self.pieces, alone, others), devices)

    def entry(self, name: str) -> TensorEntry:
        """Raises TreeFormatError if the layout lacks the tensor."""
        entry = self.layout.tensors.get(name)
        if entry is None:
            raise TreeFormatError(f"the index refers to tensor {name[:200]!r}, which the layout does not have")
        return entry

    def may_fill(self, name: str, live: torch.Tensor) -> bool:
        """Whether filling `live` in place leaves whole what is filled in place so far: no memory is shared, or the two
        were saved tied."""
        local = _local(live)
        other = self._memory.taken_as(local)
        return self._are_tied(other, name) if other is not None else not self._memory.touches(local)

    def _are_tied(self, one: str, other: str) -> bool:
        return len({self.entry(name).alias_of or name for name in (one, other)}) == 1

    def into(self, name: str, live: torch.Tensor) -> Filler:
        """Fills `live` in place, casting if the dtypes differ. Raises StateMismatchError on another global shape.

        A check raises it if `live` was also planned under a name whose value is another."""
        entry = self.entry(name)
        if entry.shape != tuple(live.shape):
            raise StateMismatchError(
                name,
                f"its shape was {entry.shape} and is now {tuple(live.shape)}",
                "build it alike, or exclude it",
            )
        local = live
        if isinstance(live, DTensor):
            box = local_box(name, live)
            if box is None:
                return lambda arrivals: live
            local = box.local
            self._want(WantedPiece(name, entry.dtype, box.offsets, tuple(local.shape)))
        else:
            self._whole(name, entry)
        self._live.append((name, local))
        if (other := self._kept_to_compare(name, local)) is not None:
            self.checks.append(partial(_check_one_value, name, other, local.dtype))
            self.needed_first.update((name, other))
        self._memory.take(name, local)
        self._filled.add(id(live))

        def fill(arrivals: Arrivals) -> torch.Tensor:
            if not arrivals.is_in_place(name):
                _write(local, self._arrived(name, arrivals))
            return live

        return fill

    def shared_or(self, new: Filler, name: str, live: torch.Tensor) -> Filler:
        """`live`, which another component fills, if both were saved with one value; else what `new` makes of `name`."""
        local = _local(live)
        other = self._memory.taken_as(local)
        if other is None or self.entry(other).component == self.entry(name).component:
            return new
        self._kept_to_compare(name, local)
        return lambda arrivals: live if _are_equal(name, other, arrivals, local.dtype) else new(arrivals)

    def _kept_to_compare(self, name: str, local: torch.Tensor) -> str | None:
        """The first name under which this very view is filled, unless the two were saved tied."""
        other = self._memory.taken_as(local)
        if other is None or self._are_tied(other, name):
            return None
        self._uses[other] += 1
        if self._late is None:  # a late step may compare with what has come first
            self.needed_first.update((name, other))
        return other

    def new(self, name: str, device: torch.device) -> Filler:
        """A new plain tensor that holds the whole stored one."""
        self._whole(name, self.entry(name))
        self._devices[name] = device
        return lambda arrivals: self._arrived(name, arrivals).to(device)

    def like(self, name: str, model: torch.Tensor) -> Filler:
        """A new tensor placed as `model` is (device, sharding, strides), with the stored dtype."""
        dtype = torch_dtype(self.entry(name).dtype)
        if not isinstance(model, DTensor):
            self._whole(name, self.entry(name))
            self._devices[name] = model.device
            return lambda arrivals: _placed(self._arrived(name, arrivals), model)
        box = local_box(name, model)
        if box is None:
            return lambda arrivals: torch.empty_like(model, dtype=dtype, requires_grad=False)
        self._want(WantedPiece(name, self.entry(name).dtype, box.offsets, tuple(box.local.shape)))
        self._devices[name] = box.local.device

        def fill(arrivals: Arrivals) -> torch.Tensor:
            local = _placed(self._arrived(name, arrivals), box.local)
            return dtensor_around(local, model.device_mesh, model.placements, model.shape, model.stride())

        return fill

    def beside(self, name: str, parameter: DTensor) -> Filler:
        """A new DTensor on the mesh of `parameter`, whose optimizer keeps it in another shape: a mean over its rows,
        say. It is sharded where its dimensions are certainly the parameter's, else replicated."""
        entry = self.entry(name)
        placements, copies = placements_beside(entry.shape, parameter), mesh_copies(parameter)
        shape = (0,) if copies is None else box_at(name, entry.shape, placements, copies)[1]
        local = torch.empty(shape, dtype=torch_dtype(entry.dtype), device=_local(parameter).device)
        stride = row_major_strides(entry.shape, 1)
        return self.like(name, dtensor_around(local, parameter.device_mesh, placements, entry.shape, stride))

    def referred(self, ref: TensorRef, live: torch.Tensor | None) -> Filler:
        """The tensor of a tree's reference: `live`, in place, if it fits exactly and nothing else fills its memory;
        else a new one, like it or on its former device."""
        entry = self.entry(ref.name)
        if live is not None and fits(entry, live) and self.may_fill(ref.name, live):
            return self.into(ref.name, live)
        if live is not None and (fits(entry, live) or (isinstance(live, DTensor) and entry.shape == tuple(live.shape))):
            new = self.replaced(ref, live)
        else:
            new = _declared(self.new(ref.name, device_of(ref)), ref)
        if live is None or not fits(entry, live):
            return new
        # The very tensor, as in a list of the model's parameters, is more than a view of it, which may be replaced.
        if id(live) in self._filled:
            return self.shared_or(new, ref.name, live)
        other = self._memory.taken_as(_local(live))
        if other is None or self.entry(other).component != entry.component:  # else a tie would have been saved
            self.parted.append(ref.name)
        return new

    def replaced(self, ref: TensorRef, live: torch.Tensor) -> Filler:
        """A new tensor like `live`, for an owner that may keep it: a Parameter stays one, and what is trained is."""
        return _declared(self.like(ref.name, live), ref)

    def _whole(self, name: str, entry: TensorEntry) -> None:
        self._want(WantedPiece(name, entry.dtype, (0,) * len(entry.shape), entry.shape))

    def _want(self, piece: WantedPiece) -> None:
        first = self.pieces.setdefault(piece.name, piece)
        if first != piece:
            raise StateMismatchError(
                piece.name, "two places of the state want different parts of it", "shard both places alike"
            )
        self._uses[piece.name] += 1
        (self.needed_first if self._late is None else self._late).add(piece.name)

    def _arrived(self, name: str, arrivals: Arrivals) -> torch.Tensor:
        """The stored tensor, to be kept, changed or released: each place that wants it gets its own."""
        return arrivals.own(name) if self._uses[name] == 1 else arrivals.shared(name).clone()


def fits(entry: TensorEntry, live: torch.Tensor) -> bool:
    """Whether writing the stored tensor over `live` changes nothing but the values."""
    return entry.shape == tuple(live.shape) and torch_dtype(entry.dtype) == live.dtype and not live.is_meta


def _local(live: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return live.to_local() if isinstance(live, DTensor) else live


def _are_equal(name: str, other: str, arrivals: Arrivals, dtype: torch.dtype) -> bool:
    one, two = (flat(arrivals.shared(each).to(dtype)).view(torch.uint8).cpu() for each in (name, other))
    return torch.equal(one, two)


def _check_one_value(name: str, other: str, dtype: torch.dtype, arrivals: Arrivals) -> None:
    if not _are_equal(name, other, arrivals, dtype):
        raise StateMismatchError(
            name,
            f"it has one memory with {other!r} here, and the checkpoint has two values",
            "build the state as it was saved, or leave one of them out",
        )


def device_of(ref: TensorRef) -> torch.device:
    """The device type that it came from if this process has it (its current ordinal), else the host."""
    if ref.device == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _declared(filler: Filler, ref: TensorRef) -> Filler:
    def fill(arrivals: Arrivals) -> torch.Tensor:
        tensor = filler(arrivals)
        if ref.parameter:
            return torch.nn.Parameter(tensor, requires_grad=ref.requires_grad)
        return tensor.requires_grad_(ref.requires_grad)

    return fill


def _placed(arrived: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """`arrived` on the device and with the strides of `model`; `arrived` itself if it has both already."""
    wanted: torch.Tensor = torch.empty_like(model, dtype=arrived.dtype, device="meta", requires_grad=False)
    if is_row_major(wanted):
        return arrived.to(model.device)
    return _write(torch.empty_like(wanted, device=model.device), arrived)


def _write(live: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode() if live.is_inference() else torch.no_grad():
        if any(stride == 0 and size > 1 for stride, size in zip(live.stride(), live.shape, strict=True)):
            live.data = source.to(device=live.device, dtype=live.dtype, copy=True)  # expanded: elements share memory
        elif live.numel():
            live.copy_(source)
    return live
