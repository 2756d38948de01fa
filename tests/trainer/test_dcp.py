"""People's own dcp.save and dcp.load on Holdfast: what stock DCP gives back, without a pickle in the store."""

from __future__ import annotations

import collections
import copy
import datetime
import os
import pathlib
import signal
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gloo import run_ranks
from safetensors.torch import load_file
from tests.support.damage import chunks_of, files_of, flip
from tests.support.training import Job, values
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast import errors
from holdfast.dcp.reader import ROUND_BYTES, HoldfastReader
from holdfast.dcp.writer import HoldfastWriter
from holdfast.export.pull import Format, pull
from holdfast.restore.checkpoint_reader import CheckpointSource
from holdfast.state.tree import TAGS_BY_TYPE
from holdfast_client.shard_writer import ShardWriter
from holdfast_protocol.base import RunName
from holdfast_protocol.runs import Latest

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def assorted():
    return {
        "model": {"weight": torch.arange(12.0).view(3, 4), "half": torch.ones(5, dtype=torch.bfloat16)},
        "zero": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "strided": torch.arange(24).view(4, 6).t(),
        "large": torch.arange(20_000_000, dtype=torch.int32),
        "numbers": {"step": 7, "lr": 0.1, "name": "x", "inf": float("inf"), "tuple": (1, "a"), "none": None},
    }


def blank(state):
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    return torch.zeros_like(state) if isinstance(state, torch.Tensor) else None


def equal(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and one == other


@pytest.mark.rule("no-pickle")
def test_save_and_load_give_back_tensors_and_values(run, service):
    with holdfast.Checkpointer(run) as ckpt:
        dcp.save(assorted(), storage_writer=ckpt.writer(4))
    loaded = blank(assorted())
    with holdfast.Checkpointer(run) as ckpt:
        reader = ckpt.reader()
        assert reader.step == 4
        dcp.load(loaded, storage_reader=reader)
    assert equal(loaded, assorted())
    [view] = service.client.checkpoints.all(*run.split("/"))
    assert (view.step, view.state) == (4, "committed")


def test_the_time_that_dcp_save_blocks_training_is_told_and_that_of_async_save_is_not_known(run, service):
    with holdfast.Checkpointer(run) as ckpt:
        dcp.save({"t": torch.arange(5)}, storage_writer=ckpt.writer(0))
        blocked = ckpt.stats.blocked_seconds
        dcp.async_save({"t": torch.arange(5)}, storage_writer=ckpt.writer(1), no_dist=True).result(timeout=60)
        assert ckpt.stats.blocked_seconds == blocked
    told = {view.step: view.blocked_seconds for view in service.client.checkpoints.all(*run.split("/"))}
    assert 0 < told[0] <= blocked
    assert told[1] is None


def test_nan_is_seen_and_such_a_checkpoint_is_kept_as_diverged(run, service):
    masked = {"weight": torch.ones(3, 3), "mask": torch.full((2,), -float("inf")), "count": torch.tensor(2)}
    poisoned = {**masked, "moment": torch.tensor([1.0, float("nan")], dtype=torch.bfloat16)}
    with holdfast.Checkpointer(run, check_finite=True) as ckpt:
        dcp.save(masked, storage_writer=ckpt.writer(0))
        dcp.save(poisoned, storage_writer=ckpt.writer(1))
    with holdfast.Checkpointer(run, check_finite=False) as ckpt:
        reader = ckpt.reader()
        assert reader.step == 0, "the diverged one is skipped"
        dcp.load(blank(masked), storage_reader=reader)
        dcp.save(poisoned, storage_writer=ckpt.writer(2))
    views = {view.step: view for view in service.client.checkpoints.all(*run.split("/"))}
    assert {step: (view.state, view.health) for step, view in views.items() if step} == {
        1: ("committed", "diverged"),
        2: ("committed", "ok"),
    }
    assert views[0].health == "ok"


KEPT_TYPES = TAGS_BY_TYPE.keys() - {np.longdouble, np.clongdouble}
"""Those two are as wide as the machine has them: the SDK refuses them."""


def of_each_type():
    """A value of each type that a state of the SDK may hold, by the name of its type."""
    values = [
        7, 0.5, 1j, "x", b"ab", bytearray(b"b"), (1, (2, "x")), torch.Size([2, 3]), {3, 4}, frozenset({5}), {"a": 1},
        collections.OrderedDict(a=1), collections.defaultdict(list, a=[1]), collections.Counter("abca"),
        collections.deque([1, 2], 5), datetime.datetime(2026, 1, 2, 3, 4, tzinfo=datetime.UTC),
        datetime.date(2026, 1, 2), datetime.time(3, 4), datetime.timedelta(seconds=3), pathlib.Path("data/shard-1"),
        torch.bfloat16, torch.device("cpu"), np.arange(4), np.array(["a", "bb"]),
        *(np.zeros(1, code)[0] for code in np.typecodes["All"] if np.dtype(code).type in KEPT_TYPES),
    ]  # fmt: skip
    return {f"{at} {type(value).__name__}": value for at, value in enumerate(values)}


def emptied(values):
    """To load into: DCP looks into mappings, and puts back what was in them."""
    found = dict.fromkeys(values)
    for key, value in values.items():
        if isinstance(value, dict):
            found[key] = copy.copy(value)
            for inner in value:
                found[key][inner] = None
    return found


def typed(value):
    """To compare by: numpy's arrays have no `==` that answers, and one number may have two classes of one dtype."""
    if isinstance(value, dict):
        return type(value), [(key, typed(inner)) for key, inner in value.items()]
    if isinstance(value, np.ndarray | np.generic):
        return isinstance(value, np.ndarray), value.dtype, value.tobytes()
    return type(value), value


@pytest.mark.rule("writer-is-whole")
def test_a_value_of_each_type_that_the_sdk_keeps_comes_back_through_load_and_through_pull(run, service, tmp_path):
    saved = of_each_type()
    assert {type(value) for value in saved.values()} >= KEPT_TYPES
    with holdfast.Checkpointer(run) as ckpt:
        dcp.save({"values": saved, "t": torch.ones(2)}, storage_writer=ckpt.writer(0))
    loaded, pulled = emptied(saved), emptied(saved)
    with holdfast.Checkpointer(run) as ckpt:
        dcp.load({"values": loaded}, storage_reader=ckpt.reader())
    pull(service.client, RunName(*run.split("/")), Latest(), tmp_path / "dcp", Format.DCP)
    dcp.load({"values": pulled}, checkpoint_id=tmp_path / "dcp")
    for found in (loaded, pulled):
        for key, value in saved.items():
            assert typed(found[key]) == typed(value), key
    pull(service.client, RunName(*run.split("/")), Latest(), tmp_path / "torch", Format.TORCH)
    plain = torch.load(tmp_path / "torch" / "dcp.pt", weights_only=True)
    assert plain["t"].tolist() == [1, 1], "what stock loaders refuse is in the tree, and the rest is where it was"
    assert plain["values"]["0 int"] == 7


@pytest.mark.rule("writer-is-whole")
@pytest.mark.parametrize("format_", [Format.TORCH, Format.SAFETENSORS, Format.DCP])
def test_pull_gives_back_what_dcp_save_was_given(run, service, tmp_path, format_):
    with holdfast.Checkpointer(run) as ckpt:
        dcp.save({**assorted(), "layers": [torch.ones(2), {"w": torch.zeros(3)}]}, storage_writer=ckpt.writer(0))
    summary = pull(service.client, RunName(*run.split("/")), Latest(), tmp_path / "out", format_)
    expected = {**assorted(), "layers": [torch.ones(2), {"w": torch.zeros(3)}]}
    if format_ is Format.TORCH:
        whole = torch.load(tmp_path / "out" / "dcp.pt", weights_only=True)
        assert [each.tolist() for each in (whole["layers"][0], whole["layers"][1]["w"])] == [[1.0] * 2, [0.0] * 3]
        assert equal({**whole, "layers": 0}, {**expected, "layers": 0})
    elif format_ is Format.SAFETENSORS:
        found = load_file(tmp_path / "out" / "dcp.safetensors")
        assert torch.equal(found["model.weight"], expected["model"]["weight"])
        assert "dcp.tree.json" in summary["files"]
    else:
        loaded = blank(assorted())
        dcp.load(loaded, checkpoint_id=tmp_path / "out")
        assert equal(loaded, assorted())


@pytest.mark.rule("writer-is-whole")
@pytest.mark.parametrize("below", ["model", None])
def test_load_weights_finds_the_model_in_what_dcp_save_was_given(run, below):
    saved, loaded = nn.Linear(3, 2), nn.Linear(3, 2)
    state = saved.state_dict() if below is None else {below: saved.state_dict(), "ema": {"other": torch.ones(1)}}
    with holdfast.Checkpointer(run) as ckpt:
        dcp.save(state, storage_writer=ckpt.writer(0))
    holdfast.load_weights(f"{run}@latest", loaded)
    assert equal(loaded.state_dict(), saved.state_dict())
    with pytest.raises(errors.ConfigurationError, match="none of this model's parameters"):
        holdfast.load_weights(f"{run}@latest", nn.Embedding(3, 2, dtype=torch.float16), component="nowhere")


@pytest.mark.rule("writer-is-whole")
def test_a_component_that_is_called_dcp_is_a_component(run, service, tmp_path):
    state = {"dcp": nn.Linear(2, 2)}
    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore(state)
        ckpt.save(0, state).committed.result(timeout=60)
        loaded = {"dcp/weight": torch.zeros(2, 2)}
    with holdfast.Checkpointer(run) as ckpt:
        dcp.load(loaded, storage_reader=ckpt.reader())
    assert torch.equal(loaded["dcp/weight"], state["dcp"].weight.detach())
    pull(service.client, RunName(*run.split("/")), Latest(), tmp_path / "out", Format.TORCH)
    assert torch.load(tmp_path / "out" / "dcp.pt", weights_only=True).keys() == {"weight", "bias"}


@pytest.mark.rule("writer-is-whole")
def test_leaving_the_with_waits_for_an_async_save_in_flight(run, service, monkeypatch):
    written = HoldfastWriter.write_data

    def late(self, plan, planner):
        leaving.wait(timeout=60)
        return written(self, plan, planner)

    leaving = threading.Event()
    monkeypatch.setattr(HoldfastWriter, "write_data", late)
    with holdfast.Checkpointer(run) as ckpt:
        saved = dcp.async_save({"t": torch.arange(5)}, storage_writer=ckpt.writer(3), no_dist=True)
        wait_idle = ckpt.parts.pipeline.wait_idle
        own = ckpt._own_saves.are_over
        monkeypatch.setattr(ckpt._own_saves, "are_over", lambda timeout: (leaving.set(), own(timeout))[1])
        monkeypatch.setattr(ckpt.parts.pipeline, "wait_idle", lambda timeout: (leaving.set(), wait_idle(timeout))[1])
    saved.result(timeout=60)
    assert service.client.restores.restore_point(*run.split("/")).restore_point.step == 3


@pytest.mark.rule("writer-is-whole")
def test_plan_caching_is_refused_at_the_first_save(run, service):
    with holdfast.Checkpointer(run) as ckpt:
        planner = DefaultSavePlanner(enable_plan_caching=True)
        try:
            with pytest.raises(CheckpointException, match="enable_plan_caching"):
                dcp.save({"t": torch.ones(2)}, storage_writer=ckpt.writer(0), planner=planner)
        finally:
            for name in ("save_plan", "all_plans", "global_plan", "metadata", "final_save_plan"):
                getattr(SavePlanner, f"_cached_{name}").clear()
    assert service.client.restores.restore_point(*run.split("/")).restore_point is None


@pytest.mark.rule("writer-is-whole")
def test_numbers_of_four_bits_are_kept(run):
    stored = torch.arange(6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    with holdfast.Checkpointer(run) as ckpt:
        dcp.save({"t": stored}, storage_writer=ckpt.writer(0))
    loaded = {"t": torch.zeros_like(stored)}
    with holdfast.Checkpointer(run) as ckpt:
        dcp.load(loaded, storage_reader=ckpt.reader())
    assert loaded["t"].view(torch.uint8).tolist() == list(range(6))


@pytest.fixture
def one_rank():
    """torch.distributed in this process alone: a ShardedTensor is made of nothing less."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(value, pieces=2):
    spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu"] * pieces)
    return sharded_tensor.full(spec, (2 * pieces, 2), value)


@pytest.mark.rule("writer-is-whole")
@pytest.mark.filterwarnings("ignore:Please use DTensor")
def test_a_sharded_tensor_is_refused_by_name_and_kept_by_ones_own_dcp_save(run, one_rank):
    with holdfast.Checkpointer(run) as ckpt:
        with pytest.raises(errors.UnsupportedStateError, match=r"table@0/rows .* ShardedTensor, .* ckpt.writer\(\)"):
            ckpt.save(0, {"table": {"rows": sharded(1.0)}})
        dcp.save({"rows": sharded(7.0)}, storage_writer=ckpt.writer(1))
    loaded = {"rows": sharded(0.0)}
    with holdfast.Checkpointer(run) as ckpt:
        dcp.load(loaded, storage_reader=ckpt.reader())
    with holdfast.Checkpointer(run) as ckpt:
        whole = {"rows": torch.zeros(4, 2)}
        dcp.load(whole, storage_reader=ckpt.reader())
    assert [shard.tensor.tolist() for shard in loaded["rows"].local_shards()] == [[[7.0] * 2] * 2] * 2
    assert whole["rows"].tolist() == [[7.0] * 2] * 4


@pytest.mark.rule("writer-is-whole")
@pytest.mark.filterwarnings("ignore:Please use DTensor")
@pytest.mark.parametrize(("room", "rounds"), [(ROUND_BYTES, 1), (16 * 4 * 8, 4)])
def test_the_pieces_of_a_tensor_are_read_together_as_far_as_memory_goes(run, one_rank, monkeypatch, room, rounds):
    saved = sharded(0.0, pieces=64)
    for at, shard in enumerate(saved.local_shards()):
        shard.tensor.fill_(at)
    with holdfast.Checkpointer(run) as ckpt:
        dcp.save({"rows": saved}, storage_writer=ckpt.writer(0))
    read, read_now = [], CheckpointSource.read
    monkeypatch.setattr(CheckpointSource, "read", lambda *of: read.append(read_now(*of)))
    monkeypatch.setattr("holdfast.dcp.reader.ROUND_BYTES", room)
    loaded = {"rows": torch.zeros(128, 2)}
    with holdfast.Checkpointer(run) as ckpt:
        dcp.load(loaded, storage_reader=ckpt.reader())
    assert torch.equal(loaded["rows"], torch.arange(64.0).repeat_interleave(4).view(128, 2))
    assert len(read) == rounds, "each round fetches a chunk once, for all that is in it"


class Custom:
    pass


REFUSED = {
    "class": (Custom(), "it is of type test_dcp.Custom; give plain values"),
    "inside": ([1, Custom()], r"odd\[1\] cannot be saved: it is of type test_dcp.Custom"),
    "never pickled": (threading.Lock(), "it is of type _thread.lock; give plain values"),
    "function": (lambda: 1, "it is of type builtins.function; leave functions"),
    "tensor": ((torch.ones(2), 1), r"odd\[0\] cannot be saved: it is a Tensor .*; keep tensors in dicts and lists"),
}


@pytest.mark.rule("no-pickle")
@pytest.mark.rule("writer-is-whole")
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_kept_is_refused_by_key_and_class_before_anything_is_uploaded(run, service, what, monkeypatch):
    value, said = REFUSED[what]
    uploads = []
    monkeypatch.setattr(ShardWriter, "upload", lambda _, chunks: uploads.append(chunks))
    with holdfast.Checkpointer(run) as ckpt, pytest.raises(CheckpointException, match=said):
        dcp.save({"fine": torch.ones(2), "odd": value}, storage_writer=ckpt.writer(0))
    [view] = service.client.checkpoints.all(*run.split("/"))
    assert view.state == "aborted"
    assert "odd" in view.abort_reason
    assert not uploads


@pytest.mark.rule("no-pickle")
def test_no_pickle_is_in_the_store(run, service):
    with holdfast.Checkpointer(run) as ckpt:
        dcp.save(assorted(), storage_writer=ckpt.writer(0))
    [view] = service.client.checkpoints.all(*run.split("/"))
    for chunk in service.client.checkpoints.shard_chunks(view.id, 0).chunks:
        stored = [path.read_bytes() for path in service.store.glob(f"**/{chunk.digest}/*")]
        assert stored
        assert not any(data.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x04")) for data in stored)


def test_the_next_start_goes_on_from_a_dcp_checkpoint(run, service):
    with holdfast.Checkpointer(run) as ckpt:
        for step in range(3):
            dcp.save({"t": torch.full((2,), step)}, storage_writer=ckpt.writer(step))
    with holdfast.Checkpointer(run) as ckpt:
        with pytest.raises(errors.NotRestored):
            ckpt.writer(9)
        state = {"t": torch.zeros(2, dtype=torch.int64)}
        dcp.load(state, storage_reader=ckpt.reader(at="1"))
        dcp.save({"t": torch.full((2,), 9)}, storage_writer=ckpt.writer(2))
    assert state["t"].tolist() == [1, 1]
    attempt = service.client.attempts.get(*run.split("/"), 2)
    assert attempt.resumed_from is not None


def own_loop(rank, run, killed_after=None):
    """A loop of one's own around stock DCP, sharded: saves after every second step; where a step is given, kill -9."""
    torch.manual_seed(3)
    model = fully_shard(nn.Sequential(nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 5)), mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    start, losses = 0, {}
    with holdfast.Checkpointer(run or "tests/none") as ckpt:
        if run:
            try:
                reader = ckpt.reader()
            except errors.NoRestorePoint:
                pass
            else:
                weights, slots = get_state_dict(model, optimizer)
                dcp.load({"model": weights, "optimizer": slots}, storage_reader=reader)
                set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=slots)
                start = reader.step + 1
        for step in range(start, 8):
            batch = torch.randn(4, 9, generator=torch.Generator().manual_seed(10 * step + rank))
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[step] = loss.item()
            if run and step % 2:
                weights, slots = get_state_dict(model, optimizer)
                dcp.save({"model": weights, "optimizer": slots}, storage_writer=ckpt.writer(step))
            if step == killed_after:
                os.kill(os.getpid(), signal.SIGKILL)
    return start, losses, [parameter.full_tensor().tolist() for parameter in model.parameters()]


def test_a_loop_around_stock_dcp_is_killed_and_goes_on_bit_for_bit(run):
    whole = run_ranks(own_loop, 2, None)
    with pytest.raises(AssertionError, match="died with exit code -9"):
        run_ranks(own_loop, 2, run, 4)
    for (start, losses, final), (_, straight, expected) in zip(run_ranks(own_loop, 2, run), whole, strict=True):
        assert start == 4
        assert losses == {step: straight[step] for step in range(4, 8)}
        assert final == expected


def test_a_load_that_breaks_midway_leaves_a_running_job_nothing_to_save(run, service, monkeypatch):
    monkeypatch.setenv("HOLDFAST_DIRECT_FILES", "false")  # else it is read again at once, and may be found before
    state = {"t": torch.arange(5.0)}
    with holdfast.Checkpointer(run) as ckpt:
        dcp.save(state, storage_writer=ckpt.writer(0))
        [view] = service.client.checkpoints.all(*run.split("/"))
        for _, digest in chunks_of(service.client, view.id, "t"):
            for path in files_of(service.store, digest):
                flip(path)
        with pytest.raises(CheckpointException):
            dcp.load(state, storage_reader=ckpt.reader("0"))
        with pytest.raises(errors.NotRestored, match="parts of a checkpoint"):
            ckpt.save(1, state)
        with pytest.raises(CheckpointException, match="parts of a checkpoint"):
            dcp.save(state, storage_writer=ckpt.writer(1))
    assert len(list(service.client.checkpoints.all(*run.split("/")))) == 1


def load_breaks_on_rank_1(rank, run):
    def broken(*_):
        raise ValueError("only on rank 1")

    with holdfast.Checkpointer(run) as ckpt, pytest.MonkeyPatch.context() as patch:
        dcp.save({"t": torch.ones(4)}, storage_writer=ckpt.writer(0))
        if rank == 1:
            patch.setattr(HoldfastReader, "_load_tensors", broken)
        with pytest.raises(CheckpointException, match="only on rank 1"):
            dcp.load({"t": torch.zeros(4)}, storage_reader=ckpt.reader())
        assert ckpt.parts.session.may_save == (rank == 0)
        with pytest.raises(errors.NotRestored, match="The state holds parts"):
            ckpt.save(1, {"t": {"x": torch.ones(4)}})
        with pytest.raises(CheckpointException, match="The state holds parts"):
            dcp.save({"t": torch.ones(4)}, storage_writer=ckpt.writer(1))
        return True


@pytest.mark.rule("one-vote-per-step")
def test_a_load_that_breaks_on_one_rank_makes_all_ranks_refuse_the_next_save(run):
    assert run_ranks(load_breaks_on_rank_1, 2, run) == [True, True]


def test_an_empty_run_has_no_reader(run):
    with holdfast.Checkpointer(run) as ckpt, pytest.raises(errors.NoRestorePoint):
        ckpt.reader()


def test_tensors_of_a_holdfast_checkpoint_can_be_read_too(run):
    weights = {"weights": {"a": torch.arange(6.0)}}
    with holdfast.Checkpointer(run, replicated=["weights"]) as ckpt:
        ckpt.restore(weights)
        ckpt.save(0, weights).committed.result(timeout=60)
    with holdfast.Checkpointer(run) as ckpt:
        metadata = ckpt.reader().read_metadata()
        [name] = [name for name in metadata.state_dict_metadata if name.endswith("a")]
    with holdfast.Checkpointer(run) as ckpt:
        loaded = {name: torch.zeros(6)}
        dcp.load(loaded, storage_reader=ckpt.reader())
    assert loaded[name].tolist() == list(range(6))


def dcp_job(rank, run, kind, steps):
    job = Job(rank, kind, seed=steps, loader=False)
    model = job.state["model"]
    with holdfast.Checkpointer(run) as ckpt:
        if steps:
            for step in range(steps):
                job.step(step)
            dcp.save({"model": get_model_state_dict(model), "step": steps}, storage_writer=ckpt.writer(steps))
        else:
            loaded = {"model": get_model_state_dict(model), "step": 0}
            dcp.load(loaded, storage_reader=ckpt.reader())
            set_model_state_dict(model, loaded["model"])
            assert loaded["step"] == 2
    return {name: value for name, value in values(job.state).items() if name in model.state_dict()}


@pytest.mark.rule("no-pickle")
@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 2), (2, 3), (3, 1)])
def test_a_sharded_dcp_checkpoint_loads_on_any_world_size(run, saved_by, loaded_by):
    saved = run_ranks(dcp_job, saved_by, run, "fsdp", 2, timeout_seconds=180)
    loaded = run_ranks(dcp_job, loaded_by, run, "fsdp", 0, timeout_seconds=180)
    assert len(saved[0]) == 6
    assert loaded == [saved[0]] * loaded_by
