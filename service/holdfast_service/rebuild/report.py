"""What came of a rebuild: what is back, and by name what is not as it was."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_SHOWN = 100


@dataclass
class RebuildReport:
    """`damaged`: documents that could not be read, and what was done without them. `corrupt`: checkpoints that are back
    and cannot be read whole. `protected`: checkpoints that are held until a person has looked, as the rebuild lost what
    held or pinned them. `foreign`: what another catalog has written. `doubts`: what could not be known, by project.
    `remembered`: what only the database that is replaced knew, or knew better. `notes`: what else a person has to
    know."""

    catalog_id: str = ""
    epoch: int = 0
    projects: int = 0
    runs: int = 0
    attempts: int = 0
    checkpoints: dict[str, int] = field(default_factory=dict)
    holds: int = 0
    removed: int = 0
    copies: int = 0
    copied_bytes: int = 0
    orphans: int = 0
    orphan_bytes: int = 0
    bad_objects: int = 0
    damaged: list[str] = field(default_factory=list)
    corrupt: list[str] = field(default_factory=list)
    protected: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    doubts: dict[str, list[str]] = field(default_factory=dict)
    remembered: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        return not self.damaged and not self.corrupt and not self.protected

    def doubt(self, project_id: str, reason: str) -> None:
        """By the project's id, until the last step knows its name."""
        self.doubts.setdefault(project_id, []).append(reason)

    def document(self) -> dict[str, Any]:
        return {**vars(self), "whole": self.whole}

    def lines(self) -> list[str]:
        states = ", ".join(f"{count} {state}" for state, count in sorted(self.checkpoints.items())) or "none"
        lines = [
            f"Catalog {self.catalog_id}, epoch {self.epoch}",
            f"  {self.projects} projects, {self.runs} runs, {self.attempts} attempts",
            f"  checkpoints: {states}; {self.removed} were purged and stay so",
            f"  {self.copies} copies of chunks, {self.copied_bytes} bytes; {self.holds} holds",
            f"  {self.orphans} objects belong to no checkpoint, {self.orphan_bytes} bytes",
        ]
        for title, names in (
            ("damaged", self.damaged),
            ("corrupt", self.corrupt),
            ("held until a person has looked", self.protected),
            ("another catalog's", self.foreign),
            ("not known", [f"{name}: {' '.join(why)}" for name, why in self.doubts.items()]),
            ("known only by the database that is replaced", self.remembered),
            ("note", self.notes),
        ):
            lines += [f"  {title}: {name}" for name in names[:_SHOWN]]
            if len(names) > _SHOWN:
                lines.append(f"  {title}: and {len(names) - _SHOWN} more; --json has all of them")
        return lines
