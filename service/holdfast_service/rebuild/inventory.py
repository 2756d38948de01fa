"""Copies, by what a store really holds: where each one lies is in no record, for repairs, copying and tiers change it.

Nothing is trusted (rule fencing-token): a copy whose size is right is `suspect`. A reader checks every byte, so
restores work at once; no save relies on it before the service has read it. An object of another size than the record
says is looked into here: encoded anew since, or damaged.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from typing import Any

from sqlalchemy import select, update

from holdfast_protocol.codecs import Codec, DecodeError, decode
from holdfast_protocol.states import CopyState, Proof
from holdfast_protocol.tiers import ARCHIVED
from holdfast_service.copies.predicates import oldest_attempts
from holdfast_service.db.dialect import database_now, insert_absent
from holdfast_service.db.engine import Database
from holdfast_service.db.tables.core import Chunk, Copy
from holdfast_service.db.tables.records import FoundEncoding
from holdfast_service.rebuild.report import RebuildReport
from holdfast_service.rebuild.sources import SourceStore
from holdfast_service.stores.base import ObjectArchived, ObjectMissing, Store, StoredObject

_OBJECTS_PER_BATCH = 1000
# The catalog that wrote the record had it proven. The state says that it must be read again all the same.
_VOUCHED = Proof.READ


def put_copies(
    database: Database,
    source: SourceStore,
    foreign: Collection[str],
    report: RebuildReport,
    on_object: Callable[[int], None],
) -> Counter[str]:
    """Without the projects of another catalog. By project, also of those without any record, how many objects belong to
    no checkpoint. Raises StoreError: a listing that is not whole would make chunks look lost."""
    orphans: Counter[str] = Counter()
    objects = source.store.list_objects(None)
    while batch := list(islice(objects, _OBJECTS_PER_BATCH)):
        by_project: dict[str, list[StoredObject]] = defaultdict(list)
        for each in batch:
            if each.key.project_id not in foreign:
                by_project[each.key.project_id].append(each)
        for project_id, of_project in sorted(by_project.items()):
            before = report.orphans
            _put_batch(database, source, project_id, of_project, report)
            orphans[project_id] += report.orphans - before
        on_object(len(batch))
    return orphans


def _put_batch(
    database: Database, source: SourceStore, project_id: str, batch: list[StoredObject], report: RebuildReport
) -> None:
    digests = {each.key.digest for each in batch}
    with database.read() as session:
        chunks = session.scalars(select(Chunk).where(Chunk.project_id == project_id, Chunk.digest.in_(digests))).all()
        attempts = oldest_attempts(session, [chunk.id for chunk in chunks])
        encodings = {
            (row.digest, row.stored_bytes): row
            for row in session.scalars(
                select(FoundEncoding).where(FoundEncoding.project_id == project_id, FoundEncoding.digest.in_(digests))
            )
        }
        now = database_now(session)
    needed: dict[str, list[Chunk]] = defaultdict(list)
    for chunk in chunks:
        if chunk.id in attempts:
            needed[chunk.digest].append(chunk)
    rows, unread = [], []
    for each in sorted(batch, key=lambda found: (found.key.digest, found.key.generation)):
        if each.key.digest not in needed:
            report.orphans, report.orphan_bytes = report.orphans + 1, report.orphan_bytes + each.bytes
            continue
        chunk = _owner(each, needed[each.key.digest], source.store)
        row = _row(each, chunk.bytes, encodings.get((chunk.digest, each.bytes)), source.store)
        if row is None:
            continue  # deleted since it was listed
        report.bad_objects += row["state"] == CopyState.BAD
        report.copies, report.copied_bytes = report.copies + 1, report.copied_bytes + each.bytes
        damage: dict[str, Any] = {"bad_at": None, "finding": None, "damage": None}
        if "finding" in row:
            unread.append(chunk.id)
            damage |= {"bad_at": now, "damage": 1}
            report.notes.append(
                f"{each.key.path} {row['finding']}: it counts as bad. If nothing else has the chunk, thaw it and "
                "rebuild the catalog again"
            )
        rows.append(
            damage
            | row
            | {
                "chunk_id": chunk.id,
                "project_id": project_id,
                "store_id": source.marker.store_id,
                "attempt_id": attempts[chunk.id],
                "generation": each.key.generation,
                "stored_bytes": each.bytes,
                "storage_class": each.storage_class,
                "ticket_expires_at": now,
                "created_at": each.modified_at,
            }
        )
    with database.transaction() as session:
        if unread:
            session.execute(
                update(Chunk).where(Chunk.id.in_(unread)).values(damages=1),
                execution_options={"synchronize_session": False},
            )
        insert_absent(session, Copy, rows[: len(rows) // 2])
        insert_absent(session, Copy, rows[len(rows) // 2 :])


def _owner(found: StoredObject, chunks: list[Chunk], store: Store) -> Chunk:
    """The chunk of the copy. A digest has two chunks if a client once gave a wrong size: the copy's bytes decide."""
    if len(chunks) > 1:
        try:
            stored = b"".join(store.open_read(found.key))
        except (ObjectMissing, ObjectArchived):
            stored = b""
        for chunk in chunks:
            if chunk.bytes == len(stored) and hashlib.sha256(stored).hexdigest() == chunk.digest:
                return chunk
            if any(codec is not Codec.RAW and _decodes(codec, chunk.bytes, stored, chunk.digest) for codec in Codec):
                return chunk
    return min(chunks, key=lambda chunk: (chunk.bytes != found.bytes, chunk.id))


def _row(found: StoredObject, chunk_bytes: int, encoding: FoundEncoding | None, store: Store) -> dict[str, Any] | None:
    digest = found.key.digest
    state = CopyState.COLD if found.storage_class in ARCHIVED else CopyState.SUSPECT
    if found.bytes == chunk_bytes:
        return {"state": state, "proof": _VOUCHED, "codec": Codec.RAW, "stored_digest": digest}
    if encoding is not None:
        codec, stored_digest = Codec(encoding.codec), encoding.stored_digest
        return {"state": state, "proof": _VOUCHED, "codec": codec, "stored_digest": stored_digest}
    unread: dict[str, Any] = {}
    try:
        stored = b"".join(store.open_read(found.key))
    except ObjectMissing:
        return None
    except ObjectArchived:
        stored, unread = b"", {"finding": "is archived, and no record says how it is encoded"}
    stored_digest = hashlib.sha256(stored).hexdigest()
    for codec in Codec:
        if codec is not Codec.RAW and _decodes(codec, chunk_bytes, stored, digest):
            return {"state": state, "proof": _VOUCHED, "codec": codec, "stored_digest": stored_digest}
    bad = {"state": CopyState.BAD, "proof": Proof.UNPROVEN, "codec": Codec.RAW, "stored_digest": stored_digest}
    return bad | unread


def _decodes(codec: Codec, chunk_bytes: int, stored: bytes, digest: str) -> bool:
    def pieces() -> Iterator[bytes]:
        yield stored

    hashed = hashlib.sha256()
    try:
        for block in decode(codec, chunk_bytes, pieces()):
            hashed.update(block)
    except DecodeError:
        return False
    return hashed.hexdigest() == digest
