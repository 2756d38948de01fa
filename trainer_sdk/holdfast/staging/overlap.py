"""`overlap=True`: copies that training does not wait for, and the proof that nothing wrote to what they read.

    save()           versions are noted; copies are queued on the GPUs, those of host tensors are handed to a thread
    the next step    torch's hook on all optimizers: the step waits for the copies on the host, its streams for the GPUs
    end of the copy, the next step, the seal
                     the versions are as they were, or the save is torn and fails

Only TensorPiece.guarded tensors are copied so, and only after a trial: the first save of a tensor copies it before it
returns, and its version must stay until the next step. The versions are for what the hook does not see: whatever else
writes in place, as load_state_dict() does. They do not count each write of a step (torch's fused kernels raise none),
so both are needed. An operation raises a version only at its end, and the interpreter goes on meanwhile: so they are
compared once more after the copy.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import torch

from holdfast.staging.copy import Copier, Copy, Copying
from holdfast.state.before_step import BeforeStep, is_being_captured
from holdfast.state.tensors import TensorPiece, is_plain
from holdfast_client.chunks.workers import WorkerThreads

log = logging.getLogger("holdfast")

_CLOSE_SECONDS = 10.0


class TornSaveError(RuntimeError):
    """Something wrote to a tensor while it was copied."""


class LateCopy:
    """The copies of one save that are still running when save() returns."""

    def __init__(
        self,
        pieces: Sequence[TensorPiece],
        copy_of: Callable[[TensorPiece], Copy],
        on_gpus: Copying,
        on_host: Sequence[TensorPiece],
        distrusted: set[str],
    ) -> None:
        """`copy_of` says where a piece goes, and is asked on the copying thread. `distrusted` gets the names of the
        tensors that were written to."""
        self._watched = _noted(pieces)
        self._copy_of = copy_of
        self._on_gpus = on_gpus
        self._events = on_gpus.events
        self._on_host = on_host
        self._distrusted = distrusted
        self._lock = threading.Lock()
        self._host_is_over = threading.Event()
        if not on_host:
            self._host_is_over.set()
        self._is_over = threading.Event()
        self._is_taken = False
        self._failure: BaseException | None = None
        self.on_proven: Callable[[], object] | None = None
        """Called once it is proven, until that was told."""
        self._waits_since: float | None = None
        self._held: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        """When a step reached its stream's wait for a GPU's copies, and their end."""
        self.waited_seconds = 0.0
        """How long a step has waited for this: final once it is over. On a GPU its stream did."""

    def run(self, copier: Copier) -> None:
        """On the copying thread."""
        if not self._take():
            return
        try:
            copier.copy_on_host([self._copy_of(piece) for piece in self._on_host])
            self._end_on_host()
            self._on_gpus.wait()
            self.check()
            self.waited_seconds += self._seconds_on_gpus()
        except BaseException as error:
            self._fail(error)
        finally:
            self._end_on_host()
            self._events, self._held = [], []
            self._let_go()
            self._is_over.set()
            self.tell_proven()

    def before_step(self, waiting: Callable[[], AbstractContextManager[None]]) -> None:
        """On the thread of the step, which may write when this returns. `waiting` is entered while it waits."""
        if self._is_over.is_set():
            self.check(last=True)
            return
        with self._lock:
            if not self._host_is_over.is_set() and self._waits_since is None:
                self._waits_since = time.monotonic()
        if self._waits_since is not None:
            with waiting():
                self._host_is_over.wait()
        self.check(last=True)
        for arrived in self._events:
            stream = torch.cuda.current_stream(arrived.device)
            reached = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            reached.record(stream)
            stream.wait_event(arrived)
            self._held.append((reached, arrived))

    def check(self, *, last: bool = False) -> None:
        """Compares the versions. `last`: the caller's thread has ended its writes, and may begin others at once."""
        with self._lock:
            torn = _moved(self._watched)
            if torn or last:
                self._watched = []
            if torn:  # published before the lock is free: the other thread that checks lets the save commit
                self._distrusted.update(torn)
                self._fail(_torn(torn))

    def cancel(self, error: BaseException) -> None:
        """The save fails. Nothing is copied unless that has begun."""
        self._fail(error)
        if self._take():
            self._end_on_host()
            self._on_gpus.wait()
            self._let_go()
            self._is_over.set()

    def _let_go(self) -> None:
        """Of the tensors and of the slab: this stays until the next copy begins, which may take memory of its own."""
        self._on_host, self._copy_of = (), _no_copy

    def _take(self) -> bool:
        with self._lock:
            is_first, self._is_taken = not self._is_taken, True
        return is_first

    def step_is_captured(self) -> None:
        """A CUDA graph may be replayed before the copy is over, and no hook is called then."""
        if self._is_over.is_set():
            self.check(last=True)
        else:
            self._fail(
                TornSaveError(
                    "the step of an optimizer was captured into a CUDA graph while its tensors were copied beside "
                    "training (overlap=True). Later saves are copied before they return; capture before the first save"
                )
            )

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Returns when nothing is copied any more; False if that takes longer."""
        return self._is_over.wait(timeout_seconds)

    def settle(self) -> None:
        """As wait(). Raises TornSaveError, and the error of a failed copy."""
        self.wait()
        if self._failure is not None:
            raise self._failure

    def confirm(self) -> None:
        """As settle(), before the seal: also of a write that was running when the copy ended."""
        self.wait()
        self.check()
        self.settle()

    @property
    def is_proven(self) -> bool:
        """It is over, and its last check has found no write."""
        with self._lock:
            return self._is_over.is_set() and not self._watched and self._failure is None

    def when_proven(self, call: Callable[[], object]) -> None:
        """`call` is called once it is proven: on the copying thread, or now. Maybe twice."""
        self.on_proven = call
        self.tell_proven()

    def tell_proven(self) -> None:
        if (call := self.on_proven) is not None and self.is_proven:
            call()
            self.on_proven = None

    def end(self) -> None:
        """Waits, and watches nothing any more."""
        self.wait()
        with self._lock:
            self._watched = []

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error

    def _end_on_host(self) -> None:
        with self._lock:
            if not self._host_is_over.is_set():
                # Here, not where the step waits: a small save may be sealed before that thread has its turn.
                if self._waits_since is not None:
                    self.waited_seconds += time.monotonic() - self._waits_since
                self._host_is_over.set()

    def _seconds_on_gpus(self) -> float:
        seconds = 0.0
        for reached, arrived in self._held:
            with torch.cuda.device(arrived.device):  # this thread's own may be one that the process does not use
                if reached.query():  # type: ignore[no-untyped-call]  # else the stream gets there after the copies, and does not wait
                    seconds += max(0.0, reached.elapsed_time(arrived) / 1000)
        return seconds


def _no_copy(piece: TensorPiece) -> Copy:
    raise AssertionError(f"the copy of {piece.spec.name!r} is over")


class Overlap:
    """One Checkpointer's: one copy at a time, and the hook that makes steps wait for it."""

    def __init__(self, copier: Copier, waiting: Callable[[], AbstractContextManager[None]]) -> None:
        """`waiting` is entered while a step waits for copies."""
        self._copier = copier
        self._waiting = waiting
        self._thread = WorkerThreads(1, "holdfast-copy")
        self._late: LateCopy | None = None
        self._trusted: set[str] = set()
        self._distrusted: set[str] = set()
        self._on_trial: list[_Noted] = []
        """Copied by the last save before it returned."""
        self._steps_are_captured = False
        self._hook = BeforeStep(self._before_step)

    def takes(self, piece: TensorPiece) -> bool:
        """Whether the piece can be copied beside training: nothing wrote to it between an earlier save and the step
        after that."""
        return piece.spec.name in self._trusted and self._has_guard(piece)

    def _has_guard(self, piece: TensorPiece) -> bool:
        """A piece that is declared frozen is copied once, and one that was made in inference mode has no version."""
        return (
            piece.guarded is not None
            and not self._steps_are_captured
            and piece.spec.pack != "declared"
            and piece.spec.name not in self._distrusted
            and (piece.local.is_cpu or piece.local.is_cuda)
            and not (piece.guarded.is_inference() or piece.local.is_inference())
        )

    def begin(
        self, later: Sequence[TensorPiece], copy_of: Callable[[TensorPiece], Copy], now: Iterable[TensorPiece]
    ) -> LateCopy | None:
        """On the training thread. `later`: what `takes` has taken; `now`: what is copied before the save returns. None
        if there is nothing to copy beside training."""
        self._on_trial = _noted(piece for piece in now if self._has_guard(piece))
        if not later:
            return None
        on_host = [piece for piece in later if piece.local.is_cpu]
        self._copier.wait_for_pinned(piece.local for piece in on_host)
        on_gpus = self._copier.start(copy_of(piece) for piece in later if not piece.local.is_cpu)
        late = self._late = LateCopy(later, copy_of, on_gpus, on_host, self._distrusted)
        try:
            self._thread.submit(functools.partial(late.run, self._copier))
        except BaseException as error:  # an interrupt: the job may be in the queue or not
            late.cancel(error)
            raise
        return late

    def wait(self) -> None:
        """Before the thread that saves writes to the tensors by other means than a step. A trial begins anew."""
        self._on_trial = []
        if self._late is not None:
            self._late.wait()
            self._late.check(last=True)

    def _end_trial(self) -> None:
        """On the training thread, before a step may write. What was written to already is never copied beside
        training."""
        on_trial, self._on_trial = self._on_trial, []
        moved = _moved(on_trial)
        self._distrusted.update(moved)
        self._trusted.update({name for name, *_ in on_trial}.difference(self._distrusted))
        if moved:
            log.info(
                "%s was written to between a save and the next step: in spite of overlap=True, each save copies that "
                "before it returns",
                _named(moved),
            )

    def close(self) -> None:
        """Waits for a copy within bounds. One that takes longer stays guarded."""
        self._thread.end()
        self._thread.join(time.monotonic() + _CLOSE_SECONDS)
        if self._late is None or self._late.wait(0):
            self._hook.remove()

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if is_being_captured():
            if not self._steps_are_captured:
                self._steps_are_captured = True
                log.warning(
                    "overlap=True changes nothing any more: the step of an optimizer was captured into a CUDA graph, "
                    "and torch calls no hook when that is replayed"
                )
            if self._late is not None:
                self._late.step_is_captured()
            return
        if self._on_trial:
            self._end_trial()
        if self._late is not None:
            self._late.before_step(self._waiting)
            if self._late.on_proven is not None:  # who hears it may take a moment, and training waits for nothing
                self._thread.submit(self._late.tell_proven)


def _named(names: Sequence[str]) -> str:
    return repr(names[0]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _torn(names: Sequence[str]) -> TornSaveError:
    return TornSaveError(
        f"{_named(names)} was written to while it was copied beside training (overlap=True), and not by the step of an "
        "optimizer. Later saves copy it before they return; to save that too, write to it before the call of step() "
        "or save()"
    )


_Noted = tuple[str, torch.Tensor, int]
"""The name of a tensor, the tensor or what was detached from it, and its version. A plain tensor has one version with
what was detached from it, a DTensor and its local tensor have one each."""


def _noted(pieces: Iterable[TensorPiece]) -> list[_Noted]:
    noted = []
    for piece in pieces:
        noted.append((piece.spec.name, piece.local, piece.local._version))
        assert piece.guarded is not None
        if not (is_plain(piece.guarded) and is_plain(piece.local)):  # else one version is both's
            noted.append((piece.spec.name, piece.guarded, piece.guarded._version))
    return noted


def _moved(noted: Iterable[_Noted]) -> list[str]:
    """The names of the tensors that were written to since."""
    return list(dict.fromkeys(name for name, tensor, version in noted if tensor._version != version))
