"""Small training jobs for the SDK's tests: the same everywhere, deterministic, importable by spawned ranks."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import holdfast

Kind = Literal["plain", "ddp", "fsdp"]


class Net(nn.Module):
    """Sizes that no world size divides, a parameter that never gets a gradient, a tied pair, a 0-d parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 5)
        self.scale = nn.Parameter(torch.ones(1))
        self.never = nn.Parameter(torch.full((3,), 2.0))
        self.drop = nn.Dropout(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(torch.tanh(self.up(x)))) * self.scale


class Position:
    """A data loader's place: how many batches it gave, and its own generator."""

    def __init__(self, rank: int) -> None:
        self.given = 0
        self.generator = torch.Generator().manual_seed(100 + rank)

    def batch(self) -> torch.Tensor:
        self.given += 1
        return torch.randn(6, 5, generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]
        self.generator.set_state(state["generator"])


def make_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=0.01)
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.1)
    assert name == "momentum"
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@dataclass
class Job:
    """One rank's training job. Every draw it makes comes from a generator that a checkpoint holds."""

    rank: int = 0
    kind: Kind = "plain"
    optimizer: str = "adamw"
    seed: int = 0
    loader: bool = True
    state: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        random.seed(self.seed + self.rank)
        np.random.seed(self.seed + self.rank)
        model: nn.Module = Net()
        if self.kind == "ddp":
            model = DistributedDataParallel(model, find_unused_parameters=True)
        elif self.kind == "fsdp":
            model = fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer = make_optimizer(self.optimizer, model.parameters())
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 6], gamma=0.5)
        torch.manual_seed(1000 + self.rank)
        self.state = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler}
        if self.loader:
            self.state["dataloader"] = Position(self.rank)
            self.state["notes"] = {"seen": []}

    def step(self, step: int) -> float:
        model, optimizer = self.state["model"], self.state["optimizer"]
        batch = self.state["dataloader"].batch() if self.loader else _batch_of(step)
        if self.loader:
            batch = batch + random.random() + np.random.rand() + torch.rand(())
            self.state["notes"]["seen"].append(step)
        optimizer.zero_grad()
        loss = (model(batch) - batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        self.state["lr_scheduler"].step()
        return float(loss.detach())


def _batch_of(step: int) -> torch.Tensor:
    """The same on every rank and world size."""
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(step))


def values(state: dict[str, Any]) -> dict[str, Any]:
    """All that a state holds, whole and comparable with ==: tensors as (dtype, shape, bytes). A collective for fsdp."""
    optimizer = state["optimizer"]
    found: dict[str, Any] = {name: _plain(tensor) for name, tensor in state["model"].state_dict().items()}
    for at, group in enumerate(optimizer.param_groups):
        found[f"group{at}"] = {name: value for name, value in group.items() if name != "params"}
        for place, parameter in enumerate(group["params"]):
            for slot, value in optimizer.state.get(parameter, {}).items():
                found[f"slot{at}.{place}.{slot}"] = _plain(value)
    found["lr_scheduler"] = state["lr_scheduler"].state_dict()
    if "dataloader" in state:
        position = state["dataloader"]
        found["dataloader"] = (position.given, _plain(position.generator.get_state()))
        found["notes"] = state["notes"]
    return {name.removeprefix("module."): value for name, value in found.items()}


def random_numbers() -> tuple[Any, ...]:
    """The generators of this process, comparable."""
    numpy_state = np.random.get_state(legacy=True)
    return random.getstate(), str(numpy_state), torch.get_rng_state().numpy().tobytes()


def _plain(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    whole = whole.detach().contiguous()
    return str(whole.dtype), tuple(whole.shape), whole.reshape(-1).view(torch.uint8).numpy().tobytes()


@dataclass
class Trained:
    """What a rank reports of one launch."""

    start: int
    losses: dict[int, float]
    restored: dict[str, Any]
    """The state as it was right after restore()."""
    final: dict[str, Any]
    rng: tuple[Any, ...]
    committed: list[int]


def train(
    rank: int,
    run: str | None,
    until: int,
    *,
    every: int | None = 1,
    kind: Kind = "plain",
    optimizer: str = "adamw",
    seed: int = 0,
    loader: bool = True,
    at: str | None = None,
) -> Trained:
    """Trains steps [start, until) of `run`; without a run, without Holdfast. Waits for each commit."""
    job = Job(rank, kind, optimizer, seed, loader)
    losses: dict[int, float] = {}
    committed: list[int] = []
    if run is None:
        restored = values(job.state)
        for step in range(until):
            losses[step] = job.step(step)
        return Trained(0, losses, restored, values(job.state), random_numbers(), committed)
    with holdfast.Checkpointer(run, save=holdfast.Every(steps=every or 10**9), create=True, strict=True) as ckpt:
        start = ckpt.restore(job.state, at=at)
        restored = values(job.state)
        for step in range(start, until):
            losses[step] = job.step(step)
            handle = ckpt.step(step, job.state, metrics={"loss": losses[step]})
            if handle is not None:
                committed.append(handle.committed.result(timeout=60).step)
        return Trained(start, losses, restored, values(job.state), random_numbers(), committed)
