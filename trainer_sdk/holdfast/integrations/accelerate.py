"""Accelerate: the content of accelerator.save_state() as the state of a Checkpointer. Sharded models stay sharded.

    accelerator.prepare(…) -> training_state(accelerator) -> checkpointer.restore(state), checkpointer.step(step, state)

Accelerator keeps prepared objects in lists of its own; save_state() and load_state() read the same ones. Written
against accelerate 1.15.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import SeedableRandomSampler
from accelerate.utils import DistributedType
from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from holdfast.errors import ConfigurationError
from holdfast.state.components import FitsAnyWorld

log = logging.getLogger("holdfast")

_KEEP_THEIR_OWN = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
_DRAW_ANEW = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""torch's samplers whose order comes from a generator, which no loader's state has."""


def training_state(accelerator: Accelerator) -> dict[str, Any]:
    """The state of everything that was prepared or registered for checkpointing, by these keys: `model`, `optimizer`,
    `lr_scheduler`, `dataloader`, `custom` (the second of each is `model_1` and so on), `scaler`, `accelerator`.

        state = training_state(accelerator)     # once, after the last prepare() and register_for_checkpointing()
        with holdfast.Checkpointer("demo/gpt") as checkpointer:
            for step in range(checkpointer.restore(state), total_steps): ...

    Random generators are in every checkpoint. A data loader's epoch is saved, and its exact position and seed if it is
    stateful (DataLoaderConfiguration(use_stateful_dataloader=True), torchdata), which needs use_seedable_sampler=True
    to shuffle; if not, skip the trained batches with accelerator.skip_first_batches(). Hooks that were registered for
    save_state() are not called.

    With gradient accumulation call step() where accelerator.sync_gradients is true: gradients are in no checkpoint.

    Raises ConfigurationError with DeepSpeed and Megatron-LM, whose state is in engines of their own, and for a stateful
    loader whose sampler would draw another order after a resume.
    """
    if accelerator.distributed_type in _KEEP_THEIR_OWN:
        raise ConfigurationError(
            f"{accelerator.distributed_type.value} keeps its state in an engine of its own. "
            "Use FSDP2 (fsdp_version=2), or accelerator.save_state()."
        )
    state = {
        **_numbered("model", accelerator._models),
        **_numbered("optimizer", (optimizer.optimizer for optimizer in accelerator._optimizers)),
        **_numbered("lr_scheduler", (scheduler.scheduler for scheduler in accelerator._schedulers)),
        **_numbered("dataloader", map(_loader, accelerator._dataloaders)),
        **_numbered("custom", accelerator._custom_objects),
        "accelerator": _Counter(accelerator),
    }
    return state if accelerator.scaler is None else state | {"scaler": accelerator.scaler}


def _numbered(name: str, objects: Iterable[Any]) -> dict[str, Any]:
    return {f"{name}_{at}" if at else name: each for at, each in enumerate(objects)}


def _loader(loader: Any) -> Any:
    if not getattr(loader, "use_stateful_dataloader", False):
        return _Epoch(loader)
    sampler = _sampler(loader)
    if isinstance(sampler, _DRAW_ANEW) and not isinstance(sampler, SeedableRandomSampler):
        raise ConfigurationError(
            f"{type(sampler).__name__} draws another order after a resume: it would repeat samples and miss others. "
            "Use DataLoaderConfiguration(use_seedable_sampler=True) with shuffle=True, or a sampler that shuffles by "
            "set_epoch()."
        )
    return _Position(loader)


def _sampler(loader: Any) -> Any:
    batches = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    # With several ranks, accelerate's part for one rank has the loader's own batch sampler inside.
    return getattr(getattr(batches, "batch_sampler", batches), "sampler", None)


@cache
def _warn_of_gradients() -> None:
    log.warning(
        "a checkpoint is saved while gradients are accumulated, and they are not in it: a resume takes its next "
        "optimizer step without those of the batches so far. Call step() where accelerator.sync_gradients is true"
    )


class _Counter(FitsAnyWorld):
    """The accelerator's position within gradient accumulation."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        """Warns once if gradients are under way: a resume takes its next optimizer step without them."""
        if not self._accelerator.sync_gradients and self._accelerator.is_main_process:
            _warn_of_gradients()
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._accelerator.step = state["step"]


class _Epoch(FitsAnyWorld):
    """How often a loader was gone through: a seedable sampler shuffles by it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, int]:
        return {"iteration": getattr(self._loader, "iteration", 0)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        if hasattr(self._loader, "set_epoch"):
            self._loader.set_epoch(state["iteration"])


class _Position:
    """Where a stateful loader is. Its own state has neither the epoch nor the seed, by which a seedable sampler
    shuffles."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        state = self._loader.state_dict()
        # Accelerate counts an epoch when its loop has ended, not yet at the last batch.
        is_in_loop = self._loader in self._loader.gradient_state.dataloader_references
        return {
            "loader": state,
            "iteration": self._loader.iteration + (is_in_loop and state.get("_iterator_finished", False)),
            "seed": getattr(_sampler(self._loader), "initial_seed", None),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loader.load_state_dict(state["loader"])
        # Until its first batch the loader would tell the place that it had before.
        self._loader.dl_state_dict = state["loader"]
        self._loader.set_epoch(state["iteration"])
        if state["seed"] is not None:
            _sampler(self._loader).initial_seed = state["seed"]
