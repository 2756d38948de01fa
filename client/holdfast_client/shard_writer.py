"""Upload and seal one rank's shard of one checkpoint: bytes -> digests -> chunks in the store -> seal. No collectives.

Used by the save pipeline, by the DCP writer and for spooled saves, which differ in where the bytes come from.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from holdfast_client.chunks.encoding import OutgoingChunk, hash_chunk
from holdfast_client.chunks.uploader import ShardUploader
from holdfast_client.chunks.workers import TransferWorkers
from holdfast_client.client import Client
from holdfast_client.errors import HoldfastError
from holdfast_protocol.base import Fence, text_to_keep
from holdfast_protocol.checkpoints import (
    BeginCheckpoint,
    CheckpointView,
    FailShard,
    IndexOrdinals,
    SealShard,
    ShardSummary,
)
from holdfast_protocol.digests import shard_digest
from holdfast_protocol.runs import RunName
from holdfast_protocol.states import CheckpointState
from holdfast_protocol.text import without_secrets

log = logging.getLogger("holdfast.client")


class ShardWriter:
    """Made by `begin`. `stop` may be called from any thread."""

    def __init__(
        self,
        client: Client,
        rank: int,
        fence: Fence,
        begun: CheckpointView,
        *,
        begun_at: float,
        workers: TransferWorkers | None,
        brief_client: Client | None,
    ) -> None:
        """`begun_at`: by time.monotonic()."""
        self._client = client
        self._brief_client = brief_client or client
        self._rank = rank
        self._fence = fence
        self._workers = workers
        self._uploader: ShardUploader | None = None
        self._stopped = threading.Event()
        self._begun_at = self._uploaded_at = begun_at
        self.checkpoint_id = begun.id
        # The step is saved a second time. The seal says whether it is the same content; nothing can be sent.
        self._committed_before = begun.state is CheckpointState.COMMITTED
        self.pushed_by = begun.pushed_by
        """The attempt that pushes it late; None: the attempt that saves it writes it itself."""
        self.on_verified: Callable[[int], object] | None = None
        """Called on the uploading thread with the bytes of each chunk that is verified."""
        self.digests: list[str] = []
        """Of the chunks that were uploaded, by ordinal."""
        self.sent_bytes = self.sent_chunk_bytes = 0

    @classmethod
    def begin(
        cls,
        client: Client,
        run: RunName,
        rank: int,
        begin: BeginCheckpoint,
        *,
        workers: TransferWorkers | None = None,
        brief_client: Client | None = None,
    ) -> ShardWriter:
        """The writer of a checkpoint that it begins. Every rank does so, and gets the same checkpoint. `brief_client`
        tells of a failure, which is good to say and not worth waiting for. Raises what the begin raises."""
        fence = Fence(epoch=begin.epoch, attempt=begin.attempt, launch_id=begin.launch_id)
        begun_at = time.monotonic()
        begun = client.checkpoints.begin(run.project, run.run, begin)
        return cls(client, rank, fence, begun, begun_at=begun_at, workers=workers, brief_client=brief_client)

    def upload(self, chunks: Iterable[OutgoingChunk], *, held_bytes: int | None = None) -> None:
        """Hashes the chunks, gives them the next ordinals, and returns when the service has verified each of them.
        `held_bytes`: how much their source has room for, where it waits until chunks are verified.
        Raises ShardSealed if this rank has sealed before, or the checkpoint has been committed meanwhile."""
        if self._committed_before:
            self.only_hash(chunks)
            return
        self._uploader = ShardUploader(
            self._client,
            self.checkpoint_id,
            self._rank,
            self._fence,
            workers=self._workers,
            on_verified=self.on_verified,
            held_bytes=held_bytes,
        )
        if self._stopped.is_set():
            self._uploader.stop()
        uploaded = self._uploader.upload(chunks)
        self._uploaded_at = time.monotonic()
        self.digests.extend(uploaded.digests)
        self.sent_bytes += uploaded.sent_bytes
        self.sent_chunk_bytes += uploaded.sent_chunk_bytes

    def only_hash(self, chunks: Iterable[OutgoingChunk]) -> None:
        """In place of an upload, where the shard is sealed: the seal says whether this is the same content."""
        for chunk in chunks:
            hashed = hash_chunk(chunk, self._stopped, with_md5=False)
            self.digests.append(hashed.digest)
            if hashed.release is not None:
                hashed.release()

    def seal(self, *, summary: ShardSummary, index: IndexOrdinals) -> CheckpointView:
        """`index`: where the documents are among the uploaded chunks. The seal that completes the world commits."""
        measured = summary.model_copy(update={"upload_seconds": self._uploaded_at - self._begun_at})
        seal = SealShard(
            **dict(self._fence), **dict(measured), digest=shard_digest(self.digests), chunks=self.digests, index=index
        )
        return self._client.checkpoints.seal(self.checkpoint_id, self._rank, seal)

    def fail(self, error: BaseException) -> None:
        """Aborts the checkpoint at once: no rank shall wait for this one (the reaper would, in time). Never raises."""
        if self._committed_before:
            return
        reason = without_secrets(f"{type(error).__name__}: {error}")
        failed = FailShard(**self._fence.model_dump(), reason=text_to_keep(reason, 4000))
        try:
            self._brief_client.checkpoints.seal(self.checkpoint_id, self._rank, failed)
        except HoldfastError as not_told:
            log.info("the service was not told that rank %d failed: %s", self._rank, not_told)

    def stop(self) -> None:
        self._stopped.set()
        if self._uploader is not None:
            self._uploader.stop()
