"""torchtitan's checkpoint manager, with its checkpoints in a run. Its Config goes where torchtitan's own would.

trainer.train() -> load() -> restore of the kind of the checkpoint, then of everything, or of the model alone
save(), each step -> checkpointer.step() (must the job leave?), and checkpointer.save() at the interval

Other formats stay torchtitan's: `initial_load_path` to a folder, Hugging Face's format in and out. Written
against torchtitan 0.3.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.components.checkpointer import DATALOADER, LR_SCHEDULER, MODEL, OPTIMIZER, CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.tools.logging import logger

from holdfast.checkpointer import Checkpointer
from holdfast.errors import ConfigurationError, NoRestorePoint
from holdfast.health.diverged import losses_are_finite
from holdfast.integrations.trash import Trash
from holdfast.restore.partial import load_weights
from holdfast.save.job import SaveHandle
from holdfast.schedule.save_policy import OnPreemption
from holdfast.settings import TrainerSettings
from holdfast.state.components import FitsAnyWorld
from holdfast_protocol.checkpoints import CheckpointView
from holdfast_protocol.runs import parse_run
from holdfast_protocol.states import CheckpointKind

SCHEME = "holdfast://"
"""Before the selector of another run's checkpoint, in initial_load_path: `holdfast://demo/base@best:loss`."""

# Its state names the data-parallel rank: equal states are those of ranks that split only the model.
FitsAnyWorld.register(ParallelAwareDataloader)

_ABOUT = "torchtitan"
_AVERAGE = "loss_metrics/global_avg_loss"
_MAXIMUM = "loss_metrics/global_max_loss"


class HoldfastCheckpointManager(CheckpointManager):
    """A torchtitan checkpoint manager. Its Config has all fields of torchtitan's own, and `run`.

    A relaunch goes on from the newest restore point. Staging is over when save() returns, and the upload runs beside
    training, so `async_mode` is ignored. The last checkpoint has the model alone, in `export_dtype`, unless
    `last_save_model_only=False` or `last_save_in_hf` (then it has everything, and the folder has the export).
    `load_only` reads the model alone and opens no attempt, so a job that trains this run meanwhile goes on.
    torchtitan's data loader cannot go on with another number of data-parallel ranks:
    `exclude_from_loading=["dataloader"]`. Pipeline stages need the same number of ranks.
    """

    _checkpointer: Checkpointer | None = None
    """None for a reader, which must not take the run from the job that trains it."""
    _trash: Trash | None = None
    save_future: Future[CheckpointView] | None

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        run: str = ""
        """The run, as project/run; without it HOLDFAST_RUN."""

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        # torchtitan's purge deletes folders, and its processes would stage once more.
        theirs: dict[str, Any] = {"keep_latest_k": 0, "async_mode": "disabled"}
        super().__init__(
            replace(config, **theirs),
            dataloader=dataloader,
            model_parts=model_parts,
            optimizers=optimizers,
            lr_schedulers=lr_schedulers,
            states=states,
            sd_adapter=sd_adapter,
            base_folder=base_folder,
        )
        if not self.enable:
            return
        self.keep_latest_k = config.keep_latest_k
        self._components: dict[str, dict[str, Any]] = {
            MODEL: {MODEL: model_parts[0] if len(model_parts) == 1 else nn.ModuleList(model_parts)},
            # The container is an Optimizer too, with an empty state: the ones inside hold the state.
            OPTIMIZER: {f"{OPTIMIZER}_{at}" if at else OPTIMIZER: each for at, each in enumerate(optimizers)},
            DATALOADER: {} if dataloader is None else {DATALOADER: dataloader},
            LR_SCHEDULER: {LR_SCHEDULER: _Alike(lr_schedulers)},
        }
        for key, value in states.items():
            self._components.setdefault(key, {key: _Alike(value)})
        self._stages = _differ([name for part in model_parts for name, _ in part.named_parameters()])
        if self._stages and self.last_save_model_only and not self.last_save_in_hf:
            raise ConfigurationError(
                "Each pipeline stage has a part of the model of its own, and no part alone is a model. "
                "Set last_save_model_only=False."
            )
        # A rank 0 that is not the last stage has no loss, and tells a number in its place.
        self._logged = _Logged() if self._stages else _logged_by(states.get("train_state"))
        self._about = _About()
        self._run = str(TrainerSettings().run_name(config.run or None))
        if not self.load_only:
            own = [*self._components[MODEL], *self._components[OPTIMIZER]] if self._stages else []
            left_out = [] if self._stages else self._whole(0).keys() - {MODEL}
            self._checkpointer = Checkpointer(
                self._run, save=OnPreemption(), per_rank=own, healthy=_losses_are_finite, drop=left_out
            )

    def _load(self, step: int = -1) -> bool:
        at = None if step == -1 else str(step)
        if self._checkpointer is None:
            return self._read_weights(at)
        about = {_ABOUT: self._about}
        if self._stages:
            # Each rank's own parts come at once, or not at all; and no checkpoint of stages has the model alone.
            found = self._checkpointer.restore(about | self._wanted(), at) > 0
            return self._loaded() if found else self._initial_load()
        if self._checkpointer.restore(about, at) == 0:
            return self._initial_load()
        if self._about.model_only and self._about.step > 0:
            raise ConfigurationError(
                f"{self._checkpointer.run} ended with step {self._about.step}, whose checkpoint has the model alone. "
                f"Begin another run with initial_load_path={SCHEME}{self._checkpointer.run}@{self._about.step}, or go "
                "on from an earlier one with load_step."
            )
        state = about | (self._components[MODEL] if self._about.step == 0 else self._wanted())
        self._checkpointer.restore(state)
        return self._loaded()

    def _loaded(self) -> bool:
        logger.info("Loaded step %d of %s.", self._about.step, self._run)
        # The iterator that training makes next draws a number that the one before the checkpoint has drawn already.
        for loader in self._components[DATALOADER].values():
            if self._about.step > 0 and getattr(loader, "generator", self) is None:
                loader.generator = torch.Generator().manual_seed(torch.initial_seed())
        return True

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        checkpointer = self._checkpointer
        if checkpointer is None:
            return False
        metrics = self._logged.at(curr_step)
        if curr_step > 0:
            checkpointer.step(curr_step, self._whole(curr_step), metrics)
        if not self._should_save(curr_step, last_step):
            return False
        kind = CheckpointKind.FINAL if last_step and curr_step > 0 else CheckpointKind.PERIODIC
        if last_step and self.last_save_in_hf:
            self._save_last_step(curr_step)
        model_only = last_step and self.last_save_model_only and not self.last_save_in_hf
        state = self._export(curr_step) if model_only else self._whole(curr_step)
        handle = checkpointer.save(curr_step, state, metrics, kind)
        self.save_future = handle.committed
        self._about.saved.append(curr_step)
        if last_step:
            self.maybe_wait_for_saving()
        self._drop_old(handle)
        return True

    def _maybe_wait_for_staging(self) -> None:
        """Nothing to wait for: save() returns when the last byte is staged."""

    def _wait_for_saving(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.wait()
        self.save_future = None

    def _close(self) -> None:
        # torchtitan closes it while the error that ended training is handled, and again when it is collected.
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            try:
                checkpointer.__exit__(*sys.exc_info())
            finally:
                if self._trash is not None:
                    self._trash.close()  # the last save is committed by now, so an older one may go

    def _whole(self, step: int) -> dict[str, Any]:
        self._about.tell(step, model_only=False)
        return {_ABOUT: self._about, **{key: each for part in self._components.values() for key, each in part.items()}}

    def _wanted(self) -> dict[str, Any]:
        if unknown := sorted(set(self.exclude_from_loading) - self._components.keys()):
            raise ConfigurationError(
                f"exclude_from_loading names {unknown[0]!r}, which the state lacks. It has {sorted(self._components)}."
            )
        kept = [part for key, part in self._components.items() if key not in self.exclude_from_loading]
        return {key: each for part in kept for key, each in part.items()}

    def _export(self, step: int) -> dict[str, Any]:
        """The model for export. A module again, so that load_weights() finds its names."""
        self._about.tell(step, model_only=True)
        module = nn.Module()
        for name, value in self.states[MODEL].state_dict().items():
            if isinstance(value, torch.Tensor):
                *path, last = name.split(".")
                converted = value.detach().to(self.export_dtype) if value.is_floating_point() else value.detach()
                _inner(module, path).register_parameter(last, nn.Parameter(converted, requires_grad=False))
        return {_ABOUT: self._about, MODEL: module}

    def _initial_load(self) -> bool:
        path = self.initial_load_path or ""
        if not path.startswith(SCHEME):
            return bool(super()._load())
        if not self.initial_load_model_only or self.initial_load_in_hf:
            raise ConfigurationError(
                f"{path} gives the weights of another run, and nothing else. "
                "Leave initial_load_model_only as it is, and initial_load_in_hf out."
            )
        self._load_weights(path.removeprefix(SCHEME))
        return True

    def _load_weights(self, selector: str) -> None:
        # A stage has some of the model's parameters, and needs all of those.
        report = load_weights(selector, self._components[MODEL][MODEL], component=MODEL, strict=not self._stages)
        if report.missing:
            raise ConfigurationError(f"{selector} lacks {report.missing[0]!r}, which a stage needs. Name another run.")

    def _read_weights(self, at: str | None) -> bool:
        try:
            self._load_weights(f"{self._run}@{at or 'latest'}")
        except NoRestorePoint:
            if at is not None:
                raise
            return self._initial_load()
        return True

    def _drop_old(self, save: SaveHandle) -> None:
        checkpointer = self._checkpointer
        if checkpointer is None or self.keep_latest_k == 0 or dist.get_rank() != 0:
            return
        if self._trash is None:
            reason = f"keep_latest_k={self.keep_latest_k}"
            self._trash = Trash(checkpointer.parts.client.settings, parse_run(checkpointer.run), reason)
        self._trash.drop(sorted(set(self._about.saved))[: -self.keep_latest_k], save)


class _About:
    """The kind of this checkpoint, because a seed and an export have the model alone; and the saved steps, for
    keep_latest_k."""

    def __init__(self) -> None:
        self.step = 0
        self.model_only = False
        self.saved: list[int] = []

    def tell(self, step: int, *, model_only: bool) -> None:
        self.step, self.model_only = step, model_only

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "model_only": self.model_only, "saved": [*self.saved, self.step]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step, self.model_only, self.saved = state["step"], state["model_only"], list(state["saved"])

    def load_resharded_state_dict(self, states: list[Any], *, rank: int, world_size: int) -> None:
        self.load_state_dict(states[0])


class _Logged:
    """What torchtitan logged last: its own logger, and between its calls what they were given."""

    def __init__(self, inner: Any = None) -> None:
        self._inner = inner
        self._step = -1
        self._metrics: dict[str, Any] = {}

    def at(self, step: int) -> dict[str, Any]:
        return self._metrics if step == self._step else {}

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self._inner.log(metrics, step)
        self._step = step
        self._metrics = {name: value for name, value in metrics.items() if len(name) <= 100 and isinstance(value, Real)}

    def close(self) -> None:
        self._inner.close()


def _logged_by(trainer: Any) -> _Logged:
    """Between a trainer and its loggers, if it has them. They get numbers, on every rank and before the step's save:
    nothing is left to read from a device."""
    processor = getattr(trainer, "metrics_processor", None)
    logged = _Logged(getattr(processor, "logger", None))
    if processor is not None:
        processor.logger = logged
    return logged


def _losses_are_finite(step: int, metrics: Mapping[str, float], /) -> bool | str:
    """The default rule, but for the maximum over the ranks if the average is finite. A rank whose labels are all
    ignored has no average of its own, so the maximum is NaN; torchtitan too looks at the average alone."""
    if math.isfinite(metrics.get(_AVERAGE, math.nan)):
        metrics = {name: value for name, value in metrics.items() if name != _MAXIMUM}
    return losses_are_finite(step, metrics)


class _Alike:
    """A state that any rank may load from any rank's, on another number of ranks, as torchtitan itself does."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def state_dict(self) -> Any:
        return self._inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._inner.load_state_dict(state)

    def load_resharded_state_dict(self, states: list[Any], *, rank: int, world_size: int) -> None:
        self._inner.load_state_dict(states[0])


def _differ(names: list[str]) -> bool:
    """Whether ranks have parameters of other names: then they are pipeline stages."""
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, names)
    return any(each != names for each in everybody)


def _inner(module: nn.Module, path: list[str]) -> nn.Module:
    for name in path:
        if name not in module._modules:
            module.add_module(name, nn.Module())
        module = module.get_submodule(name)
    return module
