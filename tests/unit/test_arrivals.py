"""Which tensors take their bytes themselves, what is new where they cannot; every byte gets where it belongs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.layout.plan import ChunkSizes, global_layout
from holdfast.layout.reshard import Read, WantedPiece, plan_reads, scatter
from holdfast.state import destinations as arrivals
from holdfast.state.destinations import Arrivals, in_place
from holdfast.state.on_device import OnDevice
from holdfast.state.tensors import TakenMemory, bytes_of, dtype_name, fresh
from tests.support.staged import staged, tensors

HOST = torch.device("cpu")


def piece(name, tensor):
    return WantedPiece(name, dtype_name(tensor.dtype), (0,) * tensor.ndim, tuple(tensor.shape))


def chosen(live, others=()):
    return set(in_place({name: piece(name, tensor) for name, tensor in live.items()}, live, others))


def test_contiguous_tensors_take_their_bytes_themselves_whatever_autograd_thinks_of_them():
    with torch.inference_mode():
        of_inference = torch.zeros(3)
    leaf = torch.zeros(4, requires_grad=True)
    live = {
        "plain": torch.zeros(2, 3),
        "parameter": torch.nn.Parameter(torch.zeros(3)),
        "no leaf": leaf * 2,
        "of inference": of_inference,
        "scalar": torch.zeros(()),
        "one of many": torch.zeros(5, dtype=torch.int16).expand(4, 5).T[2:3, :1],
        "rows of another": torch.zeros(5, 2)[1:3],
        "bfloat16": torch.zeros(3, dtype=torch.bfloat16),
    }
    assert chosen(live) == set(live)


def test_what_has_no_byte_for_each_element_in_order_does_not():
    live = {
        "transposed": torch.zeros(2, 3).T,
        "columns": torch.zeros(2, 3)[:, :2],
        "expanded": torch.zeros(1, 3).expand(2, 3),
        "channels last": torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conjugate": torch.zeros(3, dtype=torch.complex64).conj(),
        "negative": torch.zeros(3, dtype=torch.complex64).conj().imag,
        "empty": torch.zeros(0, 3),
    }
    assert chosen(live) == set()


def test_another_dtype_or_shape_than_the_stored_one_does_not():
    live = torch.zeros(4)
    assert in_place({"t": WantedPiece("t", "bfloat16", (0,), (4,))}, {"t": live}) == {}
    assert in_place({"t": WantedPiece("t", "float32", (0,), (2,))}, {"t": live}) == {}
    assert in_place({"t": WantedPiece("t", "int32", (0,), (4,))}, {"t": live}) == {}


def test_tensors_that_share_memory_are_left_to_an_order():
    base = torch.zeros(10)
    rows = {"a": base[0:2], "b": base[2:5], "c": base[6:10]}
    assert chosen(rows) == {"a", "b", "c"}, "side by side is apart"
    assert chosen({**rows, "whole": base}) == set()
    assert chosen({**rows, "again": base[3:4]}) == {"a", "c"}
    assert chosen({**rows, "tied": base[6:10]}) == {"a", "b"}
    assert chosen(rows, [base[:5:4]]) == {"c"}, "also where the other one is written in another way"
    alone = torch.zeros(3)
    assert chosen({"once": alone, "twice": alone}) == set()


def test_memory_is_taken_by_its_bytes_and_named_by_its_view():
    base, taken = torch.zeros(10), TakenMemory()
    taken.take("a", base[2:4])
    taken.take("b", base[6:8])
    assert not any(map(taken.touches, [base[:2], base[4:6], base[8:], base[2:2], torch.zeros(10)]))
    assert all(map(taken.touches, [base, base[3:5], base[7:8], base[::3]]))
    taken.take("over both", base[3:7])
    assert taken.touches(base[4:6])
    assert not any(map(taken.touches, [base[:2], base[8:]]))
    assert (taken.taken_as(base[2:4]), taken.taken_as(base[2:5])) == ("a", None)


def test_whoever_looks_at_versions_sees_that_live_tensors_change_before_the_first_byte():
    parameter = torch.nn.Parameter(torch.ones(3))
    loss = (parameter * parameter).sum()
    before = parameter._version
    Arrivals([piece("p", parameter)], {"p": parameter})
    assert parameter._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("elements", [3, 5 * 1024 * 1024 + 3], ids=["small", "large"])
def test_a_new_tensor_is_an_ordinary_one(elements):
    tensor = fresh((1, elements), torch.bfloat16, HOST)
    assert tensor.shape == (1, elements)
    assert tensor.stride() == (elements, 1)
    assert tensor.data_ptr() % 64 == 0
    assert not tensor._is_view()
    assert tensor.untyped_storage().nbytes() == tensor.nbytes
    bytes_of(tensor)[:] = bytes([0x80, 0x3F]) * elements
    assert tensor.requires_grad_().sum().item() == torch.ones(elements, dtype=torch.bfloat16).sum().item()


@pytest.mark.parametrize("elements", [3, 2**21], ids=["small", "large"])
def test_a_new_tensor_is_on_its_device_whatever_the_scripts_default_is(elements):
    with torch.device("meta"):
        tensor = fresh((elements,), torch.float32, HOST)
    assert tensor.device == HOST
    bytes_of(tensor)[:] = bytes(4 * elements)
    assert tensor.count_nonzero().item() == 0


def test_a_tensor_of_inference_mode_is_written_on_a_device_too():
    with torch.inference_mode():
        tensor = torch.zeros(3, 2, dtype=torch.int16)
    by_rows = Read(0, 0, "t", 2, (2, 1), 2, (4, 2), 6, (4, 2))
    OnDevice(tensor).take(by_rows, memoryview(bytearray([9, 9, 1, 2, 9, 9, 3, 4])))
    assert tensor.tolist() == [[0, 0], [0, 0x0201], [0, 0x0403]]


def test_an_own_tensor_is_given_away_once_and_what_nobody_took_is_let_go():
    found = Arrivals([WantedPiece("a", "int8", (0,), (2,)), WantedPiece("b", "int8", (0,), (2,))], {})
    assert not found.touch_live_tensors
    kept = found.own("a")
    assert set(found.rooms()) == {"b"}
    found.let_go()
    assert found.rooms() == {}
    assert kept.shape == (2,)


@pytest.mark.parametrize("room_in", [arrivals.room_in, OnDevice], ids=["host", "as on a device"])
@settings(deadline=None, max_examples=60)
@given(
    tensors=st.lists(tensors(), min_size=1, max_size=4),
    sizes=st.sampled_from([ChunkSizes(16, 64, 32), ChunkSizes(1, 16, 16), ChunkSizes()]),
    data=st.data(),
)
def test_every_byte_gets_where_it_belongs_in_host_memory_and_in_a_devices(room_in, tensors, sizes, data):
    shard = staged({str(at): tensor for at, tensor in enumerate(tensors)}, sizes)
    layout = global_layout([shard.plan])
    wanted = []
    for name, entry in layout.tensors.items():
        begins = tuple(data.draw(st.integers(0, size)) for size in entry.shape)
        ends = tuple(data.draw(st.integers(begin, size)) for begin, size in zip(begins, entry.shape, strict=True))
        wanted.append(WantedPiece(name, entry.dtype, begins, tuple(e - b for b, e in zip(begins, ends, strict=True))))
    found = Arrivals(wanted, {})
    rooms = {want.name: room_in(found.shared(want.name)) for want in wanted}
    for (_, ordinal), reads in plan_reads(layout, wanted).by_chunk.items():
        for read in reads:
            scatter(read, memoryview(bytearray(shard.chunk(ordinal))), rooms[read.name])
    for want in wanted:
        expected = tensors[int(want.name)].detach().resolve_conj().resolve_neg()
        for axis, (offset, size) in enumerate(zip(want.offsets, want.shape, strict=True)):
            expected = expected.narrow(axis, offset, size)
        assert bytes(bytes_of(found.own(want.name))) == bytes(bytes_of(expected.contiguous()))
