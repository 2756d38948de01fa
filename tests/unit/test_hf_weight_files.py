"""The pieces of a tensor, however ranks have cut it, at their places in a safetensors file, converted on the way."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from safetensors.torch import load

from holdfast.export.hf.weight_files import MOST_FILES, InFile, Weight, plan_files
from holdfast.export.safetensors_files import check_dtypes
from holdfast.layout.plan import ChunkSizes, PieceSpec, build_local_plan, global_layout
from holdfast.layout.reshard import WantedPiece, plan_reads
from holdfast.state.tensors import dtype_name, torch_dtype
from holdfast_client.errors import ConfigurationError
from holdfast_protocol.index_documents import ITEM_BYTES

SMALL = ChunkSizes(own_chunk_bytes=256, pack_bytes=256, cut_bytes=304)
"""Cuts come in the middle of rows."""


def cut(shape: tuple[int, ...], parts: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The boxes of a mesh with so many parts in each dimension; the last ones are smaller, or empty."""
    steps = [-(-size // count) for size, count in zip(shape, parts, strict=True)]
    boxes = []
    for place in np.ndindex(*parts):
        offsets = tuple(min(at * step, size) for at, step, size in zip(place, steps, shape, strict=True))
        boxes.append(
            (offsets, tuple(min(step, size - at) for step, size, at in zip(steps, shape, offsets, strict=True)))
        )
    return boxes


@pytest.mark.parametrize(
    ("shape", "parts"),
    [((), ()), ((7,), (3,)), ((30, 7), (4, 1)), ((30, 7), (1, 3)), ((9, 5, 6), (2, 2, 2)), ((4, 1, 9), (1, 1, 2))],
)
@pytest.mark.parametrize(
    ("stored", "written"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.int64,) * 2,
    ],
)
def test_every_element_is_where_the_head_says(tmp_path, shape, parts, stored, written):
    torch.manual_seed(3)
    whole = (torch.randn(shape) * 100).to(stored)
    other = torch.randn(3).half()  # before it, so that nothing begins at a round place
    boxes = cut(shape, parts)
    plans = []
    for rank, (offsets, box) in enumerate(boxes):
        spec = PieceSpec("model/w", "model", dtype_name(stored), shape, offsets, box, replicated=False)
        plans.append(build_local_plan([spec], rank=rank, world_size=len(boxes), sizes=SMALL))
    layout = global_layout(plans)
    files = plan_files(
        [Weight("w", "model/w", dtype_name(written), shape), Weight("v", "model/v", "float16", (3,))], 10**6, {"t": "w"}
    )
    [file] = files.files
    path = tmp_path / file.name
    path.write_bytes(file.head)
    os.truncate(path, file.bytes)
    with path.open("r+b") as opened:
        opened.seek(file.starts["v"])
        opened.write(other.numpy().tobytes())
        opened.flush()
        room = InFile(opened.fileno(), file.starts["w"], dtype_name(stored), dtype_name(written))
        wanted = WantedPiece("model/w", dtype_name(stored), (0,) * len(shape), shape)
        for (rank, ordinal), reads in plan_reads(layout, [wanted]).by_chunk.items():
            offsets, box = boxes[rank]
            local = whole[tuple(slice(at, at + size) for at, size in zip(offsets, box, strict=True))].contiguous()
            raw = local.reshape(-1).view(torch.uint8).numpy().tobytes()
            chunk = bytearray(layout.shards[rank].chunks[ordinal])
            for piece in layout.shards[rank].pieces:
                begin = 0
                for segment in piece.segments:
                    if segment.ordinal == ordinal:
                        chunk[segment.offset : segment.offset + segment.bytes] = raw[begin : begin + segment.bytes]
                    begin += segment.bytes
            for read in reads:
                room.take(read, memoryview(chunk))
    found = load(path.read_bytes())
    assert torch.equal(found["w"], whole.to(written))
    assert (found["w"].dtype, found["w"].shape) == (written, whole.shape)
    assert torch.equal(found["v"], other)


def test_a_file_is_full_before_the_next_one_begins_and_a_large_tensor_has_one_of_its_own():
    weights = [
        Weight(name, name, "float32", (count,)) for name, count in (("a", 2), ("b", 2), ("c", 9), ("d", 1), ("e", 4))
    ]
    files = plan_files(weights, 16, {"tied": "d"})
    assert [sorted(file.starts) for file in files.files] == [["a", "b"], ["c"], ["d"], ["e"]]
    assert files.files[0].name == "model-00001-of-00004.safetensors"
    assert [b"tied" in file.head for file in files.files] == [False, False, True, False]
    assert files.index()["metadata"] == {"total_parameters": 18, "total_size": 72}
    assert all(len(file.head) % 8 == 0 for file in files.files)
    assert plan_files(weights, 10**9, {}).index() is None


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_each_dtype_is_refused_or_has_its_name_in_the_head(dtype):
    try:
        check_dtypes({dtype: "w"})
    except ConfigurationError:
        return
    [file] = plan_files([Weight("w", "w", dtype, (2,))], 10**6, {}).files
    found = load(file.head.ljust(file.bytes, b"\0"))["w"]
    assert (found.dtype, found.shape) == (torch_dtype(dtype), (2,))


def test_too_many_files_are_refused_with_the_remedy():
    weights = [Weight(str(at), str(at), "float32", (8,)) for at in range(MOST_FILES + 1)]
    with pytest.raises(ConfigurationError, match=r"501 files, and 500 are the most.*--max-file-size"):
        plan_files(weights, 8, {})
