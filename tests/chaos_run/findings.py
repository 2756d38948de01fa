"""What a chaos run has found, and what it has counted: filled by the judges, shown by the table."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum


class Wrong(StrEnum):
    """What must not be."""

    BYTES = "wrong bytes"
    HANG = "hangs"
    LOST_COMMIT = "lost commits"
    LOST_WORK = "more than one interval lost"
    END = "ends that nobody made"
    ACCOUNT = "told otherwise by REST"
    SUMS = "sums that are not those of the rows"


@dataclass(frozen=True)
class Finding:
    """`kind`: the fault behind it, as far as that is known."""

    wrong: Wrong
    kind: str
    text: str


@dataclass(frozen=True)
class Recovery:
    """What it cost that `kind` ended a launch. `lost`: the steps that the next one trained again; `saved_lost`: of them
    up to the last one that save() had returned for on all ranks; `committed_lost`: up to the last one that the job was
    told of. `seconds`: from the fault until the next launch's first step; None if it came to none. `read`: bytes by
    where they came from, to all ranks, or to the one that had been killed alone."""

    kind: str
    lost: int
    saved_lost: int
    committed_lost: int
    seconds: float | None
    read: dict[str, int]


@dataclass
class Verdict:
    """`lost`: by the fault that ended a launch, the steps that the next one trained again."""

    findings: list[Finding] = field(default_factory=list)
    facts: Counter[str] = field(default_factory=Counter)
    lost: dict[str, list[int]] = field(default_factory=dict)
    recoveries: list[Recovery] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def found(self, wrong: Wrong, kind: str, text: str) -> None:
        self.findings.append(Finding(wrong, kind, text))

    def count(self, wrong: Wrong, kind: str | None = None) -> int:
        return sum(one.wrong is wrong and kind in (None, one.kind) for one in self.findings)
