"""The order for one launch of the script, written by the command and read by the recorder in each rank."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

_ORDER_FILE = "order.json"
_RUN_LETTERS = 60
"""Letters of the script's own run in the throw-away one's name: a run's name has at most 100."""


@dataclass(frozen=True)
class LaunchOrder:
    """The launch goes on until its last step boundary, and waits there for its SIGKILL."""

    tag: str
    """Makes the throw-away run's name; launches with the same one are launches of the same run."""
    watcher_pid: int
    """The command's process. Once it has ended, no SIGKILL will come."""
    stop_after: int | None = None
    """The last boundary, counted from 1."""
    stop_at_step: int | None = None
    """The last boundary, by the number that the script gives its step."""
    save_at_stop: bool = False
    """Save at the last boundary, and wait until that is committed."""

    def is_last(self, boundary: int, step: int) -> bool:
        """Whether `step`, the launch's boundary of this number, is its last one."""
        if self.stop_after is not None:
            return boundary >= self.stop_after
        return self.stop_at_step is not None and step >= self.stop_at_step

    def run_name(self, own: str) -> str:
        """The throw-away run that stands for the script's `own` (without its project)."""
        return f"{own[:_RUN_LETTERS]}-{self.tag}"

    def write(self, folder: Path) -> None:
        (folder / _ORDER_FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> LaunchOrder:
        """Raises OSError if there is none."""
        return cls(**json.loads((folder / _ORDER_FILE).read_text()))


@dataclass(frozen=True)
class Place:
    """The process of a rank, recorded at its begin and again when it waits for its SIGKILL."""

    rank: int
    world_size: int
    pid: int
    process_group: int

    @classmethod
    def here(cls, rank: int, world_size: int) -> Place:
        return cls(rank, world_size, os.getpid(), os.getpgrp())

    def note(self, folder: Path, moment: str) -> None:
        """`moment`: began or parked. Written atomically, because the command polls."""
        unfinished = folder / f"{moment}-{self.rank}.unfinished"
        unfinished.write_text(json.dumps(asdict(self)))
        unfinished.replace(folder / f"{moment}-{self.rank}.json")


def places(folder: Path, moment: str) -> list[Place]:
    """The ranks that have recorded this moment, in the order of their numbers."""
    found = [Place(**json.loads(file.read_text())) for file in folder.glob(f"{moment}-*.json")]
    return sorted(found, key=lambda place: place.rank)
