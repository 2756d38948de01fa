"""What was asked for and acknowledged: a line each, in its file before the process goes on. What the lines mean for the
checkpoints stands in model.py. Times are `time.monotonic()`, which every process of the machine shares.

    opened     a launch was given its attempt, and what it was offered to go on from
    committed  a job was told that its checkpoint is committed
    fenced     a launch was told that another one has taken over
    asked      somebody is about to ask that a checkpoint is deleted
    back       somebody was told that it was taken back from the trash
    failed     the database failed over: since when it does not know, and what was recorded beside the data by then
    told       the service said that its database went backwards
    found      what must not be
    count      for the table (tests/soak/ledger.py, whose files these are)
"""

from __future__ import annotations

import time
from enum import StrEnum

from tests.soak.ledger import Ledger


class Wrong(StrEnum):
    """What must not be; and, beside the four, a trial that has shown nothing."""

    LOST = "lost"
    MIXED = "mixed"
    WRONG = "wrong"
    LEAKED = "leaked"
    STUCK = "not recovered"


class Journal(Ledger):
    def opened(
        self, run: str, launch: str, epoch: int, attempt: int, asked_at: float, step: int | None, skipped: list[str]
    ) -> None:
        """`step`: that of the restore point. `skipped`: newer checkpoints that the service named with a reason."""
        self.write(
            kind="opened",
            at=asked_at,
            run=run,
            launch=launch,
            epoch=epoch,
            attempt=attempt,
            step=step,
            skipped=skipped,
        )

    def committed(
        self, checkpoint_id: str, run: str, launch: str, attempt: int, step: int, begun_at: float, after_fence: bool
    ) -> None:
        """`begun_at`: when the save began. `after_fence`: this launch had been told before that it is fenced."""
        self.write(
            kind="committed",
            at=time.monotonic(),
            begun_at=begun_at,
            checkpoint=checkpoint_id,
            run=run,
            launch=launch,
            attempt=attempt,
            step=step,
            after_fence=after_fence,
        )

    def fenced(self, run: str, launch: str) -> None:
        self.write(kind="fenced", at=time.monotonic(), run=run, launch=launch)

    def asked(self, checkpoint_id: str) -> None:
        self.write(kind="asked", at=time.monotonic(), checkpoint=checkpoint_id)

    def back(self, checkpoint_id: str) -> None:
        self.write(kind="back", at=time.monotonic(), checkpoint=checkpoint_id)

    def failed_over(self, knows_until: float, at: float, recorded: list[str]) -> None:
        self.write(kind="failed", knows_until=knows_until, at=at, recorded=recorded)

    def told(self, what: str) -> None:
        self.write(kind="told", at=time.monotonic(), what=what)

    def found(self, wrong: Wrong, what: str) -> None:
        self.write(kind="found", wrong=wrong.value, what=what)
