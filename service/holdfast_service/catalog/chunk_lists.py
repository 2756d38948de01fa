"""The chunk list of a sealed shard: one row for all the shards that have this very list.

Written in a transaction of its own, before the checkpoint is locked: a list may have 200,000 entries, and the other
ranks' seals would wait for it. Until the shard refers to it, the chunks are held by what was negotiated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from sqlalchemy import exists, insert, select
from sqlalchemy.orm import Session

from holdfast_service.catalog.insert import insert_absent
from holdfast_service.catalog.tables import ChunkList, ChunkListEntry
from holdfast_service.database import Database

_ROWS_PER_STATEMENT = 5000


def ensure_chunk_list(database: Database, project_id: str, digest: str, chunk_ids: Sequence[int]) -> int:
    """The row's id. `digest` is the shard_digest of the list; equal lists are those of the same rows, sizes and all."""
    return database.run(lambda session: _ensure(session, project_id, digest, chunk_ids))


def _ensure(session: Session, project_id: str, digest: str, chunk_ids: Sequence[int]) -> int:
    # Waits for a rank that is writing the same list; what it wrote is seen by the next statement.
    entries_digest = hashlib.sha256(",".join(map(str, chunk_ids)).encode("ascii")).hexdigest()
    same = {"project_id": project_id, "entries_digest": entries_digest}
    insert_absent(session, ChunkList, [same | {"digest": digest}])
    list_id = session.execute(select(ChunkList.id).filter_by(**same).with_for_update()).scalar_one()
    if not session.scalar(select(exists().where(ChunkListEntry.chunk_list_id == list_id))):
        entries = [
            {"chunk_list_id": list_id, "ordinal": ordinal, "chunk_id": chunk_id}
            for ordinal, chunk_id in enumerate(chunk_ids)
        ]
        for first in range(0, len(entries), _ROWS_PER_STATEMENT):
            session.execute(insert(ChunkListEntry), entries[first : first + _ROWS_PER_STATEMENT])
    return list_id
