"""The chunks of two checkpoints, read as any reader does, verified, into the arrays where their bytes are wanted.

A copy that is not what it should be becomes suspect, and another one is read. What no copy gives is damaged: it is
told, and the controllers that read copies again decide what that means.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import NamedTuple

from holdfast_protocol.base import PROTOCOL_MINOR
from holdfast_protocol.states import StoreRole
from holdfast_service.attached_stores.attached import AttachedStore, ask_stores
from holdfast_service.comparisons.batches import Part, Side, Strip
from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Checkpoint
from holdfast_service.operations.queue import ProcessEnds
from holdfast_service.restore.read_checkpoint import choose_copies, chunks_of_checkpoint
from holdfast_service.restore.service_reader import (
    BadChunkError,
    StoredChunk,
    read_verified,
    renew_leases,
    suspect,
)
from holdfast_service.stores.base import StoreError

_THREADS = 4
_AT_ONCE = 1000
_RENEW_EVERY_SECONDS = 60
_TELL_EVERY_SECONDS = 1.0


class Target(NamedTuple):
    """Takes the chunk's bytes from `offset` on, as many as fit."""

    offset: int
    into: memoryview


@dataclass(frozen=True)
class Opened:
    """A checkpoint under a lease."""

    checkpoint_id: str
    project_id: str
    lease_id: str


class ChunkReader:
    """`opened`: where the chunks of each side are."""

    def __init__(self, context: ServiceContext, opened: Sequence[Opened]) -> None:
        self._context = context
        self._opened = opened
        self._renewed_at = time.monotonic()

    def read(self, side: int, wanted: Mapping[str, Sequence[Target]], tell: Callable[[int], None]) -> set[str]:
        """By digest. `tell` hears about once a second, or more often, how many bytes have been read. Returns those that
        are damaged: what their targets hold is worth nothing. Raises StoreError, `checkpoint_cold`, `chunk_not_found`
        and what `tell` raises."""
        found: dict[str, tuple[AttachedStore, StoredChunk]] = {}
        digests = list(wanted)
        for first in range(0, len(digests), _AT_ONCE):
            found |= self._copies(side, digests[first : first + _AT_ONCE])
        damaged = {digest for digest in digests if digest not in found}
        stop, ended, done = threading.Event(), SimpleQueue[Future[bool]](), 0
        threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="holdfast-compare")
        try:
            reading: dict[Future[bool], str] = {}
            for digest, copy in found.items():
                future = threads.submit(self._read, side, *copy, wanted[digest], stop)
                reading[future] = digest
                future.add_done_callback(ended.put)  # to wait for all of them again for each takes the square of them
            while reading:
                with suppress(Empty):
                    future = ended.get(timeout=_TELL_EVERY_SECONDS)
                    digest = reading.pop(future)
                    if not future.result():
                        damaged.add(digest)
                    done += found[digest][1].bytes
                if time.monotonic() - self._renewed_at > _RENEW_EVERY_SECONDS:
                    renew_leases(self._context, *(each.lease_id for each in self._opened))
                    self._renewed_at = time.monotonic()
                tell(done)
        finally:
            stop.set()
            threads.shutdown(wait=True, cancel_futures=True)
        return damaged

    def _copies(
        self, side: int, digests: Sequence[str], avoid: Collection[StoreRole] = ()
    ) -> dict[str, tuple[AttachedStore, StoredChunk]]:
        """The best copy of each, of those that have one. From a store to `avoid` only if no other has it."""
        opened = self._opened[side]
        ask_stores(self._context)
        with self._context.database.read() as session:
            checkpoint = session.get_one(Checkpoint, opened.checkpoint_id)
            # Of the checkpoint alone: the project may have a chunk that claims the same digest for other bytes.
            chunks = list(chunks_of_checkpoint(session, opened.project_id, checkpoint, digests).values())
            now = database_now(session)
            chosen = choose_copies(
                session, self._context, checkpoint, chunks, avoid=avoid, now=now, protocol_minor=PROTOCOL_MINOR
            )
            return {
                chunk.digest: (chosen[chunk.id].attached, StoredChunk.of(chunk, chosen[chunk.id].copy))
                for chunk in chunks
                if chunk.id in chosen
            }

    def _read(
        self,
        side: int,
        attached: AttachedStore,
        stored: StoredChunk,
        targets: Sequence[Target],
        stop: threading.Event,
    ) -> bool:
        """Whether a copy gave the chunk's bytes. Raises StoreError if none did, and a store did not answer."""

        def on_bytes(count: int) -> None:
            if stop.is_set():
                raise ProcessEnds
            self._context.read_rate_limit.acquire(count)

        tried: set[int] = set()
        avoid: list[StoreRole] = []
        failed: StoreError | None = None
        while stored.copy_id not in tried:
            tried.add(stored.copy_id)
            avoid.append(attached.role)
            try:
                read_verified(attached.store, stored, _Spread(targets), on_bytes)
                return True
            except BadChunkError as error:
                suspect(self._context, error.stored)
            except StoreError as error:
                attached.watch.doubt()
                failed = error
            other = self._copies(side, [stored.digest], avoid).get(stored.digest)
            if other is None:
                break
            attached, stored = other
        if failed is not None:
            raise failed
        return False


class _Spread:
    """Takes a chunk block by block, and gives each target its bytes."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = sorted(targets, key=lambda target: target.offset)
        self._first = self._at = 0

    def __call__(self, block: bytes | memoryview) -> None:
        view = memoryview(block)
        at, end = self._at, self._at + view.nbytes
        self._at = end
        while self._first < len(self._targets) and _end(self._targets[self._first]) <= at:
            self._first += 1
        for number in range(self._first, len(self._targets)):
            offset, into = self._targets[number]
            if offset >= end:
                break
            start, stop = max(offset, at), min(offset + into.nbytes, end)
            if start < stop:
                into[start - offset : stop - offset] = view[start - at : stop - at]


def _end(target: Target) -> int:
    return target.offset + target.into.nbytes


class Loaded(NamedTuple):
    """A part's bytes in both checkpoints. If a chunk of them is `damaged` they are worth nothing. No memoryviews: these
    are compared byte by byte, and no other thread of the process runs meanwhile."""

    part: Part
    before: bytearray
    after: bytearray
    damaged: bool


def read_batch(
    reader: ChunkReader, sides: tuple[Side, Side], batch: Sequence[Part], tell: Callable[[int], None]
) -> list[Loaded]:
    """`tell` hears how many bytes of chunks have been read. Raises as ChunkReader.read."""
    arrays = [[bytearray(part.bytes) for _ in sides] for part in batch]
    wanted: tuple[dict[str, list[Target]], ...] = (defaultdict(list), defaultdict(list))
    needed: list[set[str]] = [set() for _ in batch]
    boxes: list[Callable[[], None]] = []
    for number, part in enumerate(batch):
        for at, side in enumerate(sides):
            for strip, first, last in part.strips(at):
                rows, array = (first - part.first, last - part.first), memoryview(arrays[number][at])
                if strip.box:
                    into = memoryview(bytearray((last - first) * strip.row_bytes))
                    boxes.append(partial(_fill, part, array, strip, rows, into))
                else:
                    into = array[rows[0] * strip.row_bytes : rows[1] * strip.row_bytes]
                for run in side.runs(strip, first, last):
                    # What both have is read once.
                    of = 0 if run.digest in sides[0].sizes else at
                    wanted[of][run.digest].append(Target(run.offset, into[run.at : run.at + run.bytes]))
                    needed[number].add(run.digest)
    damaged: set[str] = set()
    before = 0
    for at, side in enumerate(sides):

        def told(done: int, before: int = before) -> None:
            tell(before + done)

        damaged |= reader.read(at, wanted[at], told)
        before += sum(side.sizes[digest] for digest in wanted[at])
    for fill in boxes:
        fill()
    return [
        Loaded(part, one, other, damaged=bool(digests & damaged))
        for part, (one, other), digests in zip(batch, arrays, needed, strict=True)
    ]


def _fill(part: Part, array: memoryview, strip: Strip, rows: tuple[int, int], box: memoryview) -> None:
    """Writes a box into its place among the part's rows, where it has those from rows[0] to rows[1]."""
    from holdfast_service.comparisons.measures import fill_box

    assert part.subject.axis is not None  # else no strip is a box
    behind = part.subject.axis + 1
    offsets = (rows[0], *strip.piece.offsets[behind:])
    shape = (rows[1] - rows[0], *strip.piece.shape[behind:])
    fill_box(array, (part.last - part.first, *part.subject.entry.shape[behind:]), offsets, shape, box)
