"""Checkpoints with the tensors of one's choice, cut among the ranks as one likes, saved by the protocol's own calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from holdfast.layout.plan import ChunkSizes, LocalPlan, PieceSpec, build_local_plan, global_layout, whole
from holdfast_protocol.index_documents import Box, SavedAs, ShardIndex
from tests.support.rank import Job

SIZES = ChunkSizes(own_chunk_bytes=1024, pack_bytes=2048, cut_bytes=4096)

Cut = Callable[[tuple[int, ...], int, int], Box]
"""Shape, rank, world size -> the box that the rank stores."""


def in_rows(shape: tuple[int, ...], rank: int, ranks: int) -> Box:
    return _along(0, shape, rank, ranks)


def in_columns(shape: tuple[int, ...], rank: int, ranks: int) -> Box:
    return _along(len(shape) - 1, shape, rank, ranks)


def _along(axis: int, shape: tuple[int, ...], rank: int, ranks: int) -> Box:
    ends = [shape[axis] * each // ranks for each in range(ranks + 1)]
    offsets, size = [0] * len(shape), list(shape)
    offsets[axis], size[axis] = ends[rank], ends[rank + 1] - ends[rank]
    return tuple(offsets), tuple(size)


def plans_of(
    tensors: Mapping[str, torch.Tensor], ranks: int, cut: Cut | None, sizes: ChunkSizes = SIZES
) -> list[LocalPlan]:
    """Without a cut each tensor is whole on one rank."""

    def spec(name: str, tensor: torch.Tensor, rank: int) -> PieceSpec:
        component = name.partition("/")[0]
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        found = whole(name, component, dtype, shape, replicated=True)
        if cut is None or not shape:
            return found
        offsets, size = cut(shape, rank, ranks)
        return found._replace(replicated=False, offsets=offsets, shape=size)

    return [
        build_local_plan(
            [spec(name, tensor, rank) for name, tensor in tensors.items()], rank=rank, world_size=ranks, sizes=sizes
        )
        for rank in range(ranks)
    ]


def chunks_of(plan: LocalPlan, tensors: Mapping[str, torch.Tensor]) -> list[bytes]:
    """The bytes of a rank's chunks, by ordinal."""
    chunks = [bytearray(size) for size in plan.shard.chunks]
    for piece in plan.shard.pieces:
        box = tuple(slice(at, at + size) for at, size in zip(piece.offsets, piece.shape, strict=True))
        data, start = bytes_of(tensors[piece.tensor][box]), 0
        for ordinal, offset, size in piece.segments:
            chunks[ordinal][offset : offset + size] = data[start : start + size]
            start += size
    return [bytes(chunk) for chunk in chunks]


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def save_tensors(
    job: Job,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    *,
    cut: Cut | None = None,
    sizes: ChunkSizes = SIZES,
) -> str:
    """The checkpoint's id. As many ranks save as the job has; names begin with the component's."""
    plans = plans_of(tensors, job.world_size, cut, sizes)
    layout = global_layout(plans)
    save = job.begin(step)
    for plan in plans:
        index = ShardIndex(SavedAs(job.run, step, job.world_size), rank=plan.rank, layout_digest=layout.digest)
        chunks = chunks_of(plan, tensors)
        ordinals = {"shard": len(chunks)}
        documents = [index.encode()]
        if plan.rank == 0:
            ordinals = {"shard": len(chunks) + 1, "layout": len(chunks)}
            documents = [layout.encode(), *documents]
        size = sum(map(len, chunks))
        components = {name.partition("/")[0]: {"kind": "model", "logical_bytes": size} for name in tensors}
        save.write(plan.rank, [*chunks, *documents], index=ordinals, components=components)
    return save.id
