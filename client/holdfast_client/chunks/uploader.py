"""Uploads one rank's chunks: offer, PUT what is missing, report what is done, until all are verified.

    bytes -> [offer] -> present, or a ticket -> [PUT on a thread] -> [report] -> verified
                ^--------- expired ticket, missing or mismatch ---------'

Offers and reports share a call, so that the service verifies with the store while the rest is still going up.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from holdfast_client.chunks.jobs import Done, Jobs
from holdfast_client.chunks.stopping import check_stop
from holdfast_client.chunks.ticket_life import WAITS_PER_CHUNK, TicketLife, TicketWaitedTooLong
from holdfast_client.chunks.upload import put_chunk
from holdfast_client.chunks.workers import TransferWorkers
from holdfast_client.client import Client
from holdfast_client.errors import (
    ChecksumMismatch,
    DirectFileRefused,
    StoreRefused,
    StoreUnavailable,
    TicketProblem,
    UnexpectedReply,
)
from holdfast_protocol.chunks import (
    MAX_BATCH,
    ChunkAnswer,
    ChunkOffer,
    FinishedAnswer,
    FinishedState,
    NegotiateChunks,
    UploadTicket,
)
from holdfast_protocol.fencing import Fence

OFFER_BYTES_WHEN_IDLE = 32 * 1024**2
OFFER_BYTES_WHEN_BUSY = 256 * 1024**2
HELD_BYTES = 1024**3
"""Bytes that are taken from the iterator and not yet verified; beyond them it waits."""
TRIES_PER_CHUNK = 4
MISSING_PAUSE_SECONDS = 0.5


@dataclass
class _Chunk:
    body: memoryview
    md5: str | None
    tries: int = 0


@dataclass(frozen=True)
class Uploaded:
    """All chunks of an upload, and those of them whose bytes had to be sent."""

    chunks: int
    bytes: int
    sent_chunks: int
    sent_bytes: int


class ShardUploader:
    """For one shard of one checkpoint, used once. `workers` are shared with other transfers; without them it starts
    its own for the time of the upload. `on_sent(bytes)` is called on the uploading thread after each chunk."""

    def __init__(
        self,
        client: Client,
        checkpoint_id: str,
        rank: int,
        fence: Fence,
        *,
        workers: TransferWorkers | None = None,
        on_sent: Callable[[int], None] | None = None,
    ) -> None:
        self._client = client
        self._checkpoint_id = checkpoint_id
        self._rank = rank
        self._fence = fence
        self._workers = workers
        self._on_sent = on_sent
        self._stop = threading.Event()
        self._seen: set[str] = set()
        self._open: dict[str, _Chunk] = {}
        self._to_offer: deque[str] = deque()
        self._to_offer_bytes = 0
        self._finished: deque[str] = deque()
        self._all_bytes = self._held_bytes = 0
        self._sent_chunks = self._sent_bytes = 0

    def stop(self) -> None:
        """From any thread: the upload ends with TransferStopped, within a block or a socket's time-out."""
        self._stop.set()

    def upload(self, chunks: Iterable[tuple[str, memoryview]]) -> Uploaded:
        """Takes (SHA-256, bytes) as they come and returns when the service has verified every one of them.

        Each view must stay as it is until then. When this returns or raises, no thread reads the views any more.
        Raises StaleAttempt, CheckpointAborted, QuotaExceeded, StoreFull and the rest of errors.py as they come;
        IntegrityError if a chunk never verifies.
        """
        if self._workers is not None:
            return self._upload(chunks, Jobs(self._workers, self._stop))
        with TransferWorkers() as workers:
            return self._upload(chunks, Jobs(workers, self._stop))

    def _upload(self, chunks: Iterable[tuple[str, memoryview]], jobs: Jobs) -> Uploaded:
        try:
            for digest, body in chunks:
                check_stop(self._stop)
                if digest in self._seen:
                    continue
                self._take(digest, body)
                while (done := jobs.next(timeout_seconds=0)) is not None:
                    self._settle(done)
                if self._time_to_offer(jobs):
                    self._negotiate(jobs)
                while self._held_bytes > HELD_BYTES:
                    self._advance(jobs)
            while self._open:
                self._advance(jobs)
        finally:
            jobs.drain()
            self._open.clear()
        return Uploaded(len(self._seen), self._all_bytes, self._sent_chunks, self._sent_bytes)

    def _take(self, digest: str, body: memoryview) -> None:
        self._seen.add(digest)
        md5 = hashlib.md5(body, usedforsecurity=False).hexdigest() if self._client.store_asks_md5() else None
        self._open[digest] = _Chunk(body, md5)
        self._held_bytes += body.nbytes
        self._all_bytes += body.nbytes
        self._offer_later(digest)

    def _offer_later(self, digest: str) -> None:
        self._to_offer.append(digest)
        self._to_offer_bytes += self._open[digest].body.nbytes

    def _time_to_offer(self, jobs: Jobs) -> bool:
        enough = OFFER_BYTES_WHEN_IDLE if jobs.has_idle_thread else OFFER_BYTES_WHEN_BUSY
        return len(self._to_offer) >= MAX_BATCH or self._to_offer_bytes >= enough

    def _advance(self, jobs: Jobs) -> None:
        """One step towards an end: offers and reports what there is, else waits for a transfer."""
        check_stop(self._stop)
        if self._to_offer or self._finished:
            self._negotiate(jobs)
            wait_seconds: float | None = 0
        else:
            wait_seconds = None
        while jobs.running and (done := jobs.next(wait_seconds)) is not None:
            self._settle(done)
            wait_seconds = 0

    def _negotiate(self, jobs: Jobs) -> None:
        offered = [self._to_offer.popleft() for _ in range(min(MAX_BATCH, len(self._to_offer)))]
        self._to_offer_bytes -= sum(self._open[digest].body.nbytes for digest in offered)
        finished = [self._finished.popleft() for _ in range(min(MAX_BATCH, len(self._finished)))]
        reply = self._client.negotiate(
            self._checkpoint_id,
            self._rank,
            NegotiateChunks(
                epoch=self._fence.epoch,
                attempt=self._fence.attempt,
                chunks=[self._offer(digest) for digest in offered],
                finished=finished,
                mount_proof=self._client.mount.proof(),
            ),
        )
        for finished_answer in reply.finished:
            self._judge(finished_answer)
        answers = {answer.digest: answer for answer in reply.chunks}
        if not answers.keys() >= set(offered) or not {answer.digest for answer in reply.finished} >= set(finished):
            raise UnexpectedReply("The service did not answer for every chunk that it was asked about")
        for digest in offered:
            self._follow(answers[digest], jobs)

    def _offer(self, digest: str) -> ChunkOffer:
        chunk = self._open[digest]
        return ChunkOffer(digest=digest, bytes=chunk.body.nbytes, md5=chunk.md5)

    def _follow(self, answer: ChunkAnswer, jobs: Jobs) -> None:
        if answer.status == "present":
            self._close(answer.digest)
        elif answer.ticket is None:
            raise UnexpectedReply("The service asked for an upload and gave no ticket for it")
        else:
            chunk, ticket, life = self._open[answer.digest], answer.ticket, TicketLife(answer.ticket.expires_in_seconds)
            jobs.start(answer.digest, lambda: self._put(chunk.body, ticket, life))

    def _put(self, body: memoryview, ticket: UploadTicket, life: TicketLife) -> None:
        life.check()
        put_chunk(ticket, body, self._client.transfers, stop=self._stop)

    def _settle(self, done: Done) -> None:
        """What became of one transfer. Whatever cannot be mended by a new ticket is raised."""
        if done.error is None:
            self._finished.append(done.digest)
        elif isinstance(done.error, TicketProblem | DirectFileRefused):
            if isinstance(done.error, DirectFileRefused):
                self._client.mount.give_up()
            refused = StoreRefused(f"No ticket could be used; the last time: {done.error.detail}")
            waited = isinstance(done.error, TicketWaitedTooLong)
            self._try_again(done.digest, refused, WAITS_PER_CHUNK if waited else TRIES_PER_CHUNK)
        else:
            raise done.error

    def _judge(self, answer: FinishedAnswer) -> None:
        """What the service found in the store after we had reported an upload."""
        if answer.digest not in self._open:
            return
        if answer.state is FinishedState.VERIFIED:
            self._sent_chunks += 1
            self._sent_bytes += self._open[answer.digest].body.nbytes
            if self._on_sent is not None:
                self._on_sent(self._open[answer.digest].body.nbytes)
            self._close(answer.digest)
        elif answer.state is FinishedState.MISSING:
            # A network filesystem may show a new file late, and sending it again at once would not be seen either.
            self._stop.wait(MISSING_PAUSE_SECONDS * 2 ** self._open[answer.digest].tries)
            lost = f"Chunk {answer.digest[:12]} was sent and is not in the store. {answer.detail}"
            self._try_again(answer.digest, StoreUnavailable(lost.rstrip()))
        else:
            wrong = f"Chunk {answer.digest[:12]} does not arrive as it was sent. {answer.detail}"
            self._try_again(answer.digest, ChecksumMismatch(wrong.rstrip()))

    def _try_again(self, digest: str, if_too_often: Exception, allowed: int = TRIES_PER_CHUNK) -> None:
        self._open[digest].tries += 1
        if self._open[digest].tries >= allowed:
            raise if_too_often
        self._offer_later(digest)

    def _close(self, digest: str) -> None:
        self._held_bytes -= self._open.pop(digest).body.nbytes
