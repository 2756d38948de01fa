"""What one rank uploads of a save, and how the agent of its node takes it over."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from holdfast.save.job import SaveJob
from holdfast.session.session import Session
from holdfast.staging import StagedShard
from holdfast_client.agent.link import HandedSave, NodeAgent
from holdfast_client.agent.messages import HandOver, StagedChunk
from holdfast_client.chunks.transfer import OutgoingChunk
from holdfast_protocol.checkpoints import IndexOrdinals
from holdfast_protocol.index_documents import Layout


class ShardChunks:
    """What one rank uploads of a save, in ordinal order: the staged chunks, its index, and rank 0's layout."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._encoded_layout: tuple[str, bytes] | None = None

    def of(self, job: SaveJob, staged: StagedShard) -> Iterator[OutgoingChunk]:
        for ordinal in range(staged.chunk_count):
            yield OutgoingChunk(
                functools.partial(staged.chunk, ordinal),
                digest=staged.digest(ordinal),
                release=functools.partial(staged.done_with, ordinal),
                item_bytes=staged.plan.item_bytes[ordinal],
            )
        for document in self.documents(job):
            yield OutgoingChunk.of(document)

    def documents(self, job: SaveJob) -> list[bytes]:
        """What follows the staged chunks: the index, and on rank 0 the layout."""
        return [job.index.encode(), *([self._layout_bytes(job.layout)] if self._rank == 0 else [])]

    def _layout_bytes(self, layout: Layout) -> bytes:
        """Encoded once per plan, because many saves use it."""
        if self._encoded_layout is None or self._encoded_layout[0] != layout.digest:
            self._encoded_layout = (layout.digest, layout.encode())
        return self._encoded_layout[1]

    def ordinals(self, staged: StagedShard) -> IndexOrdinals:
        """The ordinals of the index and the layout."""
        index = staged.chunk_count
        return IndexOrdinals(shard=index, layout=index + 1 if self._rank == 0 else None)


class AgentHandover:
    """Gives staged saves to the agent of this node. It then commits them even if this process is killed."""

    def __init__(self, agent: NodeAgent, session: Session, chunks: ShardChunks, retry_seconds: float) -> None:
        """`retry_seconds`: how long the agent retries each of its calls."""
        self._agent = agent
        self._session = session
        self._chunks = chunks
        self._retry_seconds = retry_seconds

    def hand_over(self, job: SaveJob) -> HandedSave | None:
        """Returns when the agent has taken it: all of its copies must have arrived. None: it stays here, as a save
        through a staging ring does, and all saves do while there is no agent. Raises TornSaveError."""
        staged = job.staged
        place = staged.in_shared_memory() if isinstance(staged, StagedShard) else None
        if place is None or not isinstance(staged, StagedShard):
            return None
        memory, starts = place
        documents = self._chunks.documents(job)
        chunks = [
            StagedChunk(start=start, bytes=size, item_bytes=item_bytes, digest=staged.digest(ordinal))
            for ordinal, (start, size, item_bytes) in enumerate(
                zip(starts, staged.plan.shard.chunks, staged.plan.item_bytes, strict=True)
            )
        ]
        hand = HandOver(
            project=self._session.run.project,
            run=self._session.run.run,
            **dict(self._session.fence),
            number=job.number,
            step=job.step,
            kind=job.kind,
            world_size=self._session.ranks.world_size,
            rank=self._session.ranks.rank,
            memory=memory.id,
            chunks=chunks,
            documents=[len(document) for document in documents],
            index=self._chunks.ordinals(staged),
            summary=job.told,
            retry_seconds=self._retry_seconds,
        )
        return self._agent.hand_over(memory, hand, documents, retry_seconds=self._retry_seconds)
