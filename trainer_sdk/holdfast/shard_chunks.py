"""What one rank uploads of a save, in ordinal order: the staged chunks, its index, and rank 0's layout."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from holdfast.save_job import SaveJob
from holdfast.staging import StagedShard
from holdfast_client.chunks.outgoing import OutgoingChunk
from holdfast_protocol.index_documents import Layout


class ShardChunks:
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
        yield OutgoingChunk.of(job.index.encode())
        if self._rank == 0:
            yield OutgoingChunk.of(self._layout_bytes(job.layout))

    def _layout_bytes(self, layout: Layout) -> bytes:
        """Encoded once per plan, which is used by many saves."""
        if self._encoded_layout is None or self._encoded_layout[0] != layout.digest:
            self._encoded_layout = (layout.digest, layout.encode())
        return self._encoded_layout[1]
