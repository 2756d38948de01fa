"""DDP and fully_shard on real gloo ranks: bit for bit on the same world, equal state on another one."""

from __future__ import annotations

import functools
from collections import OrderedDict

import pytest
import torch
from gloo import run_ranks
from tests.support.training import Job, random_numbers, train, values
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import holdfast
from holdfast import errors


@pytest.mark.rule("bit-exact-resume")
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_ranks_resume_bit_for_bit(run, kind):
    whole = run_ranks(functools.partial(train, kind=kind), 2, None, 6, timeout_seconds=180)
    first = run_ranks(functools.partial(train, kind=kind, every=2), 2, run, 4, timeout_seconds=180)
    second = run_ranks(functools.partial(train, kind=kind, every=2, seed=7), 2, run, 6, timeout_seconds=180)
    for rank in range(2):
        assert (first[rank].start, second[rank].start) == (0, 4)
        assert first[rank].losses | second[rank].losses == whole[rank].losses
        assert second[rank].final == whole[rank].final
        assert second[rank].rng == whole[rank].rng
    assert whole[0].rng != whole[1].rng, "each rank has random numbers of its own, and got its own back"


@pytest.mark.rule("capture-changes-nothing")
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_saving_every_step_changes_nothing_on_two_ranks(run, kind):
    without = run_ranks(functools.partial(train, kind=kind, optimizer="momentum"), 2, None, 4, timeout_seconds=180)
    saving = run_ranks(functools.partial(train, kind=kind, optimizer="momentum"), 2, run, 4, timeout_seconds=180)
    for rank in range(2):
        assert saving[rank].committed == [0, 1, 2, 3]
        assert saving[rank].losses == without[rank].losses
        assert saving[rank].final == without[rank].final


def final_values(rank, run, until, kind, seed=0):
    trained = train(rank, run, until, kind=kind, every=1, seed=seed, loader=False)
    return trained.start, trained.restored, trained.final


def restore_only(rank, run, kind):
    job = Job(rank, kind, seed=9, loader=False)
    with holdfast.Checkpointer(run) as ckpt:
        start = ckpt.restore(job.state)
    return start, values(job.state), random_numbers()


@pytest.mark.rule("bit-exact-resume")
# Every way from one of the three world sizes to another, one after the other in one run. What every rank has whole is
# cut in another way only when the number of ranks grows or shrinks.
@pytest.mark.parametrize(("kind", "world_sizes"), [("ddp", [1, 4, 2]), ("fsdp", [1, 2, 4, 1, 4, 2, 1])])
def test_the_state_is_equal_after_each_resharding_between_one_two_and_four_ranks(run, kind, world_sizes):
    saved = None
    for step, world_size in enumerate(world_sizes):
        launched = run_ranks(final_values, world_size, run, step + 1, kind, step, timeout_seconds=240)
        for start, restored, _ in launched:
            assert start == step
            assert saved is None or restored == saved
        saved = launched[0][2]


MESHES = {"line": [0, 1, 2, 3], "pairs": [[0, 1], [2, 3]], "crossed": [[0, 2], [1, 3]]}
"""Of the same four ranks. Of two dimensions the first replicates and the second shards."""


def sharded_over(kind, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(OrderedDict(up=nn.Linear(5, 7), down=nn.Linear(7, 3)))
    if kind == "tensor parallel":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        ways = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
        model = fully_shard(parallelize_module(model, mesh["tp"], ways), mesh=mesh["dp"])
    else:
        names = ("replicate", "shard") if isinstance(MESHES[kind][0], list) else ("shard",)
        model = fully_shard(model, mesh=DeviceMesh("cpu", MESHES[kind], mesh_dim_names=names))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}


def whole(state):
    found = {}
    for name, parameter in state["model"].named_parameters():
        for slot, value in [("", parameter), *state["optimizer"].state.get(parameter, {}).items()]:
            found[name, slot] = (value.full_tensor() if isinstance(value, DTensor) else value).detach().tolist()
    return found


def on_one_mesh_after_the_other(rank, run, kinds):
    before = None
    for step, kind in enumerate(kinds):
        state = sharded_over(kind, seed=step)
        with holdfast.Checkpointer(run, save=holdfast.OnPreemption()) as ckpt:
            assert ckpt.restore(state) == step
            assert before is None or whole(state) == before, kind
            for parameter in state["model"].parameters():
                parameter.grad = parameter.detach().clone()  # another one for each element
            state["optimizer"].step()
            before = whole(state)
            ckpt.save(step, state).committed.result(timeout=60)
    return before


@pytest.mark.rule("bit-exact-resume")
def test_as_many_ranks_in_another_mesh_get_the_pieces_of_their_places_and_not_what_each_had_saved(run):
    kinds = ["line", "pairs", "crossed", "tensor parallel", "line"]
    ends = run_ranks(on_one_mesh_after_the_other, 4, run, kinds, timeout_seconds=240)
    assert ends == [ends[0]] * 4


@pytest.mark.rule("random-state-last")
def test_random_numbers_are_derived_anew_on_another_world_size_and_differ_by_rank(run):
    run_ranks(final_values, 2, run, 1, "ddp", timeout_seconds=120)
    again = [run_ranks(restore_only, 3, run, "ddp", timeout_seconds=120) for _ in range(2)]
    assert [rng for _, _, rng in again[0]] == [rng for _, _, rng in again[1]], "from run, step and rank alone"
    assert len({rng[2] for _, _, rng in again[0]}) == 3


def draw_alike(rank, run):
    torch.manual_seed(7)
    with holdfast.Checkpointer(run, create=True) as ckpt:
        if ckpt.restore({}) == 0:
            ckpt.save(0, {}).committed.result(timeout=60)
    return torch.rand(1).item()


@pytest.mark.rule("random-state-last")
def test_ranks_that_drew_the_same_numbers_do_so_on_another_world_size(run):
    run_ranks(draw_alike, 2, run, timeout_seconds=120)
    assert len(set(run_ranks(draw_alike, 3, run, timeout_seconds=120))) == 1


def restore_with_loader(rank, run):
    job = Job(rank, "ddp", seed=9)
    del job.state["notes"]
    before = values({**job.state, "notes": None})
    with holdfast.Checkpointer(run) as ckpt:
        try:
            ckpt.restore(job.state)
        except errors.StateMismatchError as error:
            return "load_resharded_state_dict" in str(error), values({**job.state, "notes": None}) == before
    return "restored"


@pytest.mark.rule("random-state-last")
def test_a_loader_that_does_not_reshard_refuses_another_world_size_with_the_remedy(run):
    run_ranks(train, 2, run, 1, timeout_seconds=120)
    assert run_ranks(restore_with_loader, 3, run, timeout_seconds=120) == [(True, True)] * 3


class Merging:
    """A loader that declares resharding: it adds up how many samples were taken."""

    def __init__(self, taken=0):
        self.taken = taken

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.taken = state["taken"]

    def load_resharded_state_dict(self, states, *, rank, world_size):
        self.taken = sum(state["taken"] for state in states) // world_size


def merge(rank, run, taken):
    loader = Merging(taken + rank)
    with holdfast.Checkpointer(run, create=True) as ckpt:
        if ckpt.restore({"dataloader": loader}) == 0:
            ckpt.save(0, {"dataloader": loader}).committed.result(timeout=60)
    return loader.taken


@pytest.mark.rule("random-state-last")
def test_a_loader_that_declares_resharding_is_given_every_ranks_state(run):
    run_ranks(merge, 4, run, 6, timeout_seconds=120)
    assert run_ranks(merge, 2, run, 0, timeout_seconds=120) == [15, 15]


def buffers(rank, run):
    torch.manual_seed(rank)
    model = nn.parallel.DistributedDataParallel(nn.BatchNorm1d(3), broadcast_buffers=False)
    with holdfast.Checkpointer(run, create=True) as ckpt:
        start = ckpt.restore({"model": model})
        restored = model.module.running_mean.tolist()
        if start == 0:
            model(torch.randn(8, 3))
            ckpt.save(0, {"model": model}).committed.result(timeout=60)
        return restored, model.module.running_mean.tolist()


@pytest.mark.rule("buffers-from-rank-0")
def test_buffers_come_from_rank_0(run):
    saved = run_ranks(buffers, 2, run, timeout_seconds=120)
    assert saved[0][1] != saved[1][1]
    restored = run_ranks(buffers, 2, run, timeout_seconds=120)
    assert [mean for mean, _ in restored] == [saved[0][1]] * 2


def count_document_reads(rank, run):
    """The lists of chunks that come to this rank along with tickets, and those that it asks for by themselves."""
    job = Job(rank, "fsdp", loader=False)
    with holdfast.Checkpointer(run) as ckpt:
        along, asked = [], []
        client = ckpt.parts.client
        read_chunks, shard_chunks = client.restores.read_chunks, client.checkpoints.shard_chunks
        client.restores.read_chunks = lambda *a: (along.append(a[1].shard), read_chunks(*a))[1]
        client.checkpoints.shard_chunks = lambda *a: (asked.append(a[1]), shard_chunks(*a))[1]
        ckpt.restore(job.state)
    return [each for each in along if each is not None], asked


@pytest.mark.rule("packs-apart")
@pytest.mark.rule("one-layout-per-plan")
def test_every_list_of_chunks_is_asked_for_by_one_rank_only(run):
    run_ranks(final_values, 4, run, 1, "fsdp", timeout_seconds=240)
    assert run_ranks(count_document_reads, 4, run, timeout_seconds=240) == [([0], []), ([1], []), ([2], []), ([3], [])]
    assert run_ranks(count_document_reads, 2, run, timeout_seconds=240) == [([0, 2], []), ([1], [3])]
