"""torchtitan's own optimizers, schedulers and data loader, saved and loaded by our checkpoint manager.

Its Trainer needs its whole list of dependencies; `Loop` does what that does with a checkpoint manager, call by call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.trainer.conftest import Service
from tests.trainer.gloo import run_ranks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import IterableDataset
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

import holdfast
from holdfast.errors import ConfigurationError
from holdfast.integrations.torchtitan import HoldfastCheckpointManager, _losses_are_finite
from holdfast_protocol.states import AttemptOutcome, CheckpointKind, CheckpointState, Health

STEPS = 6
LOSS = "loss_metrics/global_avg_loss"
MAXIMUM = "loss_metrics/global_max_loss"


class Numbers(IterableDataset):
    """Each rank's own, and it knows where it is."""

    def __init__(self, rank: int) -> None:
        self.rank, self.at = rank, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.at += 1
            yield torch.full((4,), self.at / 10 + self.rank)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Logger:
    """One of torchtitan's, which needs no tensorboard."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.losses[step] = metrics[LOSS]

    def close(self) -> None:
        """It holds nothing."""


class Loop:
    """What torchtitan's Trainer is to its checkpoint manager: `train_state` with a metrics processor, load(), save()
    after steps, close()."""

    def __init__(self, rank: int, config: BaseCheckpointManager.Config, seed: int = 0) -> None:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Dropout(0.2), torch.nn.Linear(5, 3))
        if not config.create_seed_checkpoint:
            model = fully_shard(model)
        groups = [
            ParamGroupConfig(pattern="weight", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.05}),
            ParamGroupConfig(pattern="bias", optimizer_name="Adam", optimizer_kwargs={"lr": 0.02}),
        ]
        self.model = model
        self.optimizers = OptimizersContainer.Config(param_groups=groups, implementation="for-loop").build(
            model_parts=[model]
        )
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=3).build(
            optimizers=self.optimizers, training_steps=STEPS
        )
        self.loader = ParallelAwareDataloader(Numbers(rank), rank, dist.get_world_size(), batch_size=2)
        self.step = self.ntokens_seen = 0
        self.losses: dict[int, float] = {}
        self.logger = Logger()
        self.metrics_processor = SimpleNamespace(logger=self.logger)
        self.checkpointer = config.build(
            dataloader=self.loader,
            model_parts=[model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self},
            sd_adapter=None,
        )

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]

    def train(self, until: int) -> None:
        batches = iter(self.loader)
        while self.step < until:
            self.step += 1
            batch = next(batches)
            self.optimizers.zero_grad()
            loss = self.model(batch).square().mean()
            loss.backward()
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            self.ntokens_seen += batch.numel()
            self.losses[self.step] = loss.item()
            if self.step % 2 == 0:
                # A rank whose labels are all ignored has no average, and then the ranks have no maximum.
                self.metrics_processor.logger.log({LOSS: loss.item(), MAXIMUM: math.nan}, self.step)
            self.checkpointer.save(self.step, last_step=self.step == STEPS)

    def parameters(self) -> Any:
        return _plain(dict(self.model.named_parameters()))

    def values(self) -> Any:
        """Parameters, slots and learning rates, whole on every rank."""
        groups = [(each, group) for each in self.optimizers for group in each.param_groups]
        slots = [{**optimizer.state[parameter]} for optimizer, group in groups for parameter in group["params"]]
        return self.parameters(), _plain(slots), [group["lr"] for _, group in groups], self.step


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.full_tensor() if isinstance(value, DTensor) else value).tolist()
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def config_of(run: str | None, **options: Any) -> BaseCheckpointManager.Config:
    named = {"run": run} if run else {}
    return HoldfastCheckpointManager.Config(enable=run is not None, interval=2, **named, **options)


def trained(rank: int, run: str | None, until: int, seed: int, options: dict[str, Any], killed: bool = False) -> Any:
    loop = Loop(rank, config_of(run, **options), seed)
    found = loop.checkpointer.load(step=options.get("load_step", -1))
    start, restored = loop.step, loop.values()
    loop.train(until)
    assert loop.logger.losses == {step: loss for step, loss in loop.losses.items() if step % 2 == 0}
    if killed:
        # Committed on every rank, and then as good as a kill: nothing is closed and no attempt is ended.
        loop.checkpointer.maybe_wait_for_saving()
        holdfast.Checkpointer.close = lambda *_: None
    else:
        loop.checkpointer.close()
    return found, start, restored, loop.losses, loop.values(), torch.rand(1).item()


@pytest.mark.rule("sharded-hooks")
def test_a_killed_job_goes_on_bit_for_bit_and_keeps_the_latest_k(run: str, service: Service) -> None:
    options = {"keep_latest_k": 2, "last_save_model_only": False}
    whole = run_ranks(trained, 2, None, STEPS, 0, {})
    first = run_ranks(trained, 2, run, 5, 0, options, True)
    second = run_ranks(trained, 2, run, STEPS, 7, options)
    for rank in range(2):
        assert first[rank][:2] == (False, 0)
        assert second[rank][:2] == (True, 4)
        assert first[rank][3] | second[rank][3] == whole[rank][3]
        assert second[rank][4:] == whole[rank][4:]
    project, name = run.split("/")
    found = service.client.checkpoints.list(project, name).items
    kept = {each.step: each for each in found if each.state == CheckpointState.COMMITTED}
    assert kept.keys() == {4, 6}
    assert kept[6].kind == CheckpointKind.FINAL
    # What torchtitan logged at a step goes with its checkpoint, and is the run's curve.
    loss = second[0][3][6]
    assert kept[6].metrics[LOSS].value == loss
    curves = {curve.name: curve.points for curve in service.client.runs.metrics_history(project, name).metrics}
    assert (curves[LOSS][-1].step, curves[LOSS][-1].value) == (6, loss)
    assert (curves[MAXIMUM][-1].step, curves[MAXIMUM][-1].nonfinite) == (6, "nan")
    assert {each.health for each in kept.values()} == {Health.OK}


def test_an_average_that_is_not_finite_has_diverged() -> None:
    assert _losses_are_finite(1, {LOSS: 2.0, MAXIMUM: math.nan, "grad_norm": math.inf}) is True
    assert _losses_are_finite(1, {LOSS: 2.0, MAXIMUM: math.nan, "aux_loss": math.inf}) == "the metric aux_loss is inf"
    for average in ({LOSS: math.nan}, {}):
        assert _losses_are_finite(1, average | {MAXIMUM: math.nan}) is not True


def seed_checkpoint(rank: int, run: str) -> Any:
    loop = Loop(rank, config_of(run, create_seed_checkpoint=True), seed=3)
    loop.checkpointer.save(curr_step=0, last_step=True)
    loop.checkpointer.close()
    return loop.parameters()


def models(rank: int, run: str, other: str) -> Any:
    """From a seed to the export; then what an evaluation reads, what a relaunch says, and another run's beginning."""
    loop = Loop(rank, config_of(run, export_dtype="bfloat16", exclude_from_loading=["dataloader"]))
    seeded = loop.checkpointer.load(), loop.step, loop.parameters()
    loop.train(STEPS)
    loop.checkpointer.close()
    trained = loop.parameters()

    reader = Loop(rank, config_of(run, load_only=True), seed=5)
    read = reader.checkpointer.load(), reader.checkpointer.save(2), reader.parameters()
    reader.checkpointer.close()

    again = Loop(rank, config_of(run))
    try:
        again.checkpointer.load()
    except ConfigurationError as error:
        refused = str(error)
        again.checkpointer.close()

    begun = Loop(rank, config_of(other, initial_load_path=f"holdfast://{run}@latest"), seed=5)
    first = begun.checkpointer.load(), begun.step, begun.parameters()
    try:
        raise RuntimeError("training fails, and torchtitan closes")
    except RuntimeError:
        begun.checkpointer.close()
    return seeded, trained, read, refused, first


@pytest.mark.rule("sharded-hooks")
def test_a_seed_the_export_a_reader_and_the_weights_of_another_run(run: str, service: Service) -> None:
    project, name = run.split("/")
    service.client.runs.create(project, f"{name}-b")
    seed = run_ranks(seed_checkpoint, 1, run)[0]
    for seeded, trained, read, refused, first in run_ranks(models, 2, run, f"{run}-b"):
        assert seeded == (True, 0, seed)
        rounded = {key: torch.tensor(each).bfloat16().tolist() for key, each in trained.items()}
        assert read == (True, False, rounded)
        assert "has the model alone" in refused
        assert first == (True, 0, rounded)
    export = service.client.checkpoints.select(project, name, "latest")
    assert (export.step, set(export.components), export.missing_components) == (STEPS, {"model", "torchtitan"}, [])
    attempts = service.client.attempts.list(project, f"{name}-b").items
    assert [each.outcome for each in attempts] == [AttemptOutcome.FAILED]
