"""The chunk objects of a service whose primary store is a folder."""

from __future__ import annotations

import os
import time

from holdfast_service.stores.posix.posix_store import PosixStore
from tests.support.service import RunningService


def chunks(service: RunningService) -> set[bytes]:
    """What each object holds."""
    store = service.context.store
    assert isinstance(store, PosixStore)
    return {path.read_bytes() for path in store.root.glob("*/chunks/*/*/*") if path.suffix != ".sha256"}


def age_everything(service: RunningService) -> None:
    """Each object is three days old: the collector spares the young."""
    store = service.context.store
    assert isinstance(store, PosixStore)
    for path in store.root.glob("*/chunks/*/*/*"):
        os.utime(path, (time.time() - 3 * 24 * 3600.0,) * 2)
