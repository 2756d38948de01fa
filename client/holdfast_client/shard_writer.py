"""Upload and seal one rank's shard of one checkpoint: bytes -> digests -> chunks in the store -> seal. No collectives.

The save pipeline, the node agent, the DCP writer and spooled saves use it, with different sources of bytes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from holdfast_client.chunks.transfer import OutgoingChunk, hash_chunk
from holdfast_client.chunks.uploader import ShardUploader
from holdfast_client.chunks.workers import TransferWorkers
from holdfast_client.client import Client
from holdfast_client.errors import (
    CheckpointAborted,
    CheckpointConflict,
    ChunkGone,
    HoldfastError,
    IncompleteCheckpoint,
    ShardSealed,
    TransferStopped,
)
from holdfast_client.host_calls import HostCalls
from holdfast_protocol.base import Fence, RunName, text_to_keep
from holdfast_protocol.checkpoints import (
    AbortCheckpoint,
    BeginCheckpoint,
    CheckpointView,
    ChunkAnswer,
    ChunksNegotiated,
    FailShard,
    FirstOffer,
    IndexOrdinals,
    NegotiateChunks,
    SealShard,
    ShardSummary,
)
from holdfast_protocol.digests import shard_digest
from holdfast_protocol.states import AbortCause, CheckpointState, Health
from holdfast_protocol.text import without_secrets

log = logging.getLogger("holdfast.client")

BEGINS = 3
"""Limits all tries together: if a rank is dead for good, the others must not wait for it for ever."""

BEGIN_ANEW_AFTER = frozenset({AbortCause.SILENT, AbortCause.CHUNK_GONE})
"""Outages cause these aborts. The other causes mean that a rank does not want the checkpoint or cannot complete it."""


def worth_another_begin(error: BaseException) -> bool:
    """Whether a save that did not commit can still be committed by its attempt. Pure.

    The service aborts a checkpoint after long silence, because it cannot tell a dead job from one that is cut off. A
    living job still holds the staged bytes. Every rank that hears of the abort begins the same step again, and gets the
    same new checkpoint (rule one-checkpoint-per-step); chunks that had arrived are not sent again."""
    if isinstance(error, ChunkGone | IncompleteCheckpoint):
        # This rank's seal has found that a chunk of any rank was lost. It is sent again.
        return True
    return isinstance(error, CheckpointAborted) and error.context.get("cause") in BEGIN_ANEW_AFTER


class ShardWriter:
    """Begins the checkpoint with its first call, or when `begin` is called. `stop` may be called from any thread."""

    def __init__(
        self,
        client: Client,
        run: RunName,
        rank: int,
        begin: BeginCheckpoint,
        *,
        workers: TransferWorkers | None = None,
        brief_client: Client | None = None,
        host_calls: HostCalls | None = None,
    ) -> None:
        """No call is made. `brief_client` tells of a failure, which is good to say and not worth waiting for.
        `host_calls`: begins and seals together with the other ranks of the host."""
        self._client = client
        self._host_calls = host_calls
        self._brief_client = brief_client or client
        self._run = run
        self._rank = rank
        self._request = begin
        self._fence = Fence(epoch=begin.epoch, attempt=begin.attempt, launch_id=begin.launch_id)
        self._workers = workers
        self._uploader: ShardUploader | None = None
        self._stopped = threading.Event()
        self._begun: CheckpointView | None = None
        self._begun_at = self._uploaded_at = time.monotonic()
        self.begin_failed = False
        """The service refused the begin or did not answer it."""
        self.on_begun: Callable[[], object] | None = None
        """Called once the checkpoint is begun, on the thread that made the call. What it raises, `upload` raises."""
        self.on_verified: Callable[[int], object] | None = None
        """Called on the uploading thread with the bytes of each chunk that is verified."""
        self.on_hashed: Callable[[int, str], object] | None = None
        """Called on the uploading thread with the ordinal and the digest of each chunk."""
        self.digests: list[str] = []
        """Of the chunks that were uploaded, by ordinal."""
        self.sent_bytes = self.sent_chunk_bytes = 0

    @property
    def checkpoint_id(self) -> str | None:
        """None until it is begun."""
        return None if self._begun is None else self._begun.id

    @property
    def begun(self) -> CheckpointView:
        """The checkpoint as it was begun. Only after that."""
        assert self._begun is not None
        return self._begun

    @property
    def is_stopped(self) -> bool:
        return self._stopped.is_set()

    @property
    def pushed_by(self) -> int | None:
        """The attempt that pushes it late. None: the attempt that saves it writes it itself, or it is not begun."""
        return None if self._begun is None else self._begun.pushed_by

    def begin(self) -> ShardWriter:
        """Begins the checkpoint now, and returns this writer. Every rank begins it, and gets the same one. Raises what
        the begin raises."""
        if self._begun is None:
            self._begin(self._client, None)
        return self

    def begun_elsewhere(self, begun: CheckpointView) -> None:
        """Another process of this node has begun it for this writer. Raises what `on_begun` does."""
        self._begun = begun
        if self.on_begun is not None:
            self.on_begun()

    def upload(self, chunks: Iterable[OutgoingChunk], *, held_bytes: int | None = None) -> None:
        """Hashes the chunks, gives them the next ordinals, and returns when the service has verified each of them.
        `held_bytes`: the room of their source, if it waits until chunks are verified.
        Raises ShardSealed if this rank has sealed before, or the checkpoint has been committed meanwhile."""
        self._upload(chunks, held_bytes, seal=None)

    def upload_and_seal(
        self,
        chunks: Iterable[OutgoingChunk],
        describe: Callable[[], tuple[ShardSummary, IndexOrdinals]],
        *,
        held_bytes: int | None = None,
    ) -> CheckpointView:
        """`upload` and `seal` with one call less: the seal reports what was sent last. `describe` is called when all
        chunks were sent, maybe more than once and on another thread. It gives what `seal` takes. Raises TransferStopped
        only if this rank is not sealed."""
        sealed: list[tuple[list[str], CheckpointView]] = []

        def seal(digests: list[str]) -> None:
            self._uploaded_at = time.monotonic()
            sealed.append((digests, self._seal([*self.digests, *digests], *describe())))

        try:
            self._upload(chunks, held_bytes, seal=seal)
        except TransferStopped:
            # It is raised once the running calls have ended, and one of them may have sealed.
            if not sealed:
                raise
            self.digests.extend(sealed[-1][0])
        return sealed[-1][1] if sealed else self._seal(self.digests, *describe())

    def upload_and_seal_again(
        self,
        chunks: Callable[[], Iterable[OutgoingChunk]],
        describe: Callable[[], tuple[ShardSummary, IndexOrdinals]],
    ) -> CheckpointView:
        """`upload_and_seal` of chunks that can be taken more than once, where another process may have sealed this very
        shard: it ended after the seal, or missed its reply. The bytes are still compared."""
        try:
            return self.upload_and_seal(chunks(), describe)
        except ShardSealed:
            self.only_hash(chunks())
            summary, index = describe()
            return self.seal(summary=summary, index=index)

    def _upload(
        self, chunks: Iterable[OutgoingChunk], held_bytes: int | None, *, seal: Callable[[list[str]], None] | None
    ) -> None:
        if self._is_committed:
            self.only_hash(chunks)
            return
        self._uploader = ShardUploader(
            self._client,
            self.checkpoint_id or "",
            self._rank,
            self._fence,
            workers=self._workers,
            on_verified=self.on_verified,
            held_bytes=held_bytes,
            negotiate=self._negotiate,
            seal=seal,
        )
        self._uploader.on_hashed = self.on_hashed
        if self._stopped.is_set():
            self._uploader.stop()
        uploaded = self._uploader.upload(chunks)
        self._uploaded_at = max(self._uploaded_at, time.monotonic()) if seal is None else self._uploaded_at
        self.digests.extend(uploaded.digests)
        self.sent_bytes += uploaded.sent_bytes
        self.sent_chunk_bytes += uploaded.sent_chunk_bytes

    @property
    def _is_committed(self) -> bool:
        """The step is saved a second time. The seal says whether it is the same content; nothing can be sent. If what
        was committed is corrupt, the begin has raised CheckpointConflict: to compare would call a lost state saved."""
        return self._begun is not None and self._begun.state is CheckpointState.COMMITTED

    def _begin(self, client: Client, offer: FirstOffer | None) -> ChunksNegotiated | None:
        """What was negotiated with it, if anything was."""
        request = self._request.model_copy(update={"offers": [] if offer is None else [offer]})
        try:
            if self._host_calls is None:
                begun = client.checkpoints.begin(self._run.project, self._run.run, request)
            else:
                begun = self._host_calls.begin(client, self._run.project, self._run.run, request)
        except BaseException:
            self.begin_failed = True
            raise
        self._begun = begun
        if self._is_committed and begun.health is Health.CORRUPT:
            raise CheckpointConflict(
                f"The checkpoint of step {begun.step} was committed and is corrupt "
                f"({begun.health_reason or 'its bytes are lost'}), and nothing can be sent to it any more; save under "
                "another step",
                context={"health": begun.health},
            )
        if self.on_begun is not None:
            self.on_begun()
        return next((part for part in begun.negotiated if part.rank == self._rank), None)

    def _negotiate(self, request: NegotiateChunks) -> ChunksNegotiated:
        """In one call with the begin if it is the first, on the thread of the uploader's calls."""
        if self._begun is None:
            offer = FirstOffer(rank=self._rank, chunks=request.chunks, mount_proof=request.mount_proof)
            negotiated = self._begin(self._client, offer)
            if negotiated is not None:
                return negotiated
        assert self._begun is not None
        if self._is_committed:
            present = [ChunkAnswer(digest=each.digest, status="present") for each in request.chunks]
            return ChunksNegotiated(chunks=present, finished=[])
        return self._client.checkpoints.negotiate(self._begun.id, self._rank, request)

    def only_hash(self, chunks: Iterable[OutgoingChunk]) -> None:
        """Instead of an upload, if the shard is sealed: the seal says whether this is the same content."""
        for chunk in chunks:
            hashed = hash_chunk(chunk, self._stopped, with_md5=False)
            self.digests.append(hashed.digest)
            if hashed.release is not None:
                hashed.release()

    def seal(self, *, summary: ShardSummary, index: IndexOrdinals) -> CheckpointView:
        """`index`: the ordinals of the documents among the uploaded chunks. The seal that completes the world
        commits."""
        return self._seal(self.digests, summary, index)

    def _seal(self, digests: list[str], summary: ShardSummary, index: IndexOrdinals) -> CheckpointView:
        assert self._begun is not None  # by the first negotiation
        measured = summary.model_copy(update={"upload_seconds": self._uploaded_at - self._begun_at})
        seal = SealShard(
            **dict(self._fence), **dict(measured), digest=shard_digest(digests), chunks=digests, index=index
        )
        if self._host_calls is None:
            return self._client.checkpoints.seal(self._begun.id, self._rank, seal)
        return self._host_calls.seal(self._client, self._begun.id, self._rank, seal)

    def fail(self, error: BaseException) -> None:
        """Aborts the checkpoint at once, so that no rank waits until the service's reaper does. Begins it first if this
        rank has not yet. Never raises."""
        reason = without_secrets(f"{type(error).__name__}: {error}")
        failed = FailShard(**self._fence.model_dump(), reason=text_to_keep(reason, 4000))
        try:
            if self._begun is None:
                self.on_begun = None
                self._begin(self._brief_client, None)
            assert self._begun is not None
            if not self._is_committed:
                self._brief_client.checkpoints.seal(self._begun.id, self._rank, failed)
        except HoldfastError as not_told:
            log.info("the service was not told that rank %d failed: %s", self._rank, not_told)

    def abort(self, reason: str) -> None:
        """Gives the checkpoint up for all ranks. Begins it first if this rank has not yet: another rank may have.
        Raises HoldfastError if the service is not told."""
        begun = self._begun or self._brief_client.checkpoints.begin(self._run.project, self._run.run, self._request)
        abort = AbortCheckpoint(**self._fence.model_dump(), reason=text_to_keep(reason, 4000))
        self._brief_client.checkpoints.abort(begun.id, abort)

    def stop(self) -> None:
        self._stopped.set()
        if self._uploader is not None:
            self._uploader.stop()
