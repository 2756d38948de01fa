"""What a fault is given, and what it says it did."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from tests.chaos_run.job import Job
from tests.chaos_run.place import Place


@dataclass
class Arena:
    """`damaged`: chunks whose bytes in the store were made wrong, by digest. `small_disk`: the folder of a local tier
    on a disk of its own, which may be filled; None where none could be made."""

    place: Place
    jobs: list[Job]
    numbers: random.Random
    small_disk: Path | None = None
    damaged: set[str] = field(default_factory=set)
    over: threading.Event = field(default_factory=threading.Event)

    def pause(self, least_seconds: float, most_seconds: float) -> None:
        self.over.wait(self.numbers.uniform(least_seconds, most_seconds))

    def a_job(self) -> Job:
        return self.numbers.choice(self.jobs)


@dataclass(frozen=True)
class Strike:
    """`jobs`: those that have to come back from it. `what`: what happened, for people."""

    jobs: list[Job]
    what: str


Fault: TypeAlias = Callable[[Arena, str], Strike | None]
"""Called with its kind. None where this could not be done now: another one is tried."""
