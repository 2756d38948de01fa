"""A shard staged through a window: the same bytes as staged whole, never more memory than allowed, and no way to wait
for ever."""

from __future__ import annotations

import resource
import threading
from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.layout.plan import ChunkSizes, build_local_plan
from holdfast.staging import StagingArea, WindowedShard
from holdfast.staging.copy import PAGE_BYTES
from holdfast.staging.shard import Room
from holdfast_client.errors import TransferStopped
from tests.support.staged import pieces_of, staged, tensors

MIB = 1024 * 1024
SIZES = ChunkSizes(16, 64, 32)


def windowed(tensors, window_bytes, sizes=SIZES, area=None):
    pieces = pieces_of(tensors)
    plan = build_local_plan([piece.spec for piece in pieces], rank=0, world_size=1, sizes=sizes)
    return (area or StagingArea(window_bytes=window_bytes)).stage(plan, pieces)


def filled(shard):
    """Runs fill() as the training thread does; `result` holds what it gave."""
    result = []
    thread = threading.Thread(target=lambda: result.append(shard.fill()))
    thread.start()
    return thread, result


def taken(shard, held=1):
    """Every chunk, as an upload takes them that verifies `held` at once, the newest of them first."""
    chunks, waiting = [], deque()
    for ordinal in range(shard.chunk_count):
        chunks.append(bytes(shard.chunk(ordinal)))
        waiting.append(ordinal)
        if len(waiting) >= held:
            while waiting:
                shard.done_with(waiting.pop())
    return chunks


def whole_chunks(tensors, sizes=SIZES):
    shard = staged(tensors, sizes)
    return [bytes(shard.chunk(ordinal)) for ordinal in range(shard.chunk_count)]


@pytest.mark.rule("staging-slabs")
@given(st.lists(tensors(), max_size=8), st.sampled_from([64, 100, PAGE_BYTES + 64, 5 * PAGE_BYTES]), st.integers(1, 2))
def test_a_window_gives_the_same_chunks_as_staging_whole(values, window_bytes, held):
    named = {f"t{at}": tensor for at, tensor in enumerate(values)}
    shard = windowed(named, window_bytes)
    if isinstance(shard, WindowedShard):
        thread, result = filled(shard)
        chunks = taken(shard, held if window_bytes > PAGE_BYTES + 64 else 1)
        thread.join()
        assert result == [True]
    else:
        chunks = taken(shard)
    assert chunks == whole_chunks(named)
    shard.release()


def test_a_large_tensor_of_any_strides_goes_through_a_small_window():
    sizes = ChunkSizes(64, 256, 128)
    values = {
        "transposed": torch.randn(37, 53).t(),
        "permuted": torch.randn(7, 11, 13).permute(2, 0, 1),
        "stepped": torch.randn(9, 40)[::2, 3::3],
        "expanded": torch.randn(1, 30).expand(20, 30),
        "conjugated": torch.randn(20, 20, dtype=torch.complex64).t().conj(),
    }
    shard = windowed(values, 256, sizes)
    thread, result = filled(shard)
    assert taken(shard) == whole_chunks(values, sizes)
    thread.join()
    assert result == [True]


def test_what_fits_into_the_window_is_staged_at_once():
    values = {"w": torch.arange(8)}
    shard = windowed(values, 1024)
    assert not isinstance(shard, WindowedShard)
    assert bytes(shard.chunk(0)) == whole_chunks(values)[0]


@pytest.mark.rule("staging-slabs")
def test_the_window_is_all_the_memory_that_a_large_state_takes():
    values = {f"t{at}": torch.ones(16 * MIB // 4).view(4, -1).t() for at in range(16)}  # 256 MiB, none contiguous
    sizes = ChunkSizes(MIB, 4 * MIB, 2 * MIB)
    area = StagingArea(window_bytes=12 * MIB)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(2):
        shard = windowed(values, 0, sizes, area)
        thread, result = filled(shard)
        for ordinal in range(shard.chunk_count):
            assert bytes(shard.chunk(ordinal)[-4:]) == b"\x00\x00\x80\x3f"
            shard.done_with(ordinal)
        thread.join()
        assert result == [True]
        assert shard._layout.slab.capacity_bytes == 12 * MIB
        shard.release()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 24 * 1024  # KiB


def test_gaps_between_small_tensors_are_zero_wherever_the_chunk_lies_in_the_window():
    values = {f"t{at:02}": torch.full((3,), -1, dtype=torch.int8) for at in range(30)}
    values |= {f"t{at:02}x": torch.full((2,), -1.0, dtype=torch.float64) for at in range(30)}
    shard = windowed(values, 64)
    thread, _ = filled(shard)
    assert taken(shard) == whole_chunks(values)
    thread.join()


def test_training_goes_on_only_when_the_last_byte_is_staged():
    values = {f"t{at}": torch.full((16,), float(at)) for at in range(4)}
    shard = windowed(values, 64)
    thread, result = filled(shard)
    for ordinal in range(3):
        shard.chunk(ordinal)
        assert not result
        shard.done_with(ordinal)
    thread.join()
    assert result == [True]
    values["t3"].fill_(-1.0)
    assert bytes(shard.chunk(3)) == bytes(torch.full((16,), 3.0).untyped_storage())


@pytest.mark.rule("bounded-exit")
def test_an_upload_that_gives_up_lets_training_go_on_and_the_slab_is_used_again():
    area = StagingArea(window_bytes=64)
    values = {f"t{at}": torch.full((16,), float(at)) for at in range(4)}
    shard = windowed(values, 0, area=area)
    thread, result = filled(shard)
    shard.chunk(0)
    shard.give_up()
    shard.give_up()
    thread.join()
    assert result == [False]
    assert area.free == 0, "the upload may still read what it has"
    shard.release()
    assert area.free == 1
    again = windowed(values, 0, area=area)
    thread, result = filled(again)
    assert taken(again) == whole_chunks(values)
    thread.join()
    assert result == [True]


@pytest.mark.rule("bounded-exit")
def test_an_upload_that_ends_before_staging_began_keeps_nothing_waiting():
    area = StagingArea(window_bytes=64)
    shard = windowed({f"t{at}": torch.zeros(16) for at in range(4)}, 0, area=area)
    shard.release()
    shard.release()
    assert area.free == 0, "training has yet to come, and to leave"
    assert shard.fill() is False
    assert area.free == 1
    with pytest.raises(RuntimeError, match="released"):
        shard.chunk(0)


def test_a_staging_that_fails_is_raised_by_who_waits_for_its_chunks():
    values = {f"t{at}": torch.zeros(16) for at in range(4)}
    shard = windowed(values, 64)
    del shard._stored["t1"]
    thread, result = filled(shard)
    assert bytes(shard.chunk(0)) == bytes(64)
    shard.done_with(0)
    with pytest.raises(KeyError, match="t1"):
        shard.chunk(1)
    thread.join()
    assert result == [False]


def test_what_ends_the_program_while_training_waits_is_raised_and_fails_the_upload():
    values = {f"t{at}": torch.zeros(16) for at in range(4)}
    shard = windowed(values, 64)

    def interrupted(ordinal, *arguments):
        raise KeyboardInterrupt

    shard._layout.copies = interrupted
    with pytest.raises(KeyboardInterrupt):
        shard.fill()
    with pytest.raises(KeyboardInterrupt):
        shard.chunk(0)


def test_a_thread_that_waits_for_a_chunk_hears_that_it_shall_stop():
    shard = windowed({f"t{at}": torch.zeros(16) for at in range(4)}, 64)
    stop = threading.Event()
    heard = []

    def wait():
        with pytest.raises(TransferStopped):
            shard.chunk(0, stop)
        heard.append(True)

    thread = threading.Thread(target=wait)
    thread.start()
    stop.set()
    thread.join()
    assert heard == [True]


def test_closing_frees_the_window_when_its_save_is_over():
    area = StagingArea(window_bytes=64)
    shard = windowed({f"t{at}": torch.zeros(16) for at in range(4)}, 0, area=area)
    thread, _ = filled(shard)
    shard.chunk(0)
    area.close()
    slab = shard._layout.slab
    assert slab.tensor.numel() > 0
    shard.give_up()
    thread.join()
    shard.release()
    assert slab.tensor.numel() == 0


@given(st.data(), st.integers(64, 10 * PAGE_BYTES))
def test_room_is_never_given_twice_and_all_comes_back(data, capacity_bytes):
    room, held = Room(capacity_bytes), {}
    for _ in range(30):
        if held and data.draw(st.booleans()):
            start = data.draw(st.sampled_from(sorted(held)))
            room.give(start)
            del held[start]
            continue
        size = data.draw(st.integers(1, capacity_bytes))
        start = room.take(size)
        if start is None:
            assert held, "an empty window has room for whatever is no larger than it"
            continue
        assert start % PAGE_BYTES == 0
        assert start + size <= capacity_bytes
        assert all(start + size <= other or other + bytes_ <= start for other, bytes_ in held.items())
        held[start] = size
