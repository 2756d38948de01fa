"""Begin, steps and failure of a fit, which neither a CheckpointIO nor a strategy hears of."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import Strategy

from holdfast.errors import ConfigurationError
from holdfast.integrations.lightning.checkpoint_io import HoldfastCheckpointIO
from holdfast.integrations.lightning.named_run import NamedRun, RestOfCheckpoint
from holdfast.integrations.lightning.strategy import HoldfastStrategyMixin


class HoldfastCallback(Callback):
    """Beside HoldfastCheckpointIO or a strategy with HoldfastStrategyMixin, and before ModelCheckpoint.

    When the job is told to leave, the step is saved and Preempted comes out of trainer.fit(). SIGTERM is Holdfast's
    meanwhile: Lightning's own handler calls a collective from within, and would end the epoch before the save.

    A step's metrics are what self.log() got between this callback's on_train_batch_start for the step's first batch and
    its on_train_batch_end after the update. Lightning calls the module's own on_train_batch_end, and those of callbacks
    behind this one, later: what these log then is in no step's metrics. What they change is in what is saved of the
    step, but for ModelCheckpoint's saves, which Lightning makes before the module's own.
    """

    def __init__(self) -> None:
        self._run: NamedRun | None = None
        self._sigterm: Any = None
        self._stepped = -1
        self._has_told = False
        self._unhook: Callable[[], None] = _nothing
        self._before: dict[str, Any] | None = None
        """The values that Lightning had when the step began; None between two steps."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Raises ConfigurationError if the state would not be seen."""
        if stage == "fit":
            self._run = _named_run(trainer)
            self._run.begin(trainer)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._fit.open()
        if threading.current_thread() is threading.main_thread():
            self._sigterm = signal.getsignal(signal.SIGTERM)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._sigterm is not None:
            signal.signal(signal.SIGTERM, self._sigterm)
        self._stepped, self._before, self._has_told = trainer.global_step, None, False
        self._hook(trainer, pl_module)
        if trainer.fit_loop.restarted_mid_epoch:
            # The loader's iterator exists by now. Between two epochs it is made next.
            self._fit.restore_rng()
            if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
                # The checkpoint was saved after an epoch's last batch. Lightning has counted that epoch as done by now,
                # and in its middle-of-an-epoch stage would not count the next one as begun: a save in that epoch would
                # not be resumed at its place.
                trainer.fit_loop.reset_restart_stage()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._before is None:  # with accumulate_grad_batches, a step has several batches
            self._before = {key: metric._forward_cache for key, metric in trainer._results.items()}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != self._stepped:
            self._stepped = trainer.global_step
            logged, older = _logged(trainer._results, self._before or {})
            self._before = None
            self._fit.tell(trainer.global_step, logged, older)
            self._has_told = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._unhook()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._unhook()
        if self._run is not None:
            self._run.fail(exception)

    def _hook(self, trainer: Any, pl_module: Any) -> None:
        """Lightning calls nothing between the module's own on_train_batch_end, which may change state, and the next
        batch, which moves the loader on. So a step ends, and is saved, with that hook."""
        own, is_inherited = pl_module.on_train_batch_end, "on_train_batch_end" not in vars(pl_module)

        def end_step() -> None:
            if self._has_told:
                self._has_told = False
                self._fit.step(trainer.global_step, _live_state(trainer))

        def unhook() -> None:
            if is_inherited:
                del pl_module.on_train_batch_end
            else:
                pl_module.on_train_batch_end = own
            self._unhook = _nothing

        pl_module.on_train_batch_end, self._unhook = _WithStepsEnd(own, end_step), unhook

    @property
    def _fit(self) -> NamedRun:
        if self._run is None:
            raise AssertionError("setup() comes before any other hook of a fit")
        return self._run


class _WithStepsEnd:
    """The module's own hook, and the end of the step behind it. A copy of the module, pickled or deep, has its own hook
    alone."""

    def __init__(self, own: Callable[..., None], end_step: Callable[[], None]) -> None:
        self._own = own
        self._end_step = end_step

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._own(*args, **kwargs)
        self._end_step()

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._own.__self__, self._own.__name__)  # type: ignore[attr-defined]  # a bound method


def _nothing() -> None:
    pass


def _named_run(trainer: Any) -> NamedRun:
    strategy = trainer.strategy
    if isinstance(strategy, HoldfastStrategyMixin):
        return strategy.named_run
    io = strategy.checkpoint_io
    if not isinstance(io, HoldfastCheckpointIO):
        raise ConfigurationError(
            "HoldfastCallback does nothing by itself. Give Trainer plugins=[HoldfastCheckpointIO(…)], or a strategy "
            "with HoldfastStrategyMixin."
        )
    ignores_it = type(strategy).save_checkpoint is not Strategy.save_checkpoint
    if ignores_it or trainer.world_size > 1:
        why = "never asks it" if ignores_it else f"asks it on one rank of {trainer.world_size}"
        raise ConfigurationError(
            f"A CheckpointIO is not enough here: {type(strategy).__name__} {why}. Use HoldfastDDPStrategy, "
            "HoldfastModelParallelStrategy, or HoldfastStrategyMixin before a strategy of your own."
        )
    return io.named_run


def _logged(results: Any, before: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """What the module has logged within this step, by the names that ModelCheckpoint monitors; and the names that it
    has logged at older steps only, whose values Lightning keeps. Each self.log() puts a new tensor there, even of an
    equal value. It waits for no device: Lightning's own `metrics` would, for those of the progress bar."""
    logged: dict[str, Any] = {}
    older: set[str] = set()
    for key, metric in results.items():
        if metric.meta.on_step:
            names = metric.meta.name, metric.meta.forked_name(on_step=True)
            value = metric._forward_cache
            if isinstance(value, torch.Tensor) and value is not before.get(key):
                logged |= dict.fromkeys(names, value.detach())
            else:
                older.update(names)
    return logged, older - logged.keys()


def _live_state(trainer: Any) -> dict[str, Any]:
    def dump() -> dict[str, Any]:
        dumped: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        return dumped

    if isinstance(trainer.strategy, HoldfastStrategyMixin):
        return trainer.strategy.training_state(dump)
    return {"checkpoint": RestOfCheckpoint(dump)}
