"""Asking for state never changes training, and a save followed by a load continues it, both bit for bit."""

import copy
import random

import numpy as np
import pytest
import torch
from roundtrip import load, save
from torch import nn

from holdfast.errors import StateMismatchError, TreeFormatError
from holdfast.state.capture import capture
from holdfast.state.components import Declarations, capture_rng, derive_rng, generators_alike, restore_rng
from holdfast.state.tree import decode_tree, encode_tree


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(8, 3)
        self.never_used = nn.Parameter(torch.randn(5))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x):
        return self.last(self.drop(torch.relu(self.norm(self.first(x))))) + self.frozen


def two_optimizers(net):
    rest = torch.optim.SGD(net.last.parameters(), lr=0.1, momentum=0.9)
    return {"first": torch.optim.AdamW(net.first.parameters()), "rest": rest}


def two_groups(net):
    groups = [{"params": net.first.parameters(), "lr": 0.1}, {"params": net.last.parameters()}]
    return {"optimizer": torch.optim.AdamW(groups)}


def tensor_lr(net):
    return {"optimizer": torch.optim.Adam(net.parameters(), torch.tensor(0.01), amsgrad=True, foreach=False)}


OPTIMIZERS = {
    "adamw": lambda net: {"optimizer": torch.optim.AdamW(net.parameters(), lr=0.01)},
    "adamw_fused": lambda net: {"optimizer": torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)},
    "adam_amsgrad_tensor_lr": tensor_lr,
    "nadam": lambda net: {"optimizer": torch.optim.NAdam(net.parameters())},
    "sgd": lambda net: {"optimizer": torch.optim.SGD(net.parameters(), lr=0.1)},
    "sgd_momentum": lambda net: {"optimizer": torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)},
    "two_optimizers": two_optimizers,
    "lbfgs": lambda net: {"optimizer": torch.optim.LBFGS(net.parameters(), max_iter=4, history_size=3)},
    "groups": two_groups,
}


def build(kind):
    torch.manual_seed(1)
    net = Net()
    optimizers = OPTIMIZERS[kind](net)
    first = next(iter(optimizers.values()))
    scheduler = torch.optim.lr_scheduler.MultiStepLR(first, [2, 4])
    return {"model": net, **optimizers, "lr_scheduler": scheduler, "seen": [0]}


def step(state):
    net = state["model"]
    optimizers = [part for part in state.values() if isinstance(part, torch.optim.Optimizer)]
    inputs = torch.randn(4, 6)

    def closure():
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = net(inputs).square().mean()
        loss.backward()
        return loss

    if isinstance(optimizers[0], torch.optim.LBFGS):
        loss = optimizers[0].step(closure)
    else:
        loss = closure()
        for optimizer in optimizers:
            optimizer.step()
    state["lr_scheduler"].step()
    state["seen"][0] += 1
    return loss.detach()


def snapshot(state):
    parts = {key: part if isinstance(part, list) else part.state_dict() for key, part in state.items()}
    return copy.deepcopy(parts)


def assert_same(one, other, path=""):
    assert type(one) is type(other), path
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, path
        assert one.device == other.device, path
        assert torch.equal(one, other), path
    elif isinstance(one, dict):
        assert list(one) == list(other), path
        for key in one:
            assert_same(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for at, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{path}[{at}]")
    else:
        assert one == other, path


def change_dtype(state):
    state["model"].last.weight.data = state["model"].last.weight.data.double()


def change_shape(state):
    state["model"].never_used.data = torch.randn(7)


def freeze(state):
    state["model"].last.bias.requires_grad_(False)


def tie(state):
    state["model"].running = state["model"].norm.running_mean


def untie(state):
    state["model"].alias = nn.Parameter(state["model"].last.weight.detach().clone())


def load_the_optimizer(state):
    state["optimizer"].load_state_dict(copy.deepcopy(state["optimizer"].state_dict()))


def slots_become_numbers(state):
    for slots in state["optimizer"].state.values():
        slots["step"] = float(slots["step"])


def paths_change_places(state):
    state["extra"] = dict(reversed(state["extra"].items()))


def a_tensor_goes(state):
    del state["extra"]["a.b"]


CHANGES = [
    step,
    change_dtype,
    change_shape,
    freeze,
    tie,
    untie,
    load_the_optimizer,
    slots_become_numbers,
    paths_change_places,
    a_tensor_goes,
]


def said_in(captured):
    pieces = [(piece.spec, piece.local.data_ptr(), id(piece.guarded)) for piece in captured.pieces]
    return pieces, captured.trees, captured.replicated_trees


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("declared", [Declarations(), Declarations.of(per_rank=["extra"], frozen=["model/frozen"])])
def test_what_an_earlier_capture_described_is_said_again_only_while_it_holds(change, declared):
    state = build("adamw") | {"extra": {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}}
    state["model"].alias = state["model"].last.weight
    state["model"].register_buffer("running", torch.zeros(8))
    step(state)
    before = capture(state, rank=0, world_size=1, declared=declared).described
    change(state)
    anew = capture(state, rank=0, world_size=1, declared=declared)
    again = capture(state, rank=0, world_size=1, declared=declared, before=before)
    assert said_in(again) == said_in(anew)
    assert again.described == anew.described
    assert any(again.described.get(path) is each for path, each in before.items())  # else nothing was said again


@pytest.mark.rule("capture-changes-nothing")
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_capturing_every_step_changes_no_bit_of_training(kind):
    plain, watched = build(kind), build(kind)
    torch.manual_seed(7)
    expected = [step(plain) for _ in range(6)]
    torch.manual_seed(7)
    losses = []
    for _ in range(6):
        save(watched)
        losses.append(step(watched))
        save(watched)
    assert_same(losses, expected)
    assert_same(snapshot(watched), snapshot(plain))


@pytest.mark.rule("capture-changes-nothing")
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_capture_leaves_generators_grads_and_modes_alone(kind):
    state = build(kind)
    step(state)
    state["model"].eval()
    random_before, before = capture_rng(), snapshot(state)
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in state["model"].named_parameters()}
    save(state)
    assert capture_rng() == random_before
    assert_same(snapshot(state), before)
    assert not state["model"].training
    for name, parameter in state["model"].named_parameters():
        assert (parameter.grad is None) == (grads[name] is None)
        assert grads[name] is None or torch.equal(parameter.grad, grads[name])


@pytest.mark.rule("capture-changes-nothing")
@pytest.mark.rule("bit-exact-resume")
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_resumed_run_continues_bit_for_bit(kind, steps):
    state = build(kind)
    torch.manual_seed(7)
    for _ in range(steps):
        step(state)
    saved, generators, at_save = save(state), capture_rng(), snapshot(state)
    expected = [step(state) for _ in range(3)]

    fresh = build(kind)
    with torch.no_grad():
        for parameter in fresh["model"].parameters():
            parameter.add_(1.0)
    for _ in range(2):
        step(fresh)  # slots that the checkpoint may not have must go
    load(fresh, [saved])
    restore_rng(generators)
    assert_same(snapshot(fresh), at_save)
    assert_same([step(fresh) for _ in range(3)], expected)
    assert_same(snapshot(fresh), snapshot(state))


@pytest.mark.rule("capture-changes-nothing")
def test_a_fresh_optimizer_has_no_slots_before_or_after():
    state = build("adamw")
    captured = capture(state, rank=0, world_size=1)
    assert not state["optimizer"].state
    assert not [piece for piece in captured.pieces if piece.spec.component == "optimizer"]


@pytest.mark.rule("capture-changes-nothing")
def test_one_optimizer_over_two_modules_needs_nothing_said():
    def both():
        torch.manual_seed(3)
        one, other = nn.Linear(3, 3), nn.Linear(3, 3)
        optimizer = torch.optim.AdamW([*one.parameters(), *other.parameters()])
        return {"one": one, "other": other, "optimizer": optimizer}

    def advance(state):
        state["optimizer"].zero_grad()
        state["other"](state["one"](torch.ones(2, 3))).sum().backward()
        state["optimizer"].step()

    state = both()
    for _ in range(3):
        advance(state)
    saved = save(state)
    assert "optimizer/other/weight/exp_avg" in saved.plan.tensors
    fresh = both()
    load(fresh, [saved])
    advance(state)
    advance(fresh)
    assert_same(snapshot(fresh), snapshot(state))


def test_tensors_are_loaded_in_place():
    state = build("adamw")
    for _ in range(2):
        step(state)
    saved = save(state)
    weight = state["model"].first.weight
    slot = state["optimizer"].state[weight]["exp_avg"]
    addresses = weight.data_ptr(), slot.data_ptr()
    step(state)
    load(state, [saved])
    assert state["model"].first.weight is weight
    assert state["optimizer"].state[weight]["exp_avg"] is slot
    assert (weight.data_ptr(), slot.data_ptr()) == addresses


def test_implementation_flags_stay_as_the_live_optimizer_has_them():
    state = build("adamw")
    step(state)
    saved = save(state)
    fused = build("adamw_fused")
    fused["optimizer"].param_groups[0]["lr"] = 5.0
    load(fused, [saved])
    assert fused["optimizer"].param_groups[0]["fused"] is True
    assert fused["optimizer"].param_groups[0]["lr"] == 0.01
    step(fused)


@pytest.mark.rule("typed-trees")
def test_schedulers_keep_integers_and_fire_their_milestones():
    state = build("sgd")
    step(state)
    saved = save(state)
    fresh = build("sgd")
    load(fresh, [saved])
    assert fresh["lr_scheduler"].milestones == {2: 1, 4: 1}
    step(fresh)
    assert fresh["optimizer"].param_groups[0]["lr"] == pytest.approx(0.01)


@pytest.mark.rule("typed-trees")
def test_plain_values_come_back_into_the_users_own_containers():
    history, mean = [1, (2, 3)], torch.zeros(3)
    state = {"epoch": 3, "notes": {"history": history, 1: "one"}, "mean": mean}
    saved = save(state)
    state["epoch"] = 9
    history.append(4)
    state["notes"]["new"] = True
    mean.fill_(5)
    load(state, [saved])
    assert state == {"epoch": 3, "notes": {"history": [1, (2, 3)], 1: "one"}, "mean": mean}
    assert state["notes"]["history"] is history
    assert torch.equal(mean, torch.zeros(3))


def test_generators_come_back_exactly():
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    random.gauss(0, 1)
    np.random.standard_normal()
    saved = capture_rng()
    expected = (random.gauss(0, 1), np.random.standard_normal(3).tolist(), torch.randn(3).tolist())
    for _ in range(4):
        random.random(), np.random.random(), torch.rand(9)
    restore_rng(saved)
    assert (random.gauss(0, 1), np.random.standard_normal(3).tolist(), torch.randn(3).tolist()) == expected


@pytest.mark.rule("random-state-last")
@pytest.mark.parametrize("devices", [0, 1, 4])
def test_the_hosts_generators_come_back_where_another_number_of_devices_is_visible(monkeypatch, devices):
    saved = encode_tree({**decode_tree(capture_rng()), "cuda": [b"first", b"second"]}, path="rng")
    expected = (random.random(), np.random.random(), torch.rand(1).item())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    assert not restore_rng(saved)
    assert (random.random(), np.random.random(), torch.rand(1).item()) == expected


@pytest.mark.rule("random-state-last")
def test_cuda_begins_before_its_generators_are_set(monkeypatch):
    """torch applies a seed that was set before CUDA has begun after all else that was set before."""
    done = []
    saved = encode_tree({**decode_tree(capture_rng()), "cuda": [b"first", b"second"]}, path="rng")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "init", lambda: done.append("begin"))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: done.append((device, bytes(state.numpy()))))
    assert restore_rng(saved)
    assert done == ["begin", (0, b"first"), (1, b"second")]
    done.clear()
    assert restore_rng(capture_rng())
    assert not done, "a process without CUDA has saved none of its generators"


@pytest.mark.rule("random-state-last")
def test_derived_generators_depend_on_run_step_and_rank_only():
    def draw(*key):
        derive_rng(*key)
        return random.random(), np.random.random(), torch.rand(1).item()

    assert draw("demo/gpt", 10, 0) == draw("demo/gpt", 10, 0)
    draws = {draw("demo/gpt", 10, 0), draw("demo/gpt", 10, 1), draw("demo/gpt", 11, 0), draw("demo/other", 10, 0)}
    assert len({number for numbers in draws for number in numbers}) == 12


@pytest.mark.rule("random-state-last")
def test_generators_that_all_ranks_saved_alike_are_derived_alike():
    def saved(seed, *cuda):
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(seed)
        return encode_tree({**decode_tree(capture_rng()), "cuda": list(cuda)}, path="rng")

    def draw(rank, alike):
        derive_rng("demo/gpt", 10, rank, alike)
        return random.random(), np.random.random(), torch.rand(1).item()

    ranks = [saved(5, b"drawn from", b"idle"), saved(6, b"idle", b"drawn from")]
    alike = generators_alike(ranks)
    assert alike == {"python", "numpy", "cuda"}
    one, other = draw(1, alike), draw(2, alike)
    assert one[:2] == other[:2]
    assert one[2] != other[2]
    assert "cuda" not in generators_alike([saved(5), saved(5)]), "CUDA was not in use"
    for unknown in (ranks[:1], [*ranks, None], [*ranks, {"dict": [["python"]]}]):
        assert generators_alike(unknown) == frozenset()


def test_malformed_generators_change_nothing():
    before = capture_rng()
    no_bytes = encode_tree({**decode_tree(before), "cuda": [1]}, path="rng")
    for broken in (None, {"dict": []}, {"dict": [["python", 1], ["numpy", 1], ["torch", 1], ["cuda", []]]}, no_bytes):
        with pytest.raises(TreeFormatError, match="malformed"):
            restore_rng(broken)
    assert capture_rng() == before


def test_a_state_that_this_process_does_not_take_is_not_the_checkpoints_fault(monkeypatch):
    """As of another numpy or torch: an older checkpoint's may be taken, and nobody would hear of it."""
    before = capture_rng()
    other = np.random.Generator(np.random.PCG64()).bit_generator.state
    with pytest.raises(StateMismatchError, match=r"does not take it \(ValueError: .*torch and numpy that saved it"):
        restore_rng(encode_tree({**decode_tree(before), "numpy": other}, path="rng"))
    assert capture_rng() == before

    def refuse(_state, _device):
        raise RuntimeError("RNG state is wrong size")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_rng_state", refuse)
    with pytest.raises(StateMismatchError, match="RNG state is wrong size"):
        restore_rng(encode_tree({**decode_tree(before), "cuda": [b"longer"]}, path="rng"))
    assert capture_rng() == before
