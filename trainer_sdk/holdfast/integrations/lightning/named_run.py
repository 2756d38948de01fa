"""One run behind Lightning's names: each name's step, when to begin an attempt, which checkpoints may be trashed.

checkpoint_io.py and strategy.py bring the state; callback.py says when a fit begins, steps and fails.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Set
from typing import Any, NamedTuple

from holdfast.checkpointer import Checkpointer
from holdfast.errors import ConfigurationError, NotFound, Preempted, StateMismatchError
from holdfast.integrations.lightning.names import SCHEME, Wanted, read_name, remove_name, write_name
from holdfast.integrations.trash import Trash
from holdfast.restore.partial import read_into
from holdfast.save.job import SaveHandle
from holdfast.schedule.save_policy import OnPreemption
from holdfast.settings import TrainerSettings
from holdfast.state.components import capture_rng, restore_rng
from holdfast.state.load import LoadOptions
from holdfast_client.client import Client
from holdfast_client.settings import ClientSettings

log = logging.getLogger("holdfast")


class RestOfCheckpoint:
    """Lightning's dict without model and optimizers, given back unchanged."""

    def __init__(self, dumped: Any = None) -> None:
        self._dump = dumped if callable(dumped) else lambda: dumped or {}
        self.loaded: dict[str, Any] = {}
        self.resumes = False

    def state_dict(self) -> dict[str, Any]:
        return dict(self._dump())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loaded = dict(state)

    def load_resharded_state_dict(self, states: list[Any], *, rank: int, world_size: int) -> None:
        """Rank 0's, which is all that Lightning itself writes, without the places of its loaders. Raises
        StateMismatchError for a resume in the middle of an epoch, which needs them."""
        self.load_state_dict(states[0])
        loop = self.loaded.get("loops", {}).get("fit_loop", {})
        places = loop.get("state_dict", {}).pop("combined_loader", None)
        if places and self.resumes and not loop["epoch_loop.batch_progress"]["is_last_batch"]:
            raise StateMismatchError(
                "the place of the training loader",
                f"each of {len(states)} ranks saved its own in the middle of an epoch, and there are now {world_size}",
                "resume on as many ranks as saved it, or from a checkpoint of the end of an epoch; if the place of "
                'rank 0 will do for all, give the strategy checkpointer={"replicated": ["checkpoint"]}',
            )


class Names:
    """Name -> step, kept in each checkpoint, so that a job on another node has them too."""

    def __init__(self) -> None:
        self.steps: dict[str, int] = {}

    def state_dict(self) -> dict[str, int]:
        return dict(self.steps)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.steps = dict(state)

    def load_resharded_state_dict(self, states: list[Any], *, rank: int, world_size: int) -> None:
        self.load_state_dict(states[0])


class _Ended(NamedTuple):
    """A fit that is over."""

    trainer: Any
    attempt: int
    committed: int | None
    """The last step that was."""


class NamedRun:
    """`options` are those of Checkpointer, which is made when a fit begins, because the ranks join only then. Raises
    ConfigurationError for `overlap`."""

    def __init__(self, run: str | None, options: Mapping[str, Any]) -> None:
        if options.get("overlap"):
            raise ConfigurationError(
                "overlap=True does not go with Lightning: its WeightAveraging writes to weights through `.data` right "
                "after a save, which nothing can see. Leave it out of checkpointer={…}."
            )
        self._run = run
        # By default ModelCheckpoint alone says when: after a save in the middle of an epoch, a loader that is not
        # stateful begins the epoch again.
        self._options: dict[str, Any] = {"save": OnPreemption(), **options}
        self._checkpointer: Checkpointer | None = None
        self._names = Names()
        self._saved: int | None = None
        self._last: SaveHandle | None = None
        self._older: Set[str] = frozenset()
        """What was logged at older steps than the last one, and not at that."""
        self._metrics_of_step: Mapping[str, Any] = {}
        self._step_before: int | None = None
        self._trash: Trash | None = None
        self._rng: Any = None
        self._trainer: Any = None
        self._failure: BaseException | None = None
        self._has_restored = False
        self._ended: _Ended | None = None

    @property
    def checkpointer(self) -> Checkpointer:
        if self._checkpointer is None:
            if self._trainer is None:
                raise ConfigurationError(
                    "Nothing tells Holdfast when this fit begins. Give Trainer callbacks=[HoldfastCallback()]."
                )
            self._checkpointer = Checkpointer(self._run, **self._options)
        return self._checkpointer

    def begin(self, trainer: Any) -> None:
        """A fit begins; a load from here on is a resume."""
        self._trainer, self._failure, self._has_restored = trainer, None, False
        self._saved = self._last = self._ended = None
        self._older = frozenset()

    def open(self) -> None:
        """On every rank, before the first save of this fit."""
        _ = self.checkpointer

    def fail(self, error: BaseException) -> None:
        self._failure = error

    def last(self) -> str | None:
        """For ckpt_path: the newest restore point; None if nothing was ever committed."""
        settings = self._options.get("client_settings") or ClientSettings()
        name = TrainerSettings().run_name(self._run)
        with Client(settings) as client:
            try:
                decision = client.restores.restore_point(name.project, name.run)
            except NotFound:
                return None
        return f"{SCHEME}latest" if decision.ever_committed else None

    def load(self, wanted: Wanted, state: dict[str, Any]) -> None:
        """Into the objects of `state`. In a fit without a save so far, the job resumes from this checkpoint. Otherwise,
        to test or predict, it is only read. Raises ConfigurationError for a checkpoint of another run."""
        point = wanted.point
        if wanted.run not in (None, self._run_name):
            raise ConfigurationError(
                f"ckpt_path names a checkpoint of {wanted.run}, and this job's run is {self._run_name}. Give "
                "HoldfastCheckpointIO or the strategy the run that you mean."
            )
        if self._trainer is None or self._has_restored or self._saved is not None:
            selector = f"{self._run_name}@{point}"
            read_into(
                selector,
                lambda _stored: (state, LoadOptions()),
                rank_trees=True,
                client_settings=self._options.get("client_settings"),
            )
            return
        state["checkpoint"].resumes = True
        self.checkpointer.restore(state | {"names": self._names}, None if point == "latest" else point)
        self._has_restored = True
        self._rng = capture_rng()
        if self._is_first:
            self._write_names_that(state["checkpoint"].loaded.get("callbacks", {}))

    def restore_rng(self) -> None:
        """Once more, because Lightning may have drawn numbers since that were drawn before the checkpoint."""
        if self._rng is not None:
            restore_rng(self._rng)
            self._rng = None

    def save(self, step: int, path: str | os.PathLike[str], state: dict[str, Any]) -> None:
        """On every rank. Two names of ModelCheckpoint for one step are one checkpoint. After the fit, which has ended
        its attempt, this opens another one, and returns once the checkpoint is committed."""
        if self._checkpointer is not None or self._ended is None:
            self._save(step, path, state)
        else:
            self._save_after(self._ended, step, path, state)

    def _save_after(self, ended: _Ended, step: int, path: str | os.PathLike[str], state: dict[str, Any]) -> None:
        if self._failure is not None and not isinstance(self._failure, Preempted):
            raise ConfigurationError(
                f"The fit ended by {type(self._failure).__name__}, perhaps in the middle of a step, so what is in "
                "memory is not saved. Go on from the run's newest checkpoint."
            )
        self._trainer = ended.trainer
        try:
            session = self.checkpointer.parts.session
            self._saved = session.ranks.from_first(lambda: ended.committed)
            if self._saved != step:
                session.go_on_after(ended.attempt)
            handle = self._save(step, path, state)
            if handle is not None:
                handle.committed.result()
        except BaseException as error:
            self._close(error)
            raise
        self._close(None)

    def _save(self, step: int, path: str | os.PathLike[str], state: dict[str, Any]) -> SaveHandle | None:
        """None if the name needs no save."""
        checkpointer = self.checkpointer
        if self._failure is not None and not isinstance(self._failure, Preempted):
            # ModelCheckpoint saves on exceptions. This rank may be within a step, and the others are not here.
            log.warning("step %d is not saved after %s", step, type(self._failure).__name__)
            return None
        before = self._names.steps.get(os.fspath(path))
        self._names.steps[os.fspath(path)] = step
        handle = None
        if self._saved != step:
            handle = checkpointer.save(step, state | {"names": self._names}, self._metrics())
            self._saved, self._last = step, handle
        if self._is_first:
            write_name(path, self._run_name, step)
            self._trashed.keep(step)
            self._drop_unless_named(before)
        return handle

    def tell(self, step: int, metrics: Mapping[str, Any], older: Set[str] = frozenset()) -> None:
        """After each update, on every rank and before any save of the step: tells what was logged. `older`: the names
        of what was logged at older steps only, which goes with no save of this one."""
        self._older = older
        self._metrics_of_step = _with_short_names(metrics)
        self._step_before = self.checkpointer._tell(step, self._metrics_of_step)

    def step(self, step: int, state: dict[str, Any]) -> None:
        """After tell(), when nothing of the step is to come, on every rank: saves by the Checkpointer's own `save=`,
        unless ModelCheckpoint has saved the step meanwhile, and raises Preempted."""
        try:
            handle = self.checkpointer._end_step(
                step,
                state | {"names": self._names},
                self._metrics_of_step,
                last=self._step_before,
                is_saved=self._saved == step,
            )
        except Preempted:
            self._saved = step  # ModelCheckpoint, which saves on exceptions, need not save it again
            raise
        if handle is not None and not handle.declined:
            self._saved, self._last = step, handle

    def knows(self, path: str | os.PathLike[str]) -> bool:
        return os.fspath(path) in self._names.steps

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Removes the name, and with the last name its checkpoint, if that is of this run."""
        step = self._names.steps.pop(os.fspath(path), None)
        if not self._is_first:
            return
        name = read_name(path)
        if step is None and name is not None and name.run == self._run_name:
            step = name.step
        remove_name(path)
        self._drop_unless_named(step)

    def close(self) -> None:
        """The fit is over, successful or not."""
        self._close(self._failure)

    def _close(self, failure: BaseException | None) -> None:
        trainer, self._trainer = self._trainer, None
        checkpointer, trash = self._checkpointer, self._trash
        if checkpointer is None:
            return
        self._checkpointer = self._trash = None
        try:
            checkpointer.__exit__(type(failure) if failure else None, failure, None)
        finally:
            session = checkpointer.parts.session
            if session.has_opened:
                self._ended = _Ended(trainer, session.opened.attempt, checkpointer.stats.last_committed_step)
            if trash is not None:
                trash.close()  # the last save is committed by now, so an older one may go

    @property
    def _trashed(self) -> Trash:
        if self._trash is None:
            parts = self.checkpointer.parts
            self._trash = Trash(parts.client.settings, parts.session.run, "ModelCheckpoint no longer keeps it")
        return self._trash

    @property
    def _run_name(self) -> str:
        return str(TrainerSettings().run_name(self._run))

    @property
    def _is_first(self) -> bool:
        return self._checkpointer is not None and self._checkpointer.parts.session.ranks.is_first

    def _drop_unless_named(self, step: int | None) -> None:
        nameless = {step} - {None, *self._names.steps.values()}
        self._trashed.drop((each for each in nameless if each is not None), self._last)

    def _write_names_that(self, callbacks: Any) -> None:
        """Writes the names that ModelCheckpoint still counts on, on a node without them. The newest save was made
        before ModelCheckpoint took its older names away."""
        mentioned = set(_texts(callbacks))
        for path, step in self._names.steps.items():
            if path in mentioned and os.path.isdir(os.path.dirname(path)) and not os.path.exists(path):
                write_name(path, self._run_name, step)

    def _metrics(self) -> dict[str, Any]:
        """The logged values to monitor, without those of older steps. On every rank, because they may be reduced only
        now."""
        values = _with_short_names(self._trainer.callback_metrics)
        return {name: value for name, value in values.items() if name not in self._older}


def _with_short_names(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if len(name) <= 100}


def _texts(state: Any) -> Iterator[str]:
    if isinstance(state, str):
        yield state
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from _texts(key)
            yield from _texts(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _texts(value)
