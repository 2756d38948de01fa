"""A posix store whose mount is gone: an empty folder stands where it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def unmounted(root: Path) -> Iterator[None]:
    elsewhere = root.with_name(root.name + ".elsewhere")
    root.rename(elsewhere)
    root.mkdir()
    try:
        yield
    finally:
        root.rmdir()
        elsewhere.rename(root)
