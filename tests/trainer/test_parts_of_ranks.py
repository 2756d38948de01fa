"""Ranks that do not hold the same: pipeline stages, and what rank 0 alone has. On real gloo ranks."""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.trainer.gloo import run_ranks
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import holdfast
from holdfast.errors import StateMismatchError
from holdfast.save import saver

OWN = ["model", "optimizer"]


def stage_of(rank: int, seed: int, names: str, dims: tuple[str, str] = ("pp", "dp")) -> dict[str, Any]:
    """Of two stages; on four ranks each is sharded over two. Layers are named by their place in the whole, or alike."""
    width = dist.get_world_size() // 2
    stage = rank // width if dims[0] == "pp" else rank % width
    torch.manual_seed(seed + stage)
    place = 2 * stage if names == "apart" else 0
    module = nn.Sequential(OrderedDict((str(place + at), nn.Linear(4, 4)) for at in range(2)))
    if width > 1:
        fully_shard(module, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=dims)["dp"])
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter) * (stage + 1)
    optimizer.step()
    return {"model": module, "optimizer": optimizer, "stage": stage}


def whole(state: dict[str, Any]) -> Any:
    found = {}
    for name, parameter in state["model"].named_parameters():
        for slot, value in [("", parameter), *state["optimizer"].state.get(parameter, {}).items()]:
            found[name, slot] = (value.full_tensor() if isinstance(value, DTensor) else value).detach().tolist()
    return found, state["stage"]


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage()


def saved_and_resumed(rank: int, run: str, names: str, per_rank: list[str]) -> tuple[bool, str]:
    state, resumed = stage_of(rank, 1, names), stage_of(rank, 50, names)
    logging.getLogger("holdfast").addHandler(heard := Heard())
    for each, step in [(state, 0), (resumed, 1)]:
        with holdfast.Checkpointer(run, save=holdfast.OnPreemption(), per_rank=per_rank) as checkpointer:
            assert checkpointer.restore(each) == step
            if step == 0:
                checkpointer.save(0, state).committed.result(timeout=60)
    return whole(resumed) == whole(state), heard.text


@pytest.mark.rule("bit-exact-resume")
@pytest.mark.parametrize("names", ["apart", "alike"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_pipeline_stages_that_are_declared_per_rank_come_back(run: str, world_size: int, names: str) -> None:
    assert run_ranks(saved_and_resumed, world_size, run, names, OWN) == [(True, "")] * world_size


def resumed_in_another_mesh(rank: int, run: str) -> tuple[str, bool]:
    """The stages were ranks 0 and 1, and 2 and 3; now they are 0 and 2, and 1 and 3."""
    with holdfast.Checkpointer(run, save=holdfast.OnPreemption(), per_rank=OWN) as checkpointer:
        state = stage_of(rank, 1, "alike")
        checkpointer.restore(state)
        checkpointer.save(0, state).committed.result(timeout=60)
    others = stage_of(rank, 50, "alike", dims=("dp", "pp"))
    before = whole(others)
    with holdfast.Checkpointer(run, save=holdfast.OnPreemption(), per_rank=OWN) as checkpointer:
        try:
            checkpointer.restore(others)
        except StateMismatchError as error:
            return str(error), whole(others) == before
    return "restored", False


@pytest.mark.rule("bit-exact-resume")
def test_stages_of_as_many_ranks_in_another_mesh_are_refused_and_nothing_has_changed(run: str) -> None:
    """A rank must not get the stage of those that have the same number."""
    for told, is_unchanged in run_ranks(resumed_in_another_mesh, 4, run):
        assert "the checkpoint does not have it" in told
        assert is_unchanged


@pytest.mark.rule("bit-exact-resume")
@pytest.mark.parametrize("world_size", [2, 4])
def test_stages_that_collide_undeclared_are_told_with_the_remedy(run: str, world_size: int) -> None:
    told = [text for _, text in run_ranks(saved_and_resumed, world_size, run, "alike", [])]
    assert "other values of 'model/0." in told[0]
    assert 'per_rank=["model", "optimizer"]' in told[0]
    assert not any(told[1:])


def stages_undeclared(rank: int, run: str) -> str:
    state = stage_of(rank, 1, "apart")
    with holdfast.Checkpointer(run, save=holdfast.OnPreemption()) as checkpointer:
        checkpointer.restore(state)
        try:
            checkpointer.save(0, state).committed.result(timeout=60)
        except ValueError as error:
            return str(error)
    return "saved"


@pytest.mark.rule("bit-exact-resume")
@pytest.mark.parametrize("world_size", [2, 4])
def test_stages_of_other_names_are_refused_undeclared(run: str, world_size: int) -> None:
    refused = run_ranks(stages_undeclared, world_size, run)
    assert all("declared per rank" in each for each in refused), refused


def save_where_rank_1_cannot_compare(rank: int, run: str) -> str:
    def fail(captured: Any) -> Any:
        raise TypeError("this device has no float64")

    if rank == 1:
        saver.shared_by = fail
    state = {"model": nn.Linear(2, 2)}
    with holdfast.Checkpointer(run, save=holdfast.OnPreemption()) as checkpointer:
        checkpointer.restore(state)
        try:
            checkpointer.save(0, state).committed.result(timeout=60)
        except TypeError as error:
            return str(error)
    return "saved"


@pytest.mark.rule("one-vote-per-step")
def test_a_rank_that_cannot_compare_fails_the_save_on_all_ranks(run: str) -> None:
    refused = run_ranks(save_where_rank_1_cannot_compare, 2, run)
    assert refused == ["On rank 1: this device has no float64", "this device has no float64"]


def only_on_rank_0(rank: int, run: str) -> Any:
    """Horovod's way: the others get what they need from rank 0 by broadcast, and have no such component."""
    history: dict[str, Any] = {"seen": []}
    with holdfast.Checkpointer(run, save=holdfast.OnPreemption()) as checkpointer:
        state = {"model": nn.Linear(2, 2)} | ({"history": history} if rank == 0 else {})
        start = checkpointer.restore(state)
        history["seen"] = [*state.get("history", history)["seen"], start] if rank == 0 else []
        checkpointer.save(start, state | ({"history": history} if rank == 0 else {})).committed.result(timeout=60)
    return history["seen"]


@pytest.mark.rule("bit-exact-resume")
def test_what_rank_0_alone_has_comes_back_to_it(run: str) -> None:
    assert run_ranks(only_on_rank_0, 2, run) == [[0], []]
    assert run_ranks(only_on_rank_0, 2, run) == [[0, 1], []]


def only_on_rank_1(rank: int, run: str) -> str:
    model = nn.Linear(2, 2)
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=0.1), step_size=1)
    state = {"model": model} | ({"lr_scheduler": scheduler} if rank == 1 else {})
    with holdfast.Checkpointer(run, save=holdfast.OnPreemption()) as checkpointer:
        checkpointer.restore(state)
        try:
            checkpointer.save(0, state).committed.result(timeout=60)
        except ValueError as error:
            return str(error)
    return "saved"


@pytest.mark.rule("bit-exact-resume")
def test_what_ranks_share_and_rank_0_lacks_is_refused(run: str) -> None:
    """It would be in no index, and a resume of rank 1 would find that the checkpoint has none."""
    refused = run_ranks(only_on_rank_1, 2, run)
    assert all("rank 1 shares component 'lr_scheduler'" in each for each in refused), refused


def of_two_dtypes(rank: int, run: str) -> str:
    part = torch.ones(2, dtype=torch.float32 if rank == 0 else torch.bfloat16)
    weight = DTensor.from_local(part, init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False)
    with holdfast.Checkpointer(run, save=holdfast.OnPreemption()) as checkpointer:
        try:
            dcp.save({"weight": weight}, storage_writer=checkpointer.writer(0))
        except CheckpointException as error:
            return str(error)
    return "saved"


def test_ranks_that_disagree_on_the_dtype_of_a_tensor_are_refused_by_its_name_in_ones_own_dcp_save(run: str) -> None:
    refused = run_ranks(of_two_dtypes, 2, run)
    assert all("rank 1 describes tensor 'weight'" in each for each in refused), refused
    assert all("bfloat16" in each and "float32" in each for each in refused), refused
