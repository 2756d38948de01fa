"""Which stores a rebuild reads, and whose they are (rules fencing-token and rebuild-doubts).

A marker can be lost or replaced, and a bucket used by two catalogs. Each record names its catalog, so the records are
asked before a database is begun: what another catalog has written is told by name and left alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast_protocol.text import without_secrets
from holdfast_service.attached_stores.ownership import ForeignStoreError, Marker, read_marker, write_marker
from holdfast_service.rebuild.report import RebuildReport
from holdfast_service.records.documents import (
    CheckpointRecord,
    DamagedRecordError,
    ManifestRecord,
    ProjectRecord,
    RecordKind,
    RunRecord,
)
from holdfast_service.records.scanning import FoundRecord, FoundRecords, read_record
from holdfast_service.stores.base import ObjectMissing, Store, StoreError

_SHOWN = 5
# For a store whose marker is lost; the first store that a catalog attaches has it.
_FIRST_STORE_ID = 1


class RebuildRefusedError(RuntimeError):
    """It cannot begin. The message says why, and what to do."""


@dataclass(frozen=True)
class SourceStore:
    """A store that copies are looked for in; the first one's records are read. `marker` has the highest epoch that the
    store has seen."""

    url: str
    store: Store
    marker: Marker


@dataclass(frozen=True)
class Owner:
    """Who wrote the records of a project, and what the project is called."""

    catalog_id: str
    project: str


def record_owners(store: Store, found: FoundRecords) -> dict[str, Owner]:
    """By the project's id, from the first of its documents that can be read; without the others. Raises StoreError."""
    owners: dict[str, Owner] = {}
    for each in found:
        project_id = each.subject.project_id
        if project_id not in owners and (owner := _owner(store, each)) is not None:
            owners[project_id] = owner
    return owners


def usable_sources(
    opened: Sequence[tuple[str, Store]],
    found: FoundRecords,
    owners: Mapping[str, Owner],
    notes: list[str],
    catalog_id: str | None,
) -> list[SourceStore]:
    """The first store must say whose it is, and its records the same; or a person says it by `catalog_id`. The others
    are left out where they are not the same catalog's.

    Raises RebuildRefusedError, and StoreError if the first store does not answer."""
    (url, store), *others = opened
    first = SourceStore(url, store, _trusted_marker(store, without_secrets(url), found, owners, catalog_id))
    sources = [first]
    for other_url, other in others:
        try:
            marker = read_marker(other)
        except (StoreError, ForeignStoreError) as error:
            notes.append(f"{without_secrets(other_url)} is left out, and with it the copies there: {error}")
            continue
        taken = {each.marker.store_id for each in sources}
        if marker.catalog_id != first.marker.catalog_id or marker.store_id in taken:
            notes.append(f"{without_secrets(other_url)} is left out: it is not another store of the same catalog")
            continue
        sources.append(SourceStore(other_url, other, marker))
    return sources


def leave_out_foreign(
    found: FoundRecords, owners: Mapping[str, Owner], source: SourceStore, report: RebuildReport
) -> set[str]:
    """Takes the projects of other catalogs out of what was found, and tells them by name. Their ids."""
    foreign = {
        project_id: owner for project_id, owner in owners.items() if owner.catalog_id != source.marker.catalog_id
    }
    for project_id, owner in foreign.items():
        report.foreign.append(f"records/{project_id}: the project {owner.project} of the catalog {owner.catalog_id}")
    for subject in [each for each in found.by_subject if each.project_id in foreign]:
        del found.by_subject[subject]
    return set(foreign)


def refuse_foreign(
    document: ProjectRecord | RunRecord | CheckpointRecord | ManifestRecord, source: SourceStore
) -> None:
    """Raises DamagedRecordError: among this catalog's records lies one of another."""
    if document.catalog_id != source.marker.catalog_id:
        raise DamagedRecordError(f"it was written by the catalog {document.catalog_id}")


def claim(source: SourceStore) -> None:
    """Says in the store whose it is, if it does not: in the epoch of before, so that it still is to be adopted.
    Raises StoreError."""
    try:
        if read_marker(source.store).catalog_id == source.marker.catalog_id:
            return
    except (ObjectMissing, ForeignStoreError):
        pass
    write_marker(source.store, source.marker)


def _owner(store: Store, found: FoundRecord) -> Owner | None:
    models: dict[RecordKind, type[ProjectRecord | RunRecord | CheckpointRecord]] = {
        RecordKind.PROJECT: ProjectRecord,
        RecordKind.RUN: RunRecord,
        RecordKind.CHECKPOINT: CheckpointRecord,
    }
    for version in found.versions:
        try:
            document = read_record(store, found.subject.version_name(*version), models[found.subject.kind])
        except DamagedRecordError:
            continue
        return Owner(document.catalog_id, document.project.name)
    if not found.manifest:
        return None
    try:
        manifest = read_record(store, found.subject.manifest_name, ManifestRecord)
    except DamagedRecordError:
        return None
    return Owner(manifest.catalog_id, manifest.project.name)


def _trusted_marker(
    store: Store, shown: str, found: FoundRecords, owners: Mapping[str, Owner], catalog_id: str | None
) -> Marker:
    marker, problem = _marker(store)
    wanted = catalog_id or (None if marker is None else marker.catalog_id)
    projects: dict[str, list[str]] = defaultdict(list)
    for owner in owners.values():
        projects[owner.catalog_id].append(owner.project)
    if wanted is None or (projects and wanted not in projects):
        said = problem or f"its holdfast-store.json says that it is the catalog {wanted}'s"
        if catalog_id is not None:
            said = f"it has no record of the catalog {catalog_id}"
        if not projects:
            raise RebuildRefusedError(f"{shown}: {said}, and it has no records. Check the URL and its prefix.")
        told = "; ".join(f"the catalog {each} (projects {_some(names)})" for each, names in sorted(projects.items()))
        raise RebuildRefusedError(
            f"{shown}: {said}, and its records were written by {told}. Put its own holdfast-store.json back, or say "
            f"whose records to take: --catalog {min(projects)}. Nothing was changed."
        )
    epochs = [
        epoch
        for each in found.by_subject.values()
        if each.subject.project_id in owners and owners[each.subject.project_id].catalog_id == wanted
        for epoch, _ in each.versions
    ]
    if marker is not None:
        epochs.append(marker.epoch)
    return Marker(wanted, max(epochs, default=1), _FIRST_STORE_ID if marker is None else marker.store_id)


def _marker(store: Store) -> tuple[Marker | None, str]:
    """What the store says of itself, or why it says nothing. Raises other StoreErrors."""
    try:
        return read_marker(store), ""
    except ObjectMissing:
        return None, "it has no holdfast-store.json"
    except ForeignStoreError:
        return None, "its holdfast-store.json cannot be read"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(sorted(names)[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
