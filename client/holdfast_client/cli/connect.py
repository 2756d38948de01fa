"""The client of a command. A person waits for it: it gives up sooner than a trainer, and says at once that it waits."""

from __future__ import annotations

from holdfast_client.cli.say import show_note
from holdfast_client.client import Client
from holdfast_client.errors import HoldfastError
from holdfast_client.settings import ClientSettings
from holdfast_protocol.counted import counted

LONGEST_RETRY_SECONDS = 5.0


def connect() -> Client:
    settings = ClientSettings()
    patience = min(settings.retry_seconds, LONGEST_RETRY_SECONDS)
    client = Client(settings.model_copy(update={"retry_seconds": patience}))
    client.transport.on_retry = _SayOnce(patience)
    return client


class _SayOnce:
    """Else a command that waits for a service that is down looks as if it hung."""

    def __init__(self, patience_seconds: float) -> None:
        self._seconds = patience_seconds
        self._said = False

    def __call__(self, failure: HoldfastError) -> None:
        if not self._said:
            self._said = True
            show_note(f"holdfast: {failure} Retrying for {counted(round(self._seconds), 'second')}...")
