"""The file descriptor into which this process's signals are written."""

from __future__ import annotations

import signal


def wakeup_fd() -> int:
    """-1: there is none. Main thread only."""
    fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(fd)
    return fd
