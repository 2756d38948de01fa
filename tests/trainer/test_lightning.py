"""Lightning's own Trainer, with its checkpoints in a run. See examples/lightning_fit.py for one that is killed."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.wrappers import _FabricOptimizer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer, _MockOptimizer
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from tests.trainer.conftest import Service
from tests.trainer.gloo import run_ranks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from holdfast.errors import (
    ConfigurationError,
    HoldfastError,
    Preempted,
    SaveDeclined,
    SaveFailed,
    StaleAttempt,
    UnsupportedStateError,
)
from holdfast.health.diverged import losses_are_finite
from holdfast.integrations.lightning import (
    HoldfastCallback,
    HoldfastCheckpointIO,
    HoldfastDDPStrategy,
    HoldfastModelParallelStrategy,
)
from holdfast.integrations.lightning.callback import _logged
from holdfast.integrations.lightning.named_run import NamedRun
from holdfast.integrations.lightning.names import read_name, wanted_by, write_name
from holdfast.save.job import SaveHandle
from holdfast.schedule.save_policy import Every, OnPreemption, Policy
from holdfast.state.capture import capture
from holdfast_protocol.states import AttemptOutcome, CheckpointKind, CheckpointState, Health

EPOCHS = 4


class Regression(pl.LightningModule):
    """Dropout, a scheduler, and a loss that is monitored."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, width), torch.nn.Dropout(0.2), torch.nn.Tanh(), torch.nn.Linear(width, 1)
        )
        self.seen: list[float] = []

    def training_step(self, batch: Any, at: int) -> torch.Tensor:
        (inputs,) = batch
        loss = (self.net(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
        self.seen.append(float(loss))
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def test_step(self, batch: Any, at: int) -> None:
        self.tested = [parameter.clone() for parameter in self.parameters()]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)}


class Sharded(Regression):
    def configure_model(self) -> None:
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


class Killed(Exception):
    """As good as a kill: what is in memory is thrown away."""


class Kill(pl.Callback):
    def __init__(self, epoch: int) -> None:
        self._epoch = epoch

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == self._epoch:
            raise Killed


class KillAfter(pl.Callback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self._step:
            raise Killed


def loader() -> Any:
    data = torch.utils.data.TensorDataset(torch.randn(16, 4, generator=torch.Generator().manual_seed(0)))
    return torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)


def trainer_of(
    folder: Path, *callbacks: pl.Callback, saving: ModelCheckpoint | None = None, **options: Any
) -> pl.Trainer:
    saving = saving or ModelCheckpoint(dirpath=folder, monitor="loss_epoch", save_top_k=2, save_last=True)
    return pl.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        callbacks=[HoldfastCallback(), saving, *callbacks],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"devices": 1, "max_epochs": EPOCHS} | options,
    )


def fitted(trainer: pl.Trainer, kind: type[Regression] = Regression, ckpt_path: str | None = "last") -> Regression:
    pl.seed_everything(5)
    module = kind()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader(), ckpt_path=ckpt_path)
    return module


@pytest.mark.rule("sharded-hooks")
def test_a_killed_fit_goes_on_bit_for_bit(run: str, service: Service, tmp_path: Path) -> None:
    """On the node where it was, by its names; then on another one, which has none."""
    own = {"create": True}
    whole = fitted(trainer_of(tmp_path / "whole", plugins=[HoldfastCheckpointIO(f"{run}-whole", checkpointer=own)]))
    here = tmp_path / "here"
    for epoch in (2, 3):
        with pytest.raises(Killed):
            fitted(trainer_of(here, Kill(epoch), plugins=[HoldfastCheckpointIO(run)]))
    names = {path.name for path in here.iterdir()}
    for path in here.iterdir():
        path.unlink()
    io = HoldfastCheckpointIO(run)
    trainer = trainer_of(here, plugins=[io])
    resumed = fitted(trainer, ckpt_path=io.last())
    assert resumed.seen == whole.seen[-4:], "the losses of the last epoch"
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)

    # The best two of four epochs have names, the same as on the other node; what has none is in the trash.
    saving: Any = trainer.checkpoint_callback
    assert len(names) == 3
    best = {Path(path).name for path in saving.best_k_models}
    assert {path.name for path in here.iterdir()} == best | {"last.ckpt"}
    project, name = run.split("/")
    kept = {each.step for each in service.client.checkpoints.all(project, name, state=CheckpointState.COMMITTED)}
    best_steps = {read_name(path).step for path in saving.best_k_models}
    assert kept == best_steps | {12, 16}, "and the two newest always stay"
    # To look at the best one afterwards is no resume, and fences nobody.
    again = Regression()
    trainer.test(again, loader(), ckpt_path="best", verbose=False)
    [attempt] = {each.latest_attempt for each in service.client.runs.all(project) if each.name == name}
    assert attempt == 3


@pytest.mark.rule("sharded-hooks")
def test_what_a_module_logs_at_its_steps_is_the_runs_curve(run: str, service: Service, tmp_path: Path) -> None:
    module = fitted(trainer_of(tmp_path, plugins=[HoldfastCheckpointIO(run)], max_epochs=2))
    history = service.client.runs.metrics_history(*run.split("/"))
    curves = {curve.name: [(at.step, at.value) for at in curve.points] for curve in history.metrics}
    assert curves["loss_step"] == [(step, pytest.approx(loss)) for step, loss in enumerate(module.seen, 1)]
    assert curves["loss"] == curves["loss_step"]
    assert [step for step, _ in curves["loss_epoch"]] == [4, 8], "known at the end of an epoch, and told with its save"


class Occasional(Regression):
    """Logs `aux_loss` at every third batch, NaN in the first epoch; and `late` after an update."""

    def training_step(self, batch: Any, at: int) -> torch.Tensor:
        (inputs,) = batch
        total = self.current_epoch * 4 + at
        if total % 3 == 0:
            self.log("aux_loss", torch.nan if self.current_epoch == 0 else float(total), prog_bar=True)
        return self.net(inputs).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
            self.log("late", float(batch_idx))


class Observing:
    """The default rule, which also sees the steps with metrics."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def __call__(self, step: int, metrics: Mapping[str, float], /) -> bool | str:
        return losses_are_finite(step, metrics)

    def observe(self, step: int, metrics: Mapping[str, Any]) -> None:
        assert metrics["aux_loss"] is not None
        self.steps.append(step)


@pytest.mark.rule("sharded-hooks")
@pytest.mark.parametrize(
    ("batches", "logged", "diverged"), [(1, [1, 4, 7, 10], {1, 4}), (2, [1, 2, 4, 5], {1, 2})], ids=["each", "two"]
)
def test_what_was_logged_at_an_older_step_is_neither_told_nor_saved_again(
    run: str, service: Service, tmp_path: Path, batches: int, logged: list[int], diverged: set[int]
) -> None:
    rule = Observing()
    io = HoldfastCheckpointIO(run, checkpointer={"healthy": rule})
    saving = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1, save_top_k=-1)
    trainer = trainer_of(tmp_path, saving=saving, plugins=[io], max_epochs=3, accumulate_grad_batches=batches)
    fitted(trainer, Occasional, ckpt_path=None)
    history = service.client.runs.metrics_history(*run.split("/"))
    assert {curve.name: [at.step for at in curve.points] for curve in history.metrics} == {"aux_loss": logged}
    assert rule.steps == logged, "a step that logged nothing has no metrics"
    project, name = run.split("/")
    saved = list(service.client.checkpoints.all(project, name, state=CheckpointState.COMMITTED))
    assert {each.step for each in saved} == set(range(1, 12 // batches + 1))
    assert {each.step for each in saved if each.health == Health.DIVERGED} == diverged
    assert {each.step for each in saved if each.metrics} == set(logged)


def test_no_device_is_asked_for_what_was_logged() -> None:
    """A tensor of "meta" has no value. Lightning asks for it, to show it."""
    results = _ResultCollection(training=True)
    results.log("training_step", "loss", torch.empty((), device="meta"), on_step=True, prog_bar=True)
    with pytest.raises(RuntimeError):
        results.metrics(on_step=True)
    logged, older = _logged(results, {})
    assert (logged.keys(), older) == ({"loss", "loss_step"}, set())


def test_a_save_after_an_epochs_last_batch_is_resumed_and_so_are_those_after_it(run: str, tmp_path: Path) -> None:
    """Epochs have four steps. The second launch goes on from step 4, the third from step 6."""

    def launch(*callbacks: pl.Callback) -> Regression:
        io = HoldfastCheckpointIO(run)
        saving = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2, save_top_k=-1)
        trainer = trainer_of(tmp_path, *callbacks, saving=saving, plugins=[io], max_epochs=3)
        return fitted(trainer, ckpt_path=io.last())

    for killed_after in (5, 7):
        with pytest.raises(Killed):
            launch(KillAfter(killed_after))
    assert len(launch().seen) == 12 - 6, "no step is run again"


@pytest.mark.rule("sharded-hooks")
def test_after_the_fit_a_checkpoint_is_saved_in_an_attempt_of_its_own(
    run: str, service: Service, tmp_path: Path
) -> None:
    project, name = run.split("/")
    own, final = {"create": True}, tmp_path / "final.ckpt"
    whole = fitted(trainer_of(tmp_path / "whole", plugins=[HoldfastCheckpointIO(f"{run}-whole", checkpointer=own)]))
    saving = ModelCheckpoint(dirpath=tmp_path / "first", every_n_epochs=2)
    first = trainer_of(tmp_path, saving=saving, plugins=[HoldfastCheckpointIO(run)], max_epochs=3)
    fitted(first, ckpt_path=None)
    for path in (final, tmp_path / "again.ckpt"):
        first.save_checkpoint(path)
        assert read_name(path) == (run, 12)
    found = service.client.checkpoints.select(project, name, "latest")
    assert (found.step, found.attempt) == (12, 2), "another name for one step is no other checkpoint"
    resumed_from = service.client.attempts.get(project, name, 2).resumed_from
    assert resumed_from == service.client.checkpoints.select(project, name, "8").id
    outcomes = [each.outcome for each in service.client.attempts.list(project, name).items]
    assert outcomes == [AttemptOutcome.FINISHED] * 2
    resumed = fitted(trainer_of(tmp_path, plugins=[HoldfastCheckpointIO(run)]), ckpt_path=str(final))
    assert resumed.seen == whole.seen[-4:], "the losses of the last epoch"

    # Attempt 3 was another launch: what is in memory here is not the run's any more, and fences nobody.
    with pytest.raises(StaleAttempt, match="taken over"):
        first.strategy.checkpoint_io.save_checkpoint({"optimizer_states": [], "global_step": 13}, final)
    assert len(service.client.attempts.list(project, name).items) == 3


def test_after_a_fit_that_failed_nothing_is_saved(run: str, tmp_path: Path) -> None:
    """It may have ended in the middle of a step."""
    trainer = trainer_of(tmp_path, Kill(1), plugins=[HoldfastCheckpointIO(run)])
    with pytest.raises(Killed):
        fitted(trainer)
    with pytest.raises(ConfigurationError, match="The fit ended by Killed"):
        trainer.save_checkpoint(tmp_path / "after.ckpt")


class Leave(pl.Callback):
    """The machine tells the job to leave, in the middle of a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step + 1 == self._step:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_fit_that_is_told_to_leave_saves_the_step_and_goes_on_after_it(
    run: str, service: Service, tmp_path: Path
) -> None:
    """Twice in one process: Lightning puts signal handlers back after their owner has gone."""
    project, name = run.split("/")
    for attempt, step in ((1, 2), (2, 6)):
        io = HoldfastCheckpointIO(run)
        leaving = trainer_of(tmp_path, Leave(step), plugins=[io])
        with pytest.raises(Preempted):
            fitted(leaving, ckpt_path=io.last())
        assert service.client.attempts.get(project, name, attempt).outcome == AttemptOutcome.PREEMPTED
        emergency = service.client.checkpoints.select(project, name, "latest")
        assert (emergency.kind, emergency.attempt) == (CheckpointKind.EMERGENCY, attempt)
        assert emergency.step >= step
    io = HoldfastCheckpointIO(run)
    epochs = emergency.step // 4 + 1  # a busy machine may hear of it some steps later
    resumed = fitted(trainer_of(tmp_path, plugins=[io], max_epochs=epochs), ckpt_path=io.last())
    assert len(resumed.seen) == 4 * epochs - emergency.step, "no step is run again"


class Counting(Regression):
    """Counts its steps when they have ended."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ended", torch.zeros((), dtype=torch.int64))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ended += 1


class CountToo(pl.Callback):
    """Behind Holdfast's."""

    ended = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ended += 1

    def state_dict(self) -> dict[str, Any]:
        return {"ended": self.ended}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.ended = state_dict["ended"]


@pytest.mark.parametrize(
    ("policy", "end", "error"),
    [(OnPreemption(), Leave(2), Preempted), (Every(steps=3), KillAfter(6), Killed)],
    ids=["emergency", "policy"],
)
def test_what_hooks_change_at_the_end_of_a_step_is_saved_with_it(
    run: str, tmp_path: Path, policy: Policy, end: pl.Callback, error: type[BaseException]
) -> None:
    saving = ModelCheckpoint(dirpath=tmp_path, every_n_epochs=EPOCHS)
    io = HoldfastCheckpointIO(run, checkpointer={"save": policy})
    trainer = trainer_of(tmp_path, CountToo(), end, saving=saving, plugins=[io])
    with pytest.raises(error):
        fitted(trainer, Counting, ckpt_path=None)
    assert "on_train_batch_end" not in vars(trainer.lightning_module)
    io, counted = HoldfastCheckpointIO(run), CountToo()
    module = fitted(trainer_of(tmp_path, counted, plugins=[io]), Counting, ckpt_path=io.last())
    assert len(module.seen) < 4 * EPOCHS
    assert module.ended == counted.ended == 4 * EPOCHS


class Waiting(Regression):
    """Until what ModelCheckpoint saves of a step is committed."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trainer.strategy.checkpoint_io.named_run.checkpointer.wait()


def test_a_step_that_model_checkpoint_has_saved_is_not_saved_again(
    run: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saving = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1, save_top_k=-1)
    io = HoldfastCheckpointIO(run, checkpointer={"save": Every(steps=1)})
    with caplog.at_level("INFO", "holdfast"):
        fitted(trainer_of(tmp_path, saving=saving, plugins=[io], max_epochs=2), Waiting, ckpt_path=None)
    assert caplog.text.count(f"committed {run} at step") == 8


STRATEGIES: dict[str, Any] = {
    "ddp": lambda run: HoldfastDDPStrategy(run, find_unused_parameters=True),
    "fsdp2": lambda run: HoldfastModelParallelStrategy(run, data_parallel_size=2, tensor_parallel_size=1),
}


def fits_on_two_ranks(rank: int, runs: dict[str, str], folder: str) -> dict[str, tuple[list[float], ...]]:
    """By strategy: the losses of an undisturbed fit and of one that was killed, and whether both ended alike."""
    found: dict[str, Any] = {}
    foreign = Path(folder, "foreign.ckpt")
    if rank == 0:
        write_name(foreign, "demo/other", 4)
    for kind, run in runs.items():
        whole, end = fit_here(kind, f"{run}-whole", Path(folder, f"{kind}-whole"), saved_after=True)
        with pytest.raises(Killed):
            fit_here(kind, run, Path(folder, kind), Kill(2))
        resumed, same_end = fit_here(kind, run, Path(folder, kind))
        alike = all(torch.equal(one, other) for one, other in zip(end, same_end, strict=True))
        with pytest.raises(ConfigurationError, match="a checkpoint of demo/other"):  # on the rank without the file too
            fit_here(kind, run, Path(folder, kind), ckpt_path=str(foreign if rank == 0 else Path(folder, "none.ckpt")))
        found[kind] = (whole, resumed, alike)
    return found


def on_two_ranks(kind: str, run: str) -> dict[str, Any]:
    return {"devices": 2, "strategy": STRATEGIES[kind](run), "plugins": [TorchElasticEnvironment()], "max_epochs": 3}


def fit_here(
    kind: str, run: str, folder: Path, *callbacks: pl.Callback, saved_after: bool = False, ckpt_path: str | None = None
) -> tuple[list[float], list[torch.Tensor]]:
    options = on_two_ranks(kind, run)
    if saved_after:
        options["saving"] = ModelCheckpoint(dirpath=folder, every_n_epochs=2)
    trainer = trainer_of(folder, *callbacks, **options)
    module = fitted(
        trainer, Sharded if kind == "fsdp2" else Regression, ckpt_path=ckpt_path or options["strategy"].last()
    )
    if saved_after:
        trainer.save_checkpoint(folder / "after.ckpt")
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in module.parameters()]
    return module.seen, [each.detach().clone() for each in whole]


@pytest.mark.rule("sharded-hooks")
def test_ranks_that_were_killed_go_on(run: str, service: Service, tmp_path: Path) -> None:
    """Sharded state is seen where it is: Lightning's ModelParallel never asks a CheckpointIO."""
    project, name = run.split("/")
    runs = {kind: f"{run}-{kind}" for kind in STRATEGIES}
    for kind in runs:
        service.client.runs.create(project, f"{name}-{kind}")
        service.client.runs.create(project, f"{name}-{kind}-whole")
    for found in run_ranks(fits_on_two_ranks, 2, runs, str(tmp_path)):
        for kind, (whole, resumed, alike) in found.items():
            assert len(resumed) < len(whole), kind
            assert resumed == whole[-len(resumed) :], kind
            assert alike, kind
    for kind in runs:
        view = service.client.checkpoints.select(project, f"{name}-{kind}", "latest")
        assert view.world_size == 2
        assert {"model", "optimizer", "checkpoint"} <= view.components.keys()
        after = service.client.checkpoints.select(project, f"{name}-{kind}-whole", "latest")
        assert (after.step, after.attempt, after.world_size) == (view.step, 2, 2), "what was saved after the fit"
        assert after.components.keys() == view.components.keys()


def test_a_name_file_of_another_run_is_neither_loaded_nor_trashed(tmp_path: Path) -> None:
    path, dropped = tmp_path / "best.ckpt", list[int]()
    io = HoldfastCheckpointIO("demo/b")
    checkpointer: Any = SimpleNamespace(
        parts=SimpleNamespace(session=SimpleNamespace(ranks=SimpleNamespace(is_first=True)))
    )
    trash: Any = SimpleNamespace(drop=lambda steps, after: dropped.extend(steps))
    io.named_run._checkpointer, io.named_run._trash = checkpointer, trash
    for run, trashed in (("demo/a", []), ("demo/b", [500])):
        write_name(path, run, 500)
        if run != "demo/b":
            with pytest.raises(ConfigurationError, match="a checkpoint of demo/a, and this job's run is demo/b"):
                io.load_checkpoint(path)
        io.remove_checkpoint(path)
        assert (dropped, path.exists()) == (trashed, False)


@pytest.mark.parametrize(
    ("file", "point"), [("last.ckpt", "latest"), ("last-v2.ckpt", "latest"), ("lastblock-step=4.ckpt", "4")]
)
def test_only_the_names_that_save_last_gives_mean_the_newest_restore_point(
    tmp_path: Path, file: str, point: str
) -> None:
    write_name(tmp_path / file, "demo/gpt", 4)
    assert wanted_by(tmp_path / file) == (point, "demo/gpt")


@pytest.mark.rule("sharded-hooks")
def test_a_checkpoint_io_is_refused_where_it_would_not_see_the_state(run: str, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, plugins=[HoldfastCheckpointIO(run)])
    for strategy, ranks, reason in (
        (ModelParallelStrategy(), 1, "never asks it"),
        (trainer.strategy, 2, "on one rank"),
    ):
        strategy.checkpoint_io = trainer.strategy.checkpoint_io
        seen = SimpleNamespace(strategy=strategy, world_size=ranks)
        with pytest.raises(ConfigurationError, match=reason):
            HoldfastCallback().setup(seen, None, "fit")


@pytest.mark.rule("overlap-is-guarded")
@pytest.mark.parametrize("integration", [HoldfastCheckpointIO, HoldfastDDPStrategy, HoldfastModelParallelStrategy])
def test_overlap_is_refused_because_lightning_swaps_weights_unseen(integration: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"overlap=True does not go with Lightning"):
        integration("demo/gpt", checkpointer={"overlap": True})
    integration("demo/gpt", checkpointer={"overlap": False})


@pytest.mark.parametrize(
    ("failure", "saved_again"), [(SaveFailed("in the background"), []), (SaveDeclined("busy"), [4])]
)
def test_a_save_that_failed_on_one_rank_alone_does_not_make_it_save_again(
    failure: HoldfastError, saved_again: list[int]
) -> None:
    """The other ranks have not heard of it yet, and save() is for all of them."""
    handle, again = SaveHandle(4), list[int]()
    handle.fail(failure)

    def save(step: int, *_: object) -> SaveHandle:
        again.append(step)
        return SaveHandle(step)

    checkpointer: Any = SimpleNamespace(
        _tell=lambda *_: None,
        _end_step=lambda *_, **__: handle,
        save=save,
        parts=SimpleNamespace(session=SimpleNamespace(ranks=SimpleNamespace(is_first=False))),
    )
    run = NamedRun("demo/gpt", {})
    run.begin(SimpleNamespace(callback_metrics={}))
    run._checkpointer = checkpointer
    run.tell(4, {})
    run.step(4, {})
    run.save(4, "last.ckpt", {})
    assert again == saved_again


class _WithMore(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"more": 1}


@pytest.mark.rule("refuse-inexact")
def test_the_wrappers_of_optimizers_are_saved_as_what_they_wrap() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    plain = torch.optim.SGD([parameter], lr=0.5)
    saved = capture({"optimizer": plain}, rank=0, world_size=1).replicated_trees
    strategy: Any = SimpleNamespace()
    for wrapper in (_FabricOptimizer(plain, strategy), LightningOptimizer(plain)):
        assert capture({"optimizer": wrapper}, rank=0, world_size=1).replicated_trees == saved
    capture({"optimizer": _MockOptimizer()}, rank=0, world_size=1)  # of a module that configures none
    more = _FabricOptimizer(_WithMore([parameter], lr=0.5), strategy)
    with pytest.raises(UnsupportedStateError, match="_WithMore has a state_dict"):
        capture({"optimizer": more}, rank=0, world_size=1)
