"""Loading into the state of a running job: restore() at the beginning of a launch, rollback() later on.

restore()  -> session (attempt) -> restore/restorer -> restore/checkpoint_reader -> state/load
rollback() -> health/rollback (saves in flight, a new attempt) -> the same
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.compose import Parts
    from holdfast.dcp.reader import HoldfastReader


class Loading:
    """What `Checkpointer.restore`, `rollback` and `reader` do; they say what is promised."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def restore(self, state: dict[str, Any], at: str | None = None, *, skip_diverged: bool = True) -> int:
        self._parts.pipeline.wait_idle(self._parts.ranks.timeout_seconds / 2)
        return self._loading(state, lambda: self._parts.restorer.restore(state, at, skip_diverged=skip_diverged))

    def rollback(
        self,
        state: dict[str, Any],
        *,
        steps: int | None = None,
        before: int | None = None,
        skip_data: bool = False,
        keep: Iterable[str] = (),
    ) -> int:
        if self._parts.standby is not None:
            self._parts.standby.forget()  # of the state that is left: the new attempt must not save it
        back = self._parts.rollback.back
        return self._loading(
            state, lambda: back(state, steps=steps, before=before, keep=frozenset(keep), skip_data=skip_data)
        )

    def reader(self, at: str | None = None) -> HoldfastReader:
        from holdfast.dcp.reader import HoldfastReader

        return HoldfastReader(
            self._parts.session, self._parts.workers, self._parts.restorer.choose(at), rollback=at is not None
        )

    def _loading(self, state: dict[str, Any], load: Callable[[], int]) -> int:
        try:
            start = load()
        finally:
            self._parts.saver.forget_frozen()
            if self._parts.standby is not None:
                self._parts.standby.forget()
        if self._parts.recorder is not None:
            self._parts.recorder.restored(start, state)
        if self._parts.stats.last_committed_step is not None:
            # A step that was left is not saved, though it may have the number of one that is to come.
            self._parts.stats.last_committed_step = start - 1
        self._parts.schedule.restored()
        self._parts.agreement.restart()
        return start
