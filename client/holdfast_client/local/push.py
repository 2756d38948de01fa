"""Spool -> store: pushes the saves that lie on this machine. A job does it behind its saves, the next attempt before it
restores, or a person by `holdfast spool push`.
"""

from __future__ import annotations

import functools
import logging
import mmap
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast_client.chunks.transfer import OutgoingChunk
from holdfast_client.chunks.workers import TransferWorkers
from holdfast_client.client import Client
from holdfast_client.errors import (
    ChunkCorrupt,
    DetachedBranch,
    HoldfastError,
    IntegrityError,
    LocalReadFailed,
    NotFound,
    QuotaExceeded,
    ServiceUnavailable,
    StoreProblem,
    TokenProblem,
)
from holdfast_client.local.chunk_folder import ChunkFolder
from holdfast_client.local.spool import SaveKey, SpooledChunk, SpooledSave, SpoolRecord
from holdfast_client.local.tier import LocalTier
from holdfast_client.shard_writer import ShardWriter
from holdfast_client.transport import check_stop
from holdfast_protocol.attempts import AttemptView
from holdfast_protocol.base import Fence
from holdfast_protocol.checkpoints import BeginCheckpoint, CheckpointView
from holdfast_protocol.states import CheckpointState
from holdfast_protocol.text import counted

log = logging.getLogger("holdfast.client")

READ_AHEAD_BYTES = 256 * 1024**2
"""The most bytes that are read but not yet verified by the service; a larger chunk is read alone."""
_LOOK_SECONDS = 0.05


def belongs_here(client: Client, key: SaveKey) -> bool:
    """Whether the service's attempt of that number is the one that staged the save: a new catalog, or one that was
    restored from an older copy, counts from 1 again. Calls only operations that every token may call."""
    try:
        return client.attempts.get(key.project, key.run, key.attempt).launch_id == key.launch_id
    except NotFound:
        return False


def is_committed(client: Client, key: SaveKey) -> bool:
    """Whether that step of that attempt is committed, with any content. Calls only operations that every token may
    call."""
    found = client.checkpoints.list(
        key.project,
        key.run,
        state=CheckpointState.COMMITTED,
        attempt=key.attempt,
        min_step=key.step,
        max_step=key.step,
        limit=1,
    )
    return bool(found.items)


def push_late(
    client: Client,
    folder: ChunkFolder,
    record: SpoolRecord,
    fence: Fence,
    *,
    workers: TransferWorkers | None = None,
    allow_detached: bool = False,
) -> CheckpointView:
    """Begins, uploads and seals a save for the attempt that staged it; `fence` is the attempt that pushes. Idempotent.
    The seal that completes the world commits.

    Raises ChunkCorrupt if the folder has not the right bytes any more, LocalReadFailed if it cannot be read just now,
    DetachedBranch if the run has gone on without it, and a save's errors. An error for an operator aborts the
    checkpoint, so that the pushers of the other shards hear of it; but not while the attempt itself may still write it.
    """
    begin = BeginCheckpoint(
        **fence.model_dump(),
        step=record.step,
        world_size=record.world_size,
        kind=record.kind,
        origin_attempt=record.attempt,
        save_number=record.number,
        allow_detached=allow_detached,
    )
    writer = ShardWriter(client, record.run_name, record.rank, begin, workers=workers).begin()
    try:
        return push_shard(writer, folder, record)
    except (IntegrityError, QuotaExceeded, StoreProblem) as error:
        if writer.pushed_by is None:
            log.warning(
                "step %d of %s is not given up: attempt %d may still be writing it itself, and decides",
                record.step,
                record.run_name,
                record.attempt,
            )
        else:
            writer.fail(error)
        raise


def push_shard(writer: ShardWriter, folder: ChunkFolder, record: SpoolRecord) -> CheckpointView:
    """Uploads and seals the record's chunks. Raises ChunkCorrupt, LocalReadFailed, and a save's errors."""
    return writer.upload_and_seal_again(
        functools.partial(spooled_chunks, folder, record), lambda: (record.summary, record.index)
    )


def spooled_chunks(folder: ChunkFolder, record: SpoolRecord) -> Iterator[OutgoingChunk]:
    """The record's chunks by ordinal. Loading one proves it by its digest, or raises ChunkCorrupt.

    If it cannot be read it raises LocalReadFailed: a moment's trouble must not condemn what may be the only copy.
    """
    memory = _ReadAhead(READ_AHEAD_BYTES)
    for chunk in record.chunks:
        yield OutgoingChunk(
            functools.partial(_load, folder, memory, chunk),
            chunk.digest,
            functools.partial(memory.give_back, chunk.bytes),
            chunk.item_bytes,
        )


def _load(folder: ChunkFolder, memory: _ReadAhead, chunk: SpooledChunk, stop: threading.Event) -> memoryview:
    memory.take(chunk.bytes, stop)
    buffer = _fresh(chunk.bytes)
    try:
        whole = folder.read_into(chunk.digest, buffer, stop=stop)
    except OSError as error:
        trouble = error.strerror or str(error)
        raise LocalReadFailed(f"Chunk {chunk.digest[:12]} in {folder.path} cannot be read ({trouble})") from error
    if not whole:
        raise ChunkCorrupt(chunk.digest, "missing", f"{folder.path} has not its right bytes any more")
    return buffer


def _fresh(size_bytes: int) -> memoryview:
    """Memory that the kernel clears when it is read into, without the interpreter's lock. A bytearray would be cleared
    here, with the lock, for tens of milliseconds. It is freed with its last view."""
    return memoryview(mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))[:size_bytes]


class _ReadAhead:
    """Readers wait while too many bytes are read and not yet sent: the host's memory belongs to the training."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._used = 0
        self._changed = threading.Condition()

    def take(self, count: int, stop: threading.Event) -> None:
        with self._changed:
            while self._used and self._used + count > self._limit_bytes:
                self._changed.wait(_LOOK_SECONDS)
                check_stop(stop)
            self._used += count

    def give_back(self, count: int) -> None:
        with self._changed:
            self._used -= count
            self._changed.notify_all()


@dataclass(frozen=True)
class Outcome:
    """One save's result, in a few words."""

    committed: bool
    told: str


class SavePusher:
    """Pushes the saves of one machine for a person, each as far as it is here, when no job does it.

    The pusher is the run's newest attempt, of any job: the service keeps such a save on the lineage only while that
    attempt has not begun to save."""

    def __init__(self, client: Client, tier: LocalTier, *, allow_detached: bool) -> None:
        self._client = client
        self._tier = tier
        self._allow_detached = allow_detached
        self._epoch = client.service.info().epoch

    def push(self, save: SpooledSave) -> Outcome:
        """Raises ServiceUnavailable and TokenProblem, which would meet the next save too; any other result is the
        outcome."""
        try:
            if not belongs_here(self._client, save.key):
                return Outcome(False, "left: this service does not know the attempt that saved it")
            views = self._push_shards(save)
        except DetachedBranch as error:
            return Outcome(False, f"left: {error} `holdfast spool push --detached` does so.")
        except (ServiceUnavailable, TokenProblem):
            raise
        except HoldfastError as error:
            return Outcome(False, f"left: {error}")
        return self._outcome(save, views[-1])

    def _push_shards(self, save: SpooledSave) -> list[CheckpointView]:
        newest = self._newest_attempt(save.key)
        fence = Fence(epoch=self._epoch, attempt=newest.number, launch_id=newest.launch_id)
        with TransferWorkers() as workers:
            return [
                push_late(
                    self._client,
                    self._tier.folder,
                    record,
                    fence,
                    workers=workers,
                    allow_detached=self._allow_detached,
                )
                for record in save.records
            ]

    def _newest_attempt(self, key: SaveKey) -> AttemptView:
        newest_first = self._client.attempts.list(key.project, key.run, limit=1).items
        if not newest_first:
            raise NotFound(f"{key.run_name} has no attempts")
        return newest_first[0]

    def _outcome(self, save: SpooledSave, view: CheckpointView) -> Outcome:
        if view.state is not CheckpointState.COMMITTED:
            missing = ", ".join(map(str, view.missing_ranks))
            those = f"those of rank {missing}" if missing else "the others"  # the reply looks at the first 100 ranks
            return Outcome(
                False,
                f"sealed {view.sealed_ranks} of {counted(view.world_size, 'rank')}; push {those} too, where they are, "
                "and this once more",
            )
        for record in save.records:
            self._tier.spool.forget(record.name)
        return Outcome(True, "committed, detached" if view.detached else "committed")
