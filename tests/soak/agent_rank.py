"""One rank of a job without the trainer SDK that hands its saves to the agent of its node. The jobs of the soak and of
the Jepsen trial are made of such ranks.

It speaks with the agent by the client's own NodeAgent and SharedMemory, in the order of the SDK (save/outgoing.py,
save/pipeline.py, staging/places.py): bytes are staged into shared memory, the hand-over is answered, the agent uploads
and seals, and the rank does it from the same memory if the agent is gone. Only where the bytes come from is its own.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from holdfast_client.agent import connection, link
from holdfast_client.agent.link import AgentGone, HandedSave, NodeAgent, status_of
from holdfast_client.agent.messages import Caller, HandOver, StagedChunk
from holdfast_client.agent.shared_memory import SharedMemory
from holdfast_client.chunks.host_chunks import HostChunks
from holdfast_client.chunks.transfer import OutgoingChunk
from holdfast_client.client import Client
from holdfast_client.errors import HoldfastError
from holdfast_client.shard_writer import ShardWriter
from holdfast_protocol.base import RunName
from holdfast_protocol.checkpoints import BeginCheckpoint, CheckpointView, IndexOrdinals, ShardSummary
from tests.soak.ledger import BY_AGENT

SETTLE_SECONDS = 60.0
_SLAB_BYTES = 1024**2
_TRANSFERS = 4


def notice_agents_soon() -> None:
    """In this process: a trial of minutes sees agents come and go."""
    link.RETRY_SECONDS, connection.SILENCE_SECONDS = 1.0, 6.0


class AgentRank:
    """One save at a time."""

    def __init__(
        self, client: Client, run: RunName, rank: int, *, host_ranks: int, count: Callable[[str], object]
    ) -> None:
        """The client's settings name the agent. `count`: told of what was done, for the table."""
        assert client.settings.agent is not None
        self._path = client.settings.agent
        self._run, self._rank = run, rank
        self._retry_seconds = client.settings.retry_seconds
        self.count = count
        self._agent = NodeAgent(
            self._path,
            run,
            rank,
            host_ranks=host_ranks,
            transfers=_TRANSFERS,
            caller=functools.partial(Caller.of, client.settings),
        )
        self._slabs: list[SharedMemory] = []
        """Free ones, kept states in the order of their saves."""

    def settle(self) -> None:
        """Before the attempt is opened, as the SDK does: it would fence what dead ranks have left to the agent."""
        self._agent.settle(SETTLE_SECONDS)

    def ended_with_the_dead(self) -> int | None:
        """After `settle`: the agent's process, if it has sealed or given up all that dead ranks of the run have left.
        None: there is no agent, or it has not."""
        try:
            status = status_of(self._path)
        except HoldfastError:
            return None
        ours = [part for part in status.held if (part.project, part.run) == (self._run.project, self._run.run)]
        return None if any(not part.rank_lives and part.state != "sealed" for part in ours) else status.pid

    @contextlib.contextmanager
    def on_host(self) -> Iterator[HostChunks | None]:
        """What the agent keeps of the run in memory, for one restore."""
        lent = self._agent.borrow()
        if lent is None:
            yield None
            return
        with contextlib.closing(lent):
            host = HostChunks(None, (), lent=lent)
            yield host
            if host.lent_bytes:
                self.count("restores that read an agent's memory")

    def stage(
        self, begin: BeginCheckpoint, chunks: Sequence[bytes], summary: ShardSummary, index: IndexOrdinals
    ) -> StagedSave:
        """In shared memory, and handed over if there is an agent. The last chunk goes as a document, as an index
        does."""
        assert begin.launch_id is not None
        *staged, document = chunks
        memory = self._slab()
        starts = [0, *itertools.accumulate(map(len, staged))]
        memory.map[: starts[-1]] = b"".join(staged)
        ranges = [StagedChunk(start=start, bytes=len(chunk)) for start, chunk in zip(starts, staged, strict=False)]
        hand = HandOver(
            project=self._run.project,
            run=self._run.run,
            epoch=begin.epoch,
            attempt=begin.attempt,
            launch_id=begin.launch_id,
            number=begin.step + 1,
            step=begin.step,
            kind=begin.kind,
            world_size=begin.world_size,
            rank=self._rank,
            memory=memory.id,
            chunks=ranges,
            documents=[len(document)],
            index=index,
            summary=summary,
            retry_seconds=self._retry_seconds,
        )
        handed = self._agent.hand_over(memory, hand, [document], retry_seconds=self._retry_seconds)
        return StagedSave(self, memory, hand, document, handed)

    def give_back(self, memory: SharedMemory) -> None:
        if memory.may_be_read:
            memory.close()
        else:
            self._slabs.append(memory)

    def close(self, *, is_finished: bool) -> None:
        """As NodeAgent's."""
        self._agent.close(is_finished=is_finished)
        while self._slabs:
            self._slabs.pop().close()

    def _slab(self) -> SharedMemory:
        """One without a kept state, else one more, else that of the oldest state."""
        free = next((slab for slab in reversed(self._slabs) if not slab.is_kept), None)
        if free is not None:
            self._slabs.remove(free)
            return free
        spare = self._agent.spare_memory(_SLAB_BYTES) if 0 < len(self._slabs) <= self._agent.keeps else None
        if spare is not None or not self._slabs:
            return spare or SharedMemory(_SLAB_BYTES)
        oldest = self._slabs.pop(0)
        self._agent.reclaim(oldest)
        if not oldest.may_be_read:
            return oldest
        oldest.close()
        return SharedMemory(_SLAB_BYTES)


@dataclass(frozen=True)
class StagedSave:
    """One rank's part of a save. `handed`: the agent has taken it."""

    rank: AgentRank
    memory: SharedMemory
    hand: HandOver
    document: bytes
    handed: HandedSave | None

    @property
    def taken_by(self) -> int | None:
        """The process of the agent that commits it even if this process is killed; None: no agent has said so."""
        if self.handed is not None and self.handed._is_taken():
            with contextlib.suppress(OSError):  # it is gone meanwhile
                return self.handed._link.channel.peer_pid
        return None

    def write(self, writer: ShardWriter) -> CheckpointView:
        """Raises a save's errors. Afterwards the memory is for the next save."""
        digests: Sequence[str] = ()
        try:
            view = self._written(writer)
            digests = writer.digests
            return view
        finally:
            if self.handed is not None:
                self.handed.release(digests)
            self.rank.give_back(self.memory)

    def _written(self, writer: ShardWriter) -> CheckpointView:
        if self.handed is not None and self.handed.is_with_agent:
            with contextlib.suppress(AgentGone):
                view = self.handed.write(writer, lambda: self.hand.summary)
                self.rank.count(BY_AGENT)
                return view
        view = writer.upload_and_seal_again(self._chunks, lambda: (self.hand.summary, self.hand.index))
        why = "no agent has taken them" if self.handed is None else "the agent that had taken them is gone"
        self.rank.count(f"shards sealed by their rank: {why}")
        return view

    def _chunks(self) -> Iterator[OutgoingChunk]:
        staged = memoryview(self.memory.map)
        for chunk in self.hand.chunks:
            yield OutgoingChunk.of(staged[chunk.start : chunk.start + chunk.bytes])
        yield OutgoingChunk.of(self.document)
