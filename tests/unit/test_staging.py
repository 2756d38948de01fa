"""Staging: tensors -> slab -> chunks -> tensors bit for bit, without allocating in steady state."""

import gc
import resource
import threading
import weakref
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.layout.plan import ChunkSizes, build_local_plan, global_layout
from holdfast.layout.reshard import WantedPiece, plan_reads, scatter
from holdfast.staging import StagingArea, StagingBusyError
from holdfast.staging.copy import Copier, Copy, HostCopy, bits_view, whole_copy
from holdfast_client.chunks.workers import TransferWorkers
from holdfast_protocol.digests import chunk_digest
from tests.support.staged import pieces_of, staged, tensors

MIB = 1024 * 1024
SIZES = [ChunkSizes(16, 64, 32), ChunkSizes(1, 16, 16), ChunkSizes()]


def read_back(shard):
    layout = global_layout([shard.plan])
    wants = [WantedPiece(n, e.dtype, (0,) * len(e.shape), e.shape) for n, e in layout.tensors.items()]
    buffers = {want.name: bytearray(want.bytes) for want in wants}
    for (_, ordinal), reads in plan_reads(layout, wants).by_chunk.items():
        for read in reads:
            scatter(read, shard.chunk(ordinal), memoryview(buffers[read.name]))
    return {name: bytes(buffer) for name, buffer in buffers.items()}


def bits(tensor):
    """Logical bytes, by way of plain python numbers of the same width."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous().clone()
    return bytes(tensor.untyped_storage())[: tensor.numel() * tensor.element_size()]


@pytest.mark.rule("refuse-inexact")
@given(st.lists(tensors(), max_size=8), st.sampled_from(SIZES), st.booleans())
def test_every_dtype_and_form_comes_back_bit_for_bit(values, sizes, tie):
    named = {f"t{at}": tensor for at, tensor in enumerate(values)}
    if tie and values:
        named["tied"] = values[0]
    assert read_back(staged(named, sizes)) == {name: bits(tensor) for name, tensor in named.items()}


@pytest.mark.rule("staging-slabs")
def test_a_view_of_a_large_storage_stages_only_the_view():
    storage = torch.zeros(64 * MIB, dtype=torch.uint8)
    shard = staged({"view": storage[100:116]})
    assert shard.total_bytes == 16


@pytest.mark.rule("refuse-inexact")
def test_tied_tensors_are_staged_once():
    weight = torch.nn.Parameter(torch.randn(100))
    shard = staged({"a": weight, "b": weight, "c": weight[:50]})
    assert shard.total_bytes == 400 + 200
    assert shard.plan.tensors["b"].alias_of == "a"
    assert shard.plan.tensors["c"].alias_of is None


def test_nan_payloads_keep_their_bits():
    for dtype, pattern in [(torch.float32, 0x7FA00001), (torch.bfloat16, 0x7FA1), (torch.float16, 0x7D01)]:
        raw = torch.tensor([pattern] * 3, dtype=torch.int32 if dtype.itemsize == 4 else torch.int16)
        strided = torch.stack([raw, raw], 1).view(dtype)[:, 0]
        assert read_back(staged({"nan": strided}))["nan"] == bits(raw)


@pytest.mark.rule("staging-slabs")
def test_slabs_are_reused_and_steady_state_allocates_nothing():
    area = StagingArea()
    values = {f"t{at}": torch.randn(256, 1024) for at in range(32)}
    first = staged(values, area=area)
    address = first._layout.slab.tensor.data_ptr()
    plan = first.plan
    first.release()
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(20):
        shard = area.stage(plan, pieces_of(values))
        assert shard._layout.slab.tensor.data_ptr() == address
        shard.release()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4 * 1024  # KiB; the state is 32 MiB


@pytest.mark.rule("staging-slabs")
def test_a_save_that_comes_before_the_thread_that_makes_its_memory_keeps_its_own(monkeypatch):
    late = []

    class Late:
        def __init__(self, *, target, **_options):
            late.append(target)

        def start(self):
            pass

    monkeypatch.setattr(threading, "Thread", Late)
    area, values = StagingArea(), {"a": torch.randn(1000)}
    area.prepare(staged(values).plan)
    first = staged(values, area=area)
    layout = first._layout
    late[0]()
    assert bytes(first.chunk(0)) == bits(values["a"])
    first.release()
    late[0]()
    assert staged(values, area=area)._layout is layout
    assert area.free == 0


def test_another_plan_in_the_same_slab_leaves_no_old_bytes_in_the_gaps_and_clears_no_more():
    """Training waits, and the slab may be as large as the state."""
    area = StagingArea()
    staged({"a": torch.full((4096,), -1, dtype=torch.int8)}, area=area).release()
    mixed = {"a": torch.ones(3, dtype=torch.int8), "b": torch.ones(2, dtype=torch.float64)}
    reused = staged(mixed, area=area)
    assert chunk_digest(reused.chunk(0)) == chunk_digest(staged(mixed).chunk(0))
    assert bytes(reused.chunk(0)[3:8]) == bytes(5)
    assert reused._layout.slab.tensor[-1] == 255


def test_training_may_go_on_after_stage_returns():
    weight = torch.zeros(1000)
    shard = staged({"w": weight})
    weight.fill_(7.0)
    assert bytes(shard.chunk(0)) == bytes(4000)


def test_a_save_in_flight_is_never_overwritten():
    area = StagingArea(slabs=2)
    one, two = staged({"w": torch.zeros(4)}, area=area), staged({"w": torch.ones(4)}, area=area)
    assert area.free == 0
    with pytest.raises(StagingBusyError):
        staged({"w": torch.ones(4)}, area=area)
    assert bytes(one.chunk(0)) == bytes(16)
    two.release()
    two.release()
    assert area.free == 1
    with pytest.raises(RuntimeError, match="released"):
        two.chunk(0)


def test_a_failed_stage_gives_its_slab_back():
    area = StagingArea()
    pieces = pieces_of({"a": torch.zeros(4), "b": torch.zeros(4)})
    plan = build_local_plan([piece.spec for piece in pieces], rank=0, world_size=1)
    with pytest.raises(ValueError, match="'b'"):
        area.stage(plan, pieces[:1])
    assert area.free == 1


def test_chunks_are_read_only_and_close_frees_what_is_held_last():
    area = StagingArea()
    shard = staged({"a": torch.zeros(4)}, area=area)
    with pytest.raises(TypeError):
        shard.chunk(0)[0] = 1
    area.close()
    assert bytes(shard.chunk(0)) == bytes(16)
    slab = shard._layout.slab
    shard.release()
    assert slab.tensor.numel() == 0
    with pytest.raises(RuntimeError, match="closed"):
        staged({"a": torch.zeros(4)}, area=area)


def test_other_threads_may_hash_while_a_second_slab_fills():
    area = StagingArea(slabs=2)
    shard = staged({"a": torch.arange(4 * MIB, dtype=torch.int32)}, area=area)
    digests = []
    readers = [threading.Thread(target=lambda: digests.append(chunk_digest(shard.chunk(0)))) for _ in range(3)]
    for reader in readers:
        reader.start()
    staged({"a": torch.zeros(4 * MIB, dtype=torch.int32)}, area=area)
    for reader in readers:
        reader.join()
    assert len(set(digests)) == 1


class Workers:
    """Threads that begin only when the test says so."""

    count = 3

    def __init__(self):
        self.jobs = []

    def submit(self, job):
        self.jobs.append(job)


def test_helpers_that_come_late_touch_nothing():
    workers = Workers()
    area = StagingArea(helpers=workers)
    values = {f"t{at}": torch.randn(5 * MIB) for at in range(2)}
    shard = staged(values, area=area)
    assert read_back(shard) == {name: tensor.numpy().tobytes() for name, tensor in values.items()}
    assert len(workers.jobs) == 2
    shard.release()
    staged({name: torch.zeros(5 * MIB) for name in values}, area=area)
    for job in workers.jobs:
        job()
    assert not area._places[0].slab.tensor.any()


def test_helpers_share_the_copy():
    with TransferWorkers(1) as workers:
        values = {f"t{at}": torch.randn(9 * MIB + at) for at in range(3)} | {"odd": torch.randn(999, 999).t()}
        for _ in range(3):
            assert read_back(staged(values, area=StagingArea(helpers=workers.hashing))) == {
                name: tensor.contiguous().numpy().tobytes() for name, tensor in values.items()
            }


def test_a_copy_that_is_interrupted_leaves_no_helper_in_the_slab(monkeypatch):
    source, target, workers = torch.randn(16 * MIB), torch.zeros(16 * MIB), Workers()
    copy = HostCopy([Copy(target, source)])

    def interrupted():
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(copy, "_take_parts", interrupted)
        with pytest.raises(KeyboardInterrupt):
            copy.run(workers)
    for job in workers.jobs:
        job()
    assert not target.any()


class LateCopier(Copier):
    """As a device does: the bytes are read after start() has returned."""

    def _start(self, device, copies):
        late = [(copy.target, weakref.ref(copy.source)) for copy in copies]

        class Arrived:
            device = torch.device("cuda", 0)

            def synchronize(self):
                for target, source in late:
                    target.copy_(source())

        return [Arrived()]


@pytest.mark.parametrize("lazy", [torch.conj, lambda value: value.conj().imag])
def test_what_was_resolved_for_a_copy_lives_until_the_copy_is_over(lazy, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    tensor = lazy(torch.randn(1000, dtype=torch.complex64))
    flat = torch.zeros(tensor.nbytes, dtype=torch.uint8)
    copying = LateCopier().start([whole_copy(bits_view(flat, tensor.dtype, tensor.shape), tensor)])
    copying.wait()
    assert torch.equal(flat.view(tensor.dtype), tensor.resolve_conj().resolve_neg())


def test_an_empty_state_stages():
    shard = staged({"empty": torch.zeros(0, 3)})
    assert (shard.chunk_count, shard.total_bytes) == (0, 0)
