"""Calls to a store, made again if that can help. The one retry of the service towards its stores."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from holdfast_service.stores.base import StoreError

TRIES = 4
_FIRST_PAUSE_SECONDS = 0.2

_Result = TypeVar("_Result")


def with_retries(call: Callable[[], _Result], *, tries: int = TRIES) -> _Result:
    """What `call` returns. Raises the StoreError of the last try, or of the first that no repetition can fix."""
    for tried in range(1, tries):
        try:
            return call()
        except StoreError as error:
            if not error.retryable:
                raise
        # Full jitter: many service processes must not come back to a throttling store in step.
        time.sleep(random.uniform(0, _FIRST_PAUSE_SECONDS * 2**tried))  # noqa: S311
    return call()
