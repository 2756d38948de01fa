"""Which size of number a chunk's bytes are put in planes by."""

from __future__ import annotations

import pytest

from holdfast.layout.plan import ChunkSizes, PieceSpec, build_local_plan, whole

SIZES = ChunkSizes(own_chunk_bytes=1024, cut_bytes=2048, pack_bytes=1024)


def tensor(name: str, dtype: str, count: int) -> PieceSpec:
    return whole(name, "model", dtype, (count,), replicated=True)


def item_bytes(*specs: PieceSpec) -> tuple[int, ...]:
    return build_local_plan(specs, rank=0, world_size=1, sizes=SIZES).item_bytes


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("float64", 8),
        ("float32", 4),
        ("bfloat16", 2),
        ("float16", 2),
        ("complex128", 8),
        ("complex64", 4),
        ("complex32", 2),
        ("float8_e4m3fn", 1),
        ("int64", 1),
        ("uint8", 1),
        ("bool", 1),
    ],
)
def test_floating_point_numbers_have_planes_and_others_have_none(dtype: str, size: int) -> None:
    assert item_bytes(tensor("a", dtype, 100)) == (size,)


def test_a_tensor_that_is_cut_has_them_in_each_of_its_chunks() -> None:
    assert item_bytes(tensor("a", "float32", 1025)) == (4, 4, 4)


def test_in_a_pack_most_of_the_bytes_decide() -> None:
    assert item_bytes(tensor("a", "float32", 50), tensor("b", "bfloat16", 99), tensor("c", "int64", 1)) == (4,)
    assert item_bytes(tensor("a", "float32", 50), tensor("b", "bfloat16", 101), tensor("c", "int64", 1)) == (2,)
    assert item_bytes(tensor("a", "float32", 10), tensor("b", "int64", 90)) == (1,)


def test_a_rank_that_stores_nothing_has_no_chunks() -> None:
    assert item_bytes() == ()
