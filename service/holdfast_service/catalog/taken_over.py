"""How it is told that an attempt ended because a newer one was opened. Pure.

At the takeover nobody knows whether the older one is alive: a job that was killed looks for a while like one that is
between two heartbeats. So it is fenced first; one that calls later was alive, and one that stays silent was lost.
"""

from __future__ import annotations

from datetime import datetime


def fenced(by: int) -> str:
    """Right after the takeover."""
    return f"attempt {by} has taken over"


def fenced_alive(by: int) -> str:
    """It has called since."""
    return f"attempt {by} has taken over while it was still alive"


def lost_before(by: int, last_sign_at: datetime) -> str:
    """It has not called since."""
    return f"no heartbeat since {last_sign_at:%Y-%m-%d %H:%M:%S} UTC; attempt {by} has taken over"
