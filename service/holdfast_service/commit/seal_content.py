"""What a seal says: checked against itself, kept in the shard's row, compared when it comes twice. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast_protocol.canonical_json import MAX_STORED_DOCUMENT_BYTES
from holdfast_protocol.checkpoints import SealShard
from holdfast_protocol.counted import counted
from holdfast_protocol.digests import shard_digest
from holdfast_protocol.problems import ProblemCode
from holdfast_service.catalog.tables import Shard
from holdfast_service.errors import ProblemError


def check_seal(rank: int, request: SealShard) -> None:
    """Raises `invalid_request`. The client's word for its own digest and ordinals is not taken (protocol rule 10)."""
    if shard_digest(request.chunks) != request.digest:
        _refuse("The shard's digest is not that of its chunk list. Compute it with shard_digest over the same list.")
    ordinals = {"shard": request.index.shard, "layout": request.index.layout}
    for name, ordinal in ordinals.items():
        if ordinal is not None and ordinal >= len(request.chunks):
            _refuse(
                f"index.{name} is {ordinal}, and the shard has {counted(len(request.chunks), 'chunk')}. Give the "
                "ordinal at which "
                "the index stands in the chunk list."
            )
    if rank == 0 and request.index.layout is None:
        _refuse("Rank 0 brings the global layout: give index.layout.")
    if rank != 0 and (request.metrics or request.dropped_components):
        _refuse(f"Metrics and dropped_components come from rank 0, and this is rank {rank}. Send them there only.")


def check_sizes(request: SealShard, sizes: Sequence[int]) -> None:
    """Raises `invalid_request` where the seal says more than its chunks can hold; `sizes` are theirs, by ordinal. What
    is in the documents every reader checks: they are not read here, on the way of a save."""
    if request.logical_bytes > sum(sizes):
        _refuse(f"logical_bytes is {request.logical_bytes}, and the chunks of the shard have {sum(sizes)} bytes.")
    for name, ordinal in (("shard", request.index.shard), ("layout", request.index.layout)):
        if ordinal is not None and sizes[ordinal] > MAX_STORED_DOCUMENT_BYTES:
            _refuse(f"index.{name} is a chunk of {sizes[ordinal]} bytes; no document may be as large as that.")


def shard_content(request: SealShard) -> dict[str, Any]:
    """The columns of the shard that the seal fills."""
    return {
        "digest": request.digest,
        "index_ordinal": request.index.shard,
        "layout_ordinal": request.index.layout,
        "logical_bytes": request.logical_bytes,
        "components": {name: component.model_dump(mode="json") for name, component in request.components.items()},
        "metrics": None
        if request.metrics is None
        else {name: metric.model_dump(mode="json") for name, metric in request.metrics.items()},
        "finite": request.finite,
        "verdict": None if request.verdict is None else request.verdict.model_dump(mode="json"),
        "dropped_components": sorted(set(request.dropped_components)) or None,
    }


def refuse_other_content(shard: Shard, request: SealShard) -> None:
    """Raises `manifest_conflict` if the shard was sealed with anything else than this."""
    different = [name for name, value in shard_content(request).items() if getattr(shard, name) != value]
    if different:
        raise ProblemError(
            ProblemCode.MANIFEST_CONFLICT,
            f"Rank {shard.rank} has sealed this shard with other content ({', '.join(different)}). What is sealed "
            "stays; save under another step.",
            rank=shard.rank,
            different=different,
            sealed_digest=shard.digest,
        )


def _refuse(detail: str) -> None:
    raise ProblemError(ProblemCode.INVALID_REQUEST, detail)
