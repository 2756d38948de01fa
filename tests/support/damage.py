"""Damage in a posix store, for tests of what a restore makes of it: one bit, one byte less, no file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from holdfast.restore.checkpoint_reader import CheckpointSource
from holdfast_client.chunks.workers import TransferWorkers
from holdfast_client.client import Client
from holdfast_protocol.base import RunName


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    # Another byte each time: what is damaged twice must not be whole again.
    data[len(data) // 2] = (data[len(data) // 2] + 1) % 256
    path.chmod(0o600)
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES: dict[str, Callable[[Path], None]] = {"flipped": flip, "cut": cut, "deleted": Path.unlink}


def files_of(store: Path, digest: str) -> list[Path]:
    files = [path for path in store.glob(f"**/{digest}/*") if path.suffix != ".sha256"]
    assert files
    return files


def chunks_of(client: Client, checkpoint_id: str, tensor: str) -> list[tuple[int, str]]:
    """(rank that stored it, digest) of each chunk that holds a part of `tensor`, in order."""
    view = client.checkpoints.get(checkpoint_id)
    run = RunName(view.project, view.run)
    point = client.restores.restore_point(run.project, run.run, checkpoint_id).restore_point
    assert point is not None
    with TransferWorkers(1) as workers, CheckpointSource(client, run, point, workers=workers) as source:
        manifest = source.manifest()
        layout = source.layout(manifest, source.first_documents(manifest)[0])
        return [
            (rank, source.chunk_list(manifest, layout, rank)[segment.ordinal])
            for rank, shard in enumerate(layout.shards)
            for piece in shard.pieces
            if piece.tensor == tensor
            for segment in piece.segments
        ]
