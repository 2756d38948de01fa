"""What each rank did, one JSON line at a time, exact to the bit; written by train.py, read by the demo's checks.

A loss is written as `float.hex()`: two runs agree only if the texts do. Lines are never rewritten: after a kill the
steps since the last save are trained again, and are in the journal twice.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path


class Journal:
    """The writing end of one rank. A line is one write, so a killed rank leaves whole lines."""

    def __init__(self, folder: str | os.PathLike[str], rank: int) -> None:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path / f"rank{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def started(self, start: int, world_size: int, state: str) -> None:
        self._write({"start": start, "world_size": world_size, "state": state})

    def stepped(self, step: int, loss: float, state: str | None) -> None:
        self._write({"step": step, "loss": loss.hex(), "state": state})

    def _write(self, entry: dict[str, object]) -> None:
        os.write(self._file, (json.dumps(entry) + "\n").encode())


@dataclass(frozen=True)
class Step:
    step: int
    loss: str
    state: str | None


@dataclass
class LaunchRecord:
    """What one rank did in one launch. `state` is the fingerprint that it started with."""

    start: int
    world_size: int
    state: str
    steps: list[Step] = field(default_factory=list)

    @property
    def last_step(self) -> int | None:
        return self.steps[-1].step if self.steps else None


def read_journal(folder: Path, rank: int = 0) -> list[LaunchRecord]:
    """The launches of one rank, oldest first. An unfinished last line is left for the next reading."""
    path = folder / f"rank{rank}.jsonl"
    launches: list[LaunchRecord] = []
    for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
        if not line.endswith("\n"):
            break
        entry = json.loads(line)
        if "start" in entry:
            launches.append(LaunchRecord(entry["start"], entry["world_size"], entry["state"]))
        else:
            launches[-1].steps.append(Step(entry["step"], entry["loss"], entry["state"]))
    return launches
