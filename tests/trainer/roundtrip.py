"""A whole save and load without a service: capture, plan, stage, index, and back. For one process or many."""

from dataclasses import dataclass
from typing import Any

from holdfast.layout.plan import ChunkSizes, LocalPlan, build_local_plan, global_layout
from holdfast.layout.reshard import plan_reads, scatter
from holdfast.staging import StagingArea
from holdfast.state.capture import capture
from holdfast.state.components import Declarations
from holdfast.state.load import LoadOptions, LoadReport, StoredState, plan_load
from holdfast_protocol.index_documents import Layout, SavedAs, ShardIndex


@dataclass
class Saved:
    """One rank's part of a checkpoint, as plain data that may cross processes."""

    plan: LocalPlan
    chunks: list[bytes]
    index: bytes


def save(state: dict[str, Any], rank: int = 0, world_size: int = 1, **declared: Any) -> Saved:
    captured = capture(state, rank=rank, world_size=world_size, declared=Declarations.of(**declared))
    plan = build_local_plan(captured.specs, rank=rank, world_size=world_size, sizes=ChunkSizes(256, 1024, 512))
    area = StagingArea()
    shard = area.stage(plan, captured.pieces)
    chunks = [bytes(shard.chunk(ordinal)) for ordinal in range(shard.chunk_count)]
    shard.release()
    area.close()  # memory that CUDA has locked must not end while it is
    replicated = captured.replicated_trees if rank == 0 else {}
    return Saved(
        plan, chunks, ShardIndex(SavedAs("demo/gpt", 0, world_size), rank, "", captured.trees, replicated).encode()
    )


def load(
    state: dict[str, Any],
    saved: list[Saved],
    rank: int = 0,
    world_size: int = 1,
    options: LoadOptions | None = None,
    into_live: bool = True,
    **declared: Any,
) -> LoadReport:
    layout = Layout.decode(global_layout([part.plan for part in saved]).encode())
    indexes = [ShardIndex.decode(part.index) for part in saved]
    read = indexes if world_size != len(saved) else [indexes[rank]]
    stored = StoredState(layout, indexes[0].replicated_trees, {index.rank: index.trees for index in read})
    plan = plan_load(
        state, stored, rank=rank, world_size=world_size, declared=Declarations.of(**declared), options=options
    )
    arrivals = plan.arrivals(into_live=into_live)
    rooms = arrivals.rooms()
    for (source, ordinal), reads in plan_reads(layout, plan.wanted, prefer_rank=rank).by_chunk.items():
        for read in reads:
            scatter(read, memoryview(saved[source].chunks[ordinal]), rooms[read.name])
    plan.apply(arrivals)
    return plan.report
