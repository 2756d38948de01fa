"""A state on a GPU, saved and restored on a GPU. Without one all are skipped; `scripts/gpu-check` runs them on one.

TEST_DEVICE=cpu runs the same bodies in host memory, to find the mistakes that the tests themselves have.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gloo import run_ranks
from roundtrip import load, save
from tests.support.damage import chunks_of, files_of, flip
from tests.support.gpu_training import Captured, GpuJob, Memory, Net, bits, drawn, keep_busy, stream, wait_for
from tests.support.staged import staged
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.layout.plan import ChunkSizes
from holdfast.staging import StagingArea, WindowedShard
from holdfast.staging.shard import WholeShard
from holdfast.state.tensors import torch_dtype
from holdfast_protocol.index_documents import ITEM_BYTES

KIND = os.environ.get("TEST_DEVICE", "cuda")
GPUS = torch.cuda.device_count() if KIND == "cuda" else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        KIND == "cuda" and not torch.cuda.is_available(), reason="this machine or this torch has no GPU"
    ),
]
several = pytest.mark.skipif(GPUS < 2, reason="it takes two GPUs")
DEVICE = torch.device(KIND, 0) if KIND == "cuda" else torch.device("cpu")
SIZES = ChunkSizes(own_chunk_bytes=1024, cut_bytes=4096, pack_bytes=2048)
LOOKED_AT = None if KIND == "cuda" else True
"""check_finite=: on GPUs it is the default."""
if KIND == "cuda":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS may add up in another order
    # To ask whether there is a GPU begins the driver, after which what is forked cannot use it: ranks are forked from a
    # process that has imported torch.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


@pytest.fixture(autouse=True)
def _saves_are_proven(monkeypatch, caplog):
    """Files handed over through the mount would be read again in the background, perhaps before the restore."""
    monkeypatch.setenv("HOLDFAST_DIRECT_FILES", "false")
    caplog.set_level(logging.WARNING, logger="holdfast")


@pytest.fixture
def held(monkeypatch):
    """No save in flight gets its last chunk before this is set, so none commits."""
    go_on = threading.Event()
    for kind in (WholeShard, WindowedShard):

        def chunk(shard, ordinal, stop=None, *, take=kind.chunk):
            taken = take(shard, ordinal, stop)  # by now a bounded save needs no more room
            if ordinal == shard.chunk_count - 1:
                assert go_on.wait(120)
            return taken

        monkeypatch.setattr(kind, "chunk", chunk)
    yield go_on
    go_on.set()


def restored(run, state, **options):
    with holdfast.Checkpointer(run, **options) as ckpt:
        assert ckpt.restore(state) > 0
    return state


def train(run, until, *, seed=0, device=DEVICE, wrap=None, **options):
    """Saves each step, or, without a run, never. (start, losses, values at the start, at the end, the next numbers)."""
    job = GpuJob(device, seed, wrap, **options)
    losses = {}
    if run is None:
        begin = job.values()
        losses = {step: job.step() for step in range(until)}
        return 0, losses, begin, job.values(), drawn(device)
    with holdfast.Checkpointer(run) as ckpt:
        start = ckpt.restore(job.state)
        begin = job.values()
        for step in range(start, until):
            losses[step] = job.step()
            ckpt.save(step, job.state, metrics={"loss": losses[step]}).committed.result(timeout=60)
    return start, losses, begin, job.values(), drawn(device)


def assert_exact(whole, first, second):
    """`whole` never saved; `first` saved each step; `second` is its relaunch."""
    (_, losses, _, final, next_numbers), (_, before, _, at_save, _), (start, after, begin, end, numbers) = (
        whole,
        first,
        second,
    )
    assert start == len(before)
    assert begin == at_save
    assert before | after == losses
    assert end == final
    assert numbers == next_numbers


@pytest.mark.rule("capture-changes-nothing")
@pytest.mark.parametrize("option", ["plain", "foreach", "fused", "capturable"])
def test_a_relaunch_goes_on_bit_for_bit(run, option):
    """Autocast, GradScaler and dropout from the device's generator; and saving has changed none of it."""
    if option == "capturable" and KIND == "cpu":
        pytest.skip("an optimizer in host memory cannot be captured")
    options = {} if option == "plain" else {option: True}
    assert_exact(train(None, 9, **options), train(run, 5, **options), train(run, 9, seed=7, **options))


def test_a_capturable_optimizer_gets_its_step_back_on_the_device_and_in_place(run):
    options = {"capturable": True} if KIND == "cuda" else {"fused": True}
    train(run, 6, **options)
    job = GpuJob(DEVICE, 7, **options)
    for _ in range(6):
        job.step()
    steps = [slots["step"] for slots in job.state["optimizer"].state.values()]
    restored(run, job.state)
    assert [slots["step"] for slots in job.state["optimizer"].state.values()] == steps
    assert all(slots["step"] is step for slots, step in zip(job.state["optimizer"].state.values(), steps, strict=True))
    assert {step.device.type for step in steps} == {KIND}


@pytest.mark.parametrize("where", ["current stream", "another stream"])
def test_what_training_writes_after_a_save_is_not_in_it(run, where):
    value = torch.full((16 * 2**20,), 1.0, device=DEVICE)
    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore({"values": {"of": value}})
        for step in range(2):  # the second finds memory that is locked already
            value.fill_(step + 1.0)
            wait_for(DEVICE)
            handle = ckpt.save(step, {"values": {"of": value}})
            if where == "another stream":
                with stream(DEVICE):
                    value.fill_(7.0)
            else:
                value.fill_(7.0)
            handle.committed.result(timeout=60)
            wait_for(DEVICE)
    found = restored(run, {"values": {"of": torch.zeros_like(value)}})["values"]["of"]
    assert bool((found == 2.0).all())


def test_work_that_is_queued_before_a_save_is_in_it(run):
    value = torch.zeros(4 * 2**20, device=DEVICE)
    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore({"values": {"of": value}})
        keep_busy(DEVICE)
        value.fill_(3.0)
        ckpt.save(0, {"values": {"of": value}}).committed.result(timeout=60)
    assert bool((restored(run, {"values": {"of": torch.zeros_like(value)}})["values"]["of"] == 3.0).all())


def random_bits(dtype, count):
    """All patterns, those of NaN too."""
    most = 2 if dtype == torch.bool else 256
    raw = torch.randint(
        0, most, (count * dtype.itemsize,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3)
    )
    return raw.to(DEVICE).view(dtype)


@pytest.mark.rule("refuse-inexact")
@pytest.mark.parametrize("name", sorted(ITEM_BYTES))
def test_every_dtype_comes_back_bit_for_bit(name):
    value = random_bits(torch_dtype(name), 600)
    tensors = {"plain": value, "strided": value.view(20, 30)[:, ::2], "0-d": value[7], "none": value[:0]}
    again = {key: torch.empty_like(each) for key, each in tensors.items()}
    load({"values": again}, [save({"values": tensors})])
    assert {key: bits(each) for key, each in again.items()} == {key: bits(each) for key, each in tensors.items()}


def forms():
    """Views that own no row-major memory of their own."""
    value = torch.arange(24.0, device=DEVICE)
    pair = torch.complex(value, -value)
    return {
        "transposed": value.view(4, 6).t(),
        "strided": value[::3],
        "expanded": value[:4].unsqueeze(0).expand(3, 4),
        "channels last": value.view(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "conj": pair.conj(),
        "neg": pair.conj().imag,
        "view": value[5:9],
        "half": value.half().view(4, 6).t(),
    }


@pytest.mark.rule("refuse-inexact")
@pytest.mark.parametrize("into_live", [True, False], ids=["in place", "apart"])
def test_every_form_of_a_tensor_comes_back_bit_for_bit(into_live):
    expected = {name: bits(each) for name, each in forms().items()}
    parts = [save({"values": forms()})]
    again = {name: torch.full_like(each, 5.0) for name, each in forms().items()}
    load({"values": again}, parts, into_live=into_live)
    assert {name: bits(each) for name, each in again.items()} == expected
    new = {"values": {}}
    load(new, parts, into_live=into_live)
    assert {name: bits(each) for name, each in new["values"].items()} == expected, "on their former device"


@pytest.mark.rule("refuse-inexact")
def test_tied_tensors_are_stored_once_and_stay_tied():
    part = save({"model": Net().to(DEVICE)})
    assert part.plan.tensors["model/second.weight"].alias_of == "model/first.weight"
    model = Net().to(DEVICE)
    load({"model": model}, [part])
    assert model.second.weight is model.first.weight
    assert save({"model": model}).chunks == part.chunks


def test_a_state_moves_from_the_gpu_to_the_host_and_back(service, run):
    service.client.runs.create(service.project.name, "on-host")
    on_host = f"{service.project.name}/on-host"

    def contents(job):
        return {name: each[1:] if isinstance(each, tuple) else each for name, each in job.values().items()}

    saved = GpuJob(DEVICE)
    for _ in range(6):
        saved.step()
    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore(saved.state)
        ckpt.save(0, saved.state).committed.result(timeout=60)
    host = GpuJob(torch.device("cpu"), 7)
    restored(run, host.state)
    assert contents(host) == contents(saved)
    with holdfast.Checkpointer(on_host) as ckpt:
        ckpt.restore(host.state)
        ckpt.save(0, host.state).committed.result(timeout=60)
    back = GpuJob(DEVICE, 8)
    restored(on_host, back.state)
    assert back.values() == saved.values()
    back.step()


def addresses(job):
    slots = [value for each in job.state["optimizer"].state.values() for value in each.values()]
    return [
        each.data_ptr() for each in [*job.state["model"].state_dict().values(), *slots, *job.state["average"].values()]
    ]


def test_a_restore_fills_live_tensors_where_they_are(run):
    at_save = train(run, 6)[3]
    job = GpuJob(DEVICE, 7)
    for _ in range(6):
        job.step()
    before = addresses(job)
    memory = Memory(DEVICE)
    restored(run, job.state)
    assert addresses(job) == before
    assert job.values() == at_save
    assert memory.kept_bytes <= 0


def test_a_captured_graph_goes_on_with_what_a_restore_has_filled_in(run):
    weight, batch, out = (torch.full((8, 8), number, device=DEVICE) for number in (2.0, 1.0, 0.0))
    state = {"values": {"weight": weight}}
    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore(state)
        ckpt.save(0, state).committed.result(timeout=60)
    graph = Captured(DEVICE, lambda: torch.mul(batch, weight, out=out))
    weight.fill_(5.0)
    graph.replay()
    assert out.unique().tolist() == [5.0]
    restored(run, state)
    graph.replay()
    assert out.unique().tolist() == [2.0]


@pytest.mark.parametrize("host_memory", [None, 3 * 4096])
def test_a_save_in_flight_does_not_break_the_capture_of_a_graph(run, held, host_memory):
    """It hashes, is sent and commits while training captures; and a copy of a metric is on its way meanwhile."""
    state = {"values": {"of": torch.randn(10_000, device=DEVICE)}}
    batch, out, begun = torch.ones(8, device=DEVICE), torch.zeros(8, device=DEVICE), []
    with holdfast.Checkpointer(
        run, save=holdfast.Every(steps=1), chunk_sizes=SIZES, host_memory=host_memory, check_finite=False
    ) as ckpt:
        ckpt.restore(state)
        handle = ckpt.step(0, state, metrics={"loss": batch.sum()})
        assert not handle.committed.done()

        def work():
            torch.mul(batch, 3.0, out=out)
            begun.append(True)
            if len(begun) == 2 or KIND == "cpu":  # the first call is not captured
                held.set()
                handle.committed.result(timeout=60)

        graph = Captured(DEVICE, work)
        if KIND == "cuda":
            assert handle.committed.done(), "it was over before the capture was"
        out.zero_()
        graph.replay()
        assert out.tolist() == [3.0] * 8
        ckpt.step(1, state, metrics={"loss": batch.sum()}).committed.result(timeout=60)


@pytest.mark.rule("overlap-is-guarded")
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_a_step_that_comes_while_a_save_is_copied_is_not_in_it(run, options):
    model = nn.ParameterList([torch.zeros(2**24 if KIND == "cuda" else 2**20)]).to(DEVICE)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5, **options)}
    value, momentum, saved, handles = 0.0, 0.0, {}, []
    with holdfast.Checkpointer(run, overlap=True, strict=True) as ckpt:
        ckpt.restore(state)
        for step in range(4):
            model[0].grad = torch.full_like(model[0], float(step))
            state["optimizer"].step()  # at once after the save: on a GPU its stream waits, and not this thread
            momentum = momentum * 0.5 + step
            value -= momentum
            saved[step] = ([value], [momentum])
            handles.append(ckpt.save(step, state))
        for handle in handles:
            handle.committed.result(timeout=60)
    for step in (3, 2, 1, 0):  # each restore leaves the later steps off the lineage
        with holdfast.Checkpointer(run) as ckpt:
            ckpt.restore(state, at=str(step))
        slots = state["optimizer"].state[model[0]]["momentum_buffer"]
        assert (model[0].unique().tolist(), slots.unique().tolist()) == saved[step]


def is_pinned(shard):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the chunk is not to be written to, nor is it
        return torch.from_numpy(np.frombuffer(shard.chunk(0), np.uint8)).is_pinned()


@pytest.mark.rule("staging-slabs")
def test_staging_memory_is_page_locked_and_taken_again():
    area, seen = StagingArea(), set()
    for number in range(4):
        shard = staged({"of": torch.full((2**20,), float(number), device=DEVICE)}, area=area)
        assert is_pinned(shard) == (KIND == "cuda")
        assert bytes(shard.chunk(0)[:4]) == np.float32(number).tobytes()
        seen.add(np.frombuffer(shard.chunk(0), np.uint8).ctypes.data)
        shard.release()
    assert len(seen) == 1
    area.close()
    assert not is_pinned(staged({"of": torch.zeros(2**20)})), "the state is in host memory"


@pytest.mark.rule("staging-slabs")
@pytest.mark.parametrize(("check_finite", "most"), [(False, 0), (LOOKED_AT, 2**20)], ids=["no check", "checked"])
def test_a_save_allocates_no_memory_of_the_device(run, check_finite, most):
    job = GpuJob(DEVICE)
    job.state["large"] = {"of": torch.randn(8 * 2**20, device=DEVICE)}
    for _ in range(6):
        job.step()
    with holdfast.Checkpointer(run, check_finite=check_finite) as ckpt:
        ckpt.restore(job.state)
        for step in range(2):
            wait_for(DEVICE)
            memory = Memory(DEVICE)
            ckpt.save(step, job.state).committed.result(timeout=60)
            assert memory.kept_bytes <= 0
            assert memory.peak_bytes <= most


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(300, device=DEVICE))
        for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2):
            self.register_buffer(str(dtype).replace("torch.", "of_"), torch.ones(300, device=DEVICE).to(dtype))
        self.register_buffer("mask", torch.full((300,), float("-inf"), device=DEVICE))


def test_what_is_not_finite_on_the_device_makes_a_save_diverged(run):
    model = Odd()
    optimizer = torch.optim.AdamW(model.parameters())
    model.weight.sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    targets = [each for name, each in model.named_buffers() if name != "mask"]
    with holdfast.Checkpointer(run, check_finite=LOOKED_AT) as ckpt:
        ckpt.restore(state)
        assert ckpt.save(0, state).committed.result(timeout=60).health == "ok", "infinity is meant in a mask"
        broken = [(each, float("nan")) for each in (model.weight.data, *targets)]
        broken.append((optimizer.state[model.weight]["exp_avg_sq"], float("inf")))
        for step, (tensor, number) in enumerate(broken, start=1):
            before = tensor.clone()
            tensor.copy_(torch.ones(300, device=DEVICE).index_fill(0, torch.tensor(299, device=DEVICE), number))
            handle = ckpt.save(step, state)
            assert handle.diverged, tensor.dtype
            assert handle.committed.result(timeout=60).health == "diverged"
            tensor.copy_(before)
        assert ckpt.rollback(state) == 1


def test_a_bounded_save_from_the_device_is_exact(run):
    value = torch.randn(50_000, device=DEVICE)
    with holdfast.Checkpointer(run, chunk_sizes=SIZES, host_memory=3 * 4096) as ckpt:
        ckpt.restore({"values": {"of": value}})
        for step in range(2):
            value.add_(1.0)
            handle = ckpt.save(step, {"values": {"of": value}})
            expected = bits(value)
            value.fill_(0.0)
            handle.committed.result(timeout=60)
            value.copy_(torch.from_numpy(np.frombuffer(expected[3], np.float32).copy()))
    assert bits(restored(run, {"values": {"of": torch.zeros_like(value)}})["values"]["of"]) == expected


def test_frozen_tensors_of_the_device_are_compared_there(caplog):
    values, area = {"base": torch.randn(5000, device=DEVICE)}, StagingArea()
    for changes in (False, False, True):
        if changes:
            with torch.no_grad():
                values["base"].view(-1)[4999:].add_(1.0)
        shard = staged(values, area=area, declared=("base",))
        assert b"".join(bytes(shard.chunk(at)) for at in range(shard.chunk_count)) == bits(values["base"])[3]
        shard.release()
    assert caplog.text.count("'base' is declared frozen, and its bytes have changed") == 1


@pytest.mark.rule("one-vote-per-step")
def test_a_damaged_chunk_leaves_the_earlier_state_on_the_device(service, run):
    job, saved = GpuJob(DEVICE), {}
    with holdfast.Checkpointer(run, chunk_sizes=SIZES) as ckpt:
        ckpt.restore(job.state)
        for step in range(6):
            job.step()
            with torch.no_grad():
                job.state["model"].first.weight.mul_(1.01)  # also when GradScaler has skipped the step
            ckpt.save(step, job.state).committed.result(timeout=60)
            saved[step] = job.values()
    newest = next(iter(service.client.checkpoints.all(*run.split("/"))))
    for path in files_of(service.store, chunks_of(service.client, newest.id, "model/first.weight")[0][1]):
        flip(path)
    again = GpuJob(DEVICE, 7)
    with holdfast.Checkpointer(run) as ckpt:
        assert ckpt.restore(again.state) == 5
    assert again.values() == saved[4]


def test_memory_that_runs_out_in_training_leaves_a_save_in_flight_whole(run, held):
    job = GpuJob(DEVICE)
    for _ in range(6):
        job.step()
    with holdfast.Checkpointer(run, chunk_sizes=SIZES) as ckpt:
        ckpt.restore(job.state)
        handle = ckpt.save(0, job.state)
        expected = job.values()
        with pytest.raises(torch.OutOfMemoryError if KIND == "cuda" else RuntimeError):
            torch.empty(2**50, dtype=torch.uint8, device=DEVICE)
        job.step()
        held.set()
        handle.committed.result(timeout=60)
    again = GpuJob(DEVICE, 7)
    restored(run, again.state)
    assert again.values() == expected


def test_metrics_on_the_device_reach_the_runs_curve(service, run):
    job = GpuJob(DEVICE)
    with holdfast.Checkpointer(run, save=holdfast.Every(steps=100)) as ckpt:
        ckpt.restore(job.state)
        for step in range(4):
            ckpt.step(step, job.state, metrics={"loss": torch.tensor(step + 0.5, device=DEVICE)})
            wait_for(DEVICE)
    [found] = service.client.runs.metrics_history(*run.split("/"), names=["loss"]).metrics
    assert [(point.step, point.value) for point in found.points] == [(step, step + 0.5) for step in range(4)]


def test_the_loops_own_dcp_saves_and_loads_tensors_of_the_device(run):
    values = {"weight": torch.randn(500, device=DEVICE), "half": torch.randn(40, 50, device=DEVICE).half().t()}
    with holdfast.Checkpointer(run) as ckpt:
        dcp.save({"model": values}, storage_writer=ckpt.writer(3))
    again = {name: torch.zeros_like(each) for name, each in values.items()}
    with holdfast.Checkpointer(run) as ckpt:
        dcp.load({"model": again}, storage_reader=ckpt.reader())
    assert {name: bits(each) for name, each in again.items()} == {name: bits(each) for name, each in values.items()}


def of_a_rank(rank, run, wrapper, until, seed):
    device = torch.device("cuda", rank % torch.cuda.device_count()) if KIND == "cuda" else DEVICE
    if KIND == "cuda":
        torch.cuda.set_device(device)

    def wrap(model):
        if wrapper == "ddp":
            return DistributedDataParallel(model)
        return fully_shard(model, mesh=init_device_mesh(KIND, (dist.get_world_size(),)))

    return train(run, until, seed=seed, device=device, wrap=wrap)


NCCL = "cpu:gloo,cuda:nccl" if KIND == "cuda" else "gloo"


@pytest.mark.parametrize(
    ("wrapper", "ranks", "backend"),
    [
        ("ddp", 1, NCCL),
        ("fsdp", 1, NCCL),
        ("ddp", 2, "gloo"),  # two ranks may share a GPU then
        pytest.param("ddp", 2, NCCL, marks=several),
        pytest.param("fsdp", 2, NCCL, marks=several),
    ],
)
def test_ranks_on_gpus_go_on_bit_for_bit(run, wrapper, ranks, backend):
    launches = [
        run_ranks(of_a_rank, ranks, *given, timeout_seconds=180, backend=backend)
        for given in ((None, wrapper, 7, 0), (run, wrapper, 5, 0), (run, wrapper, 7, 7))
    ]
    for whole, first, second in zip(*launches, strict=True):
        assert_exact(whole, first, second)


def before_cuda_begins(rank, run):
    """A model that is made on the host, restored there, and moved only then."""
    job = GpuJob(torch.device("cpu"), seed=5)
    restored(run, job.state)
    return drawn(DEVICE)


@pytest.mark.rule("random-state-last")
def test_the_devices_generator_comes_back_before_cuda_is_in_use(run):
    *_, numbers = train(run, 3)
    assert run_ranks(before_cuda_begins, 1, run) == [numbers]


def in_host_memory(rank, run):
    train(run, 3, device=torch.device("cpu"))
    train(run, 5, device=torch.device("cpu"), seed=7)
    return torch.cuda.is_initialized()


@pytest.mark.rule("staging-slabs")
def test_a_job_in_host_memory_never_begins_cuda(run):
    assert run_ranks(in_host_memory, 1, run) == [False]


def on_the_second_gpu(rank, run):
    values = {"of": torch.zeros(100_000, device=torch.device("cuda", 1))}
    before = torch._C._cuda_hasPrimaryContext(0)
    for launch in range(2):
        with holdfast.Checkpointer(run, host_memory=3 * 4096 if launch else None, chunk_sizes=SIZES) as ckpt:
            ckpt.restore({"values": values})
            values["of"].add_(1.0)
            ckpt.save(launch, {"values": values}).committed.result(timeout=60)
    return before, torch._C._cuda_hasPrimaryContext(0), values["of"].unique().tolist()


@several
def test_a_state_on_one_gpu_makes_no_context_on_another(run):
    assert run_ranks(on_the_second_gpu, 1, run) == [(False, False, [2.0])]


@several
def test_a_state_over_two_gpus_comes_back_where_it_was(run):
    values = {f"on {at}": torch.randn(3000, device=torch.device("cuda", at)) for at in range(2)}
    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore({"values": values})
        for each in values.values():
            each.add_(1.0)
        handle = ckpt.save(0, {"values": values})
        expected = {name: bits(each) for name, each in values.items()}
        for each in values.values():
            each.zero_()
        handle.committed.result(timeout=60)
    restored(run, {"values": values})
    assert {name: bits(each) for name, each in values.items()} == expected
    assert [each.device.index for each in values.values()] == [0, 1]
