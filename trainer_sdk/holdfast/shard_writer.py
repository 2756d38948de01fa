"""Upload and seal one rank's shard of one checkpoint: bytes -> digests -> chunks in the store -> seal. No collectives.

Used by the save pipeline and by the DCP writer, which differ in where the bytes come from.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.session import Session
from holdfast_client.chunks.outgoing import OutgoingChunk, hash_chunk
from holdfast_client.chunks.uploader import ShardUploader
from holdfast_client.chunks.workers import TransferWorkers
from holdfast_protocol.base import text_to_keep
from holdfast_protocol.checkpoints import (
    BeginCheckpoint,
    CheckpointView,
    Component,
    FailShard,
    IndexOrdinals,
    Metrics,
    SealShard,
)
from holdfast_protocol.digests import shard_digest
from holdfast_protocol.states import CheckpointKind, CheckpointState

log = logging.getLogger("holdfast")


class ShardWriter:
    """Begins the checkpoint, which every rank does, and gets the same one. `stop` may be called from any thread."""

    def __init__(self, session: Session, workers: TransferWorkers, step: int, kind: CheckpointKind) -> None:
        self._session = session
        self._workers = workers
        self._rank = session.ranks.rank
        self._fence: dict[str, Any] = session.fence.model_dump()
        self._uploader: ShardUploader | None = None
        self._stopped = threading.Event()
        begin = BeginCheckpoint(**self._fence, step=step, world_size=session.ranks.world_size, kind=kind)
        begun = session.client.begin(session.run.project, session.run.run, begin)
        self.checkpoint_id = begun.id
        # This job saves the step a second time. The seal says whether it is the same content; nothing can be sent.
        self._committed_before = begun.state is CheckpointState.COMMITTED
        self.digests: list[str] = []
        """Of the chunks that were uploaded, by ordinal."""
        self.sent_bytes = 0

    def upload(self, chunks: Iterable[OutgoingChunk]) -> None:
        """Hashes the chunks, gives them the next ordinals, and returns when the service has verified each of them."""
        if self._committed_before:
            self._only_hash(chunks)
            return
        self._uploader = ShardUploader(
            self._session.client, self.checkpoint_id, self._rank, self._session.fence, workers=self._workers
        )
        if self._stopped.is_set():
            self._uploader.stop()
        uploaded = self._uploader.upload(chunks)
        self.digests.extend(uploaded.digests)
        self.sent_bytes += uploaded.sent_bytes

    def seal(
        self,
        *,
        index: int,
        layout: int | None,
        components: dict[str, Component],
        finite: bool = True,
        metrics: Metrics | None = None,
    ) -> CheckpointView:
        """`index`, `layout`: the ordinals of these documents. The seal that completes the world commits."""
        seal = SealShard(
            **self._fence,
            digest=shard_digest(self.digests),
            chunks=self.digests,
            index=IndexOrdinals(shard=index, layout=layout),
            logical_bytes=sum(component.logical_bytes for component in components.values()),
            components=components,
            finite=finite,
            metrics=metrics,
        )
        return self._session.client.seal(self.checkpoint_id, self._rank, seal)

    def fail(self, error: BaseException) -> None:
        """Aborts the checkpoint at once: no rank shall wait for this one (the reaper would, in time). Never raises."""
        if self._committed_before:
            return
        failed = FailShard(**self._fence, reason=text_to_keep(f"{type(error).__name__}: {error}", 4000))
        try:
            self._session.brief_client.seal(self.checkpoint_id, self._rank, failed)
        except HoldfastError as unheard:
            log.info("the service was not told that rank %d failed: %s", self._rank, unheard)

    def stop(self) -> None:
        self._stopped.set()
        if self._uploader is not None:
            self._uploader.stop()

    def _only_hash(self, chunks: Iterable[OutgoingChunk]) -> None:
        for chunk in chunks:
            hashed = hash_chunk(chunk, self._stopped, with_md5=False)
            self.digests.append(hashed.digest)
            if hashed.release is not None:
                hashed.release()
