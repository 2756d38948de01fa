"""Whole tensors of a checkpoint, whatever ranks hold their pieces. Flow: contents -> **tensors** -> state_dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

import torch

from holdfast.export.contents import Contents
from holdfast.layout.reshard import ReadPlan, plan_reads
from holdfast.restore.checkpoint_reader import CheckpointSource, chunk_sizes
from holdfast.state.destinations import Filler, Wants

CHUNKS_AT_ONCE = 16
"""Chunks that are asked for between two reports of progress."""


def plan_tensors(contents: Contents, names: Iterable[str]) -> tuple[ReadPlan, dict[str, Filler], Wants]:
    """The reads that give these tensors. A tied tensor is read once, under the name that it is tied to."""
    wants = Wants(contents.layout)
    host = torch.device("cpu")
    fillers = {name: wants.new(name, host) for name in dict.fromkeys(_untied(contents, name) for name in names)}
    return plan_reads(contents.layout, wants.pieces.values()), fillers, wants


def bytes_to_read(contents: Contents, names: Iterable[str]) -> int:
    """How many bytes of chunks `read_tensors` fetches."""
    reads, _, _ = plan_tensors(contents, names)
    return sum(chunk_sizes(reads, contents.layout, contents.chunks).values())


def read_tensors(
    source: CheckpointSource, contents: Contents, names: Iterable[str], on_bytes: Callable[[int], None]
) -> dict[str, torch.Tensor]:
    """Every tensor whole, on the host; tied ones are one tensor. Raises ChunkLost if no copy has the right bytes."""
    names = tuple(names)
    reads, fillers, wants = plan_tensors(contents, names)
    arrivals = wants.arrivals(into_live=False)
    rooms = arrivals.rooms()
    left = iter(reads.by_chunk.items())
    while some := dict(islice(left, CHUNKS_AT_ONCE)):
        on_bytes(source.read(ReadPlan(some), contents.layout, contents.chunks, rooms))
    whole = {name: fill(arrivals) for name, fill in fillers.items()}
    return {name: whole[_untied(contents, name)] for name in names}


def _untied(contents: Contents, name: str) -> str:
    return contents.layout.tensors[name].alias_of or name
