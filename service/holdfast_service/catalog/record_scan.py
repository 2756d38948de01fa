"""What records a store has, found by listing their names: for a rebuild, and for the check of a catalog (rule 30)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from holdfast_service.catalog.record_documents import DamagedRecordError, Record, decode
from holdfast_service.catalog.record_names import FOLDER, MANIFEST, REMOVED, RecordKind, Subject, parse_name
from holdfast_service.stores.base import ObjectMissing, Store


@dataclass
class FoundRecord:
    """The documents of one subject. `versions`: epoch and version of each, the newest first. `remembered`: the newest
    is not in the store; only the database that a rebuild replaces knows it."""

    subject: Subject
    versions: list[tuple[int, int]] = field(default_factory=list)
    manifest: bool = False
    removed: bool = False
    remembered: bool = False

    @property
    def says_anything(self) -> bool:
        """Lists alone name no run and no step: the process that wrote them died before the rest."""
        return bool(self.versions) or self.manifest

    @property
    def newest(self) -> tuple[int, int] | None:
        return self.versions[0] if self.versions else None

    @property
    def newest_name(self) -> str | None:
        return self.subject.version_name(*self.versions[0]) if self.versions else None

    @property
    def written_name(self) -> str | None:
        """The newest that is in the store."""
        versions = self.versions[1:] if self.remembered else self.versions
        return self.subject.version_name(*versions[0]) if versions else None


@dataclass
class FoundRecords:
    """`strange`: names in the folder that no record has."""

    by_subject: dict[Subject, FoundRecord]
    strange: list[str]

    def __iter__(self) -> Iterator[FoundRecord]:
        """What a record builds upon comes before it: projects, runs, checkpoints."""
        order = list(RecordKind)
        return iter(
            sorted(self.by_subject.values(), key=lambda each: (order.index(each.subject.kind), each.subject.folder))
        )


def scan_records(store: Store, folder: str = FOLDER, on_name: Callable[[], None] | None = None) -> FoundRecords:
    """Of every subject, or of the one that has this folder. Raises StoreError rather than leave one out, and what
    `on_name`, called for each name, raises."""
    found: dict[Subject, FoundRecord] = {}
    strange: list[str] = []
    for name in store.list_named(folder):
        if on_name is not None:
            on_name()
        named = parse_name(name)
        if named is None:
            strange.append(name)
            continue
        record = found.setdefault(named.subject, FoundRecord(named.subject))
        if named.version is not None:
            record.versions.append(named.version)
        elif named.rest == MANIFEST:
            record.manifest = True
        elif named.rest == REMOVED:
            record.removed = True
        elif named.list_digest is None:
            strange.append(name)
    for record in found.values():
        record.versions.sort(reverse=True)
    return FoundRecords(found, strange)


def read_record(store: Store, name: str, model: type[Record]) -> Record:
    """Raises DamagedRecordError, which one that is not there any more is too, and other StoreErrors."""
    try:
        return decode(store.read_named(name), model)
    except ObjectMissing:
        raise DamagedRecordError("it is not in the store") from None
