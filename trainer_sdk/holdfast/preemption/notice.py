"""The notice of a signal or a cloud that this machine will be taken away. It is sent to every rank."""

from __future__ import annotations

import json
from dataclasses import dataclass

from holdfast_protocol.base import text_to_keep

SIGTERM = "SIGTERM"


@dataclass(frozen=True)
class Notice:
    source: str
    """The source: a signal's name, or a cloud's."""
    reason: str
    """For people: one phrase, without a full stop."""
    deadline_seconds: float | None
    """Seconds from the notice until the process is killed; None: unknown."""

    def __str__(self) -> str:
        return f"{self.source}: {self.reason}"

    def word(self, passed_seconds: float) -> str:
        """The notice as text for other ranks. It has the time that is left, because clocks of two hosts do not
        compare."""
        left = None if self.deadline_seconds is None else self.deadline_seconds - passed_seconds
        return json.dumps([text_to_keep(self.source, 100), text_to_keep(self.reason, 1000), left])

    @classmethod
    def of(cls, word: str) -> Notice:
        source, reason, left = json.loads(word)
        return cls(source, reason, left)
