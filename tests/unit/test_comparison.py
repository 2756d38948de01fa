"""Two layouts with the digests of their chunks: what is told of each tensor, and that nothing false is told."""

from __future__ import annotations

import dataclasses

import pytest

from holdfast.layout.plan import ChunkSizes, LocalPlan, PieceSpec, build_local_plan, global_layout, whole
from holdfast_protocol.comparison.tensors import StoredTensors, TensorDiff, compare_tensors
from holdfast_protocol.digests import chunk_digest
from holdfast_protocol.index_documents import Layout, Piece, Segment, ShardLayout, TensorEntry

SIZES = ChunkSizes(own_chunk_bytes=64, cut_bytes=256, pack_bytes=128)
LARGE, SMALL = 64, 8
"""Elements of one byte: a tensor with a chunk of its own, and one in a pack."""


def saved(contents: dict[str, bytes], ranks: int = 1, *, cut: bool = False, **forms: tuple[str, tuple[int, ...]]):
    """The tensors as `ranks` ranks save them, each whole on one of them; with `cut` each cut along its first axis.
    `forms`: dtype and shape of some; else uint8 in one axis."""

    def form(name: str) -> tuple[str, tuple[int, ...]]:
        return forms.get(name, ("uint8", (len(contents[name]),)))

    def specs(rank: int) -> list[PieceSpec]:
        replicated = [whole(name, "model", *form(name), replicated=True) for name in contents]
        if not cut:
            return replicated
        return [
            spec._replace(
                replicated=False,
                offsets=(rank * (spec.shape[0] // ranks), *spec.offsets[1:]),
                shape=(spec.shape[0] // ranks, *spec.shape[1:]),
            )
            for spec in replicated
        ]

    plans = [build_local_plan(specs(rank), rank=rank, world_size=ranks, sizes=SIZES) for rank in range(ranks)]
    return StoredTensors(global_layout(plans), {plan.rank: digests_of(plan, contents) for plan in plans})


def digests_of(plan: LocalPlan, contents: dict[str, bytes]) -> list[str]:
    """Of the chunks with the tensors' bytes in them. A piece is a run of its tensor's bytes in these tests."""
    chunks = [bytearray(size) for size in plan.shard.chunks]
    for piece in plan.shard.pieces:
        data = contents[piece.tensor]
        rows = plan.tensors[piece.tensor].shape[0]
        start = piece.offsets[0] * (len(data) // rows)
        for ordinal, offset, size in piece.segments:
            chunks[ordinal][offset : offset + size] = data[start : start + size]
            start += size
    return [chunk_digest(chunk) for chunk in chunks]


def told(diff: TensorDiff) -> dict[str, list[str]]:
    """What is not empty; of another form the names alone."""
    lists = {name: getattr(diff, name) for name in TensorDiff.model_fields}
    return {
        name: [getattr(each, "name", each) for each in found] for name, found in lists.items() if found
    }  # fmt: skip


def test_a_tensor_with_chunks_of_its_own_is_equal_or_has_other_bytes():
    before = {"a": b"a" * LARGE, "b": b"b" * 600}
    after = before | {"b": b"b" * 599 + b"x"}
    assert told(compare_tensors(saved(before), saved(before))) == {"equal": ["a", "b"]}
    assert told(compare_tensors(saved(before), saved(after))) == {"equal": ["a"], "other_bytes": ["b"]}


def test_what_only_one_has_and_what_has_another_shape_or_dtype_is_named():
    before = saved({"a": b"a" * LARGE, "gone": b"g" * LARGE, "t": b"t" * LARGE, "s": b"s" * LARGE})
    after = saved(
        {"a": b"a" * LARGE, "new": b"n" * LARGE, "t": b"t" * LARGE, "s": b"s" * LARGE},
        t=("float32", (LARGE // 4,)),
        s=("uint8", (2, LARGE // 2)),
    )
    diff = compare_tensors(before, after)
    assert told(diff) == {"equal": ["a"], "only_before": ["gone"], "only_after": ["new"], "other_form": ["s", "t"]}
    assert [(str(each.before), str(each.after)) for each in diff.other_form] == [
        ("uint8 [64]", "uint8 [2, 32]"),
        ("uint8 [64]", "float32 [16]"),
    ]


def test_tensors_that_share_a_chunk_are_equal_with_it_and_else_it_is_said_that_the_digest_does_not_tell():
    before = {"a": b"a" * SMALL, "b": b"b" * SMALL}
    after = before | {"b": b"x" * SMALL}
    assert told(compare_tensors(saved(before), saved(before))) == {"equal": ["a", "b"]}
    assert told(compare_tensors(saved(before), saved(after))) == {"undecided": ["a", "b"]}
    # Alone in its pack it is told.
    assert told(compare_tensors(saved({"b": before["b"]}), saved({"b": after["b"]}))) == {"other_bytes": ["b"]}


def test_a_neighbour_that_comes_into_a_chunk_changes_nothing_that_is_said_falsely():
    before, after = {"b": b"b" * SMALL}, {"a": b"a" * SMALL, "b": b"b" * SMALL}
    assert told(compare_tensors(saved(before), saved(after))) == {"undecided": ["b"], "only_after": ["a"]}


def test_the_same_bytes_elsewhere_in_the_same_chunk_are_not_called_equal():
    """The chunk is that of `b` then `a`, both of the same bytes, and in the other checkpoint of `a` then `b`."""
    entries = {name: TensorEntry("model", "uint8", (SMALL,), True) for name in ("a", "b")}
    digests = {0: [chunk_digest(b"a" * SMALL + b"b" * SMALL)]}

    def of(first: str, second: str) -> StoredTensors:
        pieces = tuple(
            Piece(name, (0,), (SMALL,), (Segment(0, at * SMALL, SMALL),)) for at, name in enumerate((first, second))
        )
        return StoredTensors(Layout(1, entries, (ShardLayout((2 * SMALL,), pieces),)), digests)

    assert told(compare_tensors(of("a", "b"), of("b", "a"))) == {"undecided": ["a", "b"]}


@pytest.mark.parametrize("ranks", [2, 3])
def test_it_does_not_matter_which_rank_stored_a_tensor(ranks):
    contents = {f"t{each}": bytes([each]) * LARGE for each in range(7)}
    changed = contents | {"t3": b"x" * LARGE}
    assert told(compare_tensors(saved(contents, ranks), saved(contents))) == {"equal": sorted(contents)}
    assert told(compare_tensors(saved(contents, ranks), saved(changed)))["other_bytes"] == ["t3"]


def test_a_tensor_that_two_ranks_cut_where_one_rank_cuts_it_too_is_compared():
    data = bytes(range(256)) * 2  # one rank cuts it after 256 bytes, which is where two ranks part
    changed = data[:300] + b"x" + data[301:]
    for rows in (("uint8", (512,)), ("uint8", (4, 128))):
        apart, together = saved({"w": data}, 2, cut=True, w=rows), saved({"w": data}, w=rows)
        assert told(compare_tensors(apart, together)) == {"equal": ["w"]}
        assert told(compare_tensors(together, saved({"w": changed}, 2, cut=True, w=rows))) == {"other_bytes": ["w"]}


def test_what_is_cut_in_different_places_is_not_compared():
    data = bytes(128)
    assert told(compare_tensors(saved({"w": data}), saved({"w": data}, 2, cut=True))) == {"cut_differently": ["w"]}
    # Three ranks of four rows: the first of each is the same bytes, which says nothing of the others.
    assert told(compare_tensors(saved({"w": bytes(384)}, 3, cut=True), saved({"w": bytes(384)}))) == {
        "cut_differently": ["w"]
    }


def columns(digests: list[str], ranks: int) -> StoredTensors:
    """A matrix whose columns are dealt out to the ranks: no rank has one run of its bytes."""
    wide = 16 // ranks
    shards = tuple(
        ShardLayout((8 * wide,), (Piece("w", (0, rank * wide), (8, wide), (Segment(0, 0, 8 * wide),)),))
        for rank in range(ranks)
    )
    layout = Layout(ranks, {"w": TensorEntry("model", "uint8", (8, 16), False)}, shards)
    return StoredTensors(layout, {rank: [digest] for rank, digest in enumerate(digests)})


def test_columns_are_compared_with_the_same_columns_alone():
    one, other, third = (chunk_digest(bytes([each])) for each in range(3))
    assert told(compare_tensors(columns([one, other], 2), columns([one, other], 2))) == {"equal": ["w"]}
    assert told(compare_tensors(columns([one, other], 2), columns([one, third], 2))) == {"other_bytes": ["w"]}
    assert told(compare_tensors(columns([one, other], 2), columns([one], 1))) == {"cut_differently": ["w"]}


def test_columns_are_not_taken_for_the_rows_that_are_as_many_bytes():
    """The first half of the rows and the first half of the columns both begin with the tensor's first byte."""
    data = bytes(range(128))
    halves = [b"".join(data[row * 16 + at : row * 16 + at + 8] for row in range(8)) for at in (0, 8)]
    by_rows = saved({"w": data}, 2, cut=True, w=("uint8", (8, 16)))
    by_columns = columns([chunk_digest(half) for half in halves], 2)
    assert told(compare_tensors(by_rows, by_columns)) == {"cut_differently": ["w"]}


def test_tied_tensors_are_compared_by_the_bytes_that_they_are_tied_to():
    def tied(data: bytes) -> StoredTensors:
        stored = saved({"a": data, "other": b"o" * LARGE})
        entry = stored.layout.tensors["a"]._replace(alias_of="a")
        layout = dataclasses.replace(stored.layout, tensors=stored.layout.tensors | {"b": entry})
        return StoredTensors(layout, stored.chunks)

    untied = saved({"a": b"a" * LARGE, "b": b"b" * LARGE, "other": b"o" * LARGE})
    assert told(compare_tensors(tied(b"a" * LARGE), tied(b"x" * LARGE))) == {
        "other_bytes": ["a", "b"],
        "equal": ["other"],
    }
    assert told(compare_tensors(tied(b"a" * LARGE), untied)) == {"equal": ["a", "other"], "other_bytes": ["b"]}


def test_empty_tensors_and_those_without_axes_are_compared():
    contents = {"empty": b"", "one": b"\1"}
    forms = {"empty": ("uint8", (0, 3)), "one": ("uint8", ())}

    def of(data: dict[str, bytes]) -> StoredTensors:
        specs = [whole(name, "model", *forms[name], replicated=True) for name in data]
        plan = build_local_plan(specs, rank=0, world_size=1, sizes=SIZES)
        return StoredTensors(global_layout([plan]), {0: [chunk_digest(data["one"])]})

    assert told(compare_tensors(of(contents), of(contents))) == {"equal": ["empty", "one"]}
    assert told(compare_tensors(of(contents), of(contents | {"one": b"\2"}))) == {
        "equal": ["empty"],
        "other_bytes": ["one"],
    }


def test_of_a_box_that_several_ranks_stored_the_one_that_a_restore_reads_is_compared():
    one, other = chunk_digest(b"1"), chunk_digest(b"2")
    entries = {"w": TensorEntry("model", "uint8", (4,), True)}
    in_one = ShardLayout((4,), (Piece("w", (0,), (4,), (Segment(0, 0, 4),)),))
    in_two = ShardLayout((2, 2), (Piece("w", (0,), (4,), (Segment(0, 0, 2), Segment(1, 0, 2))),))
    twice = StoredTensors(Layout(2, entries, (in_one, in_two)), {0: [one], 1: [other, other]})
    once = StoredTensors(Layout(1, entries, (in_one,)), {0: [one]})
    assert told(compare_tensors(twice, once)) == {"equal": ["w"]}
