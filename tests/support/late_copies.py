"""Copies beside training (`overlap=True`) that begin only when a step waits for them, as if the machine were very slow:
the write of a step that did not wait would be in the save."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from holdfast.staging.copy import Copier
from holdfast.staging.overlap import LateCopy

_SECONDS = 120


class LateCopies:
    def __init__(self) -> None:
        self.begun: list[LateCopy] = []
        self.steps_that_waited = 0
        self._let_go: dict[LateCopy, threading.Event] = {}

    def begins(self, late: LateCopy) -> None:
        """Before another thread knows of it: two threads that each made the event would wait for two."""
        self._let_go[late] = threading.Event()
        self.begun.append(late)

    def let_go(self) -> None:
        """The last save's copies are made: no step comes."""
        self._let_go[self.begun[-1]].set()

    def run(self, late: LateCopy, run: Callable[[], None]) -> None:
        assert self._let_go[late].wait(_SECONDS), "no step has waited for the copies"
        run()

    @contextmanager
    def waiting(self, late: LateCopy, waiting: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        self.steps_that_waited += 1
        with waiting():
            self._let_go[late].set()
            yield


@contextmanager
def late_copies() -> Iterator[LateCopies]:
    copies = LateCopies()
    begin, run, before_step = LateCopy.__init__, LateCopy.run, LateCopy.before_step

    def begin_late(late: LateCopy, *arguments: object) -> None:
        begin(late, *arguments)  # type: ignore[arg-type]
        copies.begins(late)

    def run_late(late: LateCopy, copier: Copier) -> None:
        copies.run(late, lambda: run(late, copier))

    def step_late(late: LateCopy, waiting: Callable[[], AbstractContextManager[None]]) -> None:
        before_step(late, lambda: copies.waiting(late, waiting))
        assert late._host_is_over.is_set(), "a step writes to what is still copied"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LateCopy, "__init__", begin_late)
        patch.setattr(LateCopy, "run", run_late)
        patch.setattr(LateCopy, "before_step", step_late)
        yield copies
