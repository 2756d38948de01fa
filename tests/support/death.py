"""A process that ends at one place of the code, as by kill -9: nothing that it would still have done happens."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest


class Killed(BaseException):
    """The process ends right here. No `except Exception` of the code that is tested may hold it up."""


def kill(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, after: bool = False, at: int = 1
) -> Callable[[], bool]:
    """Dies just before (or after) the n-th call of `owner.name`, and at every later one: the dead make none.

    Whether it did is told by what this returns.
    """
    real = getattr(owner, name)
    calls = itertools.count(1)
    died = []

    def killed(*args: Any, **kwargs: Any) -> Any:
        if next(calls) < at:
            return real(*args, **kwargs)
        if after:
            real(*args, **kwargs)
        died.append(True)
        raise Killed

    monkeypatch.setattr(owner, name, killed)
    return lambda: bool(died)
