"""The client of a command: a person waits for it, so it gives up sooner than a trainer."""

from __future__ import annotations

from holdfast_client.client import Client
from holdfast_client.settings import ClientSettings

LONGEST_RETRY_SECONDS = 5.0


def connect() -> Client:
    settings = ClientSettings()
    patience = min(settings.retry_seconds, LONGEST_RETRY_SECONDS)
    return Client(settings.model_copy(update={"retry_seconds": patience}))
