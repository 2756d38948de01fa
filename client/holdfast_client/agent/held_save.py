"""One rank's part of one save in the agent: read from the memory that the rank has staged into, sent by a ShardWriter.

HELD -> try() for each Run of the living rank -> sealed, or its error goes to the rank, which decides
     -> finish() once the rank is dead, of what it has proven: tries by itself until the checkpoint is committed, or
        cannot be any more
"""

from __future__ import annotations

import functools
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime

from holdfast_client.agent.messages import Counts, HandOver, HeldPart, StagedChunk
from holdfast_client.chunks.transfer import OutgoingChunk
from holdfast_client.chunks.workers import TransferWorkers
from holdfast_client.client import Client
from holdfast_client.errors import (
    CheckpointAborted,
    HoldfastError,
    IntegrityError,
    StaleAttempt,
    TransferStopped,
)
from holdfast_client.host_calls import HostCalls
from holdfast_client.shard_writer import BEGINS, ShardWriter, worth_another_begin
from holdfast_client.transport import Backoff, check_stop
from holdfast_protocol.checkpoints import CheckpointView, ShardSummary
from holdfast_protocol.digests import chunk_digest
from holdfast_protocol.states import AbortCause, CheckpointState

log = logging.getLogger("holdfast.agent")

LONG_POLL_SECONDS = 30
_LOOK_SECONDS = 0.1


class JobHere:
    """The ranks of one launch on this node: they begin and seal in one call. Thread-safe."""

    def __init__(self, client: Client, host_ranks: int) -> None:
        """`client`: of the joint calls; closed with the job."""
        self._client = client
        # No process knows the secret, so nobody joins by the socket: the ranks' threads are in this process.
        self.calls = HostCalls(client, secret=secrets.token_hex(16), count=host_ranks, leads=True)
        self._members = 0
        self._lock = threading.Lock()

    def join(self) -> None:
        with self._lock:
            self._members += 1

    def leave(self) -> bool:
        """True for the last member: the job has ended here."""
        with self._lock:
            self._members -= 1
            return not self._members

    def close(self) -> None:
        self.calls.close()
        self._client.close()


class RankClient:
    """The client of one rank's saves. Each retry deadline has one for many saves: it remembers what it has learnt of
    the service and its store. Thread-safe."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._made: dict[float, Client] = {}

    def retrying(self, seconds: float) -> Client:
        with self._lock:
            if seconds not in self._made:
                self._made[seconds] = self._client.with_retry_deadline(seconds, self._stop)
            return self._made[seconds]

    def cut_off(self) -> None:
        """Ends the calls and transfers that are under way. Later saves call anew."""
        with self._lock:
            self._stop.set()
            self._stop, self._made = threading.Event(), {}
        self._client.transfers.cut()

    def close(self) -> None:
        self._client.close()


class Ledger:
    """What the agent has done since it was started. Thread-safe."""

    def __init__(self) -> None:
        self.counts = Counts()
        self._lock = threading.Lock()

    def note(
        self,
        *,
        taken: int = 0,
        tries: int = 0,
        failed_tries: int = 0,
        finished: int = 0,
        given_up: int = 0,
        error: str | None = None,
    ) -> None:
        with self._lock:
            now = self.counts
            self.counts = Counts(
                taken=now.taken + taken,
                tries=now.tries + tries,
                failed_tries=now.failed_tries + failed_tries,
                finished=now.finished + finished,
                given_up=now.given_up + given_up,
                last_error=now.last_error if error is None else error,
                last_error_at=now.last_error_at if error is None else datetime.now(UTC),
            )


class HeldSave:
    """`stop` may be called from any thread; all else is the link's working thread's."""

    def __init__(
        self,
        hand: HandOver,
        memory: memoryview,
        documents: Sequence[bytes],
        *,
        client: RankClient,
        workers: TransferWorkers,
        job: JobHere,
        rank_lives: Callable[[], bool],
        ledger: Ledger,
        digests: Sequence[str] = (),
    ) -> None:
        """`rank_lives`: asked before the service is told that this rank has failed. `digests`: of a copy; its bytes are
        proven again when they are read."""
        self.hand = hand
        self._memory = memory
        self.documents = documents
        self._client = client
        self._workers = workers
        self._job = job
        self._rank_lives = rank_lives
        self._ledger = ledger
        self._stopped = threading.Event()
        self._writer: ShardWriter | None = None
        self._view: CheckpointView | None = None
        self._is_tried = False
        self._tries, self._last_error = 0, ""
        self._may_seal = threading.Event()
        self.on_sealing: Callable[[], object] = lambda: None
        """Called before the seal of a save that is not proven."""
        self.digests: Sequence[str] = ()
        """Of the chunks and the documents of the sealed part."""
        self._is_copy = bool(digests)
        self._known = [*digests] or [chunk.digest or "" for chunk in hand.chunks]
        """Digests that were found, by ordinal."""
        self.is_released = False
        """Its rank stages another save into the memory."""
        self.is_over = False
        """Nothing is left to be done for it."""
        self.is_committed = False
        """`finish` has seen that."""
        self.is_hopeless = False
        """`finish` has seen that no later try can commit it."""

    @property
    def is_sealed(self) -> bool:
        """This rank's part is whole at the service, as far as is known."""
        return self._view is not None

    def __str__(self) -> str:
        return f"step {self.hand.step} of {self.hand.run_name}, attempt {self.hand.attempt}, rank {self.hand.rank}"

    def shown(self, *, rank_lives: bool) -> HeldPart:
        hand = self.hand
        return HeldPart(
            project=hand.project,
            run=hand.run,
            attempt=hand.attempt,
            step=hand.step,
            rank=hand.rank,
            bytes=sum(chunk.bytes for chunk in hand.chunks),
            rank_lives=rank_lives,
            state="uploading" if self._is_tried else "sealed" if self.is_sealed else "held",
            tries=self._tries,
            last_error=self._last_error or None,
        )

    def writer(self, retry_seconds: float, *, late: bool = False) -> ShardWriter:
        """Of the next try. `late`: the service takes it though the attempt has told that it has ended, as what a spool
        has kept, until another attempt takes over."""
        begin = self.hand.begin
        self._writer = ShardWriter(
            self._client.retrying(retry_seconds),
            self.hand.run_name,
            self.hand.rank,
            begin.model_copy(update={"origin_attempt": begin.attempt}) if late else begin,
            workers=self._workers,
            host_calls=self._job.calls,
        )
        self._writer.on_hashed = functools.partial(_note, self._known)  # the writer refers to no memory
        return self._writer

    def hash_all(self) -> list[str] | None:
        """The digests of the chunks and the documents. A try that runs meanwhile hashes from the first chunk on, and
        this from the last one: what the try has found is taken from it. None: the save is over for its rank."""
        for ordinal in reversed(range(len(self.hand.chunks))):
            if self._stopped.is_set() or self.is_released:
                return None
            if not self._known[ordinal]:
                chunk = self.hand.chunks[ordinal]
                self._known[ordinal] = chunk_digest(self._memory[chunk.start : chunk.start + chunk.bytes])
        return [*self._known, *map(chunk_digest, self.documents)]

    def write(self, writer: ShardWriter, summary: ShardSummary) -> CheckpointView:
        """One try. Raises a save's errors. When it ends, no thread reads the memory."""
        self._view = None
        if self._stopped.is_set():
            writer.stop()
        self._tries += 1
        self._is_tried = True
        try:
            view = writer.upload_and_seal_again(self._chunks, lambda: (self._allowed(summary), self.hand.index))
        except BaseException as error:
            self._last_error = str(error) or type(error).__name__
            self._ledger.note(tries=1, failed_tries=1, error=f"{self}: {self._last_error}")
            raise
        finally:
            self._is_tried = False
        self._ledger.note(tries=1)
        self.digests, self._view = writer.digests, view
        return view

    def prove(self) -> None:
        """Nothing has written, or will write, to what it was copied from: it may be sealed. From any thread."""
        self.hand = self.hand.model_copy(update={"is_proven": True})
        self.allow_seal()

    def allow_seal(self) -> None:
        """The seal that waits may go on. From any thread."""
        self._may_seal.set()

    def _allowed(self, summary: ShardSummary) -> ShardSummary:
        """`summary`, once it may be sealed. Raises TransferStopped."""
        self._may_seal.clear()
        if not self.hand.is_proven:
            self.on_sealing()
        while not (self.hand.is_proven or self._may_seal.wait(_LOOK_SECONDS)):
            check_stop(self._stopped)
        return summary

    def stop(self) -> None:
        """Cuts the try off, as it is; nothing is tried afterwards."""
        self._stopped.set()
        if (writer := self._writer) is not None:
            writer.stop()
            self._job.calls.flush()
            self._client.cut_off()

    def finish(self) -> None:
        """Its rank is dead, or out of reach. Returns when the checkpoint is committed or cannot be any more; the log
        says which."""
        try:
            view = self._finished()
            self.is_committed = view.state is CheckpointState.COMMITTED
            if self.is_committed:
                log.info("committed for a rank that is gone: %s", self)
            else:
                log.warning("sealed for a rank that is gone, and other ranks' parts are missing: %s", self)
        except StaleAttempt as error:
            self.is_hopeless = True
            log.warning("dropped, because the run has gone on without it: %s. %s", self, error)
        except HoldfastError as error:
            self.is_hopeless = isinstance(error, CheckpointAborted | IntegrityError)
            log.warning("not committed for a rank that is gone: %s. %s", self, error)
        finally:
            self.is_over = True
            self._ledger.note(finished=int(self.is_committed), given_up=int(not self.is_committed))

    def _finished(self) -> CheckpointView:
        if not self.hand.is_proven:
            raise TransferStopped(
                "Its rank was gone before it knew whether training had written to the tensors while they were copied "
                "(overlap=True)"
            )
        backoff = Backoff(math.inf, self._stopped.wait)
        tries = 0
        while True:
            check_stop(self._stopped)
            try:
                return self._outcome(self._view or self._try_for_dead())
            except HoldfastError as error:
                self._view = None
                tries += 1
                if tries >= BEGINS or not _worth_a_late_begin(error):
                    raise
            backoff.pause()

    def _try_for_dead(self) -> CheckpointView:
        writer = self.writer(self.hand.retry_seconds, late=True)
        try:
            return self.write(writer, self.hand.summary)
        except (CheckpointAborted, StaleAttempt, TransferStopped):
            raise
        except HoldfastError as error:
            # The other ranks would wait for it. A rank that lives makes the save itself, and decides.
            if not worth_another_begin(error) and not writer.begin_failed and not self._rank_lives():
                writer.fail(error)
            raise

    def _outcome(self, view: CheckpointView) -> CheckpointView:
        """The other ranks of the node may seal a moment later than this one, however long the upload took. Raises
        CheckpointAborted, maybe to be begun again."""
        until = time.monotonic() + self.hand.retry_seconds
        client = self._client.retrying(self.hand.retry_seconds)
        while view.state is CheckpointState.UPLOADING and time.monotonic() < until:
            check_stop(self._stopped)
            view = client.checkpoints.get(view.id, wait_seconds=LONG_POLL_SECONDS)
        if view.state is CheckpointState.ABORTED:
            raise CheckpointAborted(view.abort_reason or "It was aborted", context={"cause": view.abort_cause})
        return view

    def _chunks(self) -> Iterator[OutgoingChunk]:
        for ordinal, chunk in enumerate(self.hand.chunks):
            load = functools.partial(self._load, ordinal, chunk)
            digest = self._known[ordinal] if self._is_copy else chunk.digest
            yield OutgoingChunk(load, digest, item_bytes=chunk.item_bytes)
        for document in self.documents:
            yield OutgoingChunk.of(document)

    def _load(self, ordinal: int, chunk: StagedChunk, stop: threading.Event) -> memoryview:
        check_stop(stop)
        view = self._memory[chunk.start : chunk.start + chunk.bytes]
        if self._is_copy and chunk_digest(view) != self._known[ordinal]:
            raise IntegrityError(f"Chunk {ordinal} of the copy of {self} has changed in memory, and is not sent")
        return view


def _worth_a_late_begin(error: HoldfastError) -> bool:
    """Also after an abort because the attempt has ended: it was begun in time, and nobody had called for a minute."""
    has_ended = isinstance(error, CheckpointAborted) and error.context.get("cause") == AbortCause.ATTEMPT_ENDED
    return has_ended or worth_another_begin(error)


def _note(known: list[str], ordinal: int, digest: str) -> None:
    if ordinal < len(known):
        known[ordinal] = digest
