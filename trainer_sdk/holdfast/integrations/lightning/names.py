"""The files that stand for checkpoints: ModelCheckpoint gives names, and looks for them with the filesystem.

A name file holds the run and the step, and no other run loads or trashes what it names. ckpt_path may be one, or
`holdfast:` and a point (`holdfast:latest`, `…:1200`).
`last.ckpt` (or `last-v1.ckpt`) means the newest restore point: its own step may not have been committed when the job
was killed.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

SCHEME = "holdfast:"
_MOST_BYTES = 4096
_LAST = re.compile(r"last(-v\d+)?\.ckpt")


class Name(NamedTuple):
    """The content of a name file."""

    run: str
    step: int


class Wanted(NamedTuple):
    """What a ckpt_path asks for."""

    point: str
    """`latest`, a step, …, as text."""
    run: str | None = None
    """The run in the name file; None for `holdfast:…`, which has none."""


def wanted_by(path: str | os.PathLike[str]) -> Wanted | None:
    """None unless the path is a name file of ours or `holdfast:…`."""
    text = str(path)
    if text.startswith(SCHEME):
        return Wanted(text.removeprefix(SCHEME) or "latest")
    name = read_name(path)
    if name is None:
        return None
    return Wanted("latest" if _LAST.fullmatch(Path(text).name) else str(name.step), name.run)


def read_name(path: str | os.PathLike[str]) -> Name | None:
    """None if there is no such file."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        with open(path, "rb") as file:
            content = json.loads(file.read(_MOST_BYTES))["holdfast"]
            return Name(str(content["run"]), int(content["step"]))
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
