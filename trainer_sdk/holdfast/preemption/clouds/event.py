"""A cloud's announcement, in one form for all clouds: made by aws.py, gcp.py and azure.py, judged by poller.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class CloudEvent:
    key: str
    """Identifies the event: a reported event is not reported again."""
    reason: str
    """A few words for people."""
    deadline_seconds: float | None
    """Seconds from now until the machine may be taken. None if the cloud names no time, or if that time is over and the
    machine is still there: every second is gained then, and no deadline is known."""
    is_hint: bool = False
    """The event may never come: the machine is only likelier to be taken than others."""


def seconds_left(at: float, now: float) -> float | None:
    """Until `at`, both in seconds since 1970; None once it is over."""
    return at - now if at > now else None


class CloudSource(Protocol):
    """One cloud's way to ask. Used by one thread."""

    name: str
    pause_seconds: float
    """The pause between two polls, as the cloud recommends."""

    def look(self) -> list[CloudEvent]:
        """The present announcements for this machine. May block as long as the cloud holds its answer back. Raises
        MetadataError."""
