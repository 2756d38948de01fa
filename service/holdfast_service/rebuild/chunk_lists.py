"""Chunk lists, and the chunks that they name, from the lists beside the data. Each list is a transaction of its own."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.digests import shard_digest
from holdfast_service.catalog.chunk_lists import ensure_chunk_list
from holdfast_service.catalog.insert import insert_absent
from holdfast_service.catalog.record_documents import DamagedRecordError, ListRecord
from holdfast_service.catalog.record_tables import FoundEncoding
from holdfast_service.catalog.tables import Chunk
from holdfast_service.database import Database

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
    return ensure_chunk_list(database, project_id, digest, [ids[each] for each in digests])


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
