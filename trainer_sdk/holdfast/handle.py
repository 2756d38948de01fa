"""What save() gives back: the futures of one save. Background threads resolve them; training asks when it likes."""

from __future__ import annotations

from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field

from holdfast.errors import SaveDeclined
from holdfast_protocol.checkpoints import CheckpointView


@dataclass(eq=False)
class SaveHandle:
    """`staged` is done once the state may change again (save() returns no earlier). `local` is done once it is known
    whether this rank's part is durable on this node: False where there is no local tier, or no room in it. `committed`
    is done once the checkpoint can be restored, with the service's view of it, or with the reason why not.

    `diverged`, known when save() returns and the same on every rank: why nobody should go on from this state; None
    where it is healthy.

    The futures have `result(timeout)`, `exception(timeout)` and `done()` as in concurrent.futures. Cancelling does
    nothing.
    """

    step: int
    diverged: str | None = None
    staged: Future[None] = field(default_factory=Future, repr=False)
    local: Future[bool] = field(default_factory=Future, repr=False)
    committed: Future[CheckpointView] = field(default_factory=Future, repr=False)

    def __post_init__(self) -> None:
        # Running from the start, so that nobody can cancel what other ranks count on.
        for future in (self.staged, self.local, self.committed):
            future.set_running_or_notify_cancel()

    @property
    def declined(self) -> bool:
        """All ranks have left this save out: known when save() returns, and the same on every rank. Any other failure
        comes when it comes, to each rank by itself: before a collective nothing may hang on that."""
        return self.committed.done() and isinstance(self.committed.exception(), SaveDeclined)

    def mark_staged(self) -> None:
        """Once staging is over; an upload that failed at the same moment may have been first."""
        with suppress(InvalidStateError):
            self.staged.set_result(None)

    def mark_local(self, *, kept: bool) -> None:
        with suppress(InvalidStateError):
            self.local.set_result(kept)

    def mark_committed(self, view: CheckpointView) -> None:
        """The end of the job may have come first, and said that it does not know."""
        with suppress(InvalidStateError):
            self.committed.set_result(view)

    def fail(self, error: BaseException) -> None:
        """All futures end with `error`, where they have not ended yet."""
        for future in (self.staged, self.local, self.committed):
            with suppress(InvalidStateError):
                future.set_exception(error)
