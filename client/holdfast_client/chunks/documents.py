"""The documents of one checkpoint: manifest, layout, indexes and chunk lists, each proven before it is used.

    checkpoint digest -> shard digests -> chunk digests -> bytes

Each arrow is checked here or, the last one, by the fetcher: the result is the committed bytes, or IntegrityError. The
indexes say which run and step they were saved as, and must agree with the catalog (rule index-names-its-save).
A document may have its digest and still be malformed. So it is checked against itself and against the checkpoint's
contents before its numbers are used: the cost of reading it is bounded by the bytes that are stored.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Self

from holdfast_client.chunks.fetcher import ShardFetcher
from holdfast_client.chunks.workers import TransferWorkers
from holdfast_client.client import Client
from holdfast_client.errors import IntegrityError, NewerFormat
from holdfast_protocol.checkpoints import Manifest
from holdfast_protocol.digests import (
    MAX_STORED_DOCUMENT_BYTES,
    DocumentError,
    NewerDocumentError,
    checkpoint_digest,
    shard_digest,
)
from holdfast_protocol.index_documents import Layout, SavedAs, ShardIndex

if TYPE_CHECKING:
    from holdfast_client.chunks.host_chunks import HostChunks

ChunkLists = Mapping[int, Sequence[str]]
"""Stored rank -> the digests of its chunks, by ordinal."""


class _Collector:
    """Python's collector of garbage, which several threads may pause at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pauses = 0
        self._was_enabled = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        with self._lock:
            if not self._pauses:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._pauses += 1
        try:
            yield
        finally:
            with self._lock:
                self._pauses -= 1
                if not self._pauses and self._was_enabled:
                    gc.enable()


without_collections = _Collector().paused
"""While very many objects are made that stay: Python's collector would look at them again and again, and at all that a
script holds, which takes 0.2 s with torch alone. Nothing that waits belongs in it."""


@contextmanager
def _refusing(document: str) -> Iterator[None]:
    try:
        yield
    except NewerDocumentError as error:
        raise NewerFormat(f"{document} is of a newer holdfast: {error}") from error
    except DocumentError as error:
        raise IntegrityError(f"{document} cannot be used: {error}") from error


class CheckpointDocuments:
    """Keep it open while reading: it holds a lease, and the service deletes nothing that a lease protects."""

    def __init__(
        self,
        client: Client,
        checkpoint_id: str,
        saved_as: SavedAs,
        digest: str | None,
        *,
        workers: TransferWorkers,
        host: HostChunks | None = None,
    ) -> None:
        """The checkpoint must match `saved_as` and `digest`. `host`: this host's chunks, which are searched for
        documents first."""
        self.checkpoint_id = checkpoint_id
        self._saved_as = saved_as
        self._digest = digest
        self._host = host
        self._client = client
        self._fetcher = ShardFetcher(client, checkpoint_id, workers=workers)

    def manifest(self) -> Manifest:
        """Raises IntegrityError unless it is the restore point's and its shards' digests make the checkpoint's."""
        manifest = self._client.checkpoints.manifest(self.checkpoint_id)
        view = manifest.checkpoint
        told = SavedAs(f"{view.project}/{view.run}", view.step, view.world_size)
        if (told, view.digest) != (self._saved_as, self._digest):
            raise IntegrityError(
                f"The service offers {self.checkpoint_id} as {self._saved_as}, and its manifest is of {told}"
            )
        sealed = [shard.digest or "" for shard in sorted(manifest.shards, key=lambda shard: shard.rank)]
        if len(sealed) != manifest.checkpoint.world_size or checkpoint_digest(sealed) != manifest.checkpoint.digest:
            raise IntegrityError(f"The manifest of {self.checkpoint_id} does not match its digest")
        return manifest

    def chunk_list(self, manifest: Manifest, layout: Layout, rank: int) -> list[str]:
        """The digests of a shard's chunks, by ordinal. Raises IntegrityError unless they make the shard's digest and
        have the layout's sizes."""
        chunks = self._fetcher.chunk_list(rank).chunks
        digests = [chunk.digest for chunk in chunks]
        [sealed] = [shard.digest for shard in manifest.shards if shard.rank == rank]
        if shard_digest(digests) != sealed:
            raise IntegrityError(f"The chunk list of rank {rank} in {self.checkpoint_id} does not match its digest")
        sizes = layout.shards[rank].chunks
        if tuple(chunk.bytes for chunk in chunks[: len(sizes)]) != sizes:
            raise IntegrityError(f"The chunks of rank {rank} in {self.checkpoint_id} are not those of its layout")
        return digests

    def documents(self, digests: Iterable[str], *, shard: int | None = None) -> dict[str, bytes]:
        """Small chunks, whole, by digest. `shard`: this rank's chunk list is read next, and may come along."""
        found: dict[str, bytes] = {}
        self._fetcher.fetch(
            digests,
            lambda digest, view: found.__setitem__(digest, bytes(view)),
            host=self._host,
            most_bytes=MAX_STORED_DOCUMENT_BYTES,
            shard=shard,
        )
        return found

    def first_documents(self, manifest: Manifest) -> tuple[bytes, ShardIndex]:
        """The layout's document and rank 0's index, in one fetch. Raises as `indexes` does."""
        [of_first] = self._index_digests(manifest, {0}).values()
        documents = self.documents([manifest.layout_digest, of_first], shard=0)
        return documents[manifest.layout_digest], self._index(manifest, 0, documents[of_first])

    @without_collections()
    def layout(self, manifest: Manifest, document: bytes, known: Mapping[str, Layout] = MappingProxyType({})) -> Layout:
        """Raises IntegrityError unless it is a layout of this checkpoint: of its ranks, and of no more bytes.
        NewerFormat if a newer holdfast has written it. `known`: what was decoded before, by the documents' digests."""
        with _refusing(f"The layout of {self.checkpoint_id}"):
            layout = known.get(manifest.layout_digest) or Layout.decode(document)
        view = manifest.checkpoint
        if layout.world_size != view.world_size or layout.tensor_bytes > view.logical_bytes:
            raise IntegrityError(
                f"The layout of {self.checkpoint_id} describes {layout.tensor_bytes} bytes of {layout.world_size} "
                f"ranks, and the checkpoint has {view.logical_bytes} bytes of {view.world_size}"
            )
        return layout

    def indexes(self, manifest: Manifest, ranks: Iterable[int]) -> dict[int, ShardIndex]:
        """The index documents of these stored ranks. Raises IntegrityError unless each was sealed as this rank's, in
        the run and step that the catalog says. NewerFormat if a newer holdfast has written one."""
        digests = self._index_digests(manifest, set(ranks))
        documents = self.documents(digests.values(), shard=min(digests, default=None))
        return {rank: self._index(manifest, rank, documents[digest]) for rank, digest in digests.items()}

    def _index_digests(self, manifest: Manifest, ranks: set[int]) -> dict[int, str]:
        digests = {s.rank: s.index_digest for s in manifest.shards if s.rank in ranks and s.index_digest is not None}
        if digests.keys() != ranks:
            raise IntegrityError(f"{self.checkpoint_id} has no index of rank {min(ranks - digests.keys())}")
        return digests

    @without_collections()
    def _index(self, manifest: Manifest, rank: int, document: bytes) -> ShardIndex:
        with _refusing(f"The index of rank {rank} in {self.checkpoint_id}"):
            index = ShardIndex.decode(document)
        # A fork's has the very bytes of the run whose ranks saved it (rule index-names-its-save).
        saved_as, forked_from = self._saved_as, manifest.checkpoint.forked_from
        if forked_from is not None:
            saved_as = saved_as._replace(run=f"{manifest.checkpoint.project}/{forked_from.saved_in}")
        if (index.saved_as, index.rank) != (saved_as, rank):
            raise IntegrityError(
                f"The service offers {self.checkpoint_id} as {saved_as}, and what rank {rank} sealed is "
                f"rank {index.rank} of {index.saved_as}. `holdfast catalog check` compares the catalog with its records"
            )
        return index

    def close(self) -> None:
        self._fetcher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
