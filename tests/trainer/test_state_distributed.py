"""Capture and load on real gloo ranks: DDP, fully_shard, tensor parallel, and from each world size to another."""

import functools

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from roundtrip import load, save
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):
    """Sizes that no world size divides."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.down = nn.Linear(7, 3)

    def forward(self, x):
        return self.down(torch.tanh(self.norm(self.up(x))))


def build(kind, seed=0):
    torch.manual_seed(seed)
    net = Net()
    if kind in ("fsdp_tp", "unnormed"):
        net.norm = nn.Identity()
    if kind == "ddp":
        model = DistributedDataParallel(net)
    elif kind in ("fsdp", "hsdp"):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        if kind == "hsdp":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(net.up, mesh=mesh)
        model = fully_shard(net, mesh=mesh)
    elif kind == "fsdp_tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()})
        model = fully_shard(net, mesh=mesh["dp"])
    else:
        model = net
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.05)}


def step(state, rank, number):
    state["optimizer"].zero_grad()
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(number * 100 + rank))
    loss = state["model"](inputs).square().mean()
    loss.backward()
    state["optimizer"].step()
    return loss.item()


def full(state):
    """The whole state as plain tensors, on every rank."""
    values = {}
    model = state["model"]
    model = model.module if isinstance(model, DistributedDataParallel) else model
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        values[name] = tensor
        for slot, value in state["optimizer"].state.get(tensor, {}).items():
            values[f"{name}/{slot}"] = value
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in values.items()}


def save_on_ranks(rank, kind):
    world_size = dist.get_world_size()
    state = build(kind)
    for number in range(2):
        step(state, rank, number)
    if kind != "fsdp_tp":
        state["model"].eval()
        state["model"](torch.zeros(2, 5))  # leaves fully_shard's root unsharded
        state["model"].train()
    saved = save(state, rank, world_size)
    losses = [step(state, rank, number) for number in range(2, 4)]
    resumed = build(kind, seed=9)
    parts = gathered(saved)
    load(resumed, parts, rank, world_size)
    at_save = full(resumed)
    again = [step(resumed, rank, number) for number in range(2, 4)]
    ends = full(state), full(resumed)
    for end in ends if rank else ():
        end.update(
            {name: torch.zeros(1) for name in end if "running" in name}
        )  # rank 0's came back, by rule late-save-adoption
    return saved, at_save, losses, again, same(*ends)


def gathered(saved):
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, saved)
    return parts


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def load_on_ranks(rank, kind, parts):
    state = build(kind, seed=9)
    load(state, parts, rank, dist.get_world_size())
    loaded = full(state)
    step(state, rank, 7)
    return loaded


@functools.cache
def saved_by(kind, world_size):
    results = run_ranks(save_on_ranks, world_size, kind)
    return [result[0] for result in results], results


SOURCES = [("ddp", 2), ("fsdp", 3), ("hsdp", 4), ("fsdp_tp", 4)]


def label(side):
    return f"{side[0]}{side[1]}"


@pytest.mark.rule("bit-exact-resume")
@pytest.mark.parametrize("source", SOURCES, ids=label)
def test_the_same_world_resumes_bit_for_bit(source):
    for _, _, losses, again, equal in saved_by(*source)[1]:
        assert losses == again
        assert equal


@pytest.mark.rule("bit-exact-resume")
@pytest.mark.parametrize("source", SOURCES, ids=label)
def test_one_process_gets_the_state_of_many_ranks(source):
    parts, results = saved_by(*source)
    state = build("unnormed" if source[0] == "fsdp_tp" else "plain", seed=9)
    load(state, parts)
    assert same(full(state), results[0][1])


@pytest.mark.rule("bit-exact-resume")
@pytest.mark.parametrize(
    ("source", "target"),
    [(("ddp", 2), ("fsdp", 4)), (("fsdp", 3), ("ddp", 2)), (("hsdp", 4), ("fsdp", 2))],
    ids=label,
)
def test_another_world_or_sharding_gets_equal_state(source, target):
    parts, results = saved_by(*source)
    for loaded in run_ranks(load_on_ranks, target[1], target[0], parts):
        assert same(loaded, results[0][1])


@pytest.mark.rule("bit-exact-resume")
def test_the_state_of_one_process_reaches_many_ranks():
    state = build("plain")
    step(state, 0, 0)
    for loaded in run_ranks(load_on_ranks, 2, "fsdp", [save(state)]):
        assert same(loaded, full(state))


@pytest.mark.rule("buffers-from-rank-0")
def test_buffers_are_rank_0s_on_every_rank():
    _, results = saved_by("fsdp", 3)
    assert torch.equal(results[0][1]["norm.running_mean"], results[1][1]["norm.running_mean"])
    assert results[0][1]["norm.num_batches_tracked"] == 2


@pytest.mark.rule("layout-vote")
def test_replicas_are_stored_once():
    for kind, world_size in [("ddp", 2), ("fsdp", 3), ("hsdp", 4)]:
        parts, results = saved_by(kind, world_size)
        stored = sum(s.bytes for part in parts for piece in part.plan.shard.pieces for s in piece.segments)
        assert stored == sum(tensor.numel() * tensor.element_size() for tensor in results[0][1].values())


class Tied(nn.Module):
    """Three ranks have two rows each of the four, and so the last one has none."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.embed = nn.Embedding(4, 5)
        self.head = nn.Linear(5, 4, bias=False)
        self.head.weight = self.embed.weight


def save_tied(rank):
    world_size = dist.get_world_size()
    model = fully_shard(Tied(), mesh=init_device_mesh("cpu", (world_size,)))
    detached = save({"weights": dict(model.state_dict())}, rank, world_size)
    return save({"model": model}, rank, world_size), detached, model.head.weight.to_local().numel()


@pytest.mark.rule("layout-vote")
def test_a_rank_with_an_empty_part_of_a_tied_tensor_finds_the_tie_as_the_others_do():
    parts, detached, elements = zip(*run_ranks(save_tied, 3), strict=True)
    assert elements == (10, 10, 0)
    for saved in (parts, detached):
        assert sum(len(chunk) for part in saved for chunk in part.chunks) == 4 * 5 * 4
    fresh, weights = Tied(), {"weights": None}
    nn.init.zeros_(fresh.embed.weight)
    load({"model": fresh}, list(parts))
    load(weights, list(detached))
    for head in (fresh.head.weight, weights["weights"]["head.weight"]):
        assert torch.equal(head, Tied().head.weight)
    assert fresh.head.weight is fresh.embed.weight


def place_on_mesh(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole = torch.arange(35.0).reshape(5, 7)
    placements = [
        (Shard(0), Shard(1)), (Shard(0), Shard(0)), (Replicate(), Shard(1)), (Shard(1), Replicate()),
        (Replicate(), Replicate()),
    ]  # fmt: skip
    tensors = {f"t{at}": distribute_tensor(whole, mesh, list(placement)) for at, placement in enumerate(placements)}
    parts = gathered(save({"x": tensors}, rank, 4, replicated=["x"]))
    zeros = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    fresh = {"x": zeros}
    load(fresh, parts, rank, 4, replicated=["x"])
    refused = ""
    try:
        save({"x": DTensor.from_local(torch.ones(2), mesh, [Partial(), Replicate()])}, rank, 4)
    except ValueError as error:
        refused = str(error)
    return parts[rank], all(torch.equal(zeros[name].full_tensor(), whole) for name in zeros), refused


@pytest.mark.rule("refuse-inexact")
@pytest.mark.rule("layout-vote")
def test_every_placement_on_a_two_dimensional_mesh_comes_back_and_partial_is_refused():
    results = run_ranks(place_on_mesh, 4)
    stored = sum(s.bytes for part, _, _ in results for piece in part.plan.shard.pieces for s in piece.segments)
    assert stored == 5 * 35 * 4
    for _, equal, refused in results:
        assert equal
        assert "Partial" in refused
        assert "redistribute" in refused
    plain = {"x": None}
    load(plain, [part for part, _, _ in results], replicated=["x"])
    assert all(torch.equal(tensor, torch.arange(35.0).reshape(5, 7)) for tensor in plain["x"].values())


class Factored(torch.optim.Optimizer):
    """Keeps the means of the squared gradients over rows and over columns, as Adafactor does."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            squared, state = parameter.grad.square(), self.state[parameter]
            for slot, dim in (("rows", 1), ("columns", 0)):
                mean = squared.mean(dim)
                if isinstance(mean, DTensor):
                    kept = [Replicate() if placement.is_partial() else placement for placement in mean.placements]
                    mean = mean.redistribute(placements=kept)
                state[slot] = state[slot].lerp(mean, 0.5) if slot in state else mean
            parameter.sub_(parameter.grad / (state["rows"][:, None] * state["columns"]).sqrt(), alpha=0.05)


def build_factored(seed):
    torch.manual_seed(seed)
    model = nn.Linear(5, 7, bias=False)
    if dist.get_world_size() > 1:
        fully_shard(model)
    return {"model": model, "optimizer": Factored(model.parameters())}


def factored_on_ranks(rank, parts=None):
    world_size = dist.get_world_size()
    state = build_factored(0)
    if parts is None:
        step(state, rank, 0)
        parts = gathered(save(state, rank, world_size))
    resumed = build_factored(9)
    load(resumed, parts, rank, world_size)
    at_save = full(resumed)
    slots = [[slot for each in one["optimizer"].state.values() for slot in each.values()] for one in (state, resumed)]
    assert all(isinstance(slot, DTensor) for slot in slots[1]) == (world_size > 1)
    if slots[0] and world_size > 1:
        assert [slot.placements for slot in slots[0]] == [slot.placements for slot in slots[1]]
        step(state, rank, 1)
    step(resumed, rank, 1)
    return parts, at_save, not slots[0] or same(full(state), full(resumed))


@pytest.mark.rule("bit-exact-resume")
def test_slots_of_another_shape_than_their_sharded_parameter_come_back_sharded():
    results = run_ranks(factored_on_ranks, 2)
    assert all(equal for _, _, equal in results)
    parts, at_save, _ = results[0]
    for world_size in (1, 3):
        for _, loaded, _ in run_ranks(factored_on_ranks, world_size, parts):
            assert same(loaded, at_save)


class Averages:
    """Of sharded weights, in an object of its own."""

    def __init__(self, model):
        self.averages = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def state_dict(self):
        return {"averages": self.averages, "decay": 0.9, "seen": {"steps": 2}}

    def load_state_dict(self, state):
        for name, average in state["averages"].items():
            self.averages[name].copy_(average)


class MergingAverages(Averages):
    def load_resharded_state_dict(self, states, *, rank, world_size):
        [first, *others] = [state["averages"]["up.weight"] for state in states]
        assert [other is first for other in others] == [True, True], "three ranks saved one tensor"
        merged = states[0]
        for state in states[1:]:
            merged["seen"]["steps"] += state["seen"]["steps"]
        assert merged["seen"] == {"steps": 6}, "and a count each"
        self.load_state_dict(merged)


def whole_averages(averages):
    return {name: average.full_tensor().clone() for name, average in averages.averages.items()}


def save_averages(rank):
    averages = Averages(build("fsdp")["model"])
    return save({"averages": averages}, rank, dist.get_world_size()), whole_averages(averages)


def load_averages(rank, kind, parts, declared):
    averages = kind(build("fsdp", seed=9)["model"])
    load({"averages": averages}, parts, rank, dist.get_world_size(), replicated=declared)
    return whole_averages(averages)


@pytest.mark.rule("bit-exact-resume")
def test_an_object_of_sharded_tensors_goes_on_with_another_number_of_ranks():
    results = run_ranks(save_averages, 3)
    parts = [saved for saved, _ in results]
    for kind, declared in [(Averages, []), (Averages, ["averages"]), (MergingAverages, [])]:
        for loaded in run_ranks(load_averages, 2, kind, parts, declared):
            assert same(loaded, results[0][1])


def fail_on_one(rank):
    if rank == 1:
        raise RuntimeError("rank one's own words")
    dist.barrier()


def test_the_launcher_shows_the_failed_ranks_traceback():
    with pytest.raises(AssertionError, match="rank one's own words"):
        run_ranks(fail_on_one, 2)
