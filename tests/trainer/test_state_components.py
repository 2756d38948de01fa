"""What may stand in a state, what is refused by its key, and how loading refuses what does not fit."""

import copy
import logging

import pytest
import torch
from roundtrip import load, save
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import PostLocalSGDOptimizer
from torchmetrics import MeanMetric

from holdfast.errors import StateError, StateMismatchError, UnsupportedStateError
from holdfast.state.capture import capture
from holdfast.state.components import Declarations
from holdfast.state.load import LoadOptions


class Tied(nn.Module):
    def __init__(self, tie=True):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        if tie:
            self.head.weight = self.embed.weight


class Counting:
    """A data loader's kind of object."""

    def __init__(self, position=0):
        self.position = position

    def state_dict(self):
        return {"position": self.position, "generator": torch.tensor([self.position], dtype=torch.uint8)}

    def load_state_dict(self, state):
        self.position = state["position"]
        self.generator = state["generator"]


class Merging(Counting):
    def load_resharded_state_dict(self, states, *, rank, world_size):
        self.position = sum(state["position"] for state in states) // world_size


class Place:
    """A loader without tensors: ranks at equal places have equal states."""

    def __init__(self, position=0):
        self.position = position

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class MergingPlace(Place):
    load_resharded_state_dict = Merging.load_resharded_state_dict


def names(state, **declared):
    captured = capture(state, rank=1, world_size=2, declared=Declarations.of(**declared))
    return sorted(piece.spec.name for piece in captured.pieces)


def test_names_are_the_users_own_under_any_wrapper():
    plain = nn.Sequential(nn.Linear(2, 2))
    wrapped = nn.Sequential(torch.compile(nn.Linear(2, 2)))
    assert names({"model": plain}) == names({"model": wrapped}) == names({"model": torch.compile(plain)})
    assert names({"model": plain}) == ["model/0.bias", "model/0.weight"]


def test_only_persistent_buffers_are_saved_and_they_are_rank_0s():
    module = nn.BatchNorm1d(2)
    module.register_buffer("scratch", torch.zeros(1), persistent=False)
    captured = capture({"model": module}, rank=1, world_size=2)
    owners = {piece.spec.name: piece.spec.owner for piece in captured.pieces}
    assert owners == {"model/weight": None, "model/bias": None, "model/running_mean": 0, "model/running_var": 0,
                      "model/num_batches_tracked": 0}  # fmt: skip


def test_frozen_parameters_are_packed_apart():
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    captured = capture({"model": module}, rank=0, world_size=1)
    assert {piece.spec.name: piece.spec.pack for piece in captured.pieces} == {
        "model/weight": "trainable",
        "model/bias": "frozen",
    }


@pytest.mark.rule("typed-trees")
def test_loaders_and_plain_values_are_each_ranks_own_unless_declared():
    state = {"loader": Counting(), "ema": {"w": torch.zeros(2)}}
    assert names(state) == ["ema@1/w", "loader@1/generator"]
    assert names(state, replicated=["ema"]) == ["ema/w", "loader@1/generator"]
    assert names({"model": nn.Linear(1, 1, bias=False)}, per_rank=["model"]) == ["model@1/weight"]


def test_schedulers_are_shared():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    captured = capture({"sched": torch.optim.lr_scheduler.StepLR(optimizer, 2)}, rank=1, world_size=2)
    assert set(captured.replicated_trees) == {"sched"}


def sub_class(tensor):
    class Odd(torch.Tensor):
        pass

    return tensor.as_subclass(Odd)


@pytest.mark.rule("refuse-inexact")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: torch.zeros(2, 2).to_sparse(), "sparse"),
        (lambda: torch.zeros(2, 2).to_sparse_csr(), "sparse"),
        (lambda: torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8), "quantized"),
        (lambda: torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)]), "nested"),
        (lambda: torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged), "nested"),
        (lambda: sub_class(torch.zeros(2)), "Odd"),
        (lambda: torch.zeros(2, device="meta"), "meta"),
        (lambda: nn.UninitializedParameter(), "lazy"),
        (lambda: torch.zeros(2, dtype=torch.uint8).view(torch.bits8), "cannot store the dtype"),
    ],
)
def test_tensors_without_plain_bytes_are_refused_by_key(make, what):
    with pytest.raises(UnsupportedStateError, match=rf"extra@0/deep\[0\].*{what}.*; .+"):
        capture({"extra": {"deep": [make()]}}, rank=0, world_size=1)
    module = nn.Linear(2, 2)
    module._parameters.pop("bias")
    module._buffers["odd"] = make()
    with pytest.raises(UnsupportedStateError, match=f"model/odd.*{what}"):
        capture({"model": module}, rank=0, world_size=1)


@pytest.mark.rule("refuse-inexact")
def test_a_module_that_writes_its_own_form_is_refused():
    class Own(nn.Linear):
        def _save_to_state_dict(self, destination, prefix, keep_vars):
            destination[prefix + "packed"] = torch.zeros(1)

    with pytest.raises(UnsupportedStateError, match=r"model/0 .*form of its own"):
        capture({"model": nn.Sequential(Own(1, 1))}, rank=0, world_size=1)


class Ema(torch.optim.SGD):
    """As averages of weights are often kept."""

    def state_dict(self):
        return super().state_dict() | {"ema": {}, "current_step": 3}

    def load_state_dict(self, state_dict):
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})


class Renamed(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.rule("refuse-inexact")
def test_an_optimizer_whose_state_dict_may_hold_more_is_refused_and_a_plain_subclass_is_not():
    module = nn.Linear(1, 1)
    with pytest.raises(UnsupportedStateError, match=r"optimizer cannot be saved: Ema has a state_dict\(\) of its own"):
        capture({"model": module, "optimizer": Ema(module.parameters(), lr=1.0)}, rank=0, world_size=1)
    averaging = PostLocalSGDOptimizer(torch.optim.SGD(module.parameters(), lr=1.0), averager=None)
    with pytest.raises(UnsupportedStateError, match=r"PostLocalSGDOptimizer .*give the optimizer inside it"):
        capture({"optimizer": averaging}, rank=0, world_size=1)
    capture({"model": module, "optimizer": Renamed(module.parameters(), lr=1.0)}, rank=0, world_size=1)


@pytest.mark.rule("refuse-inexact")
def test_a_persistent_metric_is_refused_and_one_that_keeps_nothing_is_not():
    metric = MeanMetric()
    module = nn.ModuleDict({"net": nn.Linear(1, 1, bias=False), "mean": metric})
    assert names({"model": module}) == ["model/net.weight"]
    metric.persistent(True)
    with pytest.raises(UnsupportedStateError, match=r"model/mean .*MeanMetric is a persistent metric"):
        capture({"model": module}, rank=0, world_size=1)


def test_a_module_with_its_own_state_dict_is_saved_whole_and_named_once(caplog):
    class WithoutBias(nn.Linear):
        def state_dict(self, *args, **kwargs):
            return {name: value for name, value in super().state_dict(*args, **kwargs).items() if name != "bias"}

    caplog.set_level(logging.WARNING, "holdfast")
    for _ in range(2):
        captured = capture({"model": nn.Sequential(WithoutBias(1, 1))}, rank=0, world_size=1)
        assert [piece.spec.name for piece in captured.pieces] == ["model/0.weight", "model/0.bias"]
    assert caplog.text.count("WithoutBias has a state_dict() of its own") == 1


def test_a_copy_of_an_optimizers_state_is_named_once_because_it_is_not_the_optimizers(caplog):
    caplog.set_level(logging.WARNING, "holdfast")
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    for rank in (1, 0, 0):
        capture({"copied": optimizer.state_dict(), "whole": optimizer}, rank=rank, world_size=2)
    assert caplog.text.count("'copied' holds what an optimizer's state_dict() has returned") == 1
    assert "'whole'" not in caplog.text


@pytest.mark.rule("refuse-inexact")
def test_fsdp1_is_refused_with_the_remedy(monkeypatch):
    module = nn.Linear(1, 1)
    monkeypatch.setattr(module, "__class__", FullyShardedDataParallel)
    with pytest.raises(UnsupportedStateError, match="fully_shard"):
        capture({"model": nn.Sequential(module)}, rank=0, world_size=1)


@pytest.mark.rule("refuse-inexact")
@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"models": [nn.Linear(1, 1)]}, r"models/\[0\] .*key of its own at the top"),
        ({"fn": print}, "fn/ .*set them up in code"),
        ({"a/b": 1}, "not usable"),
        ({1: 1}, "not usable"),
        ({"generator": torch.Generator()}, r"get_state\(\)"),
    ],
)
def test_what_is_not_state_is_refused_by_key(state, message):
    with pytest.raises(StateError, match=message):
        capture(state, rank=0, world_size=1)


def test_declarations_are_checked():
    with pytest.raises(StateError, match="both"):
        Declarations.of(replicated=["a"], per_rank=["a"])
    with pytest.raises(StateError, match="'optimiser' is declared but not in the state"):
        capture({"model": nn.Linear(1, 1)}, rank=0, world_size=1, declared=Declarations.of(per_rank=["optimiser"]))
    module = nn.Linear(1, 1)
    state = {"model": module, "optimizer": torch.optim.SGD(module.parameters(), lr=1.0)}
    with pytest.raises(StateError, match="declare 'optimizer' per rank as well"):
        capture(state, rank=0, world_size=1, declared=Declarations.of(per_rank=["model"]))


@pytest.mark.rule("refuse-inexact")
def test_state_of_a_parameter_outside_all_groups_is_refused_not_dropped():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    optimizer.state[torch.zeros(1)] = {"x": 1}
    with pytest.raises(UnsupportedStateError, match="param_groups"):
        capture({"optimizer": optimizer}, rank=0, world_size=1)


@pytest.mark.rule("refuse-inexact")
def test_tied_weights_are_saved_once_and_stay_tied():
    model = Tied()
    saved = save({"model": model})
    assert sum(map(len, saved.chunks)) == 80
    expected = model.embed.weight.detach().clone()
    for fresh in (Tied(), Tied(tie=False)):
        load({"model": fresh}, [saved])
        assert torch.equal(fresh.embed.weight, expected)
        assert torch.equal(fresh.head.weight, expected)
    tied = {"a": expected, "b": expected}
    kept = save({"x": tied})
    state = {"x": None}
    load(state, [kept])
    assert state["x"]["a"] is not None
    assert torch.equal(state["x"]["a"], state["x"]["b"])


@pytest.mark.parametrize("into_live", [True, False])
def test_values_that_were_saved_apart_come_back_apart_where_they_share_memory(into_live):
    model = nn.Linear(2, 2)
    best = copy.deepcopy(model.state_dict())
    nn.init.ones_(model.weight)
    last = copy.deepcopy(model.state_dict())
    rows = {"min": torch.zeros(3), "max": torch.ones(3), "history": [torch.full((4,), float(at)) for at in range(8)]}
    saved = save({"best": best, "model": model, "rows": rows})
    fresh, same = nn.Linear(2, 2), torch.full((3,), 9.0)
    state = {
        "best": fresh.state_dict(),
        "model": fresh,
        "rows": {"min": same, "max": same, "history": [torch.zeros(4)] * 8},
    }
    load(state, [saved], into_live=into_live)
    assert all(torch.equal(tensor, last[name]) for name, tensor in fresh.state_dict().items())
    assert all(torch.equal(state["best"][name], tensor) for name, tensor in best.items())
    state["rows"]["min"] += 2
    assert state["rows"]["min"].tolist() == [2.0] * 3
    assert state["rows"]["max"].tolist() == [1.0] * 3
    assert [row[0].item() for row in state["rows"]["history"]] == list(range(8))


@pytest.mark.parametrize("into_live", [True, False])
def test_values_that_were_saved_tied_stay_tied(into_live):
    tied = torch.arange(3.0)
    saved = save({"x": {"a": tied, "b": tied}})
    same = torch.zeros(3)
    state = {"x": {"a": same, "b": same}}
    load(state, [saved], into_live=into_live)
    assert state["x"]["a"] is same
    assert state["x"]["b"] is same
    assert torch.equal(same, tied)


@pytest.mark.parametrize("into_live", [True, False])
def test_a_module_and_its_part_are_loaded_both_if_they_were_saved_as_one(into_live):
    model, fresh = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    load({"model": fresh, "part": fresh[0]}, [save({"model": model, "part": model[0]})], into_live=into_live)
    assert torch.equal(fresh[0].weight, model[0].weight)
    before = fresh[0].weight.tolist()
    saved_apart = save({"model": nn.Sequential(nn.Linear(2, 2)), "part": nn.Linear(2, 2)})
    with pytest.raises(StateMismatchError, match=r"one memory with 'model/0\.weight'"):
        load({"model": fresh, "part": fresh[0]}, [saved_apart], into_live=into_live)
    assert fresh[0].weight.tolist() == before, "what arrives apart is compared before it is written"


@pytest.mark.parametrize("into_live", [True, False])
def test_a_list_of_the_models_parameters_keeps_them(into_live):
    model, fresh = nn.Linear(2, 2), nn.Linear(2, 2)
    state = {"clipped": list(fresh.parameters()), "model": fresh}
    load(state, [save({"clipped": list(model.parameters()), "model": model})], into_live=into_live)
    assert all(one is other for one, other in zip(state["clipped"], fresh.parameters(), strict=True))
    assert torch.equal(fresh.weight, model.weight)


@pytest.mark.parametrize("into_live", [True, False])
@pytest.mark.parametrize("ahead", [0.0, 1.0])
def test_a_slot_that_is_the_parameter_itself_stays_it_unless_it_was_saved_apart(into_live, ahead):
    def job(slot_of):
        model = nn.Linear(2, 2, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.state[model.weight]["slow"] = slot_of(model.weight.detach())
        return model.weight, {"optimizer": optimizer, "model": model}

    weight, state = job(lambda parameter: parameter + ahead if ahead else parameter)
    fresh, resumed = job(lambda parameter: parameter)
    load(resumed, [save(state)], into_live=into_live)
    slow = resumed["optimizer"].state[fresh]["slow"]
    assert torch.equal(fresh, weight)
    assert torch.equal(slow, weight + ahead)
    assert (slow.data_ptr() == fresh.data_ptr()) == (ahead == 0)


def test_a_model_that_ties_what_the_checkpoint_does_not_is_refused():
    saved = save({"model": Tied(tie=False)})
    with pytest.raises(StateMismatchError, match=r"ties it to 'model/embed.weight'"):
        load({"model": Tied()}, [saved])


def test_a_tied_tensor_is_loaded_under_whichever_of_its_names_the_checkpoint_has():
    """The model's first one is `embed`, and another library may have kept `head` alone."""
    source = nn.ModuleDict({"head": nn.Linear(4, 5, bias=False)})
    model = Tied()
    report = load({"model": model}, [save({"model": source})])
    assert (report.missing, report.unexpected) == ([], [])
    assert torch.equal(model.embed.weight, source["head"].weight)
    other = save({"model": nn.ModuleDict({"other": nn.Linear(1, 1, bias=False)})})
    before = model.embed.weight.tolist()
    report = load({"model": model}, [other], options=LoadOptions(strict=False))
    assert (report.missing, report.unexpected) == (["model/embed.weight"], ["model/other.weight"])
    excluded = LoadOptions(strict=False, exclude=("model/embed.*",))
    source["head"].weight.data.zero_()
    assert load({"model": model}, [save({"model": source})], options=excluded).excluded == ["model/embed.weight"]
    assert model.head.weight.tolist() == before, "what is excluded under one name stays"


def test_extra_state_and_paths_that_look_alike_come_back():
    class Extra(nn.Linear):
        note = None

        def get_extra_state(self):
            return {"note": self.note, "t": torch.arange(2)}

        def set_extra_state(self, state):
            self.note = state["note"], state["t"].tolist()

    model = nn.Sequential(Extra(1, 1))
    model[0].note = (1, 2)
    values = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}
    saved = save({"model": model, "values": values})
    state = {"model": model, "values": 0}
    load(state, [saved])
    assert model[0].note == ((1, 2), [0, 1])
    assert (state["values"]["a.b"].item(), state["values"]["a"]["b"].item()) == (0, 1)


def test_parameters_among_plain_values_stay_parameters():
    saved = save({"free": [nn.Parameter(torch.ones(2), requires_grad=False), torch.ones(1, requires_grad=True)]})
    state = {"free": None}
    load(state, [saved])
    assert type(state["free"][0]) is nn.Parameter
    assert [tensor.requires_grad for tensor in state["free"]] == [False, True]


class Temperature:
    """Trained beside the model, and keeps the tensors that it is given."""

    def __init__(self, value):
        self.log_alpha = torch.full((1,), value, requires_grad=True)
        self.average = nn.Parameter(torch.full((1,), value), requires_grad=False)

    def state_dict(self):
        return {"log_alpha": self.log_alpha, "average": self.average}

    def load_state_dict(self, state):
        self.log_alpha, self.average = state["log_alpha"], state["average"]


def test_what_an_object_keeps_of_the_state_is_trained_as_before():
    saved, live = save({"temperature": Temperature(0.5)}), Temperature(0.0)
    load({"temperature": live}, [saved])
    assert (live.log_alpha.item(), live.average.item()) == (0.5, 0.5)
    assert (live.log_alpha.requires_grad, live.average.requires_grad) == (True, False)
    assert type(live.average) is nn.Parameter


@pytest.mark.rule("random-state-last")
def test_a_loader_on_another_world_size_refuses_merges_or_is_declared():
    parts = [save({"loader": Merging(position)}, rank, 2) for rank, position in enumerate([3, 5])]
    with pytest.raises(StateMismatchError, match="load_resharded_state_dict"):
        load({"loader": Counting()}, parts)
    merged = Merging()
    load({"loader": merged}, parts)
    assert merged.position == 8
    chosen = Counting()
    load({"loader": chosen}, parts, replicated=["loader"])
    assert chosen.position == 3


@pytest.mark.rule("random-state-last")
def test_ranks_at_equal_places_are_merged_or_refused_too():
    parts = [save({"loader": Place(4)}, rank, 2) for rank in range(2)]
    merged = MergingPlace()
    load({"loader": merged}, parts)
    assert merged.position == 8
    place = Place()
    for saved, rank, world_size in [(parts, 0, 1), (parts, 2, 3), ([save({"loader": Place(4)})], 1, 2)]:
        with pytest.raises(StateMismatchError, match="load_resharded_state_dict"):
            load({"loader": place}, saved, rank, world_size)
    assert place.position == 0
    load({"loader": place}, parts, replicated=["loader"])
    assert place.position == 4


def test_what_is_no_place_in_the_data_goes_on_if_all_ranks_saved_the_same():
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    parts = [save({"scaler": scaler}, rank, 2) for rank in range(2)]
    fresh = torch.amp.GradScaler("cpu")
    load({"scaler": fresh}, parts)
    assert fresh.state_dict() == scaler.state_dict()


def test_a_scheduler_of_a_package_that_is_not_here_goes_on_too():
    base = type("Scheduler", (Place,), {"__module__": "timm.scheduler.scheduler"})
    scheduler = type("CosineLRScheduler", (base,), {})
    parts = [save({"lr_scheduler": scheduler(3)}, rank, 2) for rank in range(2)]
    fresh = scheduler()
    load({"lr_scheduler": fresh}, parts)
    assert fresh.position == 3


def test_a_module_of_each_rank_loses_none_on_fewer_ranks():
    parts = [save({"stage": nn.Linear(1, 1)}, rank, 2, per_rank=["stage"]) for rank in range(2)]
    stage = nn.Linear(1, 1)
    before = stage.weight.item()
    with pytest.raises(StateMismatchError, match="restore on as many ranks as saved it"):
        load({"stage": stage}, parts, per_rank=["stage"])
    assert stage.weight.item() == before


def test_plain_values_that_all_ranks_saved_alike_need_no_declaration():
    parts = [save({"epoch": 4}, rank, 2) for rank in range(2)]
    state = {"epoch": 0}
    load(state, parts)
    assert state == {"epoch": 4}


@pytest.mark.rule("typed-trees")
def test_each_rank_gets_its_own_back():
    parts = [save({"loader": Counting(position)}, rank, 2) for rank, position in enumerate([3, 5])]
    for rank, position in enumerate([3, 5]):
        loader = Counting()
        load({"loader": loader}, parts, rank, 2)
        assert (loader.position, loader.generator.item()) == (position, position)


def untouched(state, saved, message, **options):
    before = {name: value.clone() for name, value in state["model"].state_dict().items()}
    with pytest.raises(StateMismatchError, match=message):
        load(state, [saved], options=LoadOptions(**options))
    for name, value in state["model"].state_dict().items():
        assert torch.equal(value, before[name])


def test_what_does_not_fit_is_refused_by_name_before_anything_changes():
    saved = save({"model": nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))})
    untouched({"model": nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))}, saved, r"model/1.weight.*\(1, 3\).*\(2, 3\)")
    untouched({"model": nn.Sequential(nn.Linear(2, 3))}, saved, "the state lacks it")
    untouched({"model": nn.Sequential(*[nn.Linear(2, 3), nn.Linear(3, 1), nn.Linear(1, 1)])}, saved, "model/2.weight")
    untouched({"model": nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).double()}, saved, "saved as torch.float32")
    untouched({"model": nn.Linear(2, 3), "optimizer": torch.optim.SGD([torch.zeros(1)])}, saved, "does not have it")
    with pytest.raises(StateMismatchError, match="a module was saved and a value is given"):
        load({"model": 3}, [saved])
    with pytest.raises(UnsupportedStateError, match="to_empty"):
        load({"model": nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).to("meta")}, [saved])


def test_partial_cast_and_excluded_loads():
    source = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    saved = save({"model": source})
    grown = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1), nn.Linear(1, 1)).to(torch.bfloat16)
    head = grown[1].weight.detach().clone()
    options = LoadOptions(strict=False, cast=True, exclude=("model/1.*",))
    report = load({"model": grown}, [saved], options=options)
    assert torch.equal(grown[0].weight, source[0].weight.to(torch.bfloat16))
    assert torch.equal(grown[1].weight, head)
    assert report.missing == ["model/2.weight", "model/2.bias"]
    assert report.excluded == ["model/1.weight", "model/1.bias"]


def test_an_optimizer_over_other_parameters_is_refused():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    saved = save({"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)})
    fewer = {"model": model, "optimizer": torch.optim.SGD(model[0].parameters(), lr=0.1)}
    untouched(fewer, saved, r"only the checkpoint has 'model/1.bias'")
    split = [{"params": model[0].parameters()}, {"params": model[1].parameters()}]
    untouched({"model": model, "optimizer": torch.optim.SGD(split, lr=0.1)}, saved, "1 parameter groups were saved")


def test_an_expanded_buffer_takes_its_values():
    module = nn.Module()
    module.register_buffer("scale", torch.arange(2.0).expand(3, 2))
    saved = save({"model": module})
    module.scale = torch.zeros(2).expand(3, 2)
    load({"model": module}, [saved])
    assert torch.equal(module.scale, torch.arange(2.0).expand(3, 2))


@pytest.mark.rule("refuse-inexact")
def test_ten_thousand_tensors_and_an_empty_state_save_and_load():
    state = {"values": [torch.full((2,), float(at)) for at in range(10_000)]}
    saved = save(state)
    fresh = {"values": None}
    load(fresh, [saved])
    assert all(torch.equal(a, b) for a, b in zip(state["values"], fresh["values"], strict=True))
    load({}, [save({})])
