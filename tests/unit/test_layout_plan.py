"""Planning: ownership without talking, chunks that do not move when a neighbour does, and disagreements named."""

from itertools import pairwise
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.layout.plan import ChunkSizes, LayoutError, PieceSpec, build_local_plan, global_layout, whole
from holdfast_protocol.index_documents import ITEM_BYTES, Layout

MIB = 1024 * 1024


def plan_of(*specs, rank=0, world_size=1, **more):
    return build_local_plan(specs, rank=rank, world_size=world_size, **more)


def sizes_of(plan, name):
    [piece] = [piece for piece in plan.shard.pieces if piece.tensor == name]
    return [segment.bytes for segment in piece.segments], piece.segments


def big(name, mebibytes, **more):
    return whole(name, "model", "uint8", (mebibytes * MIB,), replicated=True)._replace(**more)


@pytest.mark.rule("layout-vote")
@pytest.mark.parametrize(
    ("mebibytes", "chunks"), [(8, [8]), (64, [64]), (65, [64, 1]), (128, [64, 64]), (200, [64, 64, 64, 8])]
)
def test_a_large_tensor_has_its_own_chunks_cut_every_64_mib(mebibytes, chunks):
    plan = plan_of(big("a", 1), big("b", mebibytes), big("c", 1))
    assert sizes_of(plan, "b")[0] == [size * MIB for size in chunks]
    assert {s.ordinal for s in sizes_of(plan, "b")[1]}.isdisjoint({s.ordinal for s in sizes_of(plan, "a")[1]})


def test_small_tensors_are_packed_in_name_order_up_to_32_mib():
    plan = plan_of(*[big(f"t{at}", 7) for at in reversed(range(6))])
    assert plan.shard.chunks == (28 * MIB, 14 * MIB)
    assert [piece.tensor for piece in plan.shard.pieces] == [f"t{at}" for at in range(6)]


@pytest.mark.rule("packs-apart")
def test_unlike_tensors_never_share_a_pack():
    base = whole("a", "model", "float32", (4,), replicated=True)
    unlike = [
        base,
        base._replace(name="b", pack="frozen"),
        base._replace(name="c", component="optimizer"),
        base._replace(name="d", replicated=False),
        base._replace(name="e", pack="buffer"),
    ]
    assert plan_of(*unlike).shard.chunks == (16,) * 5


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=12), st.integers(1, 100_000))
def test_neighbours_never_move_a_large_tensors_cuts(neighbours, extra):
    spec = whole("middle", "model", "float32", (16 * MIB + extra,), replicated=True)
    alone = sizes_of(plan_of(spec), "middle")[0]
    others = [big(f"{'a' if before else 'z'}{at}", size) for at, (size, before) in enumerate(neighbours)]
    assert sizes_of(plan_of(spec, *others), "middle")[0] == alone


@pytest.mark.rule("layout-vote")
@given(st.sets(st.text(min_size=1, max_size=12), max_size=30), st.integers(1, 9))
def test_every_replicated_tensor_has_exactly_one_owner(names, world_size):
    specs = [whole(name, "model", "float32", (3,), replicated=True) for name in names]
    plans = [build_local_plan(specs, rank=rank, world_size=world_size) for rank in range(world_size)]
    owned = sorted(piece.tensor for plan in plans for piece in plan.shard.pieces)
    assert owned == sorted(names)


def test_replicated_tensors_are_spread_over_the_ranks():
    specs = [whole(f"layer{at}", "model", "float32", (3,), replicated=True) for at in range(400)]
    for rank in range(4):
        assert 60 < len(build_local_plan(specs, rank=rank, world_size=4).shard.pieces) < 140


@pytest.mark.rule("buffers-from-rank-0")
def test_buffers_come_from_rank_0():
    spec = whole("mean", "model", "float32", (3,), replicated=True)._replace(owner=0)
    owned = [len(build_local_plan([spec], rank=rank, world_size=4).shard.pieces) for rank in range(4)]
    assert owned == [1, 0, 0, 0]


@pytest.mark.rule("layout-vote")
def test_copies_along_a_mesh_dimension_have_one_owner_and_are_spread():
    first = 0
    for at in range(100):
        spec = PieceSpec(f"w{at}", "model", "float32", (4,), (0,), (2,), replicated=False)
        plans = [plan_of(spec._replace(replicas=((rank, 2),)), rank=rank, world_size=4) for rank in range(2)]
        owners = [plan.rank for plan in plans if plan.shard.pieces]
        assert len(owners) == 1
        first += owners == [0]
    assert 25 < first < 75


def test_the_order_of_specs_does_not_matter_and_the_same_specs_give_the_same_plan():
    specs = [big("a", 9), big("b", 1)]
    plan = plan_of(*specs)
    assert plan_of(*reversed(specs)) == plan
    assert plan_of(*specs, previous=plan) is plan
    assert plan_of(big("a", 9), big("b", 2), previous=plan) != plan


@pytest.mark.rule("layout-vote")
def test_a_cast_of_one_tensor_changes_the_digest():
    spec = whole("a", "model", "float32", (4,), replicated=True)
    others = [spec, spec._replace(dtype="int32"), spec._replace(pack="frozen")]
    assert len({plan_of(other).digest for other in others}) == 3


def test_ranks_that_disagree_are_told_which_tensor():
    one = build_local_plan([whole("a", "m", "float32", (4,), replicated=True)], rank=0, world_size=2)
    other = build_local_plan([whole("a", "m", "bfloat16", (4,), replicated=True)], rank=1, world_size=2)
    with pytest.raises(LayoutError, match="rank 1 describes tensor 'a'"):
        global_layout([one, other])


def test_a_part_that_nobody_stores_is_named():
    spec = PieceSpec("a", "m", "float32", (4,), (0,), (2,), replicated=False)
    with pytest.raises(LayoutError, match="store 2 of the 4 elements of tensor 'a'"):
        global_layout([plan_of(spec)])


def test_two_tensors_of_one_name_and_half_a_world_are_refused():
    spec = whole("a", "m", "float32", (4,), replicated=True)
    with pytest.raises(LayoutError, match="both named 'a'"):
        plan_of(spec, spec)
    with pytest.raises(LayoutError, match="do not make one world"):
        global_layout([build_local_plan([], rank=1, world_size=2)])


def test_an_empty_state_is_a_plan_too():
    layout = global_layout([plan_of()])
    assert Layout.decode(layout.encode()) == layout


@pytest.mark.parametrize("sizes", [(0, 64, 32), (8, 60, 32), (40, 64, 32), (8, 64, 128)])
def test_contradicting_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match="bytes"):
        ChunkSizes(*sizes)


specs = st.lists(
    st.tuples(st.sampled_from(sorted(ITEM_BYTES)), st.lists(st.integers(0, 9), max_size=3).map(tuple), st.booleans()),
    max_size=20,
)


@given(specs, st.integers(1, 4), st.sampled_from([(16, 64, 32), (64, 64, 64), (1, 16, 16), (8, 256, 100)]))
def test_every_byte_has_one_place_and_packs_never_overlap(entries, world_size, sizes):
    chosen = ChunkSizes(sizes[0], sizes[1], sizes[2])
    tensors = [whole(f"t{at:02}", "m", dtype, shape, replicated=r) for at, (dtype, shape, r) in enumerate(entries)]
    if world_size > 1:
        tensors = [spec._replace(replicated=True) for spec in tensors]
    plans = [build_local_plan(tensors, rank=rank, world_size=world_size, sizes=chosen) for rank in range(world_size)]
    layout = global_layout(plans)
    assert Layout.decode(layout.encode()) == layout
    for shard in layout.shards:
        assert all(0 < size <= chosen.cut_bytes for size in shard.chunks)
        taken = sorted((s.ordinal, s.offset, s.bytes) for piece in shard.pieces for s in piece.segments)
        for (ordinal, offset, size), (next_ordinal, next_offset, _) in pairwise(taken):
            assert (ordinal, offset + size) <= (next_ordinal, next_offset)
        for piece in shard.pieces:
            item = ITEM_BYTES[layout.tensors[piece.tensor].dtype]
            assert sum(s.bytes for s in piece.segments) == prod(piece.shape) * item
            assert all(s.offset % item == 0 for s in piece.segments)
