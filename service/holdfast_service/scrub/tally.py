"""What came of reading copies, store by store; and the totals of the catalog, for the metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sqlalchemy import update

from holdfast_service.catalog.custody_tables import ScrubTotal
from holdfast_service.catalog.insert import insert_absent
from holdfast_service.catalog.reread import Finding
from holdfast_service.database import Database


@dataclass
class Tally:
    """Of one round or one operation. `marked`: ids of the checkpoints that are corrupt by it."""

    good: int = 0
    bad: int = 0
    missing: int = 0
    read_bytes: int = 0
    healed: int = 0
    marked: set[str] = field(default_factory=set)

    @property
    def settled(self) -> int:
        return self.good + self.bad + self.missing

    def note(self, finding: Finding) -> None:
        if finding is Finding.GOOD:
            self.good += 1
        elif finding is Finding.MISSING:
            self.missing += 1
        else:
            self.bad += 1

    def add(self, other: Tally) -> None:
        self.good, self.bad, self.missing = self.good + other.good, self.bad + other.bad, self.missing + other.missing
        self.read_bytes, self.healed = self.read_bytes + other.read_bytes, self.healed + other.healed
        self.marked |= other.marked


def total_of(by_store: Mapping[int, Tally]) -> Tally:
    total = Tally()
    for tally in by_store.values():
        total.add(tally)
    return total


def keep_totals(database: Database, by_store: Mapping[int, Tally]) -> None:
    """Adds them to the catalog's: at the end of a round, for these rows are everybody's."""
    for store_id, tally in sorted(by_store.items()):
        if not (tally.settled or tally.read_bytes or tally.healed):
            continue
        with database.transaction() as session:
            insert_absent(session, ScrubTotal, [{"store_id": store_id}])
            session.execute(
                update(ScrubTotal)
                .where(ScrubTotal.store_id == store_id)
                .values(
                    read_copies=ScrubTotal.read_copies + tally.settled,
                    read_bytes=ScrubTotal.read_bytes + tally.read_bytes,
                    bad_copies=ScrubTotal.bad_copies + tally.bad + tally.missing,
                    healed_copies=ScrubTotal.healed_copies + tally.healed,
                )
            )
