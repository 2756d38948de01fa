"""What the records beside the data are called (protocol rule 30). Pure.

    records/<project id>/project/<epoch>.<version>.json
    records/<project id>/runs/<run id>/<epoch>.<version>.json
    records/<project id>/checkpoints/<id>/manifest.json            what never changes; its lists
    records/<project id>/checkpoints/<id>/lists/<digest>.json
    records/<project id>/checkpoints/<id>/<epoch>.<version>.json   what changes
    records/<project id>/checkpoints/<id>/removed.json             whatever else is here counts for nothing

The version is in the name, so a slow writer that comes late leaves an older document beside the newer one and never in
its place: no store has to compare and swap. The epoch comes first, for a catalog that was restored counts again from
where its copy was made. The greatest name counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from holdfast_service.stores.base import validated_name, validated_project_id

FOLDER = "records"
MANIFEST = "manifest.json"
REMOVED = "removed.json"
_VERSION = re.compile(r"(?P<epoch>\d{6})\.(?P<version>\d{10})\.json")
_LIST = re.compile(r"lists/(?P<digest>[0-9a-f]{64})\.json")


class RecordKind(StrEnum):
    PROJECT = "project"
    RUN = "run"
    CHECKPOINT = "checkpoint"


@dataclass(frozen=True)
class Subject:
    """What a record speaks of. `subject_id` of a project is its own id."""

    kind: RecordKind
    project_id: str
    subject_id: str

    @property
    def folder(self) -> str:
        project = f"{FOLDER}/{validated_project_id(self.project_id)}"
        if self.kind is RecordKind.PROJECT:
            return f"{project}/project"
        return f"{project}/{self.kind}s/{self.subject_id}"

    @property
    def manifest_name(self) -> str:
        return f"{self.folder}/{MANIFEST}"

    @property
    def removed_name(self) -> str:
        return f"{self.folder}/{REMOVED}"

    def version_name(self, epoch: int, version: int) -> str:
        return validated_name(f"{self.folder}/{epoch:06d}.{version:010d}.json")

    def list_name(self, digest: str) -> str:
        return f"{self.folder}/lists/{digest}.json"


def checkpoint_subject(project_id: str, checkpoint_id: str) -> Subject:
    return Subject(RecordKind.CHECKPOINT, project_id, checkpoint_id)


@dataclass(frozen=True)
class NamedRecord:
    """A name that was found: whose it is, and the rest of it within the folder."""

    subject: Subject
    rest: str

    @property
    def version(self) -> tuple[int, int] | None:
        """Epoch and version; None for what has none."""
        match = _VERSION.fullmatch(self.rest)
        return (int(match["epoch"]), int(match["version"])) if match else None

    @property
    def list_digest(self) -> str | None:
        match = _LIST.fullmatch(self.rest)
        return match["digest"] if match else None


def parse_name(name: str) -> NamedRecord | None:
    """The inverse; None for what no record is called."""
    parts = name.split("/")
    try:
        if parts[0] != FOLDER or len(parts) < 4:
            return None
        project_id = validated_project_id(parts[1])
        validated_name(name)
    except ValueError:
        return None
    if parts[2] == RecordKind.PROJECT and len(parts) == 4:
        return NamedRecord(Subject(RecordKind.PROJECT, project_id, project_id), parts[3])
    kinds = {f"{kind}s": kind for kind in (RecordKind.RUN, RecordKind.CHECKPOINT)}
    if parts[2] not in kinds or len(parts) < 5:
        return None
    return NamedRecord(Subject(kinds[parts[2]], project_id, parts[3]), "/".join(parts[4:]))
