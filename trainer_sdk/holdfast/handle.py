"""What save() gives back: two futures of one save. Background threads resolve them; training asks when it likes."""

from __future__ import annotations

from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field

from holdfast_protocol.checkpoints import CheckpointView


@dataclass(frozen=True)
class SaveHandle:
    """`staged` is done once the state may change again (save() returns no earlier); `committed` once the checkpoint can
    be restored, with the service's view of it, or with the reason why not.

    Both have `result(timeout)`, `exception(timeout)` and `done()` as in concurrent.futures. Cancelling does nothing.
    """

    step: int
    staged: Future[None] = field(default_factory=Future, repr=False)
    committed: Future[CheckpointView] = field(default_factory=Future, repr=False)

    def __post_init__(self) -> None:
        # Running from the start, so that nobody can cancel what other ranks count on.
        self.staged.set_running_or_notify_cancel()
        self.committed.set_running_or_notify_cancel()

    def mark_staged(self) -> None:
        """Once staging is over; an upload that failed at the same moment may have been first."""
        with suppress(InvalidStateError):
            self.staged.set_result(None)

    def fail(self, error: BaseException) -> None:
        """Both futures end with `error`, where they have not ended yet."""
        for future in (self.staged, self.committed):
            with suppress(InvalidStateError):
                future.set_exception(error)
