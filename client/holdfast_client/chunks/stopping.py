"""How a transfer is told to stop: by an event that it looks at between two blocks and while it waits."""

from __future__ import annotations

import threading

from holdfast_client.errors import TransferStopped


def check_stop(stop: threading.Event | None) -> None:
    if stop is not None and stop.is_set():
        raise TransferStopped("The transfer was told to stop")
