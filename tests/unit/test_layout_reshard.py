"""From any sharding to any other: every wanted byte is read exactly once, from the right place; DCP agrees."""

import itertools
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from holdfast.layout import reshard
from holdfast.layout.plan import ChunkSizes, LayoutError, PieceSpec, build_local_plan, global_layout, whole
from holdfast.layout.reshard import Read, StoredPieces, WantedPiece, linear_range_boxes, plan_reads, scatter, straight

pytestmark = pytest.mark.rule("layout-vote")

SIZES = [ChunkSizes(16, 64, 32), ChunkSizes(1, 16, 16), ChunkSizes(), ChunkSizes(64, 1024, 512)]


@st.composite
def gridded(draw, shape):
    """Disjoint boxes that cover `shape`: a random grid."""
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    ranges = [list(itertools.pairwise(cut)) or [(0, 0)] for cut in cuts]
    return [(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in itertools.product(*ranges)]


@st.composite
def reshardings(draw):
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
    return shape, draw(gridded(shape)), draw(gridded(shape)), draw(st.sampled_from(SIZES))


def store(array, boxes, sizes):
    """One rank per box: the layout and each rank's chunk bytes."""
    plans, memory = [], {}
    for rank, (offsets, shape) in enumerate(boxes):
        spec = PieceSpec("t", "m", str(array.dtype), array.shape, offsets, shape, replicated=False)
        plan = build_local_plan([spec], rank=rank, world_size=len(boxes), sizes=sizes)
        plans.append(plan)
        data = array[box(offsets, shape)].tobytes()
        for piece in plan.shard.pieces:
            for segment in piece.segments:
                memory[rank, segment.ordinal], data = data[: segment.bytes], data[segment.bytes :]
    return global_layout(plans), memory


def box(offsets, shape):
    return tuple(slice(o, o + s) for o, s in zip(offsets, shape, strict=True))


def load(layout, memory, want):
    buffer = bytearray(b"\xaa" * want.bytes)
    for chunk, reads in plan_reads(layout, [want]).by_chunk.items():
        for read in reads:
            scatter(read, memoryview(memory[chunk]), memoryview(buffer))
        if (run := straight(reads)) is not None:
            assert buffer[run.offset : run.offset + run.bytes] == memory[chunk][: run.bytes]
    return buffer


@given(reshardings(), st.sampled_from(["uint8", "float16", "float32", "complex128"]))
def test_any_box_is_read_back_whole_from_any_sharding(case, dtype):
    shape, stored, wanted, sizes = case
    array = np.arange(prod(shape) * np.dtype(dtype).itemsize, dtype=np.uint64).astype(np.uint8).view(dtype)
    array = array.reshape(shape)
    layout, memory = store(array, stored, sizes)
    for offsets, size in wanted:
        want = WantedPiece("t", dtype, offsets, size)
        assert load(layout, memory, want) == array[box(offsets, size)].tobytes()


@given(reshardings())
def test_the_boxes_agree_with_dcps_own_planner(case):
    shape, stored, wanted, sizes = case
    stored = [(o, s) for o, s in stored if prod(s)]
    if not stored or not shape:
        return
    layout, _ = store(np.zeros(shape, np.float32), stored, sizes)
    metadata = TensorStorageMetadata(
        properties=TensorProperties(),
        size=torch.Size(shape),
        chunks=[ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in stored],
    )
    for offsets, size in [(o, s) for o, s in wanted if prod(s)]:
        items = create_read_items_for_chunk_list(
            "t", metadata, [ChunkStorageMetadata(torch.Size(offsets), torch.Size(size))]
        )
        theirs = {}
        for item in items:
            rank = stored.index((tuple(item.storage_index.offset), stored_shape(stored, item.storage_index.offset)))
            theirs[rank] = theirs.get(rank, 0) + prod(item.lengths) * 4
        ours = {}
        for read in plan_reads(layout, [WantedPiece("t", "float32", offsets, size)]).reads:
            ours[read.rank] = ours.get(read.rank, 0) + read.bytes
        assert ours == theirs


@given(reshardings())
def test_what_dcps_planner_reads_of_a_stored_piece_is_read_of_that_piece(case):
    shape, stored, wanted, sizes = case
    array = np.arange(prod(shape), dtype=np.float32).reshape(shape)
    layout, memory = store(array, stored, sizes)
    chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in stored]
    metadata = TensorStorageMetadata(properties=TensorProperties(), size=torch.Size(shape), chunks=chunks)
    pieces = StoredPieces(layout)
    for offsets, size in [(o, s) for o, s in wanted if prod(s)]:
        found = np.full(size, -1, np.float32)
        whole_box = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(size))]
        for item in create_read_items_for_chunk_list("t", metadata, whole_box):
            begins = tuple(item.storage_index.offset)
            at = tuple(a + b for a, b in zip(begins, item.storage_offsets, strict=True))
            want = WantedPiece("any name", "float32", at, tuple(item.lengths))
            buffer = bytearray(want.bytes)
            for chunk, reads in pieces.plan_reads([(want, "t", begins)]).by_chunk.items():
                for read in reads:
                    scatter(read, memoryview(memory[chunk]), memoryview(buffer))
            found[box(item.dest_offsets, item.lengths)] = np.frombuffer(buffer, np.float32).reshape(item.lengths)
        assert np.array_equal(found, array[box(offsets, size)])


def test_each_stored_piece_is_looked_at_once_however_many_there_are(monkeypatch):
    looks = []
    reads_of_piece = reshard._reads_of_piece
    monkeypatch.setattr(reshard, "_reads_of_piece", lambda *of: (looks.append(of), reads_of_piece(*of))[1])
    boxes = [((row, 0), (1, 4)) for row in range(300)]
    layout, _ = store(np.zeros((300, 4), np.float32), boxes, ChunkSizes())
    wanted = [(WantedPiece(str(at), "float32", *boxes[at]), "t", boxes[at][0]) for at in range(300)]
    assert len(list(StoredPieces(layout).plan_reads(wanted).reads)) == len(looks) == 300


@pytest.mark.parametrize(("begins", "size"), [((0,), 4), ((1,), 2), ((2,), 2)])
def test_a_piece_that_is_not_stored_whole_where_dcp_reads_it_is_refused(begins, size):
    layout, _ = store(np.zeros(4, np.float32), [((0,), (2,)), ((2,), (2,))], ChunkSizes())
    holed = type(layout)(1, layout.tensors, layout.shards[:1])
    with pytest.raises(LayoutError, match="has all of"):
        StoredPieces(holed).plan_reads([(WantedPiece("x", "float32", begins, (size,)), "t", begins)])


def stored_shape(stored, offsets):
    return next(shape for at, shape in stored if at == tuple(offsets))


@given(st.lists(st.integers(1, 6), max_size=4).map(tuple), st.data())
def test_a_linear_range_is_cut_into_few_disjoint_boxes(shape, data):
    start = data.draw(st.integers(0, prod(shape)))
    stop = data.draw(st.integers(start, prod(shape)))
    flat = np.arange(prod(shape)).reshape(shape)
    boxes = list(linear_range_boxes(shape, start, stop))
    assert [n for offsets, size in boxes for n in flat[box(offsets, size)].reshape(-1)] == list(range(start, stop))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)


def test_a_column_wise_reshard_is_a_few_reads_not_one_per_row():
    layout, _ = store(np.zeros((4096, 64), np.float32), [((0, 0), (4096, 32)), ((0, 32), (4096, 32))], ChunkSizes())
    plan = plan_reads(layout, [WantedPiece("t", "float32", (0, 16), (4096, 32))])
    assert len(list(plan.reads)) == 2


def test_the_same_sharding_reads_only_its_own_shard():
    boxes = [((0, 0), (2, 4)), ((2, 0), (2, 4))]
    layout, _ = store(np.zeros((4, 4), np.float32), boxes, ChunkSizes())
    plan = plan_reads(layout, [WantedPiece("t", "float32", *boxes[1])])
    assert set(plan.by_chunk) == {(1, 0)}


def test_a_chunk_of_one_tensor_is_one_run_even_where_rows_are_cut_and_by_columns_it_is_none():
    layout, _ = store(np.zeros((7, 3, 10), "uint8"), [((0, 0, 0), (7, 3, 10))], ChunkSizes(16, 64, 16))

    def runs(offsets, shape):
        plan = plan_reads(layout, [WantedPiece("t", "uint8", offsets, shape)])
        return [straight(reads) for reads in plan.by_chunk.values()]

    assert runs((0, 0, 0), (7, 3, 10)) == [("t", 0, 64), ("t", 64, 64), ("t", 128, 64), ("t", 192, 18)]
    assert runs((0, 0, 0), (7, 3, 9)) == [None] * 4
    assert runs((0, 1, 0), (7, 2, 10)) == [None, None, None, ("t", 122, 18)], "the last rows of all"
    assert runs((1, 0, 0), (5, 3, 10)) == [None, ("t", 34, 64), ("t", 98, 52)], "rows 1 to 5: what lies before is not"


def test_bytes_that_two_tensors_or_two_places_want_are_no_run():
    one, rest, other = (
        Read(0, 0, name, 1, (8,), offset, (1,), offset, (1,)) for name, offset in (("t", 0), ("t", 8), ("u", 8))
    )
    assert straight([rest, one]) == ("t", 0, 16)
    assert straight([one, other]) is None
    assert straight([one, one]) is None
    assert straight([one, rest._replace(destination_offset=9)]) is None
    assert straight([rest]) is None


def test_a_copy_on_the_own_rank_is_preferred_and_read_once():
    spec = PieceSpec("t", "m", "float32", (4,), (0,), (4,), replicated=False)
    layout = global_layout([build_local_plan([spec], rank=rank, world_size=2) for rank in range(2)])
    want = WantedPiece("t", "float32", (0,), (4,))
    assert set(plan_reads(layout, [want]).by_chunk) == {(0, 0)}
    assert set(plan_reads(layout, [want], prefer_rank=1).by_chunk) == {(1, 0)}
    assert set(plan_reads(layout, [want], prefer_rank=7).by_chunk) == {(0, 0)}


def test_a_tied_name_reads_what_it_is_tied_to():
    spec = whole("a", "m", "float32", (4,), replicated=True)
    layout = global_layout([build_local_plan([spec, spec._replace(name="b", alias_of="a")], rank=0, world_size=1)])
    [read] = plan_reads(layout, [WantedPiece("b", "float32", (0,), (4,))]).reads
    assert (read.name, read.bytes) == ("b", 16)


@pytest.mark.parametrize(
    "want",
    [
        WantedPiece("other", "float32", (0,), (4,)),
        WantedPiece("t", "float16", (0,), (4,)),
        WantedPiece("t", "float32", (1,), (4,)),
        WantedPiece("t", "float32", (0, 0), (4, 1)),
    ],
)
def test_what_does_not_fit_the_checkpoint_is_refused(want):
    layout, _ = store(np.zeros(4, np.float32), [((0,), (4,))], ChunkSizes())
    with pytest.raises(LayoutError):
        plan_reads(layout, [want])


def test_a_hole_in_a_hostile_layout_is_refused():
    layout, _ = store(np.zeros(4, np.float32), [((0,), (2,)), ((2,), (2,))], ChunkSizes())
    holed = type(layout)(1, layout.tensors, layout.shards[:1])
    with pytest.raises(LayoutError, match="hold 8 of the 16 bytes"):
        plan_reads(holed, [WantedPiece("t", "float32", (0,), (4,))])


def test_scatter_never_leaves_its_buffers():
    layout, _ = store(np.zeros(4, np.float32), [((0,), (4,))], ChunkSizes())
    [read] = plan_reads(layout, [WantedPiece("t", "float32", (0,), (4,))]).reads
    with pytest.raises(ValueError, match="does not fit a buffer of 15 bytes"):
        scatter(read, memoryview(bytes(15)), memoryview(bytearray(16)))
    with pytest.raises(ValueError, match="does not fit a buffer of 12 bytes"):
        scatter(read, memoryview(bytes(16)), memoryview(bytearray(12)))
