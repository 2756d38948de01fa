"""How the agent of this node takes a staged save over."""

from __future__ import annotations

from holdfast.save.job import SaveJob, ShardChunks
from holdfast.session.session import Session
from holdfast.staging import StagedShard
from holdfast_client.agent.link import HandedSave, NodeAgent
from holdfast_client.agent.messages import HandOver, StagedChunk


class AgentHandover:
    """Gives staged saves to the agent of this node. It then commits what is proven even if this process is killed."""

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
            is_proven=job.is_proven,
        )
        handed = self._agent.hand_over(memory, hand, documents, retry_seconds=self._retry_seconds)
        if handed is not None and job.late is not None and not hand.is_proven:
            job.late.when_proven(handed.prove)
        return handed
