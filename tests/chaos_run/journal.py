"""What the ranks of a job have done, one JSON line at a time, and what others read of it while they run.

A line is in the file before the rank goes on, so that SIGKILL loses nothing of it; half a line is what a kill has left.
Times are `time.monotonic()`, which all processes of a machine share and no jump of a clock moves.

    begun      a rank runs: process, attempt, the step it goes on with, the digest of the state that it has restored,
               and how many bytes it read of that from where
    step       a step was trained; `state` is the digest of all state after it
    saving     a save of this step was begun
    committed  the client was told that this step's checkpoint is committed
    failed     the client was told that it is not, and why
    preempted  step() has raised Preempted; `saved` is the newest step that is committed
    ended      the rank has come to its end, and how
"""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LARGEST_FILE_BYTES = 8 * 1024


class Journal:
    """The writing end, of one rank in one launch."""

    def __init__(self, folder: Path, launch: int, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._name = folder / f"launch{launch:04d}-rank{rank}"
        self._part = 0
        self._bytes = 0
        self._lock = threading.Lock()
        self._file = self._open()

    def write(self, kind: str, **line: Any) -> None:
        text = json.dumps({"kind": kind, "at": time.monotonic(), **line}).encode() + b"\n"
        with self._lock:
            # Small files: one fault is that the process may write no large ones.
            if self._bytes + len(text) > LARGEST_FILE_BYTES:
                os.close(self._file)
                self._part, self._bytes = self._part + 1, 0
                self._file = self._open()
            self._bytes += os.write(self._file, text)

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        return os.open(f"{self._name}-part{self._part:04d}.jsonl", flags, 0o644)


@dataclass(frozen=True)
class Step:
    step: int
    at: float
    state: str


@dataclass(frozen=True)
class Told:
    """The client said that `step` is committed."""

    step: int
    at: float
    checkpoint_id: str


@dataclass
class LaunchRecord:
    """One rank's journal of one launch. Without `begun_at` it was killed before it had restored anything."""

    launch: int
    rank: int
    begun_at: float | None = None
    pid: int = 0
    attempt: int = 0
    world_size: int = 0
    start: int = 0
    state: str = ""
    read: dict[str, int] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    saving: list[int] = field(default_factory=list)
    failed: list[tuple[int, str]] = field(default_factory=list)
    left_with: int | None = None
    """The newest committed step when it was preempted."""
    ended: str | None = None
    ended_at: float | None = None

    @property
    def last_step(self) -> int | None:
        return self.steps[-1].step if self.steps else None

    def add(self, line: dict[str, Any]) -> None:
        match line["kind"]:
            case "begun":
                self.begun_at, self.pid, self.attempt = line["at"], line["pid"], line["attempt"]
                self.world_size, self.start, self.state = line["world_size"], line["start"], line["state"]
                self.read = line["read"]
            case "step":
                self.steps.append(Step(line["step"], line["at"], line["state"]))
            case "committed":
                self.told.append(Told(line["step"], line["at"], line["checkpoint"]))
            case "saving":
                self.saving.append(line["step"])
            case "preempted":
                self.left_with, self.ended = line["saved"], "preempted"
            case "failed":
                self.failed.append((line["step"], line["why"]))
            case "ended":
                self.ended, self.ended_at = line["how"], line["at"]


class JournalReader:
    """The reading end: all launches of one rank, kept and only added to. To be used from one thread."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self._folder = folder
        self._rank = rank
        self._offsets: dict[str, int] = {}
        self._over: set[str] = set()
        self._launches: dict[int, LaunchRecord] = {}

    def launches(self) -> list[LaunchRecord]:
        """The oldest first, with what has come since the last call."""
        names = sorted(path.name for path in self._folder.glob(f"launch*-rank{self._rank}-part*.jsonl"))
        for name in names:
            if name not in self._over:
                self._read_on(name)
        self._over.update(names[:-2])  # the one before the last may have had its last line after the next was begun
        return [self._launches[number] for number in sorted(self._launches)]

    def _read_on(self, name: str) -> None:
        number = int(name.removeprefix("launch").split("-")[0])
        record = self._launches.setdefault(number, LaunchRecord(number, self._rank))
        with (self._folder / name).open("rb") as file:
            file.seek(self._offsets.get(name, 0))
            for text in file:
                if not text.endswith(b"\n"):
                    break
                record.add(json.loads(text))
                self._offsets[name] = self._offsets.get(name, 0) + len(text)
