"""Objects that no copy in the catalog speaks of, and that a checkpoint needs all the same (rule late-put-window).

A database that was restored from a backup knows each copy by the key that it had then. What was moved to another
storage class, copied back or repaired since lies under another key, and the old object is gone. So an object is no
orphan while a checkpoint needs its chunk and no store has a good copy of that. The sweep takes it back as a copy that
is read before anything relies on it, as a rebuild does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

from sqlalchemy import Select, exists, select
from sqlalchemy.orm import Session

from holdfast_protocol.codecs import Codec
from holdfast_protocol.states import CopyState, Proof
from holdfast_protocol.tiers import ARCHIVED
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.collect.garbage import Question
from holdfast_service.context import ServiceContext
from holdfast_service.copies.corruption import lock_users, mark_cold
from holdfast_service.copies.predicates import KEPT, PROVEN, oldest_attempts
from holdfast_service.db.dialect import database_now, insert_absent
from holdfast_service.db.tables.core import Chunk, Copy
from holdfast_service.stores.base import StoredObject


def needed_among(context: ServiceContext, objects: Sequence[StoredObject]) -> list[StoredObject]:
    """Those of the objects, of one project, whose chunk a checkpoint needs and no store has a good copy of."""
    if not objects:
        return []
    with context.database.read() as session:
        digests = {chunk.digest for chunk in session.scalars(_lacking(session, context, objects))}
    return [each for each in objects if each.key.digest in digests]


def take_back(context: ServiceContext, store_id: int, objects: Sequence[StoredObject], actor: Actor) -> int:
    """Makes copies of those that are needed among the objects, which are of one project; how many. What has the size
    of no known encoding of its chunk stays as it is."""
    return context.database.run(partial(_take_back, context=context, store_id=store_id, objects=objects, actor=actor))


def _lacking(session: Session, context: ServiceContext, objects: Sequence[StoredObject]) -> Select[Chunk]:
    """A suspect copy is none: its object may be what is gone."""
    good = exists().where(Copy.chunk_id == Chunk.id, Copy.state.in_(KEPT), Copy.proof.in_(PROVEN))
    question = Question.now_of(session, context, context.store_ids)
    return (
        select(Chunk)
        .where(
            Chunk.project_id == objects[0].key.project_id,
            Chunk.digest.in_({each.key.digest for each in objects}),
            question.chunk_is_needed(Chunk.id),
            ~good,
        )
        .order_by(Chunk.digest, Chunk.id)
    )


def _take_back(
    session: Session, *, context: ServiceContext, store_id: int, objects: Sequence[StoredObject], actor: Actor
) -> int:
    found = session.scalars(_lacking(session, context, objects).with_only_columns(Chunk.id)).all()
    lock_users(session, *found)
    session.execute(
        select(Chunk.id).where(Chunk.id.in_(found)).order_by(Chunk.digest, Chunk.id).with_for_update()
    ).all()
    # A later statement, behind the locks: it sees what another has committed meanwhile.
    chunks = session.scalars(_lacking(session, context, objects).where(Chunk.id.in_(found))).all()
    encodings, attempts = _encodings(session, chunks), oldest_attempts(session, [chunk.id for chunk in chunks])
    in_this_store = select(Copy.generation).where(Copy.chunk_id.in_(found), Copy.store_id == store_id)
    there = set(session.scalars(in_this_store))  # a row that says `gone`, until the collector takes it away
    now = database_now(session)
    rows: list[dict[str, Any]] = []
    archived: dict[str, list[int]] = defaultdict(list)
    for each in sorted(objects, key=lambda one: (one.key.digest, one.key.generation)):
        if each.key.generation in there:
            continue
        fitting = [chunk for chunk in chunks if (chunk.id, each.bytes) in encodings and chunk.digest == each.key.digest]
        for chunk in fitting[:1]:
            codec, stored_digest = encodings[chunk.id, each.bytes]
            is_archived = each.storage_class in ARCHIVED
            if each.storage_class is not None and is_archived:
                archived[each.storage_class].append(chunk.id)
            row = {
                "chunk_id": chunk.id,
                "project_id": chunk.project_id,
                "store_id": store_id,
                "attempt_id": attempts[chunk.id],
                "generation": each.key.generation,
                "state": CopyState.COLD if is_archived else CopyState.SUSPECT,
                # As in a rebuild: the state says that it must be read again all the same.
                "proof": Proof.READ,
                "codec": codec,
                "stored_digest": stored_digest,
                "stored_bytes": each.bytes,
                "storage_class": each.storage_class,
                "ticket_expires_at": now,
                "created_at": each.modified_at,
            }
            rows.append(row)
    insert_absent(session, Copy, rows)
    for place, chunk_ids in sorted(archived.items()):
        mark_cold(session, chunk_ids, actor=actor, target=place)
    if rows:
        record_event(
            session,
            actor,
            "copy.take_back",
            project_id=objects[0].key.project_id,
            reason="No copy in the catalog spoke of these objects, and checkpoints need their chunks.",
            after={"store": store_id, "copies": len(rows)},
        )
    return len(rows)


def _encodings(session: Session, chunks: Sequence[Chunk]) -> dict[tuple[int, int], tuple[str, str]]:
    """By chunk and stored bytes: the codec and the stored digest. A copy that is moved keeps its encoding, and what is
    encoded is smaller than its chunk."""
    known = session.execute(
        select(Copy.chunk_id, Copy.stored_bytes, Copy.codec, Copy.stored_digest).where(
            Copy.chunk_id.in_([chunk.id for chunk in chunks])
        )
    )
    encodings = {(row.chunk_id, row.stored_bytes): (row.codec, row.stored_digest) for row in known}
    return encodings | {(chunk.id, chunk.bytes): (Codec.RAW.value, chunk.digest) for chunk in chunks}
