"""A number and the word for what it counts, as people read them: `1 chunk`, `2 chunks`."""

from __future__ import annotations


def counted(count: int, one: str, more: str | None = None) -> str:
    """`more` is the word for any other number than one; without it, `one` and an s."""
    return f"{count} {one if count == 1 else more or one + 's'}"
