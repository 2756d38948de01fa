"""One checkpoint as files: its documents, read and proven once; a lease for as long as a file is open; verified bytes.

    open -> [lease] -> ranges -> chunks of the range -> chunk cache, else tickets under the lease -> verified bytes
    last close -> the leases end

Each chunk is verified by its SHA-256 before a byte of it is given out. The indexes and chunk lists of a rank are read
and proven when the first chunk of its shard is wanted. Readers of several threads read at once, each under a lease of
its own.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from holdfast_client.chunks.documents import CheckpointDocuments
from holdfast_client.chunks.fetcher import Buffers
from holdfast_client.chunks.workers import TransferWorkers, WorkerThreads
from holdfast_client.client import Client
from holdfast_client.errors import ChunkLost, HoldfastError, IntegrityError, ReadsWrongHere
from holdfast_client.filesystem.chunk_cache import ChunkCache, Receive
from holdfast_client.filesystem.places import FACTS
from holdfast_client.filesystem.safetensors_layout import (
    ChunkPlace,
    NotInSafetensorsError,
    Part,
    SafetensorsFile,
    file_names,
    safetensors_file,
)
from holdfast_protocol.base import RunName
from holdfast_protocol.checkpoints import Manifest
from holdfast_protocol.index_documents import Layout, SavedAs, ShardIndex
from holdfast_protocol.restores import RestorePoint

log = logging.getLogger("holdfast.client")

_DCP = "dcp"
_SHOWN_TENSORS = 5


CLOSE_SECONDS = 5.0
"""The most that closing a file waits for the service: a lease that is not ended runs out by itself."""


class ProcessParts:
    """What all readers of a process share: threads, the room in which chunks arrive, and the cache of verified chunks.
    So their bounds hold for all of them together."""

    def __init__(self) -> None:
        self.cache = ChunkCache(0)
        self.workers = TransferWorkers()
        self.buffers = Buffers()


class ReadParts:
    """What the checkpoints of one client share: also the threads on which nobody waits for the service.

    A service that does not answer must delay no reader of another. Threads and the client end when nothing refers to it
    any more."""

    def __init__(self, client: Client, process: ProcessParts, *, caches: bool) -> None:
        self.client = client
        self.cache = process.cache if caches else ChunkCache(0)
        self.workers, self.buffers = process.workers, process.buffers
        self._beside = WorkerThreads(1, "holdfast-beside-reads")
        self._closing = WorkerThreads(1, "holdfast-closing")
        threads = (self._beside, self._closing)
        weakref.finalize(self, _end, client, threads, os.getpid()).atexit = False

    def start(self, job: Callable[[], None]) -> None:
        """Carries out `job` on the one thread for what no reader waits for: reading ahead, and leases. Its errors are
        logged. Takes no lock."""
        self._beside.submit(partial(_logged, job))

    def close_soon(self, job: Callable[[], None]) -> None:
        """Carries out `job` on another thread, and waits for it no longer than CLOSE_SECONDS."""
        done = threading.Event()

        def close() -> None:
            _logged(job)
            done.set()

        self._closing.submit(close)
        done.wait(CLOSE_SECONDS)


def _logged(job: Callable[[], None]) -> None:
    try:
        job()
    except Exception as error:  # the thread has other jobs to do
        log.warning("beside the reads of checkpoints by URL: %s", error)


def _end(client: Client, threads: Iterable[WorkerThreads], process_id: int) -> None:
    if os.getpid() != process_id:  # connections and locks are the parent's
        return
    for each in threads:
        each.end()
    client.close()


class _Reads(CheckpointDocuments):
    """The reads of one thread at a time, under one lease."""

    def hold(self, digest: str) -> None:
        self._fetcher.hold_lease(digest)

    @property
    def lease_is_due(self) -> bool:
        return self._fetcher.lease_is_due

    def renew(self) -> None:
        self._fetcher.renew_lease()

    def fetch(self, digests: Iterable[str], receive: Receive, sizes: Mapping[str, int], buffers: Buffers) -> None:
        self._fetcher.fetch(digests, receive, sizes=sizes, buffers=buffers)


@dataclass(frozen=True)
class _Documents:
    manifest: Manifest
    layout: Layout
    is_dcp: bool
    names: Mapping[str, list[str]]


class CheckpointFiles:
    """For any thread. `opened` and `closed` count the readers: with the last one the leases end. What was read of the
    documents is kept."""

    def __init__(self, parts: ReadParts, run: RunName, point: RestorePoint) -> None:
        """`point`: the service's choice, which the checkpoint must match. Makes no call."""
        self.run = run
        self.point = point
        self._parts = parts
        self._saved_as = SavedAs(str(run), point.step, point.world_size)
        self._lock = threading.RLock()
        self._readers = 0
        self._idle: queue.SimpleQueue[_Reads] = queue.SimpleQueue()
        self._documents: _Documents | None = None
        self._files: dict[str, SafetensorsFile] = {}
        self._chunks: dict[int, list[str]] = {}

    def opened(self) -> None:
        """Takes a lease, which keeps the checkpoint from being purged until `closed`. Raises as a read does."""
        with self._lock:
            self._readers += 1
        try:
            documents = self._read_documents()
            with self._borrowed() as reads:
                reads.hold(documents.manifest.layout_digest)
        except BaseException:
            self.closed_soon()
            raise

    def closed(self) -> None:
        """With the last reader the leases end. One that cannot be ended expires by itself."""
        with self._lock:
            self._readers -= 1
        self._end_unused_leases()

    def closed_soon(self) -> None:
        """As `closed`, and does not wait for a service that does not answer."""
        self._parts.close_soon(self.closed)

    def closed_by_collector(self) -> None:
        """As `closed`, on another thread: the collector may run within any call, of this client or of training, and
        must neither wait for the service nor for a lock that its own thread holds."""
        self._parts.start(self.closed)

    def names(self) -> list[str]:
        """The files with tensors, sorted. One that safetensors could not hold is left out."""
        return [name for name in sorted(self._read_documents().names) if self._holds(name)]

    def file(self, name: str) -> SafetensorsFile:
        """Raises FileNotFoundError, with the reason if the checkpoint has such tensors."""
        documents = self._read_documents()
        if name not in documents.names:
            raise FileNotFoundError(
                f"{self.run}@{self.point.step} has no {name}. It has {', '.join([*self.names(), FACTS])}."
            )
        with self._lock:
            found = self._files.get(name)
            if found is None:
                try:
                    found = safetensors_file(documents.layout, name, documents.names[name], is_dcp=documents.is_dcp)
                except NotInSafetensorsError as error:
                    raise FileNotFoundError(
                        f"{name} cannot be given: {error}. `holdfast checkpoints pull` writes it as torch or dcp."
                    ) from None
                self._files[name] = found
            return found

    def facts(self) -> bytes:
        """`checkpoint.json`: what the catalog says now, the files and the ties, as JSON for people and programs."""
        documents = self._read_documents()
        view = self._parts.client.checkpoints.get(self.point.checkpoint_id)
        tensors = documents.layout.tensors
        facts = {
            "format": "safetensors",
            "files": self.names(),
            "tied": {name: entry.alias_of for name, entry in tensors.items() if entry.alias_of is not None},
            **view.model_dump(mode="json", exclude={"etag"}),
        }
        return (json.dumps(facts, indent=2, sort_keys=True) + "\n").encode()

    def read_into(self, file: SafetensorsFile, start: int, buffer: memoryview) -> None:
        """Fills `buffer` with the bytes of `file` from `start` on. Every byte that it returns with is verified; after
        an exception the content is undefined.

        Raises ChunkLost and ReadsWrongHere with the chunk and the tensors that need it, ChunkGone once the checkpoint
        was deleted, and StoreUnavailable.
        """
        stop = start + buffer.nbytes
        if start < 0 or stop > file.bytes:
            raise ValueError(f"{file.name} has {file.bytes} bytes, and [{start}, {stop}) was asked for")
        head = file.header[start:stop]
        buffer[: len(head)] = head
        by_chunk = file.parts(start, stop)
        parts: dict[str, list[Part]] = {}
        sizes: dict[str, int] = {}
        for place, of_chunk in by_chunk.items():
            digest = self._digest(place)
            parts.setdefault(digest, []).extend(of_chunk)
            sizes[digest] = self._size(place)
        filled: list[int] = [len(head)]
        fetched = False

        def fetch(mine: list[str], take: Receive) -> None:
            nonlocal fetched
            fetched = True
            self._fetch(mine, take, sizes)

        def receive(digest: str, chunk: memoryview) -> None:
            count = 0
            for part in parts[digest]:
                for offset, at, size in part.copies(start, stop):
                    buffer[at - start : at - start + size] = chunk[offset : offset + size]
                    count += size
            filled.append(count)

        try:
            self._parts.cache.read(list(parts), receive, fetch)
        except ChunkLost as error:
            lost = f"{error.verdict} {self._needed_for(error.digest, file, start, stop, by_chunk)}"
            raise ChunkLost(error.digest, lost, error.corrupt_checkpoints) from error
        except ReadsWrongHere as error:
            needed = self._needed_for(str(error.context.get("digest")), file, start, stop, by_chunk)
            raise ReadsWrongHere(f"{error.detail}. {needed}", context=error.context) from error
        if sum(filled) != buffer.nbytes:
            raise IntegrityError(f"The chunks hold {sum(filled)} of {buffer.nbytes} bytes of {file.name}")
        if not fetched:
            self._renew()

    def read_ahead(self, file: SafetensorsFile, position: int) -> None:
        """Begins to fetch the chunk after `position`, if the tensor there goes on in another one, and its bytes before
        `position` were read. Never beyond the tensor: who reads one tensor in small steps, or the header, pays for no
        other. Waits for nothing, and its errors are not the reader's, who has the bytes before `position`."""
        tensor = next(file.between(position, position + 1), None)
        if tensor is None or tensor.begin == position or not self._parts.cache.most_bytes:
            return
        here = {part.chunk for part in tensor.parts if next(part.copies(position, position + 1), None)}
        for place in file.parts(position, tensor.end):
            if place in here:
                continue
            digests = self._chunks.get(place.rank)
            here_or_coming = digests is not None and self._parts.cache.has(digests[place.ordinal])
            if not here_or_coming and 2 * self._size(place) <= self._parts.cache.most_bytes:
                self._parts.start(partial(self._bring, place))
            return

    def _bring(self, place: ChunkPlace) -> None:
        with self._lock:
            if not self._readers:
                return
            self._readers += 1
        try:
            with suppress(HoldfastError):  # the read that needs it raises
                digest, size = self._digest(place), self._size(place)
                self._parts.cache.read(
                    [digest], lambda *_: None, lambda mine, take: self._fetch(mine, take, {digest: size})
                )
        finally:
            self.closed()

    def _fetch(self, digests: list[str], receive: Receive, sizes: Mapping[str, int]) -> None:
        with self._borrowed() as reads:
            reads.fetch(digests, receive, sizes, self._parts.buffers)

    def _digest(self, place: ChunkPlace) -> str:
        return self._chunk_list(place.rank)[place.ordinal]

    def _size(self, place: ChunkPlace) -> int:
        return self._read_documents().layout.shards[place.rank].chunks[place.ordinal]

    def _chunk_list(self, rank: int) -> list[str]:
        if (known := self._chunks.get(rank)) is not None:  # another rank's may just be asked for, under the lock
            return known
        with self._lock:
            if rank not in self._chunks:
                documents = self._read_documents()
                with self._borrowed() as reads:
                    [index] = reads.indexes(documents.manifest, [rank]).values()
                    self._chunks[rank] = self._proven(reads, documents.manifest, documents.layout, index)
            return self._chunks[rank]

    def _read_documents(self) -> _Documents:
        if self._documents is not None:
            return self._documents
        with self._lock:
            if self._documents is None:
                with self._borrowed() as reads:
                    manifest = reads.manifest()
                    document, index = reads.first_documents(manifest)
                    layout = reads.layout(manifest, document)
                    self._chunks[0] = self._proven(reads, manifest, layout, index)
                is_dcp = _is_dcp(index)
                self._documents = _Documents(manifest, layout, is_dcp, file_names(layout, is_dcp=is_dcp))
            return self._documents

    def _proven(self, reads: _Reads, manifest: Manifest, layout: Layout, index: ShardIndex) -> list[str]:
        if index.layout_digest != layout.digest:
            raise IntegrityError(f"The index of rank {index.rank} in {self.point.checkpoint_id} names another layout")
        return reads.chunk_list(manifest, layout, index.rank)

    def _holds(self, name: str) -> bool:
        try:
            self.file(name)
        except FileNotFoundError:
            return False
        return True

    @contextmanager
    def _borrowed(self) -> Iterator[_Reads]:
        """One with a lease if there is one. After an error it is used no more, and the error waits no longer for that
        than a close does."""
        try:
            reads = self._idle.get_nowait()
        except queue.Empty:
            reads = _Reads(
                self._parts.client,
                self.point.checkpoint_id,
                self._saved_as,
                self.point.digest,
                workers=self._parts.workers,
            )
        try:
            yield reads
        except BaseException:
            self._parts.close_soon(reads.close)
            raise
        self._give_back(reads)

    def _give_back(self, reads: _Reads) -> None:
        self._idle.put(reads)
        self._end_unused_leases()  # the last one has closed meanwhile, or a document was read without an open file

    def _renew(self) -> None:
        """Keeps a lease while all that is read comes from the cache. The reader does not wait for it: without a service
        it goes on at once."""
        try:
            reads = self._idle.get_nowait()
        except queue.Empty:
            return
        if reads.lease_is_due:
            self._parts.start(partial(self._renew_beside, reads))
        else:
            self._give_back(reads)

    def _renew_beside(self, reads: _Reads) -> None:
        try:
            reads.renew()
        except HoldfastError as error:
            log.info("the lease of %s was not renewed: %s", self.point.checkpoint_id, error)
        finally:
            self._give_back(reads)

    def _end_unused_leases(self) -> None:
        if self._readers:  # the last one that closes comes here too
            return
        ended: list[_Reads] = []
        # Under the lock: a file that is just being opened takes a lease of its own, or finds one that stays.
        with self._lock, suppress(queue.Empty):
            while not self._readers:
                ended.append(self._idle.get_nowait())
        for reads in ended:
            reads.close()

    def _needed_for(self, digest: str, file: SafetensorsFile, start: int, stop: int, read: Iterable[ChunkPlace]) -> str:
        """Makes no call: of the chunks that were `read` the digests are here, and an error must not hide another."""
        places = {place for place in read if self._digest(place) == digest}
        names = [
            tensor.name for tensor in file.between(start, stop) if any(part.chunk in places for part in tensor.parts)
        ]
        shown = ", ".join(names[:_SHOWN_TENSORS]) + (" and more" if len(names) > _SHOWN_TENSORS else "")
        return f"It holds bytes of {shown} in {self.run}@{self.point.step}/{file.name}."


def _is_dcp(index: ShardIndex) -> bool:
    """Whether a dcp.save wrote it, whose tensors have names of its own. A user's component `dcp` is of another kind."""
    match index.replicated_trees.get(_DCP):
        case [kind, _]:
            return bool(kind == _DCP)
    return False
