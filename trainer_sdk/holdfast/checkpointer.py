"""The one object of a training script. `compose.py` puts its parts together; each part's file says what the part does.

restore()  -> restore/restorer -> session (attempt) -> state/load
step()     -> distributed/step_agreement, schedule/schedule (due?) -> save()
save()     -> save/saver (capture, plan, vote, stage) -> save/pipeline (hash, upload, seal, commit)
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from holdfast.compose import Parts, compose
from holdfast.dcp.own_saves import OwnSaves
from holdfast.distributed.step_agreement import Ask
from holdfast.errors import ConfigurationError, HoldfastError, Preempted
from holdfast.health.diverged import HealthRule
from holdfast.layout.plan import ChunkSizes
from holdfast.progress import Progress, speak_up
from holdfast.restore.restorer import Loading
from holdfast.save.job import SaveHandle, SaveStats
from holdfast.save.pipeline import STOP_SECONDS
from holdfast.save.saver import Metrics
from holdfast.schedule.save_policy import Policy
from holdfast.schedule.schedule import Due
from holdfast.settings import TrainerSettings
from holdfast_client.settings import ClientSettings
from holdfast_protocol.states import AttemptOutcome, CheckpointKind

if TYPE_CHECKING:
    from holdfast.dcp.reader import HoldfastReader
    from holdfast.dcp.writer import HoldfastWriter
    from holdfast.verify.recorder import Recorder

_DRAIN_AFTER_ERROR_SECONDS = 30.0


class Checkpointer:
    """Saves and restores one run. Make it on every rank, after torch.distributed is initialised (if it is used).

    Args:
        run: `project/run`. Default: HOLDFAST_RUN. URL and token come from the environment (holdfast_client.settings).
        save: when step() saves: Every(steps=500), Every(minutes=10), Auto(), Best("val_loss"), OnPreemption(), or
            several joined by `|`. Default: Auto(), which saves as often as loses the least. A save that is due while an
            earlier one is in flight is deferred until that one is over.
        strict: a failed save raises SaveFailed at the next call. Without it, the failure is logged and counted in
            `stats`, and training goes on. A stale attempt and a refused token raise either way.
        replicated, per_rank: keys of the state whose values are the same on all ranks, or each rank's own, if the
            default does not fit. By default models, optimizers and schedulers are shared; all else is each rank's own.
        frozen: shell patterns over tensor names (`["model/base.*"]`). You promise that these tensors do not change
            while this job runs. The first save stages and hashes them, later ones do not. A change that Holdfast sees
            is an error in the log, and every later save stages the tensor. A change that it does not see (a write
            through `.data`) can put older bytes into checkpoints until the tensor's turn to be compared comes.
            restore() may change them.
        create: make project and run (True), refuse to (False), or make the run unless its name looks mistyped (None).
        check_finite: look for NaN and infinity in models and optimizers at each save (health/diverged.py says what
            counts): True everywhere, None only on GPUs. A checkpoint that has them is kept as diverged, and not resumed
            from.
        healthy: your own rule, asked on rank 0 at each save: `(step, metrics) -> True`, or False, or a text that says
            why the state has diverged (health/diverged.py), or `LossSpike()`. Default: a metric called loss must be
            finite.
        drop: components that the run's first checkpoint has and this job leaves out on purpose. For any other missing
            component the log names it, and `strict` raises MissingComponent.
        stage_every: stage the state after every so many steps, in place of the last staged one, and send nothing. If
            the job must leave and no step ends in time, it saves this standby snapshot. It costs as much host memory
            again as a save.
        host_memory: the most bytes of host memory that this rank stages into (HOLDFAST_HOST_MEMORY_BYTES). A larger
            state goes through it as through a ring: save() then returns only when the last byte is staged, which is
            nearly as long as the upload takes, and `frozen` saves nothing. By default a save takes as much memory as
            the state.
        overlap: save() returns while parameters and optimizer state are still copied. The next step of any torch
            optimizer waits until that is over, on a GPU only its stream does. All else is copied before save() returns:
            buffers, parameters that no optimizer of the state trains, what an optimizer with `capturable` changes, each
            tensor at its first save, and what was written to between that save and the next step. If a script writes to
            another parameter in place meanwhile, by other means than an optimizer's step, the save fails, and later
            saves copy that tensor before they return. A write through `.data` or by a collective
            (`dist.broadcast(p)`) is not seen: let save() come after all of a step's changes, and wait for
            `handle.staged.result()` before weights are swapped (an evaluation of averages). Make the Checkpointer
            before a step is captured into a CUDA graph. A state that does not fit `host_memory` is saved as without it.
        local: a folder on this node's own disk (HOLDFAST_LOCAL_DIR). A save is durable there first. It is uploaded in
            order, while later saves are staged. Saves collect there while service or store are unavailable. This job
            commits them as soon as both are back, or else the next launch with this folder does before it restores.
        agent: the socket of the agent of this node (HOLDFAST_AGENT; `holdfast agent serve` starts one). The state is
            staged into memory that the agent can read, and the agent hashes and uploads it. Once save() has returned
            (with `overlap`: once the next step of an optimizer has begun), the step is committed even if every rank of
            the node is killed. If the agent is gone, this process uploads as without it. A state that does not fit
            `host_memory` is saved as without it too. The last state stays in that memory for a relaunch on this node;
            where there is room, staging takes twice the memory for that (docs/operating/set-up.md).
        compress: `"zstd"` compresses chunks before they are sent, without loss, if that saves 5% or more
            (HOLDFAST_COMPRESS). It takes CPU time: worth it if the store is far or dear (docs/performance.md).
        config: what this job was told to train, for people: a map, a dataclass, a Namespace, or the path of a JSON or
            YAML file. `holdfast attempts show-config` shows it, and what is another than in the attempt before. Text
            under a key that names a secret is left out.
        chunk_sizes: how tensors are cut and packed, in bytes. Keep them for the life of a run.
        settings, client_settings: used in place of the environment.
    """

    def __init__(
        self,
        run: str | None = None,
        *,
        save: Policy | None = None,
        strict: bool = False,
        replicated: Iterable[str] = (),
        per_rank: Iterable[str] = (),
        frozen: Iterable[str] = (),
        create: bool | None = None,
        check_finite: bool | None = None,
        healthy: HealthRule | None = None,
        drop: Iterable[str] = (),
        stage_every: int | None = None,
        host_memory: int | None = None,
        overlap: bool = False,
        local: str | Path | None = None,
        agent: str | Path | None = None,
        compress: Literal["none", "zstd"] | None = None,
        config: object = None,
        chunk_sizes: ChunkSizes | None = None,
        settings: TrainerSettings | None = None,
        client_settings: ClientSettings | None = None,
    ) -> None:
        speak_up()
        self._raised: HoldfastError | None = None
        self._is_prepared = False
        """The first save has its memory, or is under way."""
        self._end_lock = threading.Lock()
        self._has_ended = False
        self._closed = False
        self._process_id = os.getpid()
        self.parts: Parts = compose(
            run,
            save=save,
            strict=strict,
            replicated=replicated,
            per_rank=per_rank,
            frozen=frozen,
            create=create,
            check_finite=check_finite,
            healthy=healthy,
            drop=drop,
            stage_every=stage_every,
            host_memory=host_memory,
            overlap=overlap,
            local=local,
            agent=agent,
            compress=compress,
            config=config,
            chunk_sizes=chunk_sizes,
            settings=settings,
            client_settings=client_settings,
            end=self._end,
        )
        self.stats: SaveStats = self.parts.stats
        self._loading = Loading(self.parts)
        self._own_saves = OwnSaves(self.parts, self._raise_pending)
        # A script may have no `with`: the save in flight at the end of the program is finished all the same.
        atexit.register(self._close_at_exit)

    @property
    def run(self) -> str:
        return str(self.parts.session.run)

    @property
    def progress(self) -> Progress | None:
        """How far this process's restore is, or the upload of its save in flight; None if neither runs. Any thread may
        ask, as often as it likes."""
        return self.parts.progress.read()

    def restore(
        self, state: dict[str, Any], at: str | None = None, *, skip_diverged: bool = True, stream: bool = False
    ) -> int:
        """Loads the newest restore point into `state`, and returns the next step to run. Call it on every rank.

        It returns 0, and touches nothing, only if the service says that nothing was ever committed in this run. If a
        checkpoint cannot be read whole, that is logged and all ranks take the one before. Modules, optimizers, dicts
        and lists are loaded in place. Other plain values are new objects: read them from `state` afterwards.

        With `at` (`"1200"`, `"best:loss"`, a checkpoint's id) it loads exactly that one or raises. The run goes on from
        there, and later checkpoints are never its latest again. `skip_diverged=False` accepts a diverged checkpoint.

        `stream=True` returns when the model is there, and all else but the tensors that torch optimizers keep for their
        parameters. Those arrive while the first batch runs. The first step of any optimizer waits until they were
        verified on all ranks, and the log says how long. So does every other use of an optimizer's state, and step(),
        save() and writer(). If they are damaged, that step raises RestoreFault on all ranks before anything is trained:
        call restore(state) again, which takes the checkpoint before, and begin the loop at the step that it returns.
        After any other error no step of an optimizer is taken until a restore has ended well.

        Raises on every rank or on none: NoRestorePoint, IntegrityError, StateMismatchError, ServiceUnavailable, ….
        ReadsWrongHere if the service can read the checkpoint and one rank's machine cannot: no older one is loaded.
        Bytes arrive in the tensors while they are hashed: after an error the state may hold parts of a checkpoint. The
        exception says so, and nothing is saved until a restore has ended well.
        """
        return self._loading.restore(state, at, skip_diverged=skip_diverged, stream=stream)

    def wait_for_rest(self) -> float:
        """Waits until all of a `restore(…, stream=True)` is there, on all ranks. Returns the seconds that training has
        waited for that in all: 0.0 if it was there in time, and without `stream`. Not a collective.

        Raises what the first step would: RestoreFault on all ranks if the rest is damaged."""
        self.parts.rest.settle()
        return self.parts.rest.waited_seconds

    def rollback(
        self,
        state: dict[str, Any],
        *,
        steps: int | None = None,
        before: int | None = None,
        skip_data: bool = False,
        keep: Iterable[str] = (),
    ) -> int:
        """Goes back to the newest healthy checkpoint without a new launch, and returns the next step to run. Call it on
        every rank, with the same target.

        `steps`: at least so many steps back from the last step that ran. `before`: to a step below this one. Default:
        the newest healthy checkpoint.
        `skip_data`: data loaders and samplers (keys of any rank's state with `loader` or `sampler` in them) are not
        loaded: they stay behind the data that poisoned the training. Otherwise they go back too, and the same batches
        come again. `keep`: further components, of any rank, that stay as they are.

        It finishes a save in flight, or gives it up after half a minute, and drops what `stage_every` has staged. Then
        the job goes on as a new attempt of the run. Its saves since the checkpoint are never the run's latest again.

        Raises NoRestorePoint if there is no such checkpoint: the state is unchanged, and the attempt goes on.
        StaleAttempt if another launch has taken over; and the errors of restore(). After one of those, step() and
        save() raise NotRestored until a restore() or a rollback() has ended well, also if the state is unchanged.
        """
        return self._loading.rollback(state, steps=steps, before=before, skip_data=skip_data, keep=keep)

    def step(self, step: int, state: dict[str, Any], metrics: Metrics | None = None) -> SaveHandle | None:
        """Saves if a save is due, and returns its handle. Call it after each step, on every rank. Otherwise it returns
        None and costs about a microsecond (the first call before the first save looks through the state, so that a
        thread can make that save's memory), and another one or two for each number in rank 0's `metrics`. They become
        the run's curves (`holdfast runs history`). Tensors with one element may stay on their device: it copies all of
        them at once, and is not waited for.

        While an earlier save is in flight on any rank, all ranks defer this one to the first step after that one. A
        save for Best waits instead, because the measured step must be saved, not a later one.

        Raises Preempted on every rank once the emergency save after a preemption notice is over; StaleAttempt if
        another launch has taken over; with `strict`, SaveFailed.
        """
        return self._end_step(step, state, metrics, last=self._tell(step, metrics))

    def save(
        self,
        step: int,
        state: dict[str, Any],
        metrics: Metrics | None = None,
        kind: CheckpointKind | str = CheckpointKind.PERIODIC,
    ) -> SaveHandle:
        """Saves now, and returns the handle. Call it on every rank.

        It waits for an earlier save (with a local tier only until that one is on the node's disk), then blocks until
        the state is staged, or with `overlap` until an optimizer may go on. With `host_memory` and a larger state, the
        first bytes are uploaded by then.

        Raises on every rank if one rank's state cannot be saved (UnsupportedStateError names the key).
        """
        self.parts.session.progress.reached(step)
        if metrics:
            self.parts.session.curve.take(step, metrics)
        handle = self._save(step, state, metrics, CheckpointKind(kind))
        self._raise_pending()
        if self.parts.recorder is not None:
            self.parts.recorder.stepped(step, state, metrics, handle)
        return handle

    def reader(self, at: str | None = None) -> HoldfastReader:
        """A storage reader for your own `torch.distributed.checkpoint.load`. Default: of the newest restore point.

        Call it on every rank. `reader.step` is the checkpoint's: go on with the next. Raises NoRestorePoint if there is
        none. After a dcp.load that raised, the state may hold parts of the checkpoint: nothing is saved until a
        dcp.load or restore() has ended well.
        """
        return self._loading.reader(at)

    def writer(self, step: int, *, kind: CheckpointKind | str = CheckpointKind.PERIODIC) -> HoldfastWriter:
        """A storage writer for your own `torch.distributed.checkpoint.save`: one checkpoint of this run. A loop that
        saves only this way must call step_with() to hear of a preemption notice.

        `check_finite` holds here too: a save with NaN in any of its tensors is kept as diverged, and not resumed from.
        It does not look for infinity, because tensor names alone do not say what is trained. `healthy` is not asked,
        because there are no metrics.
        """
        return self._own_saves.writer(step, CheckpointKind(kind))

    def step_with(self, step: int, save: Callable[[], object]) -> bool:
        """step() for a loop that saves by its own dcp.save: call it after each step, on every rank.

        Returns whether it called `save`. If not, it costs about a microsecond. It calls `save` if a save is due
        (`save=` of the Checkpointer; never for Best, because there are no metrics), or if the job must leave. `save`
        must save this step with `writer(step)`. A step that the loop has already saved is not saved again.

        Raises Preempted on every rank once the save of a job that must leave is committed; and any error of `save`.
        """
        return self._own_saves.step_with(step, save)

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Waits until no save is in flight, with a local tier until the spool is empty. Returns False if that takes
        longer than `timeout_seconds`. Not a collective. Raises StaleAttempt if another launch has taken over; with
        `strict`, SaveFailed."""
        over = self._wait_idle(timeout_seconds)
        self._raise_pending()
        return over

    def _wait_idle(self, timeout_seconds: float | None) -> bool:
        began = time.monotonic()
        own_are_over = self._own_saves.are_over(timeout_seconds)
        left = None if timeout_seconds is None else max(0.0, timeout_seconds - (time.monotonic() - began))
        return self.parts.pipeline.wait_idle(left) and own_are_over

    def close(self, outcome: AttemptOutcome = AttemptOutcome.FINISHED, detail: str = "") -> None:
        """Waits for the save in flight, within bounds, and ends the attempt. A second call does nothing. Not a
        collective."""
        # A forked child has none of the threads, and its end is not the job's.
        if self._closed or os.getpid() != self._process_id:
            return
        self._closed = True
        atexit.unregister(self._close_at_exit)
        began = time.monotonic()
        in_order = outcome is not AttemptOutcome.FAILED
        self.parts.rest.close()
        if in_order:
            self.parts.preemption.closing()
        if outcome is AttemptOutcome.FINISHED:
            # A notice that comes meanwhile shortens it.
            drained = self.parts.preemption.while_time_is_left(self._wait_idle)
            if not drained and (notice := self.parts.preemption.notice) is not None:
                outcome, detail = AttemptOutcome.PREEMPTED, f"{notice}. The last save was not committed in time."
        elif not in_order:
            bound = min(self.parts.preemption.wait_seconds(), _DRAIN_AFTER_ERROR_SECONDS)
            self._wait_idle(bound)
        self.parts.pipeline.close(drain_seconds=0, waited_seconds=time.monotonic() - began)
        self._end(outcome, detail)
        self.parts.preemption.close(in_order=in_order)
        self.parts.schedule.close()
        self.parts.workers.close(STOP_SECONDS)
        self.parts.saver.close()
        if self.parts.standby is not None:
            self.parts.standby.close()
        if self.parts.agent is not None:
            self.parts.agent.close(is_finished=outcome is AttemptOutcome.FINISHED)
        if self.parts.tier is not None:
            self.parts.tier.close()
        self.parts.client.close()
        self.parts.ranks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # sys.exit(0) is a normal end.
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
            if self.parts.session.ended_by() is not self._raised:
                self._raise_pending()
        elif isinstance(error, Preempted):
            self.close(AttemptOutcome.PREEMPTED, error.detail)
        else:
            self._crashed(error)

    def _close_at_exit(self) -> None:
        # Python sets it if the program ends by an exception, and in an interactive session at any earlier one.
        error = getattr(sys, "last_value", None)
        if error is None or hasattr(sys, "ps1"):
            self.close()
        elif isinstance(error, Preempted):
            self.close(AttemptOutcome.PREEMPTED, error.detail)
        else:
            self._crashed(error)

    def _end(self, outcome: AttemptOutcome, detail: str) -> None:
        """Acts once: this thread may call it, or the thread that ends the process at the deadline."""
        with self._end_lock:
            if not self._has_ended:
                self._has_ended = True
                self.parts.session.end(outcome, detail, self.parts.preemption.told)

    def _crashed(self, error: BaseException) -> None:
        # Told before anything is waited for: the launcher soon ends the other ranks, and their reports come later.
        try:
            if not self._closed and os.getpid() == self._process_id:
                self.parts.session.crashed(error)
        finally:
            self.close(AttemptOutcome.FAILED, f"{type(error).__name__}: {error}")

    def _save(
        self,
        step: int,
        state: dict[str, Any],
        metrics: Metrics | None,
        kind: CheckpointKind,
        *,
        due: Due | None = None,
    ) -> SaveHandle:
        """`due`: why step() saves; None if the script asks for it."""
        if self._closed or os.getpid() != self._process_id:
            raise ConfigurationError(
                "This save comes too late: its Checkpointer is closed, or was made by the process that this one was "
                "forked from. No thread would upload it. Save before close() or the end of the `with` block."
            )
        if self.parts.rest.coming is not None:
            self.parts.rest.settle()
        self._is_prepared = True
        try:
            handle = self.parts.saver.save(step, state, metrics, kind, wait=due is not Due.BY_INTERVAL)
            self.parts.schedule.saved(metrics, handle, due)
            return handle
        finally:
            self.parts.schedule.restart()
            self.parts.agreement.restart()

    def _tell(self, step: int, metrics: Metrics | None) -> int | None:
        """The first half of step(), before any save of the step. Returns the step before."""
        last = self.parts.session.progress.step
        self.parts.session.progress.ran(step)
        self.parts.session.curve.take(step, metrics)
        if not self.parts.session.may_save:
            self.parts.rest.settle()
            self.parts.session.ready_to_save()
        self.parts.judge.observe(step, metrics)
        return last

    def _end_step(
        self, step: int, state: dict[str, Any], metrics: Metrics | None, *, last: int | None, is_saved: bool = False
    ) -> SaveHandle | None:
        """The second half of step(). `last`: the step before. `is_saved`: save() was called between the halves."""
        if self.parts.recorder is not None:
            return self._step_recorded(self.parts.recorder, step, state, metrics, is_saved=is_saved)
        ask = self.parts.agreement.due(step)
        if ask is Ask.PREEMPT:
            raise self.parts.emergency.save(step, state, metrics)
        due = self.parts.schedule.due(step, metrics, agreed=ask is Ask.SAVE, last=last)
        if due is None and not self._is_prepared and self.parts.rest.coming is None:
            self._is_prepared = True
            self.parts.saver.prepare(state)
        saves = due is not None and not is_saved
        handle = self._save(step, state, metrics, CheckpointKind.PERIODIC, due=due) if saves else None
        if due is None and self.parts.standby is not None and self.parts.standby.is_due(step, last):
            self.parts.standby.stage(step, state, metrics)
        self._raise_pending()
        return handle

    def _step_recorded(
        self, recorder: Recorder, step: int, state: dict[str, Any], metrics: Metrics | None, *, is_saved: bool
    ) -> SaveHandle | None:
        due = recorder.saves_at(step) and not is_saved
        handle = self._save(step, state, metrics, CheckpointKind.PERIODIC) if due else None
        self._raise_pending()
        recorder.stepped(step, state, metrics, handle)
        return handle

    def _raise_pending(self) -> None:
        if (ended_by := self.parts.session.ended_by()) is not None:
            self._raised = ended_by
            raise ended_by
        failed = self.stats.last_failure
        if self.parts.strict and failed is not None and failed is not self._raised:
            self._raised = failed
            raise failed
