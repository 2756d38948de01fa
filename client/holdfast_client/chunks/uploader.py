"""Uploads one rank's chunks: hash, offer, PUT the absent ones, report, until all are verified.

    bytes -> [hash on a thread] -> [offer] -> present, or a ticket -> [PUT on a thread] -> [report] -> verified
                                      ^--------- expired ticket, missing or mismatch ---------'

All of it overlaps, chunk by chunk. Offers and reports share a call, so that the service verifies with the store during
the rest of the upload. If chunks are compressed, each is asked for first, and encoded only if it is absent: a present
chunk costs no compression. A chunk that hardly shrinks is sent raw.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from holdfast_client.chunks.connections import (
    WAITS_PER_CHUNK,
    TicketLife,
    TicketWaitedTooLong,
)
from holdfast_client.chunks.transfer import HashedChunk, OutgoingChunk, hash_chunk, put_chunk
from holdfast_client.chunks.workers import Done, Jobs, TransferWorkers
from holdfast_client.client import Client
from holdfast_client.errors import (
    ChecksumMismatch,
    DirectFileRefused,
    IncompleteCheckpoint,
    StoreRefused,
    StoreUnavailable,
    TicketProblem,
    UnexpectedReply,
)
from holdfast_client.transport import check_stop
from holdfast_protocol.base import Fence
from holdfast_protocol.checkpoints import (
    MAX_BATCH,
    ChunkAnswer,
    ChunkOffer,
    ChunksNegotiated,
    FinishedAnswer,
    FinishedState,
    NegotiateChunks,
    UploadTicket,
)
from holdfast_protocol.codecs import Codec, encode, zstd_codec

FIRST_OFFER_PART = 1 / 32
"""Part of the held bytes that the first call offers, so that sending begins at once. Each further call offers as many
as all before it together,"""
LARGEST_OFFER_PART = 1 / 8
"""but no more than these: the chunks that are hashed last are sent last, and nothing overlaps that;"""
OFFER_PART_WHEN_BUSY = 1 / 4
"""and these while every sending thread is busy."""
REPORT_PART = 1 / 4
"""Sent chunks are reported with the next offer; or at this part of the held bytes,"""
REPORT_SECONDS = 1.0
"""or this long after the last answer."""


class Call(NamedTuple):
    """The digests of a call."""

    offered: list[str]
    reported: list[str]


class NextCall:
    """The waiting content of the uploader's next call, and when that call is due: seldom, but so that no thread
    starves.

        hashed -> offer() -> [call] -> present, or a ticket -> sent -> report() -> [call] -> verified

    A call costs the service much the same however large it is. `most_held_bytes`: bytes that may be hashed and not yet
    verified. Times are `time.monotonic()`'s. Pure; ShardUploader makes the calls, one at a time."""

    def __init__(self, most_held_bytes: int, now: float) -> None:
        self._most = most_held_bytes
        self._answered_at = now
        self._to_offer: deque[tuple[str, int]] = deque()
        self._to_report: deque[tuple[str, int]] = deque()
        self._to_offer_bytes = self._to_report_bytes = self._offered_bytes = 0
        self.under_way = False

    def offer(self, digest: str, held_bytes: int) -> None:
        """The chunk must be offered, for the first time or again."""
        self._to_offer.append((digest, held_bytes))
        self._to_offer_bytes += held_bytes

    def report(self, digest: str, held_bytes: int) -> None:
        """The chunk was sent."""
        self._to_report.append((digest, held_bytes))
        self._to_report_bytes += held_bytes

    def is_due(self, now: float, *, senders_idle: bool, all_hashed: bool, stuck: bool) -> bool:
        """`all_hashed`: no chunk will be offered for the first time any more. `stuck`: only a call can bring
        progress."""
        if self.under_way or not self.waits:
            return False
        if stuck or (all_hashed and self._to_offer):
            return True
        if max(len(self._to_offer), len(self._to_report)) >= MAX_BATCH:
            return True
        if self._to_report and now - self._answered_at >= REPORT_SECONDS:
            return True
        return self._to_report_bytes >= self._most * REPORT_PART or self._to_offer_bytes >= self._batch(senders_idle)

    @property
    def waits(self) -> bool:
        """Whether there is content for a call."""
        return bool(self._to_offer or self._to_report)

    def begin(self) -> Call:
        """Takes the waiting content, at most as much as one call may carry."""
        self.under_way = True
        offered = [self._to_offer.popleft() for _ in range(min(MAX_BATCH, len(self._to_offer)))]
        reported = [self._to_report.popleft() for _ in range(min(MAX_BATCH, len(self._to_report)))]
        offered_bytes = sum(held_bytes for _, held_bytes in offered)
        self._to_offer_bytes -= offered_bytes
        self._offered_bytes += offered_bytes
        self._to_report_bytes -= sum(held_bytes for _, held_bytes in reported)
        return Call([digest for digest, _ in offered], [digest for digest, _ in reported])

    def end(self, now: float) -> None:
        """The service has answered."""
        self.under_way = False
        self._answered_at = now

    def _batch(self, senders_idle: bool) -> float:
        if not senders_idle:
            return self._most * OFFER_PART_WHEN_BUSY
        return min(max(self._most * FIRST_OFFER_PART, self._offered_bytes), self._most * LARGEST_OFFER_PART)


# What is kept of a chunk between its hash and its verdict, and the chunks that wait to be encoded.

SMALLEST_ENCODED_BYTES = 64 * 1024
"""A smaller chunk saves less than asking for it costs; and documents are compressed already."""
KEPT_PART = 0.95
"""Part of the raw bytes: a chunk that saves less than 5% is sent raw, and costs no reader a decode."""
ENCODED_BYTES = 256 * 1024**2
"""The most bytes encoded or being encoded. No more are begun, because this memory comes on top of the state."""


@dataclass(frozen=True)
class WireForm:
    codec: Codec
    body: memoryview
    digest: str
    """SHA-256 of `body`."""
    md5: str | None
    """MD5 of `body`, if the store asks for it."""

    @classmethod
    def raw(cls, chunk: HashedChunk) -> WireForm:
        return cls(Codec.RAW, chunk.body, chunk.digest, chunk.md5)


def encode_chunk(chunk: HashedChunk, stop: threading.Event) -> WireForm:
    """On a transfer thread. Raises TransferStopped."""
    codec = zstd_codec(chunk.item_bytes)
    most_bytes = int(chunk.body.nbytes * KEPT_PART)
    encoded = encode(chunk.body, codec, most_bytes=most_bytes, on_block=lambda: check_stop(stop))
    if encoded is None:
        return WireForm.raw(chunk)
    md5 = hashlib.md5(encoded, usedforsecurity=False).hexdigest() if chunk.md5 is not None else None
    return WireForm(codec, memoryview(encoded), hashlib.sha256(encoded).hexdigest(), md5)


@dataclass
class OpenChunk:
    """hashed -> [asked for, if it may be encoded] -> absent -> [encoded on a thread] -> offered, sent, verified"""

    digest: str
    bytes: int
    form: WireForm | None
    """None: it will be encoded, if the service does not have it."""
    raw: HashedChunk | None
    """Set as long as any thread may read the chunk's own bytes."""
    tries: int = 0
    waits: int = 0
    """How often its ticket expired before its transfer began; no refusal is counted."""

    @classmethod
    def of(cls, chunk: HashedChunk, *, encodes: bool) -> OpenChunk:
        asks = encodes and chunk.body.nbytes >= SMALLEST_ENCODED_BYTES
        return cls(chunk.digest, chunk.body.nbytes, None if asks else WireForm.raw(chunk), chunk)

    @property
    def held_bytes(self) -> int:
        return self.bytes if self.form is None else self.form.body.nbytes

    def offer(self) -> ChunkOffer:
        if self.form is None:
            return ChunkOffer(digest=self.digest, bytes=self.bytes, ask=True)
        if self.form.codec is Codec.RAW:
            return ChunkOffer(digest=self.digest, bytes=self.bytes, md5=self.form.md5)
        return ChunkOffer(
            digest=self.digest,
            bytes=self.bytes,
            codec=self.form.codec,
            stored_digest=self.form.digest,
            stored_bytes=self.form.body.nbytes,
            md5=self.form.md5,
        )

    def take(self, form: WireForm) -> None:
        """Sets the form that is sent. An encoded chunk needs its own bytes no more."""
        self.form = form
        if form.codec is not Codec.RAW:
            self.let_go()

    def let_go(self) -> None:
        """No thread reads the chunk's own bytes from here on. May be called twice."""
        raw, self.raw = self.raw, None
        if raw is not None and raw.release is not None:
            raw.release()


class EncodingQueue:
    """Chunks to encode, so many at once that their memory stays bounded."""

    def __init__(self) -> None:
        self._waiting: deque[OpenChunk] = deque()
        self._running = 0
        self._bytes = 0

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._running

    def add(self, chunk: OpenChunk) -> None:
        self._waiting.append(chunk)

    def begin(self, at_once: int) -> OpenChunk | None:
        """The next chunk to encode, if there is one and room for it."""
        if not self._waiting or self._running >= at_once or self._bytes >= ENCODED_BYTES:
            return None
        chunk = self._waiting.popleft()
        self._running += 1
        self._bytes += chunk.held_bytes
        return chunk

    def end(self, chunk: OpenChunk, form: WireForm) -> None:
        self._running -= 1
        self._bytes -= chunk.held_bytes
        chunk.take(form)
        self._bytes += _own_bytes(chunk)

    def close(self, chunk: OpenChunk) -> None:
        self._bytes -= _own_bytes(chunk)


def _own_bytes(chunk: OpenChunk) -> int:
    return chunk.held_bytes if chunk.form is not None and chunk.form.codec is not Codec.RAW else 0


QUIET_SECONDS = 0.1
"""After this time without an event, while chunks are hashed or encoded, a call takes all content, however little it is:
those threads may wait for the memory of open chunks."""
HELD_BYTES = 1024**3
"""Bytes that are hashed and not yet verified; at this number no more are taken."""
TRIES_PER_CHUNK = 4
MISSING_PAUSE_SECONDS = 0.5


@dataclass(frozen=True)
class _Encoding:
    digest: str


_Key = int | str | _Encoding | Call
"""A hashing job's key is the chunk's ordinal, a transfer's its digest."""
_Result = HashedChunk | WireForm | ChunksNegotiated | None
_UploadJobs = Jobs[_Key, _Result]


@dataclass(frozen=True)
class Uploaded:
    """All distinct chunks of an upload, and those of them whose bytes had to be sent."""

    digests: list[str]
    """As the chunks were given, with duplicates."""
    chunks: int
    bytes: int
    sent_chunks: int
    sent_chunk_bytes: int
    """Bytes of the sent chunks before encoding."""
    sent_bytes: int
    """On the wire."""


class ShardUploader:
    """For one shard of one checkpoint, used once.

    `workers` are shared with other transfers; without them it starts its own for the time of the upload.
    `on_verified(bytes)` is called on the uploading thread for each chunk that the service has verified, whether it was
    sent or present. `held_bytes`: the room of the source, if it waits until chunks are verified.

    `negotiate` takes the place of the call to the service. `seal` takes the place of the last report: it gets the
    digests by ordinal and seals the shard, and the service verifies what is not reported yet. It raises
    IncompleteCheckpoint if a chunk is not in the store. Then the uploader reports, sends again what is missing, and
    calls `seal` once more. It is not called if nothing is left to report."""

    def __init__(
        self,
        client: Client,
        checkpoint_id: str,
        rank: int,
        fence: Fence,
        *,
        workers: TransferWorkers | None = None,
        on_verified: Callable[[int], object] | None = None,
        held_bytes: int | None = None,
        negotiate: Callable[[NegotiateChunks], ChunksNegotiated] | None = None,
        seal: Callable[[list[str]], object] | None = None,
    ) -> None:
        self._client = client
        self._negotiated = negotiate or functools.partial(client.checkpoints.negotiate, checkpoint_id, rank)
        self._seal = seal
        self._fence = fence
        self._workers = workers
        self._on_verified = on_verified
        self.on_hashed: Callable[[int, str], object] | None = None
        self._stop = threading.Event()
        self._digests: list[str] = []
        self._seen: set[str] = set()
        self._open: dict[str, OpenChunk] = {}
        self._encoding = EncodingQueue()
        self._hashing = 0
        self._taken_all = False
        self._sending = 0
        self._most_held_bytes = HELD_BYTES if held_bytes is None else held_bytes
        self._later: list[tuple[float, str]] = []
        self._next_call = NextCall(self._most_held_bytes, time.monotonic())
        self._all_bytes = self._held_bytes = 0
        self._sent_chunks = self._sent_chunk_bytes = self._sent_bytes = 0

    def stop(self) -> None:
        """From any thread: the upload ends with TransferStopped, within a block or a socket's time-out."""
        self._stop.set()

    def upload(self, chunks: Iterable[OutgoingChunk]) -> Uploaded:
        """Returns when the service has verified every chunk. When this returns or raises, no thread reads their bytes.

        Raises StaleAttempt, CheckpointAborted, QuotaExceeded, StoreFull and others of errors.py;
        IntegrityError if a chunk never verifies.
        """
        if self._workers is not None:
            return self._upload(iter(chunks), self._workers)
        with TransferWorkers() as workers:
            return self._upload(iter(chunks), workers)

    def _upload(self, chunks: Iterator[OutgoingChunk], workers: TransferWorkers) -> Uploaded:
        jobs: _UploadJobs = Jobs(self._stop)
        try:
            while self._hash_more(chunks, jobs, workers) or self._open:
                check_stop(self._stop)
                done, quiet = self._wait(jobs)
                while done is not None:
                    self._settle(done, jobs, workers)
                    done = jobs.next(0)
                self._offer_deferred()
                self._call_if_due(jobs, workers, quiet=quiet)
                self._encode_more(jobs, workers)
        finally:
            jobs.drain()
            self._open.clear()
        return Uploaded(
            self._digests,
            len(self._seen),
            self._all_bytes,
            self._sent_chunks,
            self._sent_chunk_bytes,
            self._sent_bytes,
        )

    def _wait(self, jobs: _UploadJobs) -> tuple[Done[_Key, _Result] | None, bool]:
        """The next result, if one comes in time; and whether QUIET_SECONDS passed without one while chunks were hashed
        or encoded. It waits no longer than until a deferred chunk must be offered again."""
        most = QUIET_SECONDS if self._hashing or not self._encoding.is_idle else REPORT_SECONDS
        left = self._later[0][0] - time.monotonic() if self._later else most
        seconds = max(0.0, min(most, left))
        if jobs.running:
            done = jobs.next(seconds)
            return done, done is None and seconds == QUIET_SECONDS
        # Only deferred chunks, if any, are left.
        if self._later and not self._next_call.waits:
            self._stop.wait(max(0.0, left))
        return None, False

    def _offer_deferred(self) -> None:
        while self._later and self._later[0][0] <= time.monotonic():
            _, digest = heapq.heappop(self._later)
            self._next_call.offer(digest, self._open[digest].held_bytes)

    def _hash_more(self, chunks: Iterator[OutgoingChunk], jobs: _UploadJobs, workers: TransferWorkers) -> bool:
        """Keeps some threads hashing. False if there is nothing more to hash now."""
        with_md5, cores = self._client.store_asks_md5(), self._client.transfers.cores
        while self._hashing < workers.hashing.count and self._held_bytes <= self._most_held_bytes:
            chunk = next(chunks, None)
            if chunk is None:
                self._taken_all = True
                break
            ordinal = len(self._digests)
            self._digests.append("")
            self._hashing += 1
            work = functools.partial(hash_chunk, chunk, self._stop, with_md5=with_md5, cores=cores)
            jobs.start(workers.hashing, ordinal, work)
        return self._hashing > 0

    def _take(self, ordinal: int, chunk: HashedChunk) -> None:
        self._digests[ordinal] = chunk.digest
        if self.on_hashed is not None:
            self.on_hashed(ordinal, chunk.digest)
        opened = OpenChunk.of(chunk, encodes=self._client.encodes_chunks())
        if chunk.digest in self._seen:
            opened.let_go()
            return
        self._seen.add(chunk.digest)
        self._open[chunk.digest] = opened
        self._held_bytes += chunk.body.nbytes
        self._all_bytes += chunk.body.nbytes
        self._next_call.offer(chunk.digest, opened.held_bytes)

    def _call_if_due(self, jobs: _UploadJobs, workers: TransferWorkers, *, quiet: bool) -> None:
        # Tiny chunks are hashed faster than they are handed out: then nothing runs, and yet more will come.
        nothing_runs = not jobs.running and (self._taken_all or self._held_bytes > self._most_held_bytes)
        if not self._next_call.is_due(
            time.monotonic(),
            senders_idle=self._sending < workers.transfers.count,
            all_hashed=self._taken_all and not self._hashing and self._encoding.is_idle,
            stuck=nothing_runs or quiet,
        ):
            return
        call = self._next_call.begin()
        if self._seal is not None and self._is_last(call):
            jobs.start(workers.calls, call, functools.partial(self._seal_or_report, self._seal, call.reported))
            return
        offers = [self._open[digest].offer() for digest in call.offered]
        jobs.start(workers.calls, call, functools.partial(self._negotiate, offers, call.reported))

    def _negotiate(self, offers: list[ChunkOffer], finished: list[str]) -> ChunksNegotiated:
        request = NegotiateChunks(
            **self._fence.model_dump(),
            chunks=offers,
            finished=finished,
            mount_proof=self._client.mount.proof(),
        )
        return self._negotiated(request)

    def _is_last(self, call: Call) -> bool:
        """All chunks are taken, and all that are open were sent and are reported by this call."""
        nothing_runs = not (self._hashing or self._sending or self._later) and self._encoding.is_idle
        return self._taken_all and nothing_runs and not call.offered and len(call.reported) == len(self._open)

    def _seal_or_report(self, seal: Callable[[list[str]], object], reported: list[str]) -> ChunksNegotiated:
        try:
            seal(list(self._digests))
        except IncompleteCheckpoint:
            return self._negotiate([], reported)  # says which of them, and why
        verified = [FinishedAnswer(digest=digest, state=FinishedState.VERIFIED) for digest in reported]
        return ChunksNegotiated(chunks=[], finished=verified)

    def _take_reply(self, call: Call, reply: ChunksNegotiated, jobs: _UploadJobs, workers: TransferWorkers) -> None:
        self._next_call.end(time.monotonic())
        for finished in reply.finished:
            self._judge(finished)
        answers = {answer.digest: answer for answer in reply.chunks}
        judged = {answer.digest for answer in reply.finished}
        if not answers.keys() >= set(call.offered) or not judged >= set(call.reported):
            raise UnexpectedReply("The service did not answer for every chunk that it was asked about")
        for digest in call.offered:
            self._follow(answers[digest], jobs, workers)

    def _follow(self, answer: ChunkAnswer, jobs: _UploadJobs, workers: TransferWorkers) -> None:
        if answer.status == "present":
            self._close(answer.digest)
            return
        form = self._open[answer.digest].form
        if form is None:
            self._encoding.add(self._open[answer.digest])
        elif answer.ticket is None:
            raise UnexpectedReply("The service asked for an upload and gave no ticket for it")
        else:
            life = TicketLife(answer.ticket.expires_in_seconds)
            self._sending += 1
            jobs.start(workers.transfers, answer.digest, functools.partial(self._put, form.body, answer.ticket, life))

    def _encode_more(self, jobs: _UploadJobs, workers: TransferWorkers) -> None:
        # As many as there are cores, and not on the hashing threads: those may wait for memory that this frees.
        while (opened := self._encoding.begin(workers.hashing.count)) is not None:
            assert opened.raw is not None  # kept until it is encoded
            encode = functools.partial(encode_chunk, opened.raw, self._stop)
            work = functools.partial(self._client.transfers.cores.run, encode)
            jobs.start(workers.transfers, _Encoding(opened.digest), work)

    def _put(self, body: memoryview, ticket: UploadTicket, life: TicketLife) -> None:
        if ticket.kind == "file":
            self._client.mount.check_write(ticket.path)
        with life.used():
            try:
                put_chunk(ticket, body, self._client.transfers, stop=self._stop)
            except StoreUnavailable as error:
                if ticket.kind != "file":
                    raise
                # Where this machine's mount fails the service may reach the store all the same.
                raise DirectFileRefused(error.detail) from error

    def _settle(self, done: Done[_Key, _Result], jobs: _UploadJobs, workers: TransferWorkers) -> None:
        if isinstance(done.key, str):
            self._sending -= 1
            self._settle_transfer(done.key, done.error)
        elif done.error is not None:
            raise done.error
        elif isinstance(done.key, int):
            assert isinstance(done.result, HashedChunk)
            self._hashing -= 1
            self._take(done.key, done.result)
        elif isinstance(done.key, Call):
            assert isinstance(done.result, ChunksNegotiated)
            self._take_reply(done.key, done.result, jobs, workers)
        else:
            assert isinstance(done.result, WireForm)
            opened = self._open[done.key.digest]
            self._held_bytes -= opened.held_bytes
            self._encoding.end(opened, done.result)
            self._held_bytes += opened.held_bytes
            self._next_call.offer(done.key.digest, opened.held_bytes)

    def _settle_transfer(self, digest: str, error: BaseException | None) -> None:
        """Handles one transfer's outcome. Raises any error that a new ticket cannot fix."""
        if error is None:
            self._next_call.report(digest, self._open[digest].held_bytes)
        elif isinstance(error, TicketProblem | DirectFileRefused):
            if isinstance(error, DirectFileRefused):
                self._client.mount.give_up()
            refused = StoreRefused(f"No ticket could be used; the last time: {error.detail}")
            waited = isinstance(error, TicketWaitedTooLong)
            self._try_again(digest, refused, waited=waited)
        else:
            raise error

    def _judge(self, answer: FinishedAnswer) -> None:
        """Handles what the service found in the store after a reported upload."""
        if answer.digest not in self._open:
            return
        if answer.state is FinishedState.VERIFIED:
            opened = self._open[answer.digest]
            self._sent_chunks += 1
            self._sent_chunk_bytes += opened.bytes
            self._sent_bytes += opened.held_bytes
            self._close(answer.digest)
        elif answer.state is FinishedState.MISSING:
            # A network filesystem may show a new file late, and another copy sent at once would not be seen either.
            pause = MISSING_PAUSE_SECONDS * 2 ** self._open[answer.digest].tries
            lost = f"Chunk {answer.digest[:12]} was sent and is not in the store. {answer.detail}"
            self._try_again(answer.digest, StoreUnavailable(lost.rstrip()), after_seconds=pause)
        else:
            wrong = f"Chunk {answer.digest[:12]} does not arrive as it was sent. {answer.detail}"
            self._try_again(answer.digest, ChecksumMismatch(wrong.rstrip()))

    def _try_again(
        self, digest: str, if_too_often: Exception, *, waited: bool = False, after_seconds: float = 0.0
    ) -> None:
        chunk = self._open[digest]
        if waited:
            chunk.waits += 1
        else:
            chunk.tries += 1
        if chunk.waits >= WAITS_PER_CHUNK or chunk.tries >= TRIES_PER_CHUNK:
            raise if_too_often
        if chunk.tries == TRIES_PER_CHUNK - 1:
            # The last try goes over HTTP: what is written to a mount here may not be what the service sees.
            self._client.mount.give_up()
        if after_seconds:
            # The others go on meanwhile: this thread waits for all of them together.
            heapq.heappush(self._later, (time.monotonic() + after_seconds, digest))
        else:
            self._next_call.offer(digest, chunk.held_bytes)

    def _close(self, digest: str) -> None:
        opened = self._open.pop(digest)
        self._held_bytes -= opened.held_bytes
        self._encoding.close(opened)
        if self._on_verified is not None:
            self._on_verified(opened.bytes)
        opened.let_go()
