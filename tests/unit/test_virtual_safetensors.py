"""The virtual safetensors files of a layout: every byte from the right place of the right chunk, and no chunk besides;
safetensors itself reads them."""

from __future__ import annotations

import itertools
import json
import random
from math import prod
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from holdfast.layout.plan import ChunkSizes, PieceSpec, build_local_plan, global_layout
from holdfast.state.tensors import torch_dtype
from holdfast_client.errors import IntegrityError
from holdfast_client.filesystem.places import Place, parse_place
from holdfast_client.filesystem.safetensors_layout import (
    FORMAT_NAMES,
    ChunkPlace,
    NotInSafetensorsError,
    SafetensorsFile,
    file_names,
    safetensors_file,
)
from holdfast_protocol.base import RunName
from holdfast_protocol.index_documents import ITEM_BYTES, Layout, Piece, Segment, ShardLayout, TensorEntry
from holdfast_protocol.runs import AtStep, Best, Latest, SelectorError

SIZES = [ChunkSizes(16, 64, 32), ChunkSizes(1, 16, 16), ChunkSizes(), ChunkSizes(64, 1024, 512)]
DTYPES = ["float64", "float32", "float16", "uint8", "bool"]


@st.composite
def stored_tensors(draw: Any) -> tuple[dict[str, tuple[np.ndarray, list]], ChunkSizes]:
    """Arrays, each cut by a random grid into the boxes of ranks."""
    found = {}
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
        cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
        ranges = [list(itertools.pairwise(cut)) or [(0, 0)] for cut in cuts]
        boxes = [(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in itertools.product(*ranges)]
        dtype = np.dtype(draw(st.sampled_from(DTYPES)))
        array = np.frombuffer(random.Random(number).randbytes(dtype.itemsize * prod(shape)), np.uint8)
        array = array % 2 if dtype.kind == "b" else array
        found[f"model/t{number}"] = (array.view(dtype).reshape(shape), boxes)
    return found, draw(st.sampled_from(SIZES))


def chunked(tensors: dict[str, tuple[np.ndarray, list]], sizes: ChunkSizes) -> tuple[Layout, dict[ChunkPlace, bytes]]:
    """Stored by as many ranks as there are boxes: the layout, and each chunk's bytes."""
    world_size = max(len(boxes) for _, boxes in tensors.values())
    plans, chunks = [], {}
    for rank in range(world_size):
        specs = [
            PieceSpec(name, "model", str(array.dtype), array.shape, *boxes[rank], replicated=False)
            for name, (array, boxes) in tensors.items()
            if rank < len(boxes)
        ]
        plan = build_local_plan(specs, rank=rank, world_size=world_size, sizes=sizes)
        plans.append(plan)
        memory = [bytearray(size) for size in plan.shard.chunks]
        for piece in plan.shard.pieces:
            inside = tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.shape, strict=True))
            data = tensors[piece.tensor][0][inside].tobytes()
            for segment in piece.segments:
                memory[segment.ordinal][segment.offset : segment.offset + segment.bytes] = data[: segment.bytes]
                data = data[segment.bytes :]
        chunks |= {ChunkPlace(rank, ordinal): bytes(chunk) for ordinal, chunk in enumerate(memory)}
    return global_layout(plans), chunks


def model_file(layout: Layout) -> SafetensorsFile:
    return safetensors_file(
        layout, "model.safetensors", file_names(layout, is_dcp=False)["model.safetensors"], is_dcp=False
    )


def read(file: SafetensorsFile, chunks: dict[ChunkPlace, bytes], start: int, stop: int) -> bytes:
    """As checkpoint_files reads. Each byte is written once."""
    found, written = bytearray(stop - start), bytearray(stop - start)
    head = file.header[start:stop]
    found[: len(head)], written[: len(head)] = head, b"\1" * len(head)
    for place, parts in file.parts(start, stop).items():
        copies = [copy for part in parts for copy in part.copies(start, stop)]
        assert copies, "a chunk is read for nothing"
        for offset, at, size in copies:
            here = slice(at - start, at - start + size)
            assert not any(written[here])
            found[here], written[here] = chunks[place][offset : offset + size], b"\1" * size
    assert all(written)
    return bytes(found)


@given(stored_tensors(), st.randoms(use_true_random=False))
def test_any_range_of_any_sharding_has_the_bytes_of_the_tensors(stored: Any, rng: random.Random) -> None:
    tensors, sizes = stored
    layout, chunks = chunked(tensors, sizes)
    file = model_file(layout)
    whole = read(file, chunks, 0, file.bytes)
    found = safetensors.numpy.load(whole)
    assert found.keys() == {name.removeprefix("model/") for name in tensors}
    for name, (array, _) in tensors.items():
        one = found[name.removeprefix("model/")]
        assert (one.dtype, one.shape, one.tobytes()) == (array.dtype, array.shape, array.tobytes())
    for tensor in file.tensors:
        assert (tensor.begin - len(file.header)) % ITEM_BYTES[layout.tensors[tensor.name].dtype] == 0
    for _ in range(20):
        start, stop = sorted(rng.choices(range(file.bytes + 1), k=2))
        assert read(file, chunks, start, stop) == whole[start:stop]


def test_a_file_read_in_order_visits_each_chunk_once_per_size_of_elements() -> None:
    tensors = {
        f"model/{n:02}": (np.full(4 if n % 3 else 100, n, np.float32), [((0,), (4 if n % 3 else 100,))])
        for n in range(20)
    }
    layout, _ = chunked(tensors, ChunkSizes(200, 4096, 1024))
    file = model_file(layout)
    visited = [part.chunk for tensor in file.tensors for part in tensor.parts]
    assert [place for place, _ in itertools.groupby(visited)] == sorted(set(visited))
    assert len(set(visited)) > 5


@pytest.mark.parametrize("dtype", [*FORMAT_NAMES])
def test_every_dtype_has_the_name_that_safetensors_gives_it(dtype: str) -> None:
    header = save({"x": torch.zeros(2, 3).to(torch_dtype(dtype))})
    length = int.from_bytes(header[:8], "little")
    assert json.loads(header[8 : 8 + length])["x"]["dtype"] == FORMAT_NAMES[dtype]
    layout = Layout(
        1,
        {"model/x": TensorEntry("model", dtype, (2, 3), replicated=True)},
        (
            ShardLayout(
                (6 * ITEM_BYTES[dtype],), (Piece("model/x", (0, 0), (2, 3), (Segment(0, 0, 6 * ITEM_BYTES[dtype]),)),)
            ),
        ),
    )
    found = load(
        read(model_file(layout), {ChunkPlace(0, 0): bytes(6 * ITEM_BYTES[dtype])}, 0, model_file(layout).bytes)
    )
    assert found["x"].dtype == torch_dtype(dtype)


def one_rank(tensors: dict[str, TensorEntry]) -> Layout:
    pieces, chunks = [], []
    for name, entry in tensors.items():
        if entry.alias_of is None:
            pieces.append(
                Piece(name, (0,) * len(entry.shape), entry.shape, (Segment(len(chunks), 0, entry.total_bytes),))
            )
            chunks.append(entry.total_bytes)
    return Layout(1, tensors, (ShardLayout(tuple(chunks), tuple(pieces)),))


def test_tied_tensors_are_kept_once_and_what_is_tied_to_another_component_is_whole() -> None:
    entry = TensorEntry("model", "float32", (2,), replicated=True)
    layout = one_rank(
        {
            "model/embed": entry,
            "model/head": entry._replace(alias_of="model/embed"),
            "ema/embed": entry._replace(component="ema", alias_of="model/embed"),
        }
    )
    names = file_names(layout, is_dcp=False)
    assert [*names] == ["ema.safetensors", "model.safetensors"]
    model, ema = (safetensors_file(layout, name, names[name], is_dcp=False) for name in reversed(names))
    described = json.loads(model.header[8:])
    assert described["__metadata__"] == {"format": "pt", "head": "embed"}
    chunks = {ChunkPlace(0, 0): np.array([1, 2], np.float32).tobytes()}
    for file in (model, ema):
        assert load(read(file, chunks, 0, file.bytes))["embed"].tolist() == [1, 2]


def test_names_of_a_dcp_save_are_its_own_and_a_rank_has_a_file_of_its_own() -> None:
    entry = TensorEntry("dcp", "float32", (1,), replicated=True)
    assert file_names(one_rank({"model.a/b": entry}), is_dcp=True) == {"dcp.safetensors": ["model.a/b"]}
    of_ranks = one_rank({"loader@1/place": entry, "note": entry})
    assert [*file_names(of_ranks, is_dcp=False)] == ["loader@1.safetensors", "note.safetensors"]
    file = safetensors_file(of_ranks, "note.safetensors", ["note"], is_dcp=False)
    assert "note" in json.loads(file.header[8:])


def test_what_no_file_can_have_is_refused() -> None:
    complex_one = one_rank({"model/z": TensorEntry("model", "complex128", (1,), replicated=True)})
    with pytest.raises(NotInSafetensorsError, match="'model/z', which is complex128"):
        model_file(complex_one)
    one = TensorEntry("note", "uint8", (1,), replicated=True)
    for names, why in (
        (("note/__metadata__",), "keeps the name '__metadata__' for itself"),
        (("note/", "note/note"), "'note/' and 'note/note' would both be 'note'"),
    ):
        with pytest.raises(NotInSafetensorsError, match=why):
            safetensors_file(one_rank(dict.fromkeys(names, one)), "note.safetensors", names, is_dcp=False)
    with pytest.raises(IntegrityError, match="unusable name"):
        file_names(one_rank({"../up/x": TensorEntry("m", "uint8", (1,), replicated=True)}), is_dcp=False)


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("", Place()),
        ("demo", Place("demo")),
        ("demo/gpt", Place("demo", RunName("demo", "gpt"))),
        ("demo/gpt@1200#3", Place("demo", RunName("demo", "gpt"), AtStep(1200, 3))),
        (
            "demo/gpt@best:eval/loss:max/model.safetensors",
            Place("demo", RunName("demo", "gpt"), Best("eval/loss", "max"), "model.safetensors"),
        ),
        ("demo/gpt@best:eval/loss", Place("demo", RunName("demo", "gpt"), Best("eval/loss"))),
        ("demo/gpt@latest/checkpoint.json", Place("demo", RunName("demo", "gpt"), Latest(), "checkpoint.json")),
    ],
)
def test_what_a_path_names(path: str, place: Place) -> None:
    assert parse_place(path) == place


@pytest.mark.parametrize("path", ["demo/gpt/model.safetensors", "demo/gpt@", "demo/gpt@latest/a.txt", "../x", "a b"])
def test_a_path_that_names_nothing_is_refused(path: str) -> None:
    with pytest.raises(SelectorError):
        parse_place(path)
