"""The files that stand for checkpoints: ModelCheckpoint gives names, and looks for them with the filesystem.

A name file holds the run and the step. ckpt_path may be one, or `holdfast:` and a point (`holdfast:latest`, `…:1200`).
A file whose name begins with `last` means the newest restore point: its own step may not have been committed when the
job was killed.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

SCHEME = "holdfast:"
_MOST_BYTES = 4096
_LAST = "last"


def point_of(path: str | os.PathLike[str]) -> str | None:
    """`latest` or a step, as text; None unless the path is a name file of ours or `holdfast:…`."""
    text = str(path)
    if text.startswith(SCHEME):
        return text.removeprefix(SCHEME) or "latest"
    step = step_of(path)
    if step is None:
        return None
    return "latest" if Path(text).name.startswith(_LAST) else str(step)


def step_of(path: str | os.PathLike[str]) -> int | None:
    """The step in a name file; None if there is no such file."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        with open(path, "rb") as file:
            return int(json.loads(file.read(_MOST_BYTES))["holdfast"]["step"])
    return None


def write_name(path: str | os.PathLike[str], run: str, step: int) -> None:
    """Writes a name file atomically."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    fresh.write_text(json.dumps({"holdfast": {"run": run, "step": step}}) + "\n")
    fresh.replace(target)


def remove_name(path: str | os.PathLike[str]) -> None:
    Path(path).unlink(missing_ok=True)
