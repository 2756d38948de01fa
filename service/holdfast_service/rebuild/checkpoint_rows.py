"""A checkpoint's rows, from its record, its manifest and its lists."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar

from sqlalchemy import exists, insert, select
from sqlalchemy.orm import Session

from holdfast_protocol.checkpoints import ForkedFrom
from holdfast_protocol.digests import checkpoint_digest, shard_digest
from holdfast_protocol.pruning import HoldKind
from holdfast_protocol.states import CheckpointState, Health, ShardState, Tier
from holdfast_protocol.text import without_secrets
from holdfast_service.copies.corruption import corrupt_reason
from holdfast_service.db.dialect import database_now, insert_absent
from holdfast_service.db.engine import Database
from holdfast_service.db.tables.core import Checkpoint, Chunk, Shard
from holdfast_service.db.tables.operations import Hold
from holdfast_service.db.tables.records import FoundEncoding, WrittenRecord
from holdfast_service.rebuild.begin import refuse_unless_rebuilding
from holdfast_service.rebuild.report import RebuildReport
from holdfast_service.rebuild.sources import SourceStore, refuse_foreign
from holdfast_service.rebuild.subjects import put_lineage
from holdfast_service.records.content import CHANGING
from holdfast_service.records.documents import (
    CheckpointRecord,
    DamagedRecordError,
    ListRecord,
    ManifestRecord,
    RecordKind,
    ShardFacts,
)
from holdfast_service.records.scanning import FoundRecord, read_record
from holdfast_service.stores.base import Store
from holdfast_service.training.seal import ensure_chunk_lists

# Chunk lists, and the chunks that they name, from the lists beside the data. Each list is a transaction of its own.

_ROWS_PER_STATEMENT = 1000


def put_chunk_list(database: Database, project_id: str, record: ListRecord, digest: str, at: datetime) -> int:
    """The list's row. `at` stands for when its chunks were made. Raises DamagedRecordError for a list that is not the
    one of this digest."""
    digests = [chunk for chunk, _ in record.chunks]
    try:
        if shard_digest(digests) != digest:
            raise DamagedRecordError("its chunks do not give its digest")
    except ValueError as error:
        raise DamagedRecordError(str(error)) from None
    sizes = dict(record.chunks)
    if len(sizes) < len(set(record.chunks)):
        raise DamagedRecordError("it gives one of its chunks two sizes")
    wanted = sorted(sizes)
    ids: dict[str, int] = {}
    for first in range(0, len(wanted), _ROWS_PER_STATEMENT):
        some = wanted[first : first + _ROWS_PER_STATEMENT]
        with database.transaction() as session:
            insert_absent(
                session,
                Chunk,
                [{"project_id": project_id, "digest": each, "bytes": sizes[each], "created_at": at} for each in some],
            )
            found = session.execute(
                select(Chunk.digest, Chunk.id, Chunk.bytes).where(
                    Chunk.project_id == project_id, Chunk.digest.in_(some)
                )
            )
            ids |= {chunk: chunk_id for chunk, chunk_id, size in found if size == sizes[chunk]}
    with database.transaction() as session:
        _put_encodings(session, project_id, record, digests)
    chunk_ids = [ids[each] for each in digests]
    return database.run(lambda session: ensure_chunk_lists(session, project_id, {0: (digest, chunk_ids)})[0])


def _put_encodings(session: Session, project_id: str, record: ListRecord, digests: list[str]) -> None:
    rows = [
        {
            "project_id": project_id,
            "digest": digests[ordinal],
            "stored_bytes": stored_bytes,
            "codec": codec,
            "stored_digest": stored_digest,
        }
        for ordinal, codec, stored_bytes, stored_digest in record.encoded
        if 0 <= ordinal < len(digests)
    ]
    for first in range(0, len(rows), _ROWS_PER_STATEMENT):
        insert_absent(session, FoundEncoding, rows[first : first + _ROWS_PER_STATEMENT])


# A checkpoint's rows, from its record, its manifest and its lists. What cannot be read is told by name and leaves the
# checkpoint corrupt: it is in the catalog all the same, and never a restore point.
#
# `removed` outdoes everything. Else the newest record says the state; an older one, or the manifest alone, stands in
# for a damaged one, in the direction in which nothing is deleted. For a damaged manifest or list, which never change,
# that of another store does.

_SHARDS_PER_STATEMENT = 500
_KEPT_STATES = (CheckpointState.COMMITTED, CheckpointState.TRASHED)


@dataclass
class ReadCheckpoint:
    """What could be read of one. `record` None: only the manifest is left, and the checkpoint counts as committed.
    `wrong` says why it is corrupt, in parts of a sentence; `protect` why it is held until a person has looked.
    `elsewhere`: something of it was whole in another store only, and is to be written anew into the first."""

    found: FoundRecord
    record: CheckpointRecord | None = None
    manifest: ManifestRecord | None = None
    wrong: list[str] = field(default_factory=list)
    protect: str | None = None
    elsewhere: bool = False

    @property
    def sure(self) -> bool:
        """Its state is the one that was written last. The others are put after those: they may not take their steps."""
        return self.record is not None and not self.wrong

    @property
    def forked_from(self) -> ForkedFrom | None:
        """As the record says, or the manifest: a worker from before revision 0037 leaves it out of what it writes."""
        told = (each.checkpoint.forked_from for each in (self.record, self.manifest) if each is not None)
        return next((each for each in told if each is not None), None)


_Read = TypeVar("_Read")


def _first_whole(
    sources: Sequence[SourceStore],
    name: str,
    read: ReadCheckpoint,
    report: RebuildReport,
    make: Callable[[Store], _Read],
) -> _Read:
    """What `make` gives of the first store that has the document whole: what never changes is the same in each. Raises
    DamagedRecordError, which says what is wrong in the first store, and StoreError."""
    wrong: DamagedRecordError | None = None
    for source in sources:
        try:
            made = make(source.store)
        except DamagedRecordError as error:
            wrong = wrong or error
            continue
        if wrong is not None:
            read.elsewhere = True
            report.notes.append(
                f"{name}: it is taken from {without_secrets(source.url)}, for in the first store {wrong}"
            )
        return made
    assert wrong is not None
    raise wrong


def put_checkpoint(
    database: Database, sources: Sequence[SourceStore], read: ReadCheckpoint, report: RebuildReport
) -> None:
    """Raises StoreError, and DamagedRecordError for what other records contradict."""
    found = read.found
    base = read.record or read.manifest
    if base is None:
        report.damaged.append(f"{found.subject.folder}: nothing of it can be read, so it is in no run")
        report.doubt(found.subject.project_id, f"Nothing of the checkpoint {found.subject.subject_id} can be read.")
        return
    with database.read() as session:
        if session.scalar(select(exists().where(Checkpoint.id == found.subject.subject_id))):
            return
    with database.transaction() as session:
        put_lineage(session, base.project, base.run, base.attempt, read.forked_from)
    lists: dict[str, int] = {}
    project_id, made_at = found.subject.project_id, base.checkpoint.created_at
    shards: Sequence[ShardFacts] = read.manifest.shards if read.manifest is not None else ()
    for digest in sorted({shard.digest for shard in shards}):
        name = found.subject.list_name(digest)

        def put(store: Store, name: str = name, digest: str = digest) -> int:
            return put_chunk_list(database, project_id, read_record(store, name, ListRecord), digest, made_at)

        try:
            lists[digest] = _first_whole(sources, name, read, report, put)
        except DamagedRecordError as error:
            report.damaged.append(f"{name}: {error}")
            ranks = ", ".join(str(shard.rank) for shard in shards if shard.digest == digest)
            read.wrong.append(f"the chunk list of rank {ranks} cannot be read")
    _insert(database, sources[0], read, lists)
    if read.protect is not None:
        name = f"{base.project.name}/{base.run.name}@{base.checkpoint.step}#{base.checkpoint.attempt}"
        report.protected.append(f"{name}: {read.protect}")


def read_checkpoint(sources: Sequence[SourceStore], found: FoundRecord, report: RebuildReport) -> ReadCheckpoint:
    """What changes is read from the first store alone: another may be behind. Raises StoreError."""
    read, source = ReadCheckpoint(found), sources[0]

    def whole_manifest(store: Store) -> ManifestRecord:
        manifest = read_record(store, found.subject.manifest_name, ManifestRecord)
        _refuse_other(manifest, found, source)
        shards = sorted(manifest.shards, key=lambda shard: shard.rank)
        try:
            digest = checkpoint_digest([shard.digest for shard in shards])
        except ValueError as error:
            raise DamagedRecordError(str(error)) from None
        if digest != manifest.checkpoint.digest:
            raise DamagedRecordError("its shards do not give the checkpoint's digest")
        return manifest

    try:
        read.manifest = _first_whole(sources, found.subject.manifest_name, read, report, whole_manifest)
    except DamagedRecordError as error:
        report.damaged.append(f"{found.subject.manifest_name}: {error}")
        read.wrong.append("its manifest cannot be read")
    for version in found.versions:
        name = found.subject.version_name(*version)
        try:
            record = read_record(source.store, name, CheckpointRecord)
            _refuse_other(record, found, source)
            if record.state not in _KEPT_STATES:
                raise DamagedRecordError(f"it says {record.state}, of which there is no record")
        except DamagedRecordError as error:
            report.damaged.append(f"{name}: {error}")
            read.protect = _UNKNOWN.format("cannot be read")
            if not read.wrong:
                read.wrong.append("its newest record cannot be read, and its state may be older than it was")
        else:
            read.record = record
            break
    if not found.versions:
        read.protect = _UNKNOWN.format("is not there")
    return read


_UNKNOWN = (
    "its newest record {}, so the catalog does not know its holds, its pin and what people said of it. Look, place "
    "again what it had, and release the hold that the rebuild placed"
)


def _refuse_other(document: CheckpointRecord | ManifestRecord, found: FoundRecord, source: SourceStore) -> None:
    refuse_foreign(document, source)
    if (document.project.id, document.checkpoint.id) != (found.subject.project_id, found.subject.subject_id):
        raise DamagedRecordError("it is another checkpoint's")


def _insert(database: Database, source: SourceStore, read: ReadCheckpoint, lists: dict[str, int]) -> None:
    base = read.record or read.manifest
    assert base is not None
    with database.transaction() as session:
        refuse_unless_rebuilding(session)
        attempt_id = put_lineage(session, base.project, base.run, base.attempt, read.forked_from)
        now = database_now(session)
        row: dict[str, Any] = base.checkpoint.model_dump(exclude={"attempt"})
        row |= {
            "run_id": base.run.id,
            "attempt_id": attempt_id,
            "attempt_number": base.checkpoint.attempt,
            "forked_from": None if read.forked_from is None else read.forked_from.model_dump(),
            "sealed_ranks": base.checkpoint.world_size,
            "deadline_at": now,
            "recorded_version": 0,
            "version": 1,
            **_NEVER_WRITTEN,
        }
        if read.record is not None:
            row |= {name: getattr(read.record, name) for name in CHANGING} | {"version": read.record.version}
        if read.wrong:
            why = f"After the catalog was rebuilt: {'; '.join(read.wrong)}."
            row["health_reason"] = corrupt_reason(why, Health(row["health"]), row["health_reason"])
            row["health"] = Health.CORRUPT
            row["version"] += 1
        if row["state"] == CheckpointState.COMMITTED and _step_is_taken(session, row):
            row |= {"state": CheckpointState.TRASHED, "trash_reason": _TAKEN, "trashed_at": now, "trashed_by": "policy"}
            read.protect = read.protect or _TWICE
        insert_absent(session, Checkpoint, [row])
        holds = [each.model_dump() for each in ([] if read.record is None else read.record.holds)]
        if read.protect is not None:
            holds.append(_protection(read.protect, now))
        insert_absent(session, Hold, [each | {"checkpoint_id": row["id"], "mirror_error": None} for each in holds])
        shards = [] if read.manifest is None else [_shard_row(row["id"], each, lists) for each in read.manifest.shards]
        for first in range(0, len(shards), _SHARDS_PER_STATEMENT):
            session.execute(insert(Shard), shards[first : first + _SHARDS_PER_STATEMENT])
        # A version that could not be read still counts: the next one has to outdo it.
        newest = max((version for _, version in read.found.versions), default=0)
        if newest > row["version"]:
            session.get_one(Checkpoint, row["id"]).version = newest + 1
        in_the_store = read.record is not None and read.sure and not read.found.remembered and not read.elsewhere
        written = {
            "kind": RecordKind.CHECKPOINT,
            "subject_id": row["id"],
            "store_id": source.marker.store_id,
            "version": read.record.version if read.record is not None and in_the_store else 0,
            "name": read.found.written_name,
        }
        insert_absent(session, WrittenRecord, [written])


_NEVER_WRITTEN: dict[str, Any] = {
    "state": CheckpointState.COMMITTED,
    "health": Health.OK,
    "health_reason": None,
    "tier": Tier.HOT,
    "labels": [],
}


_TAKEN = "Its record is damaged or contradicts another: the same attempt has saved this step twice."
_TWICE = "its attempt has committed this step twice, as the records say. Look, and release the hold"


def _protection(why: str, now: datetime) -> dict[str, Any]:
    """A hold until a person has looked: the direction in which nothing is deleted. No token placed it, so that of any
    person who may release holds ends it."""
    return {
        "id": f"hd_{secrets.token_hex(6)}",
        "kind": HoldKind.LEGAL,
        "reason": f"After the catalog was rebuilt: {why}.",
        "retain_until": None,
        "mirror": False,
        "placed_at": now,
        "placed_by_token": "",
        "placed_by": "catalog rebuild",
    }


def _step_is_taken(session: Session, row: dict[str, Any]) -> bool:
    identity = {name: row[name] for name in ("run_id", "attempt_number", "step", "detached")}
    taken = select(Checkpoint.id).filter_by(**identity, state=CheckpointState.COMMITTED)
    return session.scalar(select(exists(taken))) is True


def _shard_row(checkpoint_id: str, shard: ShardFacts, lists: dict[str, int]) -> dict[str, Any]:
    return shard.model_dump() | {
        "checkpoint_id": checkpoint_id,
        "state": ShardState.SEALED,
        "chunk_list_id": lists.get(shard.digest),
    }
