"""`dcp.save(…, storage_writer=ckpt.writer(step))`: one checkpoint of the run, planned by DCP.

    prepare_global_plan (rank 0)   DCP's plans -> the layout; each rank is sent its share of it
    write_data (every rank)        tensors -> chunks -> store; every rank but 0 seals
    finish (rank 0)                DCP's metadata -> rank 0's index; its seal commits

Rank 0 seals last, and only if DCP has heard from every rank: a failure anywhere leaves no checkpoint.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from holdfast.dcp.metadata import COMPONENT, describe, encode_value, unpickled
from holdfast.errors import (
    CheckpointAborted,
    ConfigurationError,
    HoldfastError,
    RanksDisagree,
    UnsupportedStateError,
)
from holdfast.health.diverged import FiniteCheck
from holdfast.layout.chunk_bytes import Runs, chunks_of
from holdfast.layout.plan import ChunkSizes, PieceSpec, agreed_entries, check_whole, item_bytes_of_chunks, place
from holdfast.save.job import SaveStats, Standstill
from holdfast.session.session import Session
from holdfast.state.tensors import dtype_name, refuse_unsupported, row_major_bytes
from holdfast_client.chunks.transfer import OutgoingChunk
from holdfast_client.chunks.workers import TransferWorkers
from holdfast_client.shard_writer import ShardWriter
from holdfast_protocol.checkpoints import CheckpointView, Component, HealthVerdict, IndexOrdinals, ShardSummary
from holdfast_protocol.index_documents import (
    ITEM_BYTES,
    Layout,
    Piece,
    SavedAs,
    ShardIndex,
    ShardLayout,
    TensorEntry,
)
from holdfast_protocol.states import CheckpointKind, CheckpointState

log = logging.getLogger("holdfast")

_Box = tuple[str, tuple[int, ...]]
"""(fqn, offsets): DCP writes each at most once."""
_Look = Callable[[str, torch.Tensor], None]


_NO_PLAN_CACHING = "DCP's plan caching cannot be used here. Leave enable_plan_caching out of the planner."


class _Share(NamedTuple):
    """Rank 0's message to each rank, with DCP's plan."""

    layout_digest: str
    shard: ShardLayout


class HoldfastWriter(StorageWriter):
    """For one save. Made by `ckpt.writer(step)` on every rank, on the training thread."""

    def __init__(
        self,
        session: Session,
        workers: TransferWorkers,
        step: int,
        kind: CheckpointKind,
        *,
        finite: FiniteCheck | None,
        stats: SaveStats,
    ) -> None:
        self._session = session
        self._workers = workers
        self._step = step
        self._kind = kind
        self._finite = finite
        self._stats = stats
        self._training_thread = threading.get_ident()
        self._standstill = Standstill()
        self._with_nan: dict[str, None] = {}
        self._rank = session.ranks.rank
        self._layout: Layout | None = None
        self._writer: ShardWriter | None = None
        self._values: dict[str, Any] = {}
        self._stored_bytes = 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            raise ConfigurationError(
                "A Holdfast checkpoint is named by its run and step. Leave checkpoint_id out of dcp.save()."
            )

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator != (self._rank == 0):
            raise ConfigurationError("Rank 0 must coordinate the save. Leave coordinator_rank and no_dist out.")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._session.ready_to_save()  # all ranks hear of what is raised here
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        world_size = self._session.ranks.world_size
        if len(plans) != world_size:
            raise RanksDisagree(f"DCP saves from {len(plans)} ranks, and this run has {world_size}")
        if not all(plan.usable for plan in plans):
            raise ConfigurationError(_NO_PLAN_CACHING)
        specs = [[_spec(item) for item in plan.items if item.tensor_data is not None] for plan in plans]
        tensors = agreed_entries(
            [
                {spec.name: TensorEntry(COMPONENT, spec.dtype, spec.global_shape, replicated=False) for spec in of_rank}
                for of_rank in specs
            ]
        )
        shards = tuple(place(sorted(of_rank), ChunkSizes()) for of_rank in specs)
        self._layout = Layout(world_size, tensors, shards)
        check_whole(self._layout)  # with one rank, DCP itself does not check
        return [
            dataclasses.replace(plan, storage_data=_Share(self._layout.digest, shard))
            for plan, shard in zip(plans, shards, strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        _refuse_planner(planner)
        share: _Share = plan.storage_data
        self._writer = self._session.shard_writer(self._step, self._kind, self._workers)
        try:
            self._values = {item.index.fqn: _value(item, planner) for item in plan.items if _is_value(item)}
            items = {_box(item): item for item in plan.items if not _is_value(item)}
            self._writer.upload(_outgoing(share.shard, items, planner, self._look))
            self._stored_bytes = sum(segment.bytes for piece in share.shard.pieces for segment in piece.segments)
            if self._rank != 0:
                self._seal(self._writer, share.layout_digest, None, {})
        except BaseException as error:
            self._writer.fail(error)
            raise
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(item.index, _size(item), self._rank) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        if self._writer is None or self._layout is None:
            raise AssertionError("DCP finishes what it has planned and written")
        values = {
            result.index.fqn: rank
            for rank, of_rank in enumerate(results)
            for result in of_rank
            if result.index.fqn not in self._layout.tensors
        }
        try:
            view = self._seal(self._writer, self._layout.digest, self._layout, describe(metadata, values))
            if view.state is CheckpointState.UPLOADING:
                raise self._left_alone(self._writer)
        except BaseException as error:
            self._writer.fail(error)
            raise
        self._stats.committed += 1
        self._stats.last_committed_step = self._step

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """False: DCP never finds this writer by an id; it is made by ckpt.writer()."""
        return False

    def _look(self, name: str, local: torch.Tensor) -> None:
        if self._finite is not None and self._finite.holds_nan(name, local):
            self._with_nan[name] = None

    def _blocked_seconds(self) -> float | None:
        """How long training has stood still so far. None for `dcp.async_save`: it stages before it calls this writer,
        and writes on another thread or in another process."""
        if threading.get_ident() != self._training_thread:
            return None
        return self._standstill.seconds

    def _verdict(self) -> HealthVerdict | None:
        """On this rank's part. None if nothing is found: the other rules have not been asked."""
        if not self._with_nan:
            return None
        verdict = HealthVerdict(healthy=False, reason=f"NaN in {', '.join(self._with_nan)}"[:1000])
        log.warning("step %d has diverged: %s. It is saved, and never resumed from", self._step, verdict.reason)
        return verdict

    def _left_alone(self, writer: ShardWriter) -> CheckpointAborted:
        """All ranks have written, and yet a seal is missing: the checkpoint that the others sealed was given up before
        this rank began, so that its begin made a new one. No rank will come to that one."""
        reason = "The checkpoint that other ranks had sealed was given up meanwhile"
        with suppress(HoldfastError):  # else the service gives it up when no rank calls
            writer.abort(reason)
        return CheckpointAborted(f"Step {self._step} was not committed. {reason}. Save it again")

    def _seal(
        self, writer: ShardWriter, layout_digest: str, layout: Layout | None, replicated_trees: dict[str, Any]
    ) -> CheckpointView:
        document = ShardIndex(
            SavedAs(str(self._session.run), self._step, self._session.ranks.world_size),
            rank=self._rank,
            layout_digest=layout_digest,
            trees={COMPONENT: [COMPONENT, self._values]},
            replicated_trees=replicated_trees,
        )
        ordinal = len(writer.digests)
        documents = [document.encode()] if layout is None else [document.encode(), layout.encode()]
        verdict = self._verdict()
        blocked_seconds = self._blocked_seconds()
        self._stats.blocked_seconds += blocked_seconds or 0.0
        summary = ShardSummary(
            components={COMPONENT: Component(kind="extra", logical_bytes=self._stored_bytes)},
            finite=verdict is None,
            verdict=verdict,
            blocked_seconds=blocked_seconds,
        )
        index = IndexOrdinals(shard=ordinal, layout=None if layout is None else ordinal + 1)
        view = writer.upload_and_seal(map(OutgoingChunk.of, documents), lambda: (summary, index))
        if view.state is CheckpointState.ABORTED:
            raise CheckpointAborted(view.abort_reason or "It was aborted")
        return view


def _refuse_planner(planner: SavePlanner) -> None:
    """Raises before anything is written, at the first save: a cached plan would only be missed at the second."""
    if getattr(planner, "_enable_plan_caching", False):
        raise ConfigurationError(_NO_PLAN_CACHING)


def _spec(item: WriteItem) -> PieceSpec:
    data = item.tensor_data
    if data is None:
        raise AssertionError("only tensors have a place in the layout")
    dtype = dtype_name(data.properties.dtype)
    if dtype not in ITEM_BYTES:
        raise UnsupportedStateError(
            item.index.fqn, f"holdfast cannot store the dtype {data.properties.dtype}", "view it as uint8"
        )
    return PieceSpec(
        name=item.index.fqn,
        component=COMPONENT,
        dtype=dtype,
        global_shape=tuple(data.size),
        offsets=tuple(data.chunk.offsets),
        shape=tuple(data.chunk.sizes),
        replicated=False,
    )


def _is_value(item: WriteItem) -> bool:
    return item.type is WriteItemType.BYTE_IO


def _value(item: WriteItem, planner: SavePlanner) -> Any:
    fqn = item.index.fqn
    try:
        saved = planner.resolve_data(item)
        value = saved if isinstance(saved, torch.Tensor) else unpickled(saved)
    except Exception:
        if isinstance(planner, DefaultSavePlanner):
            # Pickle names the type inside the object. This names the object's class.
            encode_value(fqn, planner.lookup_object(item.index))
        raise
    if isinstance(value, torch.Tensor):
        raise UnsupportedStateError(fqn, "the planner gave a tensor for a value", "use DCP's DefaultSavePlanner")
    return encode_value(fqn, value)


def _box(item: WriteItem) -> _Box:
    spec = _spec(item)
    return spec.name, spec.offsets


def _size(item: WriteItem) -> int:
    return 0 if item.tensor_data is None else _spec(item).bytes


def _outgoing(
    shard: ShardLayout, items: dict[_Box, WriteItem], planner: SavePlanner, look: _Look
) -> Iterator[OutgoingChunk]:
    dtypes = {piece.tensor: _spec(items[piece.tensor, piece.offsets]).dtype for piece in shard.pieces}
    sizes = item_bytes_of_chunks(shard, dtypes)
    chunks = chunks_of(shard, lambda piece: _bytes_of(items[piece.tensor, piece.offsets], piece, planner, look))
    for chunk, item_bytes in zip(chunks, sizes, strict=True):
        yield OutgoingChunk.of(chunk, item_bytes=item_bytes)


@torch.no_grad()
def _bytes_of(item: WriteItem, piece: Piece, planner: SavePlanner, look: _Look) -> Runs:
    tensor = planner.resolve_data(item)
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedStateError(piece.tensor, "the planner gave no tensor for it", "use DCP's DefaultSavePlanner")
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    refuse_unsupported(piece.tensor, local)
    spec = _spec(item)
    if tuple(local.shape) != piece.shape or dtype_name(local.dtype) != spec.dtype:
        raise UnsupportedStateError(
            piece.tensor,
            f"it was planned as {spec.dtype} {list(piece.shape)} and is {dtype_name(local.dtype)} {list(local.shape)}",
            "save from a planner that resolves what it has planned",
        )
    look(piece.tensor, local)
    return Runs((row_major_bytes(local),))
