"""One rank of one launch at each step boundary: lines of JSON, written in the script, read by the command.

Everything is a text that is equal exactly when the value is: digests of tensors, repr() of numbers.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Outside:
    """An object that changes during training and is not in the script's state for Holdfast."""

    kind: str
    """optimizer, lr_scheduler, grad_scaler, generator, data_generator, model, or stateful."""
    type: str
    parts: dict[str, str]


@dataclass(frozen=True)
class Snapshot:
    """One rank at one moment."""

    state: dict[str, str]
    """Path (`model/0.weight`, `optimizer/param_groups[0].lr`) -> digest of a tensor, or a plain value."""
    tensors: list[str]
    """Which of these paths are tensors."""
    rng: dict[str, str]
    """The process's own generators: python, numpy, torch, cuda:0, …"""
    outside: dict[str, Outside]
    """By its name in the training loop's frames: `scaler`, `self.ema`."""
    locals: dict[str, str] = field(default_factory=dict)
    """Tensors in local variables, such as the batch, by the variable's name."""
    batches: list[int] = field(default_factory=list)
    """The number of batches that each live iterator of a DataLoader has handed out."""


@dataclass(frozen=True)
class Boundary:
    """A rank after a step."""

    step: int
    metrics: dict[str, str]
    now: Snapshot


@dataclass
class Trail:
    """All records of one rank of one launch."""

    rank: int
    start: int | None = None
    """The result of restore(); None: it was not called."""
    restored: Snapshot | None = None
    boundaries: list[Boundary] = field(default_factory=list)

    def at(self, step: int) -> Boundary | None:
        return next((boundary for boundary in self.boundaries if boundary.step == step), None)

    @property
    def steps(self) -> list[int]:
        return [boundary.step for boundary in self.boundaries]


def append_restored(file: Path, start: int, now: Snapshot) -> None:
    _append(file, {"start": start, "now": asdict(now)})


def append_boundary(file: Path, boundary: Boundary) -> None:
    _append(file, asdict(boundary))


def trail_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.jsonl"


def read_trails(folder: Path) -> list[Trail]:
    """Every rank's, in their order. A last line that its writer did not finish is left out."""
    trails = [_read(file) for file in folder.glob("rank*.jsonl")]
    return sorted(trails, key=lambda trail: trail.rank)


def _append(file: Path, line: dict[str, object]) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps(line) + "\n")


def _read(file: Path) -> Trail:
    trail = Trail(int(file.stem.removeprefix("rank")))
    for text in file.read_text().splitlines(keepends=True):
        if not text.endswith("\n"):
            break
        line = json.loads(text)
        now = _snapshot(line["now"])
        if "start" in line:
            if trail.restored is None:  # later ones are rollbacks of the script's own
                trail.start, trail.restored = line["start"], now
        else:
            trail.boundaries.append(Boundary(line["step"], line["metrics"], now))
    return trail


def _snapshot(values: dict[str, object]) -> Snapshot:
    snapshot = Snapshot(**values)  # type: ignore[arg-type]
    outside = {name: Outside(**value) for name, value in snapshot.outside.items()}  # type: ignore[arg-type]
    return Snapshot(
        snapshot.state, snapshot.tensors, snapshot.rng, outside, locals=snapshot.locals, batches=snapshot.batches
    )
