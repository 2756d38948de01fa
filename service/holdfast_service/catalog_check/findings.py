"""What a check can find, and what to do about each. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast_protocol.stores import CheckFinding, FindingKind

_EXAMPLES = 20

_ONLY_HERE = (
    "Only this database knows that. Claiming the store has it written; a rebuild from the store alone loses it. Give "
    "the rebuild this database too: `holdfast catalog rebuild --with-database URL`"
)
# What is there, what to do, and whether claiming the store would lose it.
_TEXTS: dict[FindingKind, tuple[str, str, bool]] = {
    FindingKind.MISSING_OBJECTS: (
        "copies in the catalog have no object in the store",
        "They are marked bad, and so are the checkpoints that need them; what another store has is repaired from "
        "there. `holdfast copies list-bad` lists them",
        False,
    ),
    FindingKind.WRONG_SIZES: (
        "objects have another size than the catalog says",
        "They are marked bad, and so are the checkpoints that need them; what another store has is repaired from "
        "there. `holdfast copies list-bad` lists them",
        False,
    ),
    FindingKind.DAMAGED_COPIES: (
        "copies were read and are not their chunk",
        "They are marked bad, and so are the checkpoints that need them; what another store has is repaired from "
        "there. `holdfast copies list-bad` lists them",
        False,
    ),
    FindingKind.UNKNOWN_OBJECTS: (
        "objects belong to no copy in the catalog",
        "What a checkpoint needs and no store has a good copy of, the next sweep takes back. The others cost room and "
        "nothing else: `holdfast sweeps start` removes them once they are old enough",
        False,
    ),
    FindingKind.MISSING_RECORDS: (
        "checkpoints, runs or projects have no record beside the data",
        "They are due again: the controller `records` writes them in its next pass",
        False,
    ),
    FindingKind.OLD_RECORDS: (
        "records are older than the catalog thinks",
        "They are due again: the controller `records` writes them in its next pass",
        False,
    ),
    FindingKind.DIFFERENT_RECORDS: (
        "fields of the catalog are not what the records say: its rows were changed by something else than the service",
        "Believe the records: `holdfast catalog rebuild` into an empty database brings back what they say. Trainers "
        "refuse a checkpoint with another run, step or world size than its ranks sealed. Claiming the store gives the "
        "records up",
        True,
    ),
    FindingKind.DAMAGED_RECORDS: (
        "records cannot be read",
        "They are due again: the controller `records` writes them in its next pass",
        False,
    ),
    FindingKind.UNKNOWN_RECORDS: (
        "records speak of what the catalog does not know: it was restored from before they were written, or is not the "
        "store's",
        "`holdfast catalog rebuild` into an empty database brings them back. Claiming the store gives them up",
        True,
    ),
    FindingKind.BEGUN_RECORDS: (
        "records of checkpoints that the catalog does not know were begun and not ended",
        "They may have been commits, and no record says of which run or step: a rebuild cannot bring them back, only "
        "the database that knew them can. Claiming the store gives up their chunks",
        True,
    ),
    FindingKind.NEWER_RECORDS: (
        "records are newer than the catalog: it was restored from before they were written",
        "`holdfast catalog rebuild` into an empty database brings their state back. Claiming the store gives it up",
        True,
    ),
    FindingKind.UNRECORDED: (
        "checkpoints, runs or projects have no record yet, and nothing is written into a store that is not claimed",
        _ONLY_HERE,
        False,
    ),
    FindingKind.OUTDATED_RECORDS: (
        "records are older than the catalog, and nothing is written into a store that is not claimed",
        _ONLY_HERE,
        False,
    ),
    FindingKind.REMOVED_RECORDS: (
        "checkpoints of the catalog were purged, as the store says",
        "They were in the catalog's backup and were purged since. Those whose chunks are lost are marked corrupt; put "
        "them into the trash. The others are kept once the store is claimed",
        False,
    ),
    FindingKind.LEFT_RECORDS: (
        "records of purged checkpoints were left behind",
        "The controller `records` removes them in its next pass",
        False,
    ),
    FindingKind.FOREIGN_RECORDS: (
        "records were written by another catalog",
        "Give each catalog a bucket, a folder or a prefix of its own",
        False,
    ),
}


@dataclass
class _Found:
    count: int = 0
    bytes: int = 0
    examples: list[str] = field(default_factory=list)


class Findings:
    """Counts by kind, with the first few by name."""

    def __init__(self) -> None:
        self._found: dict[FindingKind, _Found] = {}

    def add(self, kind: FindingKind, name: str, size: int = 0) -> None:
        found = self._found.setdefault(kind, _Found())
        found.count += 1
        found.bytes += size
        if len(found.examples) < _EXAMPLES:
            found.examples.append(name)

    @property
    def whole(self) -> bool:
        return not any(_TEXTS[kind][2] for kind in self._found)

    def views(self) -> list[CheckFinding]:
        """In the order of the kinds; empty if everything agrees."""
        return [
            CheckFinding(
                kind=kind,
                count=self._found[kind].count,
                bytes=self._found[kind].bytes,
                blocks=blocks,
                what=f"{self._found[kind].count} {what}.",
                remedy=f"{remedy}.",
                examples=self._found[kind].examples,
            )
            for kind, (what, remedy, blocks) in _TEXTS.items()
            if kind in self._found
        ]
