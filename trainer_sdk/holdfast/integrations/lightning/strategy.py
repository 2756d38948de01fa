"""Strategies that hand the live model and optimizers to a Checkpointer on every rank: sharded state stays sharded.

Lightning's FSDP, ModelParallel and DeepSpeed strategies never call the CheckpointIO, and DDP calls it on rank 0 alone.
So this overrides the calls that every strategy gets: save_checkpoint, load_checkpoint, remove_checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn

from holdfast.errors import ConfigurationError
from holdfast.integrations.lightning.named_run import NamedRun, RestOfCheckpoint
from holdfast.integrations.lightning.names import wanted_by

_OF_THE_OBJECTS = frozenset({"state_dict", "optimizer_states"})
_BESIDE_AVERAGES = "current_model_state"
"""Lightning's WeightAveraging puts its averages into the dict's `state_dict`, and the model's weights here."""


class HoldfastStrategyMixin:
    """Put it before a strategy of Lightning: `class Mine(HoldfastStrategyMixin, DDPStrategy)`.

    run, checkpointer: as in HoldfastCheckpointIO; all other arguments are the strategy's. Changes of
    checkpoint["state_dict"] in on_save_checkpoint() are ignored, because the model's tensors are saved from the model;
    the averages that Lightning's WeightAveraging puts there are saved.
    """

    def __init__(
        self, run: str | None = None, *args: Any, checkpointer: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.named_run = NamedRun(run, checkpointer or {})
        self._has_loaded = False

    def last(self) -> str | None:
        """For `ckpt_path=`: the run's newest restore point, on any node; None if nothing was ever committed."""
        return self.named_run.last()

    def training_state(self, dump: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """The content of a checkpoint. `dump` returns Lightning's dict, when a save asks for it."""
        strategy: Any = self
        optimizers = [each._optimizer if isinstance(each, LightningOptimizer) else each for each in strategy.optimizers]
        return {
            "model": strategy.lightning_module,
            **{f"optimizer_{at}" if at else "optimizer": each for at, each in enumerate(optimizers)},
            "checkpoint": RestOfCheckpoint(lambda: _rest_of(dump())),
        }

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Into the model as the strategy has wrapped and sharded it."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return False if self._has_loaded else bool(super().lightning_restore_optimizer)  # type: ignore[misc]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Empty: ModelParallel's own gathers a copy, but the model itself is saved."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Empty: ModelParallel's own takes a step with an optimizer that has no state yet."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """On every rank. Returns when the state may change again."""
        if "optimizer_states" not in checkpoint:
            raise ConfigurationError(
                f"{filepath} would hold weights without the rest, and nothing resumes from those. "
                "Leave save_weights_only out; `holdfast checkpoints pull --only model` writes a checkpoint's weights."
            )
        path = self._strategy.broadcast(filepath)
        self.named_run.save(checkpoint["global_step"], path, self.training_state(lambda: checkpoint))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Into the live objects; Lightning loads the rest. The strategy reads a file of Lightning's own."""
        strategy = self._strategy
        # Only rank 0 has the names; the others may be on other nodes. Every rank then refuses a name of another run.
        wanted = strategy.broadcast(wanted_by(checkpoint_path))
        self._has_loaded = wanted is not None
        if wanted is None:
            loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)  # type: ignore[misc]
            return loaded
        module, state = strategy.lightning_module, self.training_state(dict)
        fits = module.trainer.state.fn is TrainerFn.FITTING
        if not fits:
            state = {key: state[key] for key in ("model", "checkpoint")}
        self.named_run.load(wanted, state)
        rest: dict[str, Any] = state["checkpoint"].loaded
        if _BESIDE_AVERAGES not in rest:
            return rest | {"state_dict": {}}
        if not fits:  # what is tested are the averages, as with Lightning's own checkpoints
            module.load_state_dict(rest["state_dict"])
        return rest | {_BESIDE_AVERAGES: module.state_dict()}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if not self._has_loaded:
            super().load_model_state_dict(checkpoint, strict)  # type: ignore[misc]

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if not self._has_loaded:
            super().load_optimizer_state_dict(checkpoint)  # type: ignore[misc]

    def remove_checkpoint(self, filepath: Any) -> None:
        self.named_run.remove(filepath)

    def teardown(self) -> None:
        """Waits for the save in flight and ends the attempt, while the ranks are still together."""
        self.named_run.close()
        super().teardown()  # type: ignore[misc]

    @property
    def _strategy(self) -> Any:
        return self


class HoldfastDDPStrategy(HoldfastStrategyMixin, DDPStrategy):
    """Data parallel. For a bit-exact resume give find_unused_parameters=True: see docs/integrations.md."""


class HoldfastModelParallelStrategy(HoldfastStrategyMixin, ModelParallelStrategy):
    """FSDP2 and tensor parallel, as configure_model() of your module sets them up."""


def _rest_of(dumped: Mapping[str, Any]) -> dict[str, Any]:
    without = _OF_THE_OBJECTS - {"state_dict"} if _BESIDE_AVERAGES in dumped else _OF_THE_OBJECTS
    return {key: value for key, value in dumped.items() if key not in without}
