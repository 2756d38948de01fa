"""What is measured of two arrays is what torch computes in float64: for each dtype, with what is not finite, and cut
anyhow."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.layout.plan import ChunkSizes, global_layout
from holdfast_protocol.comparison.tensors import StoredTensors
from holdfast_protocol.digests import chunk_digest
from holdfast_protocol.index_documents import ITEM_BYTES
from holdfast_service.comparisons import measures
from holdfast_service.comparisons.batches import Side, plan_batches
from holdfast_service.comparisons.measures import measure
from holdfast_service.comparisons.read_batch import read_batch
from holdfast_service.comparisons.sums import Sums, is_measurable
from tests.support.saved_tensors import bytes_of, chunks_of, in_columns, in_rows, plans_of

MEASURED = sorted(dtype for dtype in ITEM_BYTES if is_measurable(dtype))
FLOAT8 = [dtype for dtype in MEASURED if dtype.startswith("float8")]


def measured(one: torch.Tensor, other: torch.Tensor) -> dict[str, float | None]:
    dtype = str(one.dtype).removeprefix("torch.")
    return measure(dtype, memoryview(bytes_of(one)), memoryview(bytes_of(other))).told()


def expected(one: torch.Tensor, other: torch.Tensor) -> dict[str, float | None]:
    a, b = one.to(torch.float64).reshape(-1), other.to(torch.float64).reshape(-1)
    finite = a.isfinite() & b.isfinite()
    x, y = a[finite], b[finite]
    before, after, difference = (float(each.norm()) for each in (x, y, y - x))
    return {
        "elements": a.numel(),
        "norm_before": before,
        "norm_after": after,
        "norm_difference": difference,
        "relative_change": difference / before if before else None if difference else 0.0,
        "largest_difference": float((y - x).abs().max()) if x.numel() else 0.0,
        "cosine": float(x @ y) / before / after if before and after else None,
        "nan_before": int(a.isnan().sum()),
        "nan_after": int(b.isnan().sum()),
        "infinite_before": int(a.isinf().sum()),
        "infinite_after": int(b.isinf().sum()),
    }


def random_of(dtype: str, seed: int, *shape: int) -> torch.Tensor:
    """Any bytes are numbers of a dtype: with NaN, infinities, subnormal ones and both zeros."""
    generator = torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype)
    if dtype == "bool":
        return torch.randint(0, 2, shape, generator=generator).to(torch.bool)
    if dtype in ("float64", "float32"):  # the squares of random bytes are beyond float64
        found = torch.randn(shape, generator=generator, dtype=torch.float64).to(kind)
        found.view(-1)[:3] = torch.tensor([math.nan, math.inf, -0.0])
        return found
    data = torch.randint(0, 256, (math.prod(shape) * ITEM_BYTES[dtype],), generator=generator, dtype=torch.uint8)
    return data.view(kind).reshape(shape)


@pytest.mark.parametrize("dtype", [each for each in MEASURED if not each.startswith("uint") or each == "uint8"])
def test_it_is_what_torch_computes(dtype):
    one, other = random_of(dtype, 1, 999), random_of(dtype, 2, 999)
    assert measured(one, other) == pytest.approx(expected(one, other), rel=1e-12, abs=1e-300)
    assert measured(one, one)["norm_difference"] == 0


@pytest.mark.parametrize("dtype", FLOAT8)
def test_each_code_of_eight_bits_is_the_number_that_torch_takes_it_for(dtype):
    codes = torch.arange(256, dtype=torch.uint8)
    ours = torch.from_numpy(measures._FLOATS[dtype][1](codes.numpy()))
    theirs = codes.view(getattr(torch, dtype)).to(torch.float64)
    assert torch.equal(ours.nan_to_num(nan=-1.5), theirs.nan_to_num(nan=-1.5))
    assert torch.equal(ours.isnan(), theirs.isnan())


def test_a_difference_of_large_integers_is_exact():
    one = torch.tensor([2**62, -(2**63), 2**63 - 1])
    assert measured(one, one + torch.tensor([1, 3, 0]))["largest_difference"] == 3
    ends = torch.tensor([-(2**63)]), torch.tensor([2**63 - 1])
    assert measured(*ends)["largest_difference"] == float(2**64 - 1) == measured(*reversed(ends))["largest_difference"]


def test_what_float64_cannot_hold_is_null_and_json_is_told_no_infinity():
    huge = torch.tensor([1e200, -1e308], dtype=torch.float64)
    found = measured(huge, -huge)
    assert [found[name] for name in ("norm_before", "norm_difference", "relative_change", "cosine")] == [None] * 4
    assert found["largest_difference"] is None
    nothing = torch.zeros(4)
    assert measured(nothing, nothing + 1)["relative_change"] is None
    assert measured(nothing, nothing)["relative_change"] == 0
    assert measured(torch.full((4,), math.nan), nothing)["norm_before"] == 0


def test_sums_of_parts_are_those_of_the_whole():
    one, other = random_of("float32", 3, 1000), random_of("float32", 4, 1000)
    total = Sums()
    for start in range(0, 1000, 300):
        part = slice(start, start + 300)
        total.add(measure("float32", memoryview(bytes_of(one[part])), memoryview(bytes_of(other[part]))))
    assert total.told() == pytest.approx(measured(one, other), rel=1e-12)


class Memory:
    """Chunks that are there already, in place of a store's."""

    def __init__(self, *sides: dict[str, bytes]) -> None:
        self._sides = sides
        self.read_bytes = 0

    def read(self, side, wanted, tell):
        read = 0
        for digest, targets in wanted.items():
            chunk = self._sides[side][digest]
            read += len(chunk)
            for offset, into in targets:
                into[:] = chunk[offset : offset + into.nbytes]
        self.read_bytes += read
        tell(read)
        return set()


SHAPES = st.lists(st.integers(1, 9), max_size=3).map(tuple)
CUTS = st.sampled_from([None, in_rows, in_columns])


@given(
    shapes=st.lists(SHAPES, min_size=1, max_size=5),
    ranks=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    cuts=st.tuples(CUTS, CUTS),
    sizes=st.tuples(st.sampled_from([64, 256]), st.sampled_from([64, 256])),
    memory_bytes=st.sampled_from([256, 1024, 10**6]),
)
def test_whatever_way_two_saves_cut_a_tensor_the_same_bytes_meet(shapes, ranks, cuts, sizes, memory_bytes):
    """And what is read was told before."""
    tensors = {f"m/{number}": random_of("bfloat16", number, *shape) for number, shape in enumerate(shapes)}
    other = {
        name: random_of("bfloat16", 50 + number, *each.shape) for number, (name, each) in enumerate(tensors.items())
    }
    sides, stores = [], []
    for contents, world, cut, size in zip((tensors, other), ranks, cuts, sizes, strict=True):
        plans = plans_of(contents, world, cut, ChunkSizes(own_chunk_bytes=size // 2, pack_bytes=size, cut_bytes=size))
        chunks = {plan.rank: chunks_of(plan, contents) for plan in plans}
        lists = {rank: [chunk_digest(chunk) for chunk in each] for rank, each in chunks.items()}
        stores.append({chunk_digest(chunk): chunk for each in chunks.values() for chunk in each})
        sizes_of = {digest: len(chunk) for digest, chunk in stores[-1].items()}
        sides.append(Side.of(StoredTensors(global_layout(plans), lists), sizes_of))
    plan = plan_batches(*sides, memory_bytes=memory_bytes)
    memory, found, told = Memory(*stores), {name: [b"", b""] for name in tensors}, []
    for batch, reads in zip(plan.batches, plan.reads, strict=True):
        assert sum(part.bytes for part in batch) * 2 <= memory_bytes
        loaded = read_batch(memory, tuple(sides), batch, told.append)
        assert told[-1] == reads
        for part, before, after, damaged in loaded:
            assert not damaged
            for at, data in enumerate((before, after)):
                found[part.subject.name][at] += bytes(data)
    for name, tensor in tensors.items():
        if name not in plan.diff.equal and name not in plan.not_compared:
            assert found[name] == [bytes_of(tensor), bytes_of(other[name])]
    assert memory.read_bytes == sum(plan.reads)
    if memory_bytes > 1024:
        assert not plan.not_compared


def test_a_batch_of_tiny_tensors_takes_no_more_memory_than_others():
    """To read a tensor takes memory besides its bytes, and a state may have a hundred thousand of one element."""
    sides = []
    for seed in (1, 2):
        tensors = {f"m/{number}": random_of("int64", 2 * number + seed, 1) for number in range(2000)}
        [plan] = plans_of(tensors, 1, None)
        chunks = chunks_of(plan, tensors)
        digests = [chunk_digest(chunk) for chunk in chunks]
        sizes = dict(zip(digests, map(len, chunks), strict=True))
        sides.append(Side.of(StoredTensors(global_layout([plan]), {0: digests}), sizes))
    found = plan_batches(*sides, memory_bytes=1024**2)
    assert sum(map(len, found.batches)) == 2000
    assert max(map(len, found.batches)) <= 512


def test_boxes_of_more_axes_than_arrays_can_have_are_told_and_not_read():
    """Torch knows 64 axes, and so does a stranger's layout."""
    sides = []
    for seed in (1, 2):
        tensors = {"m/a": random_of("bfloat16", seed, 2, *[1] * 62, 2)}
        plans = plans_of(tensors, 2, in_columns)
        digests = {plan.rank: [chunk_digest(chunk) for chunk in chunks_of(plan, tensors)] for plan in plans}
        sizes = {chunk_digest(chunk): len(chunk) for plan in plans for chunk in chunks_of(plan, tensors)}
        sides.append(Side.of(StoredTensors(global_layout(plans), digests), sizes))
    found = plan_batches(*sides, memory_bytes=1024**2)
    assert (found.not_compared, found.batches) == ({"m/a": "layout"}, [])
