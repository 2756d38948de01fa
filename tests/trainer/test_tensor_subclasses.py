"""Tensor subclasses: the tensors inside are stored, the class is told by its name, and nothing is pickled."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.support.ranks import launched, read_until
from tests.trainer.conftest import Service
from tests.trainer.gloo import run_ranks
from tests.trainer.roundtrip import load, save
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.serialization import safe_globals

import holdfast
from holdfast.errors import ConfigurationError, StateMismatchError, TreeFormatError, UnsupportedStateError
from holdfast.export.pull import Format, pull
from holdfast.state.capture import capture
from holdfast.state.components import Declarations, path_of
from holdfast.state.load import LoadOptions
from holdfast.state.tensors import dtensor_around
from holdfast.state.tree import check_known, decode_tree, encode_tree
from holdfast.state.wrappers import leaves, take_apart
from holdfast_protocol.index_documents import ShardIndex
from holdfast_protocol.runs import Latest, parse_run


def needs(library: str) -> Any:
    return pytest.mark.skipif(importlib.util.find_spec(library) is None, reason=f"{library} is not installed")


torchao = needs("torchao")
bitsandbytes = needs("bitsandbytes")


class Mode(Enum):
    ROUND = "round"
    CUT = "cut"


@dataclass(frozen=True)
class Settings:
    mode: Mode
    bits: int = 8


class Extent(NamedTuple):
    low: float
    high: float


class Scaled(torch.Tensor):
    """Codes with a scale for all, as quantized weights are."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, settings: Any) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, settings: Any) -> None:
        self.codes, self.scale, self.settings = codes, scale, settings

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], {"settings": self.settings}

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, metadata: Any, size: Any, stride: Any) -> Scaled:
        return cls(inner["codes"], inner["scale"], metadata["settings"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A DTensor takes a view of the same shape.
        if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            return cls(args[0].codes, args[0].scale, args[0].settings)
        raise NotImplementedError(func)


class Precomputed(Scaled):
    """Its scale comes with the first step, as that of torchao's weights for float8 training."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", *(["scale"] if self.scale is not None else [])], {"settings": self.settings}


SETTINGS = (Settings(Mode.CUT, 4), Extent(-1.0, float("inf")), torch.Size([2]), torch.bfloat16)
KNOWN = [Scaled, Settings, Mode, Extent]


@pytest.fixture
def known() -> Iterator[None]:
    with safe_globals(KNOWN):
        yield


def scaled(start: int, shape: tuple[int, ...] = (2, 3), settings: Any = SETTINGS) -> Scaled:
    codes = torch.arange(start, start + 6, dtype=torch.int8).reshape(shape)
    return Scaled(codes, torch.tensor(0.5 + start), settings)


def insides(tensor: torch.Tensor) -> dict[str, list[Any]]:
    return {path: inner.tolist() for path, inner in leaves("", tensor)}


def module_of(start: int, settings: Any = SETTINGS) -> nn.Module:
    module = nn.Linear(3, 2, bias=False)
    module.weight = nn.Parameter(scaled(start, settings=settings), requires_grad=False)
    module.tied = module.weight
    module.register_buffer("table", scaled(start + 50, settings=settings))
    return module


def test_the_tensors_of_a_module_come_back_in_place(known: None) -> None:
    saved = save({"model": module_of(1)})
    assert sorted(spec.name for spec in saved.plan.specs) == [
        *("model/table:codes", "model/table:scale", "model/tied:codes", "model/tied:scale"),
        *("model/weight:codes", "model/weight:scale"),
    ]
    live = module_of(90)
    weight, codes = live.weight, live.weight.codes
    load({"model": live}, [saved])
    assert live.weight is weight
    assert live.weight.codes is codes
    assert insides(live.weight) == insides(scaled(1))
    assert insides(live.table) == insides(scaled(51))


def test_slots_and_values_are_made_again_with_their_metadata(known: None) -> None:
    parameter = nn.Parameter(torch.zeros(2, 3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter] = {"mean": scaled(7)}
    saved = save({"optimizer": optimizer, "ema": {"w": scaled(9)}})
    fresh = torch.optim.SGD([nn.Parameter(torch.ones(2, 3))], lr=0.1)
    state: dict[str, Any] = {"optimizer": fresh, "ema": {}}
    load(state, [saved])
    [slots] = fresh.state.values()
    for made, expected in [(slots["mean"], scaled(7)), (state["ema"]["w"], scaled(9))]:
        assert type(made) is Scaled
        assert insides(made) == insides(expected)
        assert made.settings == SETTINGS
        assert [type(each) for each in made.settings] == [Settings, Extent, torch.Size, torch.dtype]


def test_a_class_with_two_names_on_torchs_list_has_one_in_all_processes() -> None:
    # The list is a set, so its order is another one in each process.
    with safe_globals([*KNOWN, *((Scaled, f"name{each}") for each in range(8))]):
        taken = take_apart("w", scaled(1))
        assert taken is not None
        assert taken.kind == "name0"
        load({"model": module_of(90)}, [save({"model": module_of(1)})])


def test_a_subclass_within_a_subclass_comes_back(known: None) -> None:
    nested = Scaled(scaled(3), torch.tensor(2.0), None)
    state: dict[str, Any] = {"ema": {}}
    load(state, [save({"ema": {"w": nested}})])
    assert type(state["ema"]["w"].codes) is Scaled
    assert insides(state["ema"]["w"]) == insides(nested)


def test_what_is_declared_frozen_by_its_own_name_is_so_with_all_that_is_inside(known: None) -> None:
    model = nn.ParameterDict({name: nn.Parameter(scaled(at), requires_grad=False) for at, name in enumerate("ab")})
    nested = {"w": Scaled(scaled(3), torch.tensor(2.0), None), "x": torch.zeros(2)}
    declared = Declarations.of(frozen=["model/b", "ema/w"])
    found = capture({"model": model, "ema": nested}, rank=0, world_size=1, declared=declared)
    names = {path_of(spec.name, spec.component) for spec in found.specs if spec.pack == "declared"}
    parts = ("w:codes:codes", "w:codes:scale", "w:scale")
    assert names == {"model/b:codes", "model/b:scale", *(f"ema/{part}" for part in parts)}


@pytest.mark.rule("refuse-inexact")
def test_a_class_that_is_not_on_torchs_list_is_refused_by_its_name_and_with_the_remedy() -> None:
    with pytest.raises(UnsupportedStateError, match=r"model/weight.*test_tensor_subclasses\.Scaled.*add_safe_globals"):
        capture({"model": module_of(1)}, rank=0, world_size=1)
    with safe_globals([Scaled]), pytest.raises(UnsupportedStateError, match=r"weight.*Settings.*add_safe_globals"):
        capture({"model": module_of(1)}, rank=0, world_size=1)
    with safe_globals(KNOWN), pytest.raises(UnsupportedStateError, match=r"ema.*Settings"):
        capture({"ema": Settings(Mode.CUT)}, rank=0, world_size=1)  # the list is for tensors, not for plain values


def test_what_was_built_otherwise_is_refused_before_anything_changes(known: None) -> None:
    saved = save({"model": module_of(1)})
    for live in [module_of(90, settings=None), module_of(90, settings=(Settings(Mode.ROUND, 4), *SETTINGS[1:]))]:
        before = copy.copy(insides(live.weight))
        with pytest.raises(StateMismatchError, match=r"model/weight.*quantize it in the same way"):
            load({"model": live}, [saved])
        assert insides(live.weight) == before
    with pytest.raises(StateMismatchError, match="does not have it"):
        load({"model": nn.Linear(3, 2, bias=False)}, [saved])


def test_what_has_other_tensors_inside_by_now_is_refused_by_their_names() -> None:
    codes = scaled(1).codes
    states = [{"model": nn.Module()} for _ in range(2)]
    for state, scale in zip(states, (torch.tensor(2.0), None), strict=True):
        inside: Any = codes, scale, None
        state["model"].weight = nn.Parameter(Precomputed(*inside), requires_grad=False)
    with (
        safe_globals([Precomputed]),
        pytest.raises(StateMismatchError, match=r"model/weight.*codes, scale inside, and has codes now.*before the"),
    ):
        load(states[1], [save(states[0])])


@pytest.mark.parametrize("pattern", ["model/weight", "model/weight:scale", "model/w*"])
def test_what_is_excluded_is_left_as_it_is_with_all_that_is_inside(known: None, pattern: str) -> None:
    saved = save({"model": module_of(1)})
    live = module_of(90, settings=None)
    live.table = scaled(90)
    live.tied = None
    report = load({"model": live}, [saved], options=LoadOptions(strict=False, exclude=(pattern,)))
    assert insides(live.weight) == insides(scaled(90))
    assert insides(live.table) == insides(scaled(51))
    assert report.excluded == ["model/weight:codes", "model/weight:scale"]


def test_what_is_excluded_may_be_plain_here(known: None) -> None:
    saved, live = save({"model": module_of(1)}), nn.Linear(3, 2, bias=False)
    live.register_buffer("table", scaled(90))
    load({"model": live}, [saved], options=LoadOptions(exclude=("model/weight", "model/tied")))
    assert insides(live.table) == insides(scaled(51))


def test_a_class_that_the_restoring_process_does_not_know_is_refused_before_anything_changes() -> None:
    notes = {"count": 1}
    with safe_globals(KNOWN):
        saved = save({"ema": {"w": scaled(9)}})
    with pytest.raises(StateMismatchError, match=r"Scaled.*import the library"):
        load({"ema": notes}, [saved])
    with safe_globals([Scaled]), pytest.raises(StateMismatchError, match=r"Mode.*import the library"):
        load({"ema": notes}, [saved])
    assert notes == {"count": 1}


@pytest.mark.parametrize("change", ["class", "field", "size", "whole", "no tensors", "a number inside"])
def test_a_hostile_index_makes_no_other_object(known: None, change: str) -> None:
    encoded = encode_tree(scaled(1), name_tensor=lambda path, _: decode_tree({"tensor": [path, "cpu", False, False]}))
    payload = encoded["wrapped"]
    if change == "class":
        payload[0] = f"{__name__}.Settings"
    elif change == "field":
        payload[4] = {"known": [f"{__name__}.Settings", {"dict": [["mode", 1], ["more", 2]]}]}
    elif change == "size":
        payload[1] = [float("inf")]  # JSON's 1e999
    elif change == "whole":
        payload[3] = [[2, 3], [3, 1], ["a"]]
    else:
        payload[-1] = [] if change == "no tensors" else [["codes", 1], ["scale", 2]]
    with pytest.raises(TreeFormatError):
        check_known(encoded)


def sharded(rank: int, start: int, dims: list[Any]) -> DTensor:
    """Four rows, on all ranks together or on each."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    rows, start = (4 // mesh.size(), start + 10 * rank) if isinstance(dims[0], Shard) else (4, start)
    codes = torch.arange(start, start + 3 * rows, dtype=torch.int8).reshape(rows, 3)
    local = Scaled(codes, torch.tensor(0.5 + start), SETTINGS)
    return DTensor.from_local(local, mesh, dims, run_check=False, shape=torch.Size([4, 3]), stride=(3, 1))


def shards_are_saved(rank: int, world_size: int) -> tuple[Any, ...]:
    with safe_globals(KNOWN):
        state = sharded_state(rank, 1)
        return save(state, rank, world_size), shards_of(state)


def sharded_state(rank: int, start: int) -> dict[str, Any]:
    module = nn.Linear(3, 2, bias=False)
    module.weight = nn.Parameter(sharded(rank, start, [Shard(0)]), requires_grad=False)
    module.register_buffer("whole", sharded(rank, start + 70, [Replicate()]))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return {"model": module, "optimizer": optimizer, "ema": {"w": sharded(rank, start + 30, [Shard(0)])}}


def shards_of(state: dict[str, Any]) -> list[Any]:
    sharded = state["model"].weight, state["model"].whole, state["ema"]["w"]
    return [insides(each.to_local()) for each in sharded]


def shards_are_loaded(rank: int, world_size: int, saved: list[Any], only: str | None = None) -> Any:
    with safe_globals(KNOWN):
        state = sharded_state(rank, 40)
        if only == "ema":
            state = {"ema": state["ema"]}
        elif only == "an empty ema":
            state = {"ema": {}}
        try:
            load(state, saved, rank, world_size)
        except StateMismatchError as error:
            return str(error)
        return shards_of(state)


def test_each_shard_of_a_dtensor_gets_its_own_back_and_another_number_of_shards_is_refused() -> None:
    results = run_ranks(shards_are_saved, 2, 2)
    saved = [part for part, _ in results]
    assert run_ranks(shards_are_loaded, 2, 2, saved) == [values for _, values in results]
    [refused] = run_ranks(shards_are_loaded, 1, 1, saved)
    assert "model/weight" in refused
    assert "restore on as many ranks as saved it" in refused
    [refused] = run_ranks(shards_are_loaded, 1, 1, saved, "ema")
    assert "restore on as many ranks as saved it" in refused
    for refused in run_ranks(shards_are_loaded, 2, 2, saved, "an empty ema"):
        assert "build it as it was saved" in refused


def offloaded_state(rank: int, start: int) -> dict[str, Any]:
    """As CPUOffloadPolicy of fully_shard has it: a mesh of GPUs, and all parts on the host."""
    mesh = DeviceMesh("cuda", [0, 1], _init_backend=False)

    def of_all(local: torch.Tensor) -> DTensor:
        return dtensor_around(local, mesh, [Shard(0)], (4, 3), (3, 1))

    module = nn.Module()
    module.frozen = nn.Parameter(of_all(scaled(start + 10 * rank)), requires_grad=False)
    module.trained = nn.Parameter(of_all(torch.full((2, 3), float(start + rank))))
    return {"model": module, "optimizer": torch.optim.SGD([module.trained], lr=0.1)}


def offloaded_is_saved_and_loaded(rank: int, world_size: int, saved: list[Any] | None) -> Any:
    with safe_globals(KNOWN):
        state = offloaded_state(rank, 1 if saved is None else 40)
        module, slots = state["model"], state["optimizer"].state
        if saved is None:
            parts = scaled(70 + rank), torch.full((2, 3), 7.0 + rank)
            slots[module.trained] = {
                f"slot{at}": dtensor_around(part, module.trained.device_mesh, [Shard(0)], (4, 3), (3, 1))
                for at, part in enumerate(parts)
            }
        made = save(state, rank, world_size) if saved is None else load(state, saved, rank, world_size)
        parts = module.frozen, module.trained, *slots[module.trained].values()
        with torch.no_grad():
            return made, [insides(part.to_local()) for part in parts]


def test_parts_that_are_offloaded_to_the_host_come_back_there() -> None:
    results = run_ranks(offloaded_is_saved_and_loaded, 2, 2, None)
    again = run_ranks(offloaded_is_saved_and_loaded, 2, 2, [made for made, _ in results])
    assert [values for _, values in again] == [values for _, values in results]


def test_a_pull_writes_the_tensors_inside_also_where_the_class_is_not_known_and_hf_refuses(
    run: str, service: Service, tmp_path: Path
) -> None:
    with safe_globals(KNOWN):
        module = module_of(1)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        optimizer.state[module.weight] = {"mean": scaled(7)}
        with holdfast.Checkpointer(run) as ckpt:
            ckpt.restore({})
            ckpt.save(0, {"model": module, "optimizer": optimizer}).committed.result(timeout=60)
        first, table, mean = insides(scaled(1)), insides(scaled(51)), insides(scaled(7))
    chosen = parse_run(run), Latest()
    pull(service.client, *chosen, tmp_path / "out", Format.TORCH)
    model = torch.load(tmp_path / "out" / "model.pt", weights_only=True)
    assert {name: value.tolist() for name, value in model.items()} == {
        **{f"{name}{path}": inner for name in ("weight", "tied") for path, inner in first.items()},
        **{f"table{path}": inner for path, inner in table.items()},
    }
    slots = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True)["state"][0]
    assert {f":{name}": value.tolist() for name, value in slots["mean"].items()} == mean
    with pytest.raises(ConfigurationError, match="is a tensor subclass"):
        pull(service.client, *chosen, tmp_path / "hf", Format.HF)


def ended(run: str, *arguments: object) -> list[str]:
    with launched("tests.support.quantized_rank", run, *arguments) as [rank]:
        return read_until(rank, "digest")[-1].split()


@torchao
@pytest.mark.parametrize(
    ("weights", "library", "optimizer", "slot"),
    [
        ("int8", "torchao.optim", "AdamW8bit", "OptimState8bit:torch.float32"),
        ("int4", "torchao.optim", "AdamW4bit", "OptimState4bit:torch.float32"),
        ("float8", "torchao.optim", "AdamWFp8", "OptimStateFp8:torch.float32"),
        pytest.param("int8", "bitsandbytes.optim", "AdamW8bit", "Tensor:torch.uint8", marks=bitsandbytes),
    ],
)
def test_a_killed_job_with_quantized_weights_and_optimizer_resumes_bit_for_bit(
    run: str, service: Service, weights: str, library: str, optimizer: str, slot: str
) -> None:
    project, name = run.split("/")
    service.client.runs.create(project, f"{name}-whole")
    whole = ended(f"{run}-whole", weights, library, optimizer, 6, -1)
    with launched("tests.support.quantized_rank", run, weights, library, optimizer, 6, 2) as [rank]:
        assert rank.wait(timeout=120) == -9
    assert ended(run, weights, library, optimizer, 6, -1) == whole
    assert whole[-1] == slot


def eight_bits_on_ranks(rank: int, saved: list[Any] | None) -> Any:
    from torch.distributed.fsdp import fully_shard
    from torchao.optim import AdamW8bit

    torch.compiler.set_stance("force_eager")
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(64, 128, bias=False), mesh=init_device_mesh("cpu", (2,)))
    optimizer = AdamW8bit(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    if saved is not None:
        load(state, saved, rank, 2)

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()

    def digest() -> Any:
        [slots] = optimizer.state.values()
        return [insides(slots[each].to_local()) for each in ("exp_avg", "exp_avg_sq")]

    if saved is None:
        step()
    made = save(state, rank, 2) if saved is None else None
    step()
    return made, digest(), [parameter.to_local().tolist() for parameter in model.parameters()]


@torchao
def test_torchaos_optimizer_over_sharded_weights_goes_on_bit_for_bit() -> None:
    first = run_ranks(eight_bits_on_ranks, 2, None)
    resumed = run_ranks(eight_bits_on_ranks, 2, [saved for saved, *_ in first])
    assert [each[1:] for each in resumed] == [each[1:] for each in first]
    assert ShardIndex.decode(first[0][0].index).replicated_trees["optimizer"]
