"""Megatron-core's sharded state dicts: ranks that end without a word resume bit for bit, on other sizes too."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from enum import Enum, Flag
from typing import Any

import pytest
import torch
from tests.trainer.gloo import run_ranks
from torch import nn

import holdfast
from holdfast.errors import NoRestorePoint

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed: docs/integrations.md"
)
ROWS = 8


class Rope(Enum):
    """Of a library that has entered it into torch's list, as Megatron does with its own enums."""

    NONE = "none"


torch.serialization.add_safe_globals([Rope])
ARGUMENTS = Namespace(lr=0.1, betas=(0.9, 0.95), rope=[Rope.NONE])


class Job:
    """A linear layer whose rows are shared by the ranks, as tensor parallel does, with Adam."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        torch.manual_seed(0)
        part = ROWS // world_size
        self.weight = nn.Parameter(torch.randn(ROWS, 5)[part * rank : part * (rank + 1)].clone())
        self.bias = nn.Parameter(torch.zeros(ROWS)[part * rank : part * (rank + 1)].clone())
        self.optimizer = torch.optim.Adam([self.weight, self.bias], lr=0.1)
        self.steps = 0

    def step(self) -> None:
        inputs = torch.randn(3, 5, generator=torch.Generator().manual_seed(self.steps)) + torch.rand(())
        (nn.functional.linear(inputs, self.weight, self.bias) - 1).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def sharded_state_dict(self, ranks_own: bool = True) -> dict[str, Any]:
        from megatron.core.dist_checkpointing import ShardedTensor

        def shard(name: str, value: torch.Tensor) -> Any:
            return ShardedTensor.from_rank_offsets(name, value.detach(), (0, self.rank, self.world_size))

        def slot(parameter: torch.Tensor, name: str) -> torch.Tensor:
            return self.optimizer.state.get(parameter, {}).get(name, torch.zeros_like(parameter))

        parameters = {"weight": self.weight, "bias": self.bias}
        slots = {f"{key}.{name}": (key, name) for key in parameters for name in ("exp_avg", "exp_avg_sq")}
        return {
            "model": {key: shard(key, value) for key, value in parameters.items()},
            "optimizer": {key: shard(key, slot(parameters[of], name)) for key, (of, name) in slots.items()},
            "iteration": self.steps,
            "args": ARGUMENTS,
        } | ({"random": self.random()} if ranks_own else {})

    def random(self) -> Any:
        from megatron.core.dist_checkpointing.mapping import ShardedObject

        return ShardedObject("random", [torch.get_rng_state()], (self.world_size,), (self.rank,))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["args"] == ARGUMENTS
        if "random" in state:
            torch.set_rng_state(state["random"][0])
        self.steps = state["iteration"]
        for key, parameter in {"weight": self.weight, "bias": self.bias}.items():
            parameter.data.copy_(state["model"][key])
            slots = {name: state["optimizer"][f"{key}.{name}"] for name in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = {"step": torch.tensor(float(self.steps)), **slots}

    def values(self) -> list[Any]:
        slots = [each.tolist() for own in self.optimizer.state.values() for each in own.values()]
        return [self.weight.tolist(), self.bias.tolist(), slots]


def trained(rank: int, run: str, steps: int) -> tuple[int, list[Any], list[Any]]:
    """Where it began, with what, and what it has at the end. It ends without a word."""
    from holdfast.integrations import megatron

    job = Job(rank, torch.distributed.get_world_size())
    ckpt = holdfast.Checkpointer(run, save=holdfast.OnPreemption())
    try:
        start, state = megatron.load(ckpt, job.sharded_state_dict(ranks_own=job.world_size == 2))
        job.load_state_dict(state)
    except NoRestorePoint:
        start = 0
    began_with = job.values()
    for step in range(start, steps):
        job.step()
        megatron.save(ckpt, step, job.sharded_state_dict())
    return start, began_with, job.values()


def joined(ranks: list[Any]) -> list[Any]:
    """The rows of all ranks, of each value."""
    return [[row for each in ranks for row in each[at]] for at in range(2)]


def test_ranks_that_ended_resume_bit_for_bit_and_other_parallel_sizes_get_the_same_rows(run: str, service: Any) -> None:
    project, name = run.split("/")
    service.client.runs.create(project, f"{name}-whole")
    whole = run_ranks(trained, 2, f"{run}-whole", 5)
    run_ranks(trained, 2, run, 2)
    resumed = run_ranks(trained, 2, run, 5)
    assert [start for start, *_ in resumed] == [2, 2]
    assert [end for *_, end in resumed] == [end for *_, end in whole]
    for world_size in (1, 4):
        again = run_ranks(trained, world_size, run, 5)
        assert joined([began for _, began, _ in again]) == joined([end for *_, end in resumed])


class Odd:
    pass


class Unlisted(Enum):
    ONE = 1


class Parts(Flag):
    ONE = 1
    TWO = 2


torch.serialization.add_safe_globals([Parts])


def with_odd_values(rank: int, run: str) -> list[str]:
    from holdfast.integrations import megatron

    ckpt, said = holdfast.Checkpointer(run, save=holdfast.OnPreemption()), []
    for value in (Odd(), Namespace(kind=Unlisted.ONE), Namespace(kind=Parts.ONE | Parts.TWO)):
        try:
            megatron.save(ckpt, 0, {**Job(rank, 1).sharded_state_dict(), "args": value})
        except BaseException as error:  # DCP's own is no Exception
            said.append(str(error))
    return said


def test_a_value_that_needs_pickle_is_refused_by_its_class(run: str) -> None:
    [said] = run_ranks(with_odd_values, 1, run)
    for refused, kind in zip(said, ("Odd", "Unlisted", "Parts"), strict=True):
        assert "UnsupportedStateError" in refused
        assert f"test_megatron.{kind}" in refused
