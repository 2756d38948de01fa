"""`restore(state, stream=True)`: what arrives after restore() has returned, and the wait for it.

    restore()           the model and all else is there, verified on all ranks; the state of optimizers is still read
    in the background   read, verify, make the slots -> all ranks agree (distributed/background_verdict.py) -> rank 0
                        tells the service what was restored
    the first step      torch's hook: it waits for the verdict; the optimizers get their state, or the step raises

So no step is taken unless the whole state was verified on all ranks. Until then each use of an optimizer's state waits
too (state/pending_slots.py), and so do step(), save() and writer(). If the rest is damaged, all ranks raise
RestoreFault, and the next restore() takes the checkpoint before.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.distributed.background_verdict import ENDED, BackgroundVerdict
from holdfast.errors import ConfigurationError, NotRestored, RankLost, RestoreFault
from holdfast.progress import readable_bytes
from holdfast.restore.checkpoint_reader import DAMAGED
from holdfast.session.session import Session
from holdfast.state.before_step import BeforeStep, is_being_captured
from holdfast.state.destinations import Arrivals
from holdfast.state.load_optimizer import LateSlots
from holdfast.state.pending_slots import PendingOptimizer, PendingState
from holdfast_client.errors import TransferStopped

NOT_TO_BE_TRAINED_ON = (
    "The state holds parts of a checkpoint that could not be restored: do not train on it. Build it again, or restore "
    "another point."
)

_CLOSE_SECONDS = 10.0
_CLOSED = (
    "The Checkpointer was closed before the rest of its restore was there, so this optimizer has no state. Call "
    "ckpt.wait_for_rest() before close() or the end of the `with` block."
)

log = logging.getLogger("holdfast")


@dataclass(frozen=True)
class Rest:
    """What one rank's restore leaves to the background."""

    run: str
    step: int
    """Of the checkpoint."""
    is_named: bool
    """The script has asked for this very checkpoint: no earlier one will do."""
    state: dict[str, Any]
    slots: tuple[LateSlots, ...]
    arrivals: Arrivals
    read: Callable[[], int]
    """Reads and verifies; the number of bytes."""
    stop_reading: Callable[[], object]
    """From any thread: `read` ends soon, with TransferStopped."""
    tell: Callable[[], object]
    """On rank 0, once all ranks have all: tells the service."""
    held: ExitStack
    """What reading needs: the lease, the folder that the ranks of a host share."""


class StreamedRest:
    """One rest, and the thread that brings it."""

    def __init__(self, rest: Rest, verdict: BackgroundVerdict) -> None:
        self.rest = rest
        self.is_over = threading.Event()
        self.error: BaseException | None = None
        """The same on all ranks, unless one is lost. Final once it is over."""
        self.made: dict[LateSlots, dict[Any, Any] | None] = {}
        self.bytes = 0
        self.seconds = 0.0
        self._verdict = verdict
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-rest", daemon=True)

    def start(self) -> threading.Thread | None:
        """The thread, which ends when the folder is gone and the lease has ended."""
        try:
            self._thread.start()
        except RuntimeError as error:  # the system gives no thread: the other ranks must hear of it
            self._agree(error)
            return None
        return self._thread

    def stop(self, seconds: float) -> bool:
        """Gives it up: the other ranks hear of it. Whether it is over within `seconds`: from then on nothing of it
        writes into the state. Its lease may end later."""
        self._stop.set()
        self.rest.stop_reading()
        return self.is_over.wait(seconds)

    def _run(self) -> None:
        began = time.monotonic()
        own: BaseException | None = None
        try:
            self.bytes = self.rest.read()
            # Here, not at the step: what can fail on one rank alone, all ranks must hear of before any of them steps.
            self.made = {slots: slots.make(self.rest.arrivals) for slots in self.rest.slots}
            _await_copies(slots.parameter for slots in self.rest.slots)
        except BaseException as error:
            own = RankLost(ENDED) if isinstance(error, TransferStopped) and self._stop.is_set() else error
        self.seconds = time.monotonic() - began
        self._agree(own)

    def _agree(self, own: BaseException | None) -> None:
        try:
            self.error = self._verdict.reach(own, self.rest.tell, self._stop)
        except BaseException as error:
            self.error = error
        finally:
            if self.error is not None:
                self.made = {}
            self.is_over.set()
            with suppress(Exception):  # the end of a lease, or of a folder in /tmp: training does not wait for it
                self.rest.held.close()


class RestGate:
    """One Checkpointer's: the rest that is still to come, if any. What needs the whole state calls settle()."""

    def __init__(self, session: Session, waiting: Callable[[], AbstractContextManager[None]]) -> None:
        """`waiting` is entered while training waits."""
        self._session = session
        self._ranks = session.ranks
        self._waiting = waiting
        self._lock = threading.RLock()
        self.coming: StreamedRest | None = None
        """None: nothing is to come, and there is nothing to settle."""
        self._thread: threading.Thread | None = None
        """Of the last rest."""
        self._optimizers: list[PendingOptimizer] = []
        self._hook: BeforeStep | None = None
        self._failure: BaseException | None = None
        self._number = 0
        self._process_id = os.getpid()
        self.waited_seconds = 0.0
        """How long training has waited for the rest of the last streamed restore."""
        self.before_step: int | None = None
        """The next restore takes a checkpoint before this step: that one's rest was damaged."""

    def verdict(self) -> BackgroundVerdict:
        """For the next rest. On every rank."""
        self._number += 1
        return BackgroundVerdict(self._ranks, f"rest/{self._number}")

    def begin(self, rest: Rest, verdict: BackgroundVerdict) -> None:
        """On the training thread of every rank, when all but the rest is there."""
        coming = StreamedRest(rest, verdict)
        self.waited_seconds, self._failure = 0.0, None
        with self._lock:
            self._guard(coming)
            self._thread = coming.start()

    def settle(self) -> None:
        """Returns when the whole state is there, on all ranks; at once if no rest is to come. From any thread, and not
        a collective. Raises RestoreFault on all ranks if the rest is damaged, or the error that it met, again and again
        until a restore has ended well."""
        if self.coming is None:
            return
        if os.getpid() != self._process_id:
            raise ConfigurationError(
                "The rest of the restore arrives in the process that this one was forked from. Fork after "
                "ckpt.wait_for_rest()."
            )
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if (coming := self.coming) is not None:
                self._await(coming)
                self._end(coming)

    @contextmanager
    def make_way(self, state: dict[str, Any]) -> Iterator[None]:
        """For the block in which `state` is loaded again, after which it is fit for training: what is still to come is
        given up, also where an earlier Checkpointer has left it. If the block raises, it is still missing, and no
        optimizer steps without it. Collective: if one rank cannot give it up, all raise that rank's error."""
        given_up: list[StreamedRest | None] = []

        def give_up_here() -> None:
            given_up.append(self.give_up())
            for value in state.values():
                if isinstance(value, torch.optim.Optimizer) and isinstance(value.state, PendingState):
                    given_up.append(value.state.abandon())

        try:
            self._ranks.together(give_up_here)
            yield
        except BaseException:
            missing = next((coming for coming in given_up if coming is not None), None)
            with self._lock:
                if missing is not None and self.coming is None:
                    self._guard(missing)
                    what = f"The rest of step {missing.rest.step} of {missing.rest.run}"
                    self._failure = NotRestored(f"{what} has not come, and no restore has ended well since")
            raise

    def give_up(self) -> StreamedRest | None:
        """Nothing waits any more, and nothing comes. Returns what did not. Raises NotRestored if it does not end within
        half of the ranks' time-out: the other ranks wait for this one meanwhile."""
        coming = self.coming
        if coming is None:
            return None
        if not coming.stop(self._ranks.timeout_seconds / 2):
            what = f"The rest of step {coming.rest.step} of {coming.rest.run}"
            raise NotRestored(f"{what} was given up, and a read that does not end may still write into the state")
        with self._lock:
            if self.coming is coming:
                if coming.error is not None and self._failure is None:
                    self._failed(coming, coming.error)  # damage counts, also where no use of the state has met it
                _forget_step(coming.rest)  # none was taken since, and the loop begins anew
                self._release()
        return coming

    def close(self) -> None:
        """Gives the rest up, within bounds. An optimizer whose state has not come can still not be stepped. The process
        may end at once afterwards: what the ranks of a host have shared does not stay on its disk."""
        self._end_for_good()
        is_over = self.coming is None or self.coming.is_over.is_set()
        if self._thread is not None and is_over:
            self._thread.join(_CLOSE_SECONDS)

    def _end_for_good(self) -> None:
        coming = self.coming
        if coming is None:
            if self._hook is not None:
                self._hook.remove()  # a step that ended the wait could only still it
            return
        if not coming.is_over.is_set():
            coming.stop(_CLOSE_SECONDS)
        if not self._lock.acquire(timeout=_CLOSE_SECONDS):
            return  # another thread waits for the rest, and gets its error
        try:
            if self.coming is not None and self._failure is None and coming.is_over.is_set() and coming.error is None:
                with suppress(Exception):
                    self._end(coming)
            if self.coming is not None:
                self._failure = ConfigurationError(_CLOSED)
                if self._hook is not None:
                    self._hook.remove()
                self._hook = BeforeStep(_refusing(each.optimizer for each in self._optimizers))
        finally:
            self._lock.release()

    def _guard(self, coming: StreamedRest) -> None:
        """From here on all waits for it. The caller holds the lock."""
        if self._hook is not None:
            self._hook.remove()
        self.coming = coming
        optimizers = {id(slots.optimizer): slots.optimizer for slots in coming.rest.slots}
        self._optimizers = [PendingOptimizer(each, self.settle, self.give_up) for each in optimizers.values()]
        self._hook = BeforeStep(self._before_step)

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if is_being_captured():
            raise ConfigurationError(
                "The step of an optimizer is captured into a CUDA graph before its state is there. Call "
                "ckpt.wait_for_rest() before the capture."
            )
        self.settle()

    def _await(self, coming: StreamedRest) -> None:
        if coming.is_over.is_set():
            return
        began = time.monotonic()
        try:
            with self._waiting():
                coming.is_over.wait()
        finally:
            self.waited_seconds += time.monotonic() - began

    def _end(self, coming: StreamedRest) -> None:
        """It is over. The caller holds the lock."""
        if coming.error is not None:
            self._failure = self._failed(coming, coming.error)
            raise self._failure
        for optimizer in self._optimizers:
            optimizer.put(coming.made)
        self._release()
        self.before_step = None
        self._session.has_whole_state()
        if self._ranks.is_first:
            log.info(
                "the rest of step %d of %s is there: %s on rank 0 in %.1f s, and training has waited %.1f s for it",
                coming.rest.step,
                coming.rest.run,
                readable_bytes(coming.bytes),
                coming.seconds,
                self.waited_seconds,
            )

    def _failed(self, coming: StreamedRest, error: BaseException) -> BaseException:
        step, run = coming.rest.step, coming.rest.run
        if isinstance(error, DAMAGED) and not coming.rest.is_named:
            self.before_step = step
            _forget_step(coming.rest)
            if self._ranks.is_first:
                log.error("the rest of step %d of %s cannot be restored: %s", step, run, error)
            fault = RestoreFault(f"The rest of step {step} of {run} cannot be restored: {error}", step=step)
            fault.__cause__ = error
            return fault
        error.add_note(f"It came in the rest of step {step} of {run}. {NOT_TO_BE_TRAINED_ON}")
        return error

    def _release(self) -> None:
        """Nothing waits any more. The caller holds the lock."""
        for optimizer in self._optimizers:
            optimizer.give_up()
        if self._hook is not None:
            self._hook.remove()
        self._optimizers, self._failure, self.coming = [], None, None


def _refusing(optimizers: Iterable[torch.optim.Optimizer]) -> Callable[[torch.optim.Optimizer], None]:
    """For torch's hook, which outlives the Checkpointer: it keeps none of them alive."""
    without_state = weakref.WeakSet(optimizers)

    def refuse(optimizer: torch.optim.Optimizer) -> None:
        if optimizer in without_state:
            raise ConfigurationError(_CLOSED)

    return refuse


def _await_copies(parameters: Iterable[torch.Tensor]) -> None:
    for device in {parameter.device for parameter in parameters if parameter.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def _forget_step(rest: Rest) -> None:
    """The step that is not taken leaves nothing behind: the loop begins anew, and would add to its gradients. A scaler
    would take the new ones for those that it has unscaled already; it forgets that only at its own update()."""
    for value in rest.state.values():
        if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
            value.zero_grad(set_to_none=True)
        elif isinstance(value, torch.amp.GradScaler):
            value._per_optimizer_states.clear()
