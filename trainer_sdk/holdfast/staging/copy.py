"""Bits of tensors -> bits in a slab: the memory, which views go onto which, the copies, and the pieces that need none.
Bits, never values: NaN payloads survive.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from holdfast.layout.plan import LocalPlan
from holdfast.state.tensors import TensorPiece
from holdfast_client.agent.shared_memory import SharedMemory, container_room_bytes, gib
from holdfast_client.chunks.workers import WorkerThreads

log = logging.getLogger("holdfast")

PAGE_BYTES = 4096


class AddressTakenError(RuntimeError):
    """CUDA has locked this address for other memory."""


class Slab:
    """Page-aligned host memory; page-locked once it is to take a GPU's tensors. All access to it is in this class."""

    def __init__(self, capacity_bytes: int, *, shared: bool = False, memory: SharedMemory | None = None) -> None:
        """`shared`: a node agent can map it too. `memory`: that such an agent maps already. Raises MemoryError or
        OSError if the host has too little memory. Asks nothing of CUDA."""
        self.capacity_bytes = capacity_bytes
        size = max(capacity_bytes, PAGE_BYTES)
        self.shared = memory if memory is not None else _shared_memory(size) if shared else None
        self._memory = mmap.mmap(-1, size) if self.shared is None else self.shared.map
        self.tensor = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.view = memoryview(self._memory)
        self._locked_by: torch.device | None = None
        self._refused = False

    @property
    def may_be_read(self) -> bool:
        """A node agent that does not answer may still read the last save in it."""
        return self.shared is not None and self.shared.may_be_read

    @property
    def is_lock_refused(self) -> bool:
        """It cannot be page-locked, and copies into it take longer."""
        return self._refused

    def populate(self) -> None:
        """Has the system find memory for all of it now, in place of at the first copy. Changes no byte: copies into it
        may go on meanwhile. Does nothing where the system cannot (Linux before 5.14), or where the container's limit
        would be met: the save itself says so."""
        memory = self.tensor
        room = container_room_bytes()
        if room is not None and room < memory.numel():
            return
        libc = ctypes.CDLL(None, use_errno=True)  # releases the interpreter's lock, which mmap.madvise keeps
        for start in range(0, memory.numel(), _POPULATED_BYTES):
            size = min(_POPULATED_BYTES, memory.numel() - start)
            address = ctypes.c_void_p(memory.data_ptr() + start)
            is_released = self.tensor is not memory
            if is_released or libc.madvise(address, ctypes.c_size_t(size), _MADV_POPULATE_WRITE) != 0:
                return

    def lock_for(self, gpu: torch.device) -> None:
        """Page-locks it, once, so that the copy engine of `gpu`, and of every other GPU, writes to it by itself. Memory
        that cannot be locked is used as it is: copies into it take longer, and the log says so. Raises
        AddressTakenError for an address that CUDA still takes for other memory, because its copies would go there."""
        if self._locked_by is not None or self._refused:
            return
        with torch.cuda.device(gpu):  # CUDA makes a context on the current device, which may be another rank's
            error = runtime().cudaHostRegister(self.tensor.data_ptr(), self.tensor.numel(), _FOR_ALL_GPUS)
        code = int(getattr(error, "value", error))
        if code == 0:
            self._locked_by = gpu
            return
        _clear_error(gpu)
        if code == _ALREADY_LOCKED:
            raise AddressTakenError(
                "the staging memory is at an address that CUDA has locked for other memory (error 712). A library of "
                "the job has released memory without unlocking it; this save is lost, and the next one tries anew"
            )
        self._refused = True
        log.warning(
            "the staging memory cannot be page-locked (CUDA error %d), so each save holds training longer; "
            "raise the memlock limit",
            code,
        )

    def release(self) -> None:
        """Unlocks and releases it. The memory itself ends with its last reader."""
        gpu, self._locked_by = self._locked_by, None
        if gpu is not None:
            # Not checked: after an error of CUDA each of its calls returns or raises that error, and raised from the
            # end of the job it would hide the script's own.
            with suppress(RuntimeError), torch.cuda.device(gpu):
                runtime().cudaHostUnregister(self.tensor.data_ptr())
        self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.view = memoryview(b"")
        if self.shared is not None:
            self.shared.close()


_POPULATED_BYTES = 16 * 1024 * 1024
"""At once: a thread of the training that maps or unmaps memory waits for so much."""
_MADV_POPULATE_WRITE = 23
"""Of Linux; the mmap module does not name it."""


def _shared_memory(size_bytes: int) -> SharedMemory | None:
    """None if this system gives none that can be shared: saves then stay in this process."""
    room = container_room_bytes()
    if room is not None and room < size_bytes:
        log.warning(
            "this container's memory limit leaves %s, and staging takes %s: the system may kill this process. Raise "
            "the limit, or bound the staging with host_memory=",
            gib(room),
            gib(size_bytes),
        )
    try:
        return SharedMemory(size_bytes)
    except OSError as error:  # if the host has too little memory, the other way says so
        log.warning("saves are not handed to the agent of this node, because no memory can be shared: %s", error)
        return None


def on_page(position: int) -> int:
    """The start of the first page at or after `position`."""
    return -(-position // PAGE_BYTES) * PAGE_BYTES


_ALREADY_LOCKED = 712
"""cudaErrorHostMemoryAlreadyRegistered."""
_FOR_ALL_GPUS = 1
"""cudaHostRegisterPortable."""


def runtime() -> Any:
    """CUDA's runtime calls. Tests put theirs in its place."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _clear_error(gpu: torch.device) -> None:
    """CUDA tells an error once more after the next kernel, where it would be taken for the training's."""
    with suppress(RuntimeError):
        torch.zeros(1, device=gpu)


_PART_BYTES = 8 * 1024 * 1024
_ALONE_BYTES = 2 * _PART_BYTES
"""A smaller copy is over before a second thread would have begun."""


class Copy(NamedTuple):
    """`source` is copied onto `target`: integers of one width, of one shape; or any contiguous source in host memory,
    whose bytes are copied as they lie."""

    target: torch.Tensor
    source: torch.Tensor


class HostCopy:
    """Copies between contiguous tensors in host memory, in parts, on several threads. Each thread takes the next part.

    Not on torch's own threads: those wait for each other after each tensor, and on busy cores each of these waits costs
    a turn of the scheduler. Here no thread waits until all parts are taken."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._copies = copies  # keeps the memory that the parts point to
        self._parts = deque(
            (copy.target.data_ptr() + at, copy.source.data_ptr() + at, min(_PART_BYTES, copy.source.nbytes - at))
            for copy in copies
            for at in range(0, copy.source.nbytes, _PART_BYTES)
        )
        self._changed = threading.Condition()
        self._helping = 0

    def run(self, helpers: WorkerThreads | None) -> None:
        """Returns when every byte is copied. Helpers that come later find nothing to do and touch nothing. After an
        interrupt no helper goes on."""
        if helpers is not None and sum(size for *_, size in self._parts) >= _ALONE_BYTES:
            for _ in range(helpers.count - 1):
                helpers.submit(self._help)
        try:
            self._take_parts()
        finally:
            with self._changed:
                self._parts.clear()
                while self._helping:
                    self._changed.wait()
            self._copies = ()

    def _help(self) -> None:
        with self._changed:
            if not self._parts:
                return
            self._helping += 1
        self._take_parts()
        with self._changed:
            self._helping -= 1
            self._changed.notify_all()

    def _take_parts(self) -> None:
        while True:
            try:
                target, source, size = self._parts.popleft()
            except IndexError:
                return
            ctypes.memmove(target, source, size)  # releases the interpreter's lock


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COMPARED_BYTES = 64 * 1024 * 1024
"""A tensor is compared in parts of this size, because a nearly full device has room for that."""


class Copying:
    """Copies that were started. On a device they may still be running."""

    def __init__(self, events: list[torch.cuda.Event], copies: Sequence[Copy]) -> None:
        self._events = events
        # Some sources are temporary (a conjugate view is resolved). Freed now, their memory would be written to by the
        # next work of the training's stream, while the copies' stream still reads it.
        self._copies: Sequence[Copy] = copies
        self._lock = threading.Lock()

    @property
    def events(self) -> list[torch.cuda.Event]:
        """One for each device whose copies may still be running."""
        return list(self._events)

    def wait(self) -> None:
        """Returns when the last byte has arrived. Any thread may call it, as often as it likes. CUDA is not asked again
        after the first: training may then capture a graph, which another thread's question would invalidate."""
        with self._lock:
            while self._events:
                event = self._events[-1]
                with torch.cuda.device(event.device):  # this thread's own may be one that the process does not use
                    event.synchronize()
                self._events.pop()
                del event
            self._copies = ()


class Copier:
    """Starts copies from one thread: on CUDA on one stream per device, on the host at once."""

    def __init__(self, helpers: WorkerThreads | None = None) -> None:
        """`helpers` copy as well, as long as copies are left when they come."""
        self._helpers = helpers
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @torch.no_grad()
    def start(self, copies: Iterable[Copy]) -> Copying:
        """The sources must not change until `wait` has returned."""
        by_device: dict[torch.device, list[Copy]] = defaultdict(list)
        for copy in copies:
            by_device[copy.source.device].append(copy)
        # The host's copies are made at once: those of the GPUs run meanwhile.
        in_turn = sorted(by_device.items(), key=lambda each: each[0].type != "cuda")
        events = [event for device, those in in_turn for event in self._start(device, those)]
        return Copying(events, [copy for those in by_device.values() for copy in those])

    def _start(self, device: torch.device, copies: list[Copy]) -> list[torch.cuda.Event]:
        if device.type == "cpu":
            self.wait_for_pinned(copy.source for copy in copies)
            self.copy_on_host(copies)
            return []
        targets, sources = [copy.target for copy in copies], [copy.source for copy in copies]
        if device.type != "cuda":
            torch._foreach_copy_(targets, sources)
            return []
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))  # the work that training has queued comes first
        with torch.cuda.stream(stream):
            torch._foreach_copy_(targets, sources, non_blocking=True)
            arrived = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            arrived.record(stream)
        return [arrived]

    def wait_for_pinned(self, sources: Iterable[torch.Tensor]) -> None:
        """On the training thread, whose streams they are: training may have queued a GPU's copy into pinned sources,
        without waiting for that."""
        uses_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if uses_cuda and any(source.is_pinned() for source in sources):
            torch.cuda.current_stream().synchronize()

    @torch.no_grad()
    def copy_on_host(self, copies: Sequence[Copy]) -> None:
        """Returns when all is copied. All sources are in host memory."""
        HostCopy([copy for copy in copies if copy.source.is_contiguous()]).run(self._helpers)
        strided = [copy for copy in copies if not copy.source.is_contiguous()]
        if strided:
            torch._foreach_copy_([copy.target for copy in strided], [copy.source for copy in strided])


def whole_copy(target: torch.Tensor, tensor: torch.Tensor) -> Copy:
    """The copy of the whole tensor; `target` is a bits_view of its shape."""
    as_it_lies = tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    return Copy(target, tensor if as_it_lies else _as_bits(tensor))


def bits_view(flat: torch.Tensor, dtype: torch.dtype, shape: Iterable[int]) -> torch.Tensor:
    """Bytes in a slab as the target of a copy from a tensor of `dtype` and `shape`."""
    if dtype.is_complex:
        return flat.view(_BITS[dtype.itemsize // 2]).view(*shape, 2)
    return flat.view(_BITS[dtype.itemsize]).view(tuple(shape))


def range_copies(flat: torch.Tensor, tensor: torch.Tensor, start_byte: int) -> Iterator[Copy]:
    """Copies that fill `flat` with the tensor's logical bytes from `start_byte` on, both at elements' borders.

    It makes no more of a strided tensor contiguous than the copied range.
    """
    item = tensor.element_size()
    at = 0
    for box in boxes(tensor, start_byte // item, (start_byte + flat.numel()) // item):
        size = box.numel() * item
        yield Copy(bits_view(flat[at : at + size], box.dtype, box.shape), _as_bits(box))
        at += size


@torch.no_grad()
def same_bits(flat: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether `flat` holds exactly the tensor's logical bytes. Waits for the device."""
    step = _COMPARED_BYTES
    return all(
        torch.equal(staged.to(live.device), live)
        for start in range(0, flat.numel(), step)
        for staged, live in range_copies(flat[start : start + step], tensor, start)
    )


def boxes(tensor: torch.Tensor, start: int, stop: int) -> Iterator[torch.Tensor]:
    """Views that together are the elements [start, stop) of `tensor`, in row-major order."""
    if start >= stop:
        return
    if tensor.is_contiguous():
        yield tensor.view(-1)[start:stop]
        return
    row = tensor[0].numel()
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        yield from boxes(tensor[last], start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from boxes(tensor[first - 1], start - (first - 1) * row, row)
    if first < last:
        yield tensor[first:last]
    if last * row < stop:
        yield from boxes(tensor[last], 0, stop - last * row)


def _as_bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj().resolve_neg())
    elif tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor.view(_BITS[tensor.element_size()])


class _Guard(NamedTuple):
    """Facts of a tensor. At least one changes if the tensor is replaced, or changed by an operation that autograd
    sees."""

    device: torch.device
    address: int
    strides: tuple[int, ...]
    is_conj: bool
    is_neg: bool
    version: int | None
    """None for tensors made in inference mode: they have no version, and are compared each time."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Guard:
        version = None if tensor.is_inference() else tensor._version
        return cls(tensor.device, tensor.data_ptr(), tensor.stride(), tensor.is_conj(), tensor.is_neg(), version)


class FrozenPieces:
    """Staged pieces that need no copy, because the user has declared them frozen. One plan in one slab.

    The declaration is checked. A piece is skipped only while its tensor is at the same place with the same version, and
    each save compares one piece, in turn, bit for bit. A piece that has changed is named in the log and copied at every
    later save. `distrusted` has the names of such pieces; it outlives the plan."""

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
        """Digests of the chunks whose bytes have not changed since they were hashed, by ordinal."""

    def changed(self, stored: Sequence[TensorPiece]) -> list[TensorPiece]:
        """The pieces that must be copied. They count as not staged until `staged` is called with them."""
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
        """These pieces are copied, to the last byte."""
        for piece in copied:
            if piece.spec.name in self._chunks and piece.spec.name not in self._distrusted:
                self._guards[piece.spec.name] = _Guard.of(piece.local)

    def remember(self, digests: Sequence[str]) -> None:
        """`digests` of the staged chunks, by ordinal."""
        for ordinal, names in self._pieces.items():
            if all(name in self._guards for name in names):
                self.digests[ordinal] = digests[ordinal]

    def forget(self) -> None:
        """The tensors were loaded again: stage them all. A running upload may go on reading the staged bytes."""
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
        # Another place or version alone does no harm: DDP writes its buffers at each step, with the same bits.
        if same_bits(self._views[name].reshape(-1).view(torch.uint8), piece.local):
            self._guards[name] = now
            return True
        self._distrusted.add(name)
        log.error(
            "%r is declared frozen, and its bytes have changed. It is staged at every save from now on; "
            "checkpoints from before this one may hold older bytes of it. Take it out of frozen=[…].",
            name,
        )
        return False
