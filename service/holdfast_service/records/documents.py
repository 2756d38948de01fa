"""The documents beside the data, as they are called, written and read back (rule record-outbox). Pure.

    records/<project id>/project/<epoch>.<version>.json
    records/<project id>/runs/<run id>/<epoch>.<version>.json
    records/<project id>/checkpoints/<id>/manifest.json            what never changes; its lists
    records/<project id>/checkpoints/<id>/lists/<digest>.json
    records/<project id>/checkpoints/<id>/<epoch>.<version>.json   what changes
    records/<project id>/checkpoints/<id>/removed.json             what else is here counts for nothing, but in a
                                                                   version of a later epoch

Each is canonical JSON with a digest over itself, by which a torn or altered one is known. A reader skips a field that a
later version adds, and refuses an unknown format with its number. The state, the lists and what never changes stand
apart: an edit of a label writes a few hundred bytes, however many chunks there are.

The version is in the name: a slow writer that comes late leaves an older document beside the newer one and never in its
place, and no store has to compare and swap. The epoch comes first, because a restored catalog counts again from where
its copy was made. The greatest name counts.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from holdfast_protocol.base import LARGEST_INTEGER, Digest
from holdfast_protocol.checkpoints import ForkedFrom, ShardSummary
from holdfast_protocol.codecs import Codec
from holdfast_protocol.digests import DocumentError, canonical_bytes, parse
from holdfast_protocol.states import AttemptOutcome, CheckpointKind, CheckpointState, Health, Tier
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


FORMAT = "holdfast-record"
FORMAT_VERSION = 1


class DamagedRecordError(ValueError):
    """The document is not what was written. The message says how, for people."""


class NewerRecordError(RuntimeError):
    """A newer version of Holdfast has written it. What this one does not know must not be taken for damage."""


class Document(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class ProjectFacts(Document):
    id: str
    name: str


class RunFacts(Document):
    id: str
    name: str


class AttemptFacts(Document):
    """`resumed_from_attempt` and `resumed_from_step` are those of the checkpoint `resumed_from_id`."""

    number: int
    launch_id: str
    world_size: int
    host: str
    environment: dict[str, str]
    opened_at: datetime
    ended_at: datetime | None
    outcome: AttemptOutcome | None
    outcome_detail: str | None
    last_step: int | None
    resumed_from_id: str | None
    resumed_from_attempt: int | None
    resumed_from_step: int | None
    cut_at: datetime | None


class PolicyFacts(Document):
    kind: str
    run_id: str
    document: dict[str, Any]
    version: int
    updated_at: datetime
    updated_by: str


class HoldFacts(Document):
    id: str
    kind: str
    reason: str
    retain_until: datetime | None
    mirror: bool
    mirrored_at: datetime | None
    placed_at: datetime
    placed_by_token: str
    placed_by: str
    released_at: datetime | None
    released_by: str | None
    release_reason: str | None


class DeletionFacts(Document):
    """A person's deletion of a whole run or project."""

    deleted_at: datetime
    deleted_by: str | None
    delete_reason: str | None
    purge_at: datetime | None
    purged_at: datetime | None


class ProjectRecord(Document):
    kind: Literal["project"] = "project"
    catalog_id: str
    epoch: int
    version: int
    project: ProjectFacts
    quota_bytes: int | None
    created_at: datetime
    policies: list[PolicyFacts]
    deletion: DeletionFacts | None = None
    quotas: dict[str, Annotated[int, Field(ge=0, le=LARGEST_INTEGER)]] = Field(default_factory=dict)
    """The others, by their columns."""


class RunRecord(Document):
    kind: Literal["run"] = "run"
    catalog_id: str
    epoch: int
    version: int
    project: ProjectFacts
    run: RunFacts
    latest_attempt: int
    created_at: datetime
    attempts: list[AttemptFacts]
    deletion: DeletionFacts | None = None
    tags: list[str] = Field(default_factory=list)
    note: str = ""
    forked_from: ForkedFrom | None = None


class CheckpointFacts(Document):
    """What never changes of a committed checkpoint, and its metrics: a manifest has those of the save, and a record
    also those that were given later."""

    id: str
    attempt: int
    step: int
    kind: CheckpointKind
    world_size: int
    digest: Digest
    logical_bytes: int
    chunk_bytes: int
    uploaded_bytes: int
    deduplicated_bytes: int
    metrics: dict[str, Any]
    components: dict[str, Any]
    missing_components: list[str] | None = None
    blocked_seconds: float | None = None
    pushed_by: int | None
    detached: bool
    forked_from: ForkedFrom | None = None
    created_at: datetime
    committed_at: datetime


class CheckpointRecord(Document):
    """What changes, with all that is needed to place the checkpoint in its run."""

    kind: Literal["checkpoint"] = "checkpoint"
    catalog_id: str
    epoch: int
    version: int
    project: ProjectFacts
    run: RunFacts
    attempt: AttemptFacts
    checkpoint: CheckpointFacts
    state: CheckpointState
    health: Health
    health_reason: str | None
    tier: Tier
    labels: list[str]
    pinned_at: datetime | None
    pinned_by: str | None
    pin_reason: str | None
    pinned_until: datetime | None
    trashed_at: datetime | None
    trashed_by: str | None
    trash_reason: str | None
    purge_at: datetime | None
    holds: list[HoldFacts]


class ShardFacts(ShardSummary, Document):
    """`digest` is that of its chunk list, which stands in a document of its own."""

    rank: int
    digest: Digest
    index_ordinal: int | None
    layout_ordinal: int | None
    uploaded_bytes: int
    deduplicated_bytes: int
    sealed_at: datetime | None


class ManifestRecord(Document):
    """Written once. It names its run and attempt too: the checkpoint can be placed where its record is damaged."""

    kind: Literal["manifest"] = "manifest"
    catalog_id: str
    project: ProjectFacts
    run: RunFacts
    attempt: AttemptFacts
    checkpoint: CheckpointFacts
    shards: list[ShardFacts]


class ListRecord(Document):
    """The chunks of one shard, or of several that have the very same: digest and bytes of each, in order.

    `encoded`: ordinal, codec, stored bytes and stored digest of the copies that are not the raw bytes. Where each copy
    lies is not here: repairing and copying change that, and the store's own listing knows it better.
    """

    kind: Literal["list"] = "list"
    digest: str
    chunks: list[tuple[str, int]]
    encoded: list[tuple[int, Codec, int, Digest]]


class RemovedRecord(Document):
    """`epoch`: that of the catalog which purged the checkpoint; None in what was written before that was told."""

    kind: Literal["removed"] = "removed"
    catalog_id: str
    epoch: int | None = None
    checkpoint_id: str


Record = TypeVar("Record", bound=Document)


def encode(document: Document) -> bytes:
    body = document.model_dump(mode="json")
    outer = {"format": FORMAT, "format_version": FORMAT_VERSION, "record": body, "sha256": _digest(body)}
    return canonical_bytes(outer) + b"\n"


def decode(data: bytes, model: type[Record]) -> Record:
    """Raises DamagedRecordError and NewerRecordError."""
    try:
        outer = parse(data)
        if not isinstance(outer, dict) or outer.get("format") != FORMAT:
            raise DamagedRecordError("it is no record of Holdfast")
        if outer.get("format_version") != FORMAT_VERSION:
            raise NewerRecordError(
                f"A record beside the data has the format {outer.get('format_version')!r}, and this version of "
                f"Holdfast reads {FORMAT_VERSION}. Install the version that wrote it, or a newer one."
            )
        if _digest(outer.get("record")) != outer.get("sha256"):
            raise DamagedRecordError("its bytes are not those that were written")
        return model.model_validate(outer.get("record"), extra="ignore")
    except (DocumentError, UnicodeDecodeError):
        raise DamagedRecordError("it is cut short, or no JSON") from None
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"]) or "it"
        raise DamagedRecordError(f"{where} is not as a record has it") from None


def _digest(body: Any) -> str:
    return hashlib.sha256(canonical_bytes(body)).hexdigest()
