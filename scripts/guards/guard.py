"""One place in the code that keeps a rule, and what the code is without it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Guard:
    """`text` stands in the file at `path`, and is replaced by `without`; then one of `tests` must fail."""

    rule: str
    what: str
    path: str
    text: str
    without: str
    tests: tuple[str, ...]
