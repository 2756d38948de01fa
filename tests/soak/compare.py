"""Reads a whole checkpoint through the real client and compares every byte with what its writer recorded."""

from __future__ import annotations

from holdfast_client.chunks.fetcher import ShardFetcher
from holdfast_client.chunks.host_chunks import HostChunks
from holdfast_client.client import Client
from tests.soak.content import Piece
from tests.soak.ledger import Ledger, Save


class DifferentError(Exception):
    """What was read is not what was written."""


def compare(client: Client, checkpoint_id: str, ledger: Ledger, host: HostChunks | None = None) -> int:
    """The bytes that were compared. Raises DifferentError, and what the client raises."""
    view = client.checkpoints.get(checkpoint_id)
    written = ledger.content_of(Save(view.run, view.attempt, view.step))
    shards = read_shards(client, checkpoint_id, host)
    for rank, got in shards.items():
        if not any(_same(pieces, got) for pieces in written.get(rank, [])):
            raise DifferentError(f"rank {rank} of {checkpoint_id} has other bytes than its writer recorded")
    return sum(len(data) for got in shards.values() for data in got)


def read_shards(client: Client, checkpoint_id: str, host: HostChunks | None = None) -> dict[int, list[bytes]]:
    """By rank, the bytes of its chunks in their order. What is on the `host` is read there."""
    ranks = [
        client.checkpoints.shard_chunks(checkpoint_id, shard.rank)
        for shard in client.checkpoints.manifest(checkpoint_id).shards
    ]
    stored = {shard.rank: [chunk.digest for chunk in shard.chunks] for shard in ranks}
    read: dict[str, bytes] = {}

    def keep(digest: str, data: memoryview) -> None:
        read[digest] = bytes(data)

    with ShardFetcher(client, checkpoint_id) as fetcher:
        fetcher.fetch([digest for digests in stored.values() for digest in digests], keep, host=host)
    return {rank: [read[digest] for digest in digests] for rank, digests in stored.items()}


def _same(pieces: list[Piece], got: list[bytes]) -> bool:
    return len(pieces) == len(got) and all(piece.data == data for piece, data in zip(pieces, got, strict=True))
