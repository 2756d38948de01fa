"""The local tier of this node, by the settings: the chunk folder, the spool in it, and saves kept there."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Self

from holdfast_client.chunks.transfer import HashedChunk, OutgoingChunk, hash_chunk
from holdfast_client.chunks.workers import Jobs, TransferWorkers
from holdfast_client.errors import ConfigurationError
from holdfast_client.local.chunk_folder import ChunkFolder
from holdfast_client.local.room import Hold
from holdfast_client.local.spool import Spool, SpooledChunk, SpoolRecord
from holdfast_client.settings import ClientSettings


class NoRoom(Exception):  # noqa: N818  (said aloud, it is what happened)
    """Neither limit nor disk has room for the save, after all possible eviction."""


def keep_shard(
    spool: Spool,
    name: str,
    chunks: Iterable[OutgoingChunk],
    record: Callable[[list[SpooledChunk]], SpoolRecord],
    *,
    workers: TransferWorkers,
) -> SpoolRecord:
    """Staged bytes -> chunks in the folder, held, -> a record in the spool. When this returns, the save is durable on
    this machine and outlives its process. When it returns or raises, no thread reads the chunks.

    Hashing and writing run on the keeping threads, several chunks at once, because the next chunk can be hashed while
    the disk finishes the last. `record` makes the record from the chunks, by ordinal. Raises NoRoom, OSError and the
    errors of a chunk's load; nothing of the save stays in the folder then.
    """
    with spool.claim(name) as claim:
        kept = record(_keep_chunks(spool.folder, claim.hold, chunks, workers))
        claim.keep(kept)
    return kept


def _keep_chunks(
    folder: ChunkFolder, hold: Hold, chunks: Iterable[OutgoingChunk], workers: TransferWorkers
) -> list[SpooledChunk]:
    # An event of its own: a save without room stops those of its jobs that wait for a chunk, and no other save.
    jobs: Jobs[int, SpooledChunk] = Jobs(own := threading.Event())
    found: dict[int, SpooledChunk] = {}

    def settle() -> None:
        if (done := jobs.next()) is None:
            return
        if done.error is not None:
            raise done.error
        assert done.result is not None  # a job without an error has one
        found[done.key] = done.result

    try:
        for ordinal, chunk in enumerate(chunks):
            while jobs.running >= workers.keeping.count:
                settle()
            jobs.start(workers.keeping, ordinal, functools.partial(_keep, folder, hold, chunk, own))
        while jobs.running:
            settle()
    finally:
        own.set()
        jobs.drain()
    return [found[ordinal] for ordinal in range(len(found))]


def _keep(folder: ChunkFolder, hold: Hold, chunk: OutgoingChunk, stop: threading.Event) -> SpooledChunk:
    hashed: HashedChunk = hash_chunk(chunk, stop, with_md5=False)
    hold.add([hashed.digest])
    if not folder.add(hashed.digest, hashed.body, durable=True):
        raise NoRoom
    if hashed.release is not None:
        hashed.release()
    return SpooledChunk(digest=hashed.digest, bytes=hashed.body.nbytes, item_bytes=hashed.item_bytes)


class LocalTier:
    """Thread-safe, and safe between the processes of a node."""

    def __init__(self, path: Path, limit_bytes: int | None) -> None:
        """`limit_bytes`: as a ChunkFolder's. Raises ConfigurationError if the folder cannot be used."""
        self.path = path.expanduser().absolute()
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder = ChunkFolder(self.path, limit_bytes=limit_bytes)
            self.spool = Spool(self.folder)
        except OSError as error:
            raise ConfigurationError(
                f"The local folder {self.path} cannot be used ({error.strerror or error}). "
                "Set HOLDFAST_LOCAL_DIR to one on a local disk, which this user may write to."
            ) from error

    @classmethod
    def of(cls, settings: ClientSettings, path: str | Path | None = None) -> Self | None:
        """By the settings; `path` wins over them. None if no folder is named."""
        where = path or settings.local_dir
        return None if where is None else cls(Path(where), settings.local_bytes)

    def close(self) -> None:
        """May be called twice. The folder's content stays."""
        self.spool.close()
        self.folder.close()
