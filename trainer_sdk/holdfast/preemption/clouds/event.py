"""What a cloud announces, in one form for all of them: made by aws.py, gcp.py and azure.py, weighed by poller.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class CloudEvent:
    key: str
    """The same for as long as it is the same event: what was told of it is not told again."""
    reason: str
    """A few words for people."""
    deadline_seconds: float | None
    """From now on until the machine may go; None where the cloud does not say, or where that moment is over and the
    machine is still there: every second is won then, and no moment is known to leave before."""
    is_hint: bool = False
    """It may never come to anything: the machine is likelier to be taken than others."""


def seconds_left(at: float, now: float) -> float | None:
    """Until `at`, both in seconds since 1970; None once it is over."""
    return at - now if at > now else None


class CloudSource(Protocol):
    """One cloud's way to ask. Used by one thread."""

    name: str
    pause_seconds: float
    """Between two looks, as the cloud recommends."""

    def look(self) -> list[CloudEvent]:
        """What is announced now for this machine. May block for as long as the cloud holds its answer back.
        Raises MetadataError."""
