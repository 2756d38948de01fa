"""Which records of the spool are one save, and which of its ranks are there. Pure; for the next attempt and the CLI."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from holdfast_client.local.spool_record import SpoolRecord
from holdfast_protocol.selectors import RunName
from holdfast_protocol.states import CheckpointKind


@dataclass(frozen=True, order=True)
class SaveKey:
    """One save of one attempt, alike on all its ranks. Sorts by when it was staged."""

    project: str
    run: str
    attempt: int
    number: int
    step: int
    kind: CheckpointKind
    world_size: int
    launch_id: str

    @classmethod
    def of(cls, record: SpoolRecord) -> SaveKey:
        return cls(
            record.project,
            record.run,
            record.attempt,
            record.number,
            record.step,
            record.kind,
            record.world_size,
            record.launch_id,
        )

    @property
    def run_name(self) -> RunName:
        return RunName(self.project, self.run)

    def missing(self, ranks: Iterable[int]) -> list[int]:
        """The ranks of the save that are not among these."""
        return sorted(set(range(self.world_size)).difference(ranks))


@dataclass(frozen=True)
class SpooledSave:
    key: SaveKey
    records: tuple[SpoolRecord, ...]
    """In rank order; maybe not of every rank, for the others may be on other machines."""


def saves_of(records: Iterable[SpoolRecord]) -> list[SpooledSave]:
    """In the order in which they were staged, run by run."""
    found: dict[SaveKey, dict[int, SpoolRecord]] = defaultdict(dict)
    for record in records:
        found[SaveKey.of(record)][record.rank] = record
    return [
        SpooledSave(key, tuple(by_rank[rank] for rank in sorted(by_rank))) for key, by_rank in sorted(found.items())
    ]


def pushers(holding: Iterable[tuple[int, SaveKey, int]]) -> dict[SaveKey, dict[int, int]]:
    """(who, save, rank of the save) of all who hold shards -> per save, in order: rank -> the lowest who holds it."""
    found: dict[SaveKey, dict[int, int]] = defaultdict(dict)
    for who, key, rank in holding:
        found[key][rank] = min(who, found[key].get(rank, who))
    return dict(sorted(found.items()))
