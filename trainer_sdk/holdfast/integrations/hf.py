"""Trainer of transformers, with its checkpoints in a run. No checkpoint is written to `output_dir` and read back.

train(resume_from_checkpoint) -> restore of the trainer's own progress -> Trainer counts its epochs and batches
    _load_optimizer_and_scheduler() -> restore of everything, into the prepared model, optimizer and scheduler
_maybe_log_save_evaluate() -> log, evaluation, _save_checkpoint() -> then checkpointer.step(), or save() if it is due

A callback alone sees neither the GradScaler nor the moment between preparing and counting, and cannot keep Trainer from
writing its folder. So these are the methods that Trainer itself calls. Written against transformers 5.23.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import HubStrategy, get_last_checkpoint

from holdfast.checkpointer import Checkpointer
from holdfast.errors import ConfigurationError, IntegrityError, NotFound, Preempted, ServiceUnavailable, StoreProblem
from holdfast.integrations.hf_files import ModelFiles
from holdfast.integrations.trash import Trash
from holdfast.restore.partial import load_weights
from holdfast.save.job import SaveHandle
from holdfast.state.components import HF_FILES, capture_rng, restore_rng
from holdfast_protocol.runs import parse_run

log = logging.getLogger("holdfast")

_TRAINER_STATE = "trainer_state.json"


class HoldfastTrainerMixin:
    """Put it before a Trainer class, and give the constructor a Checkpointer:

        class MyTrainer(HoldfastTrainerMixin, SFTTrainer): ...

        args = TrainingArguments(…)                      # joins the ranks
        with holdfast.Checkpointer("demo/gpt") as checkpointer:
            trainer = MyTrainer(model, args, …, checkpointer=checkpointer)
            trainer.train(resume_from_checkpoint=True)

    Saves when `save_strategy` says so (after evaluation, with its metrics) and, between, when the Checkpointer's
    `save=` is due. `load_best_model_at_end` and `metric_for_best_model` mean what they mean in Trainer.

    `save_total_limit`: there are no folders to rotate. The checkpoints that Trainer would delete after a save go to the
    run's trash, by a token with the scope operate. Checkpoints that a run must keep stay at any limit, such as its two
    newest healthy and its two newest proven ones. The retention policy of a run applies to all its jobs:
    `holdfast policies put retention demo/gpt --keep-last 3`.

    When the job is told to leave, training stops after the step, which is saved, and train() raises Preempted.
    """

    def __init__(self, *args: Any, checkpointer: Checkpointer, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.checkpointer = checkpointer
        self._progress = _Progress(self)
        self._resume: _Resume | None = None
        self._preempted: Preempted | None = None
        self._trash: Trash | None = None
        self._files: ModelFiles | None = None
        self._epoch_is_over = self._save_is_due = False
        self._stepped: int | None = None
        self._trainer.add_callback(HoldfastCallback(self))
        self._refuse_unsupported()
        self._explain_limit()

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Trainer's own, except for the values of `resume_from_checkpoint`:

        True: the newest restore point; if the run has none, training begins. So one command launches and relaunches.
        A checkpoint of the run (`"1200"`, `"best:eval_loss"`): that one; later ones are never the latest again.
        None or False: from the beginning, which a run with checkpoints refuses. A folder: Trainer loads it.
        """
        self._preempted = None
        if resume_from_checkpoint in (None, False) or os.path.isdir(str(resume_from_checkpoint)):
            return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
        at = None if resume_from_checkpoint is True else str(resume_from_checkpoint)
        while True:
            with self._resuming(at) as folder:
                try:
                    return super().train(folder, *args, **kwargs)  # type: ignore[misc]
                except _PointMoved as moved:
                    log.warning("%s: its progress is read again", moved)
                    at = None

    def get_train_dataloader(self) -> Any:
        """Trainer's own. Its sampler takes torch's seed, so this sets the seed that the run began with: after a restore
        on another number of ranks each rank has another one, and would shuffle by it."""
        if self._resume is None or self._progress.data_seed is None:  # a beginning, or saved before seeds were
            self._progress.data_seed = torch.initial_seed()
            return super().get_train_dataloader()  # type: ignore[misc]
        with torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(self._progress.data_seed)
            return super().get_train_dataloader()  # type: ignore[misc]

    @property
    def _trainer(self) -> Any:
        return self

    @contextmanager
    def _resuming(self, at: str | None) -> Iterator[str | None]:
        """A folder with the progress alone, by which Trainer counts epochs and batches before there is an optimizer."""
        next_step = self.checkpointer.restore({"trainer": self._progress}, at)
        if next_step == 0:
            yield None
            return
        with tempfile.TemporaryDirectory(prefix="holdfast-hf-") as folder:
            # The best checkpoint is no folder here, so Trainer would report it missing.
            state = TrainerState(**{**self._progress.loaded, "best_model_checkpoint": None})
            state.save_to_json(os.path.join(folder, _TRAINER_STATE))
            self._resume = _Resume(folder, next_step - 1)
            try:
                yield folder
            finally:
                self._resume = None

    def _is_resuming(self, folder: str | None) -> bool:
        return self._resume is not None and folder == self._resume.folder

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self._is_resuming(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._resume is None or checkpoint != self._resume.folder:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        step = self.checkpointer.restore(self._training_state()) - 1
        if step != self._resume.step:
            raise _PointMoved(f"step {self._resume.step} could not be read whole, and step {step} was restored")
        self._explain_skipping(step)
        # Trainer draws numbers for its loaders before it asks for these.
        self._resume.rng = capture_rng()
        self._trainer.state.best_model_checkpoint = self._progress.loaded["best_model_checkpoint"]

    def _load_scaler(self, checkpoint: str | None) -> None:
        if not self._is_resuming(checkpoint):
            super()._load_scaler(checkpoint)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._resume is not None and checkpoint == self._resume.folder:
            restore_rng(self._resume.rng)
        else:
            super()._load_rng_state(checkpoint)  # type: ignore[misc]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if trial is not None:
            raise ConfigurationError(
                "A hyperparameter search has a model for each trial, and a run has one. "
                "Search with save_strategy='no', or with a plain Trainer."
            )
        state = self._trainer.state
        if state.best_global_step in {*self._progress.saved, state.global_step}:
            state.best_model_checkpoint = f"{self.checkpointer.run}@{state.best_global_step}"
        self._save_is_due = True

    def _load_best_model(self) -> None:
        state = self._trainer.state
        if self._preempted is not None:
            return
        if state.best_model_checkpoint != f"{self.checkpointer.run}@{state.best_global_step}":
            super()._load_best_model()  # type: ignore[misc]
            return
        self.checkpointer.wait()
        try:
            load_weights(
                state.best_model_checkpoint,
                self._trainer.model,
                component="model",
                client_settings=self.checkpointer.parts.client.settings,
            )
        except (NotFound, IntegrityError, ServiceUnavailable, StoreProblem) as error:
            # As Trainer does if the folder is gone. Every rank raises it, and before any weight was changed.
            log.warning(
                "the best model, %s, could not be loaded, and the last weights stay: %s",
                state.best_model_checkpoint,
                error,
            )

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]
        # Last, so that it has this step's log and evaluation. Those of an epoch's end come with a second call.
        state = self._trainer.state
        if self._preempted is None and (self._epoch_is_over or not float(state.epoch).is_integer()):
            self._after_step(state.global_step)

    def _after_step(self, step: int) -> None:
        if step != self._stepped:
            self._stepped = step
            try:
                handle = self.checkpointer.step(step, self._training_state(saving=step), self._metrics())
            except Preempted as preempted:
                self._preempted = preempted
                self._trainer.control.should_training_stop = True
                return
            if handle is not None and not handle.declined:
                self._saved(step, handle)
        if self._save_is_due and step not in self._progress.saved:
            self._saved(step, self.checkpointer.save(step, self._training_state(saving=step), self._metrics()))
        self._save_is_due = False

    def _begin(self) -> None:
        """Before the first step of train(), with the model that is trained."""
        self._files = ModelFiles(self._trainer.model, self._trainer.processing_class)

    def _end(self) -> None:
        """The end of train(), after the turn of all other callbacks."""
        if self._trash is not None:
            if self._preempted is None:
                self.checkpointer.wait()
            self._trash.close()
            self._trash = None
        if self._preempted is not None:
            raise self._preempted

    def _saved(self, step: int, handle: SaveHandle) -> None:
        self._progress.saved.append(step)
        limit, state = self._limit, self._trainer.state
        if limit is None or not state.is_world_process_zero:
            return
        if self._trash is None:
            run = parse_run(self.checkpointer.run)
            self._trash = Trash(self.checkpointer.parts.client.settings, run, f"save_total_limit={limit}")
        gone = beyond_limit(self._progress.saved, limit, state.best_global_step)
        self._trash.drop(gone, handle)

    @property
    def _limit(self) -> int | None:
        limit: int | None = self._trainer.args.save_total_limit
        return limit if limit and limit > 0 else None

    def _explain_limit(self) -> None:
        if self._limit is not None and self._trainer.is_world_process_zero():
            run = self.checkpointer.run
            log.info(
                "save_total_limit=%d rotates no folders here. Checkpoints that Trainer would delete go to the trash "
                "of %s, by a token with the scope operate. The run's two newest healthy and two newest proven "
                "checkpoints stay whatever the limit, and so does what a job resumed from: `holdfast retention plan "
                "%s` says why each one stays. The retention policy of the run applies to all its jobs: "
                "`holdfast policies put retention %s --keep-last %d`",
                self._limit,
                run,
                run,
                run,
                self._limit,
            )

    def _explain_skipping(self, step: int) -> None:
        trainer, saved, now = self._trainer, self._progress.samples_per_step, self._samples_per_step
        if saved is None or saved == now or trainer.args.ignore_data_skip:
            return
        if trainer.is_world_process_zero():
            log.warning(
                "step %d was saved by a job that took %d samples a step, and this one takes %d: Trainer skips as many "
                "steps of this job as were trained, so it %s. Choose per_device_train_batch_size and "
                "gradient_accumulation_steps so that a step takes as many samples as before",
                step,
                saved,
                now,
                "leaves out samples that were not trained" if now > saved else "takes samples that were trained again",
            )

    @property
    def _samples_per_step(self) -> int:
        samples: int = self._trainer.get_total_train_batch_size(self._trainer.args)
        return samples

    def _training_state(self, saving: int | None = None) -> dict[str, Any]:
        """The present state, because Trainer replaces some of these objects. `saving`: the step of the save."""
        trainer = self._trainer
        self._progress.saving = saving
        optimizer, scaler = trainer.optimizer, getattr(trainer.accelerator, "scaler", None)
        state = {
            "trainer": self._progress,
            "model": trainer.model,
            "optimizer": getattr(optimizer, "optimizer", optimizer),
            "lr_scheduler": trainer.lr_scheduler,
        }
        if scaler is not None:
            state["scaler"] = scaler
        if saving is not None:  # no restore asks for them, so checkpoints without them can be restored
            state[HF_FILES] = self._files
        return state

    def _metrics(self) -> dict[str, float]:
        """The values that were logged at this very step: the loss, and an evaluation's."""
        state = self._trainer.state
        found: dict[str, float] = {}
        for entry in reversed(state.log_history):
            if entry.get("step") != state.global_step:
                break
            found = {name: value for name, value in entry.items() if _is_metric(name, value)} | found
        return found

    def _refuse_unsupported(self) -> None:
        args = self._trainer.args
        if self._trainer.is_deepspeed_enabled:
            raise ConfigurationError(
                "DeepSpeed keeps its state in an engine of its own. Use FSDP2 (fsdp_version: 2), or a loop of your own "
                "as in examples/deepspeed_zero.py."
            )
        if args.push_to_hub and args.hub_strategy is not HubStrategy.END:
            raise ConfigurationError(
                f"hub_strategy={args.hub_strategy.value!r} pushes folders that are not written here. Use 'end'."
            )
        if args.save_total_limit == 1 and os.path.isdir(args.output_dir) and get_last_checkpoint(args.output_dir):
            raise ConfigurationError(
                f"{args.output_dir} has checkpoints of a plain Trainer, which save_total_limit=1 would look among. "
                "Choose another output_dir."
            )


class HoldfastTrainer(HoldfastTrainerMixin, Trainer):
    """transformers.Trainer with a Checkpointer: see the mix-in."""


class HoldfastCallback(TrainerCallback):
    """The mix-in's work between steps; it adds this callback by itself."""

    def __init__(self, trainer: HoldfastTrainerMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._begin()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._epoch_is_over = False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._epoch_is_over = True
        if self._trainer._preempted is not None:
            # The deadline leaves no time for an evaluation, and the step is saved.
            control.should_evaluate = control.should_save = False

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._end()


class _Progress:
    """TrainerState and the callbacks' states, as Trainer writes them to trainer_state.json, and the saved steps."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.saving: int | None = None
        self.saved: list[int] = []
        self.data_seed: int | None = None
        self.samples_per_step: int | None = None
        self.loaded: Mapping[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        trainer.store_flos()
        exported = [
            each for each in [*trainer.callback_handler.callbacks, trainer.control] if isinstance(each, ExportableState)
        ]
        state = dataclasses.asdict(trainer.state)
        state["stateful_callbacks"] = TrainerState(stateful_callbacks=exported).stateful_callbacks
        saved = self.saved if self.saving is None else [*self.saved, self.saving]
        return {
            "state": state,
            "saved": saved,
            "data_seed": self.data_seed,
            "samples_per_step": trainer._samples_per_step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loaded = state["state"]
        self.saved = list(state["saved"])
        self.data_seed = state.get("data_seed")
        self.samples_per_step = state.get("samples_per_step")

    def load_resharded_state_dict(self, states: list[Any], *, rank: int, world_size: int) -> None:
        """Ranks differ only in how fast they saw an evaluation run, which training does not depend on."""
        self.load_state_dict(states[0])


@dataclasses.dataclass
class _Resume:
    folder: str
    step: int
    rng: Any = None


class _PointMoved(Exception):  # noqa: N818
    """The restore point whose progress was read could not be read whole. Every rank raises it."""


def beyond_limit(saved: list[int], limit: int, best: int | None) -> list[int]:
    """The steps that Trainer would delete: all but the newest `limit`; the best always stays."""
    order = sorted(set(saved))
    if best in order and best != order[-1]:
        order.remove(best)
        order.insert(len(order) - 1, best)
        limit = max(limit, 2)
    return order[:-limit]


def _is_metric(name: str, value: Any) -> bool:
    return name not in ("step", "epoch") and len(name) <= 100 and isinstance(value, Real)
