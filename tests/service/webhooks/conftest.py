"""A receiver, and a service that may call it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast_service.settings import ServiceSettings
from tests.support.webhooks import Receiver


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    running = Receiver()
    yield running
    running.close()


@pytest.fixture
def settings(settings: ServiceSettings, receiver: Receiver) -> ServiceSettings:
    host = receiver.url.removeprefix("http://")
    return settings.model_copy(update={"webhook_allowed_hosts": host, "lost_after_seconds": 50.0})
