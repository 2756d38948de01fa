"""Little checkpoints, made as a training job makes them: each is a step further, on one lineage.

open an attempt, tell what it resumed from -> begin -> upload -> seal (commits) -> fetch, compare -> end
"""

from __future__ import annotations

import os
import platform
import uuid

from holdfast_client.chunks.fetcher import ShardFetcher
from holdfast_client.chunks.transfer import OutgoingChunk
from holdfast_client.chunks.uploader import ShardUploader
from holdfast_client.client import Client
from holdfast_client.errors import HoldfastError, IntegrityError
from holdfast_protocol.attempts import AttemptOpened, EndAttempt, ResumedFrom
from holdfast_protocol.base import Fence, RunName
from holdfast_protocol.checkpoints import BeginCheckpoint, CheckpointView, Component, IndexOrdinals, SealShard
from holdfast_protocol.digests import chunk_digest, shard_digest
from holdfast_protocol.index_documents import Layout, Piece, SavedAs, Segment, ShardIndex, ShardLayout, TensorEntry
from holdfast_protocol.states import AttemptOutcome, CheckpointState

RUN = "doctor"
SIZE_BYTES = 64 * 1024
_COMPONENT = "sample"


def save_little_checkpoint(client: Client, project: str) -> RunName:
    """The run that it was saved to. Raises HoldfastError where anything fails."""
    run = RunName(project, RUN)
    opened = client.attempts.open_next(run, uuid.uuid4().hex, world_size=1, host=platform.node()[:255], create=True)
    _follow(client, run, opened)
    # The attempt's number, so that each has a step of its own and the newest is the latest.
    saved_as = SavedAs(str(run), step=opened.attempt, world_size=1)
    chunks = _sample_chunks(saved_as)
    checkpoint = _save(client, run, opened, saved_as, chunks)
    _read_back(client, checkpoint.id, chunks)
    request = EndAttempt(epoch=opened.epoch, attempt=opened.attempt, outcome=AttemptOutcome.FINISHED, detail="done")
    client.attempts.end(run.project, run.run, opened.attempt, request)
    return run


def _follow(client: Client, run: RunName, opened: AttemptOpened) -> None:
    """Says that it goes on from the newest sample, as a trainer does: so the samples are one lineage."""
    newest = opened.restore_point.checkpoint_id if opened.restore_point else None
    request = ResumedFrom(epoch=opened.epoch, attempt=opened.attempt, checkpoint_id=newest)
    client.attempts.resumed_from(run.project, run.run, opened.attempt, request)


def _sample_chunks(saved_as: SavedAs) -> list[bytes]:
    """Fresh bytes, so that none of them is there already; then a layout and an index like those of any checkpoint."""
    data = os.urandom(SIZE_BYTES)
    name = f"{_COMPONENT}/bytes"
    piece = Piece(name, (0,), (SIZE_BYTES,), (Segment(0, 0, SIZE_BYTES),))
    layout = Layout(
        world_size=1,
        tensors={name: TensorEntry(_COMPONENT, "uint8", (SIZE_BYTES,), replicated=True)},
        shards=(ShardLayout((SIZE_BYTES,), (piece,)),),
    )
    return [data, layout.encode(), ShardIndex(saved_as, rank=0, layout_digest=layout.digest).encode()]


def _save(
    client: Client, run: RunName, opened: AttemptOpened, saved_as: SavedAs, chunks: list[bytes]
) -> CheckpointView:
    fence = Fence(epoch=opened.epoch, attempt=opened.attempt)
    begin = BeginCheckpoint(**fence.model_dump(), step=saved_as.step, world_size=saved_as.world_size)
    begun = client.checkpoints.begin(run.project, run.run, begin)
    digests = [chunk_digest(chunk) for chunk in chunks]
    ShardUploader(client, begun.id, 0, fence).upload(map(OutgoingChunk.of, chunks))
    sealed = client.checkpoints.seal(
        begun.id,
        0,
        SealShard(
            **fence.model_dump(),
            digest=shard_digest(digests),
            chunks=digests,
            index=IndexOrdinals(shard=2, layout=1),
            logical_bytes=SIZE_BYTES,
            components={_COMPONENT: Component(kind="extra", logical_bytes=SIZE_BYTES)},
            metrics={},
        ),
    )
    if sealed.state is not CheckpointState.COMMITTED:
        raise HoldfastError(f"The checkpoint was sealed and is {sealed.state.value} instead of committed")
    return sealed


def _read_back(client: Client, checkpoint_id: str, chunks: list[bytes]) -> None:
    found: dict[str, bytes] = {}
    digests = [chunk_digest(chunk) for chunk in chunks]
    with ShardFetcher(client, checkpoint_id) as fetcher:
        fetcher.fetch(
            digests,
            lambda digest, view: found.__setitem__(digest, bytes(view)),
            most_bytes=max(map(len, chunks)),
        )
    if [found.get(digest) for digest in digests] != chunks:
        raise IntegrityError("What was read back is not what was saved")
