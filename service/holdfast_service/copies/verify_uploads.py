"""Uploads on their way: how many a project may have in flight, and whether each has arrived. The service asks the store
and never takes the client's word (rules seal-only-negotiated, verify-while-uploading and reuse-only-hashed).

Negotiating verifies uploads that are reported as done, while others are still going up, and sealing verifies unreported
ones. The service asks the store outside of any transaction, several objects at once, and settles the answers with a
conditional update: doing it twice, or beside another process, is fine.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import bindparam, func, select, update
from sqlalchemy.orm import Session

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import CopyState, Proof
from holdfast_service.db.dialect import database_now
from holdfast_service.db.engine import Database
from holdfast_service.db.tables.core import Copy, Project
from holdfast_service.errors import ProblemError
from holdfast_service.stores.base import (
    Capabilities,
    MountedStore,
    ObjectFacts,
    ObjectKey,
    ObjectMismatch,
    ObjectMissing,
    Store,
)

_AT_ONCE = 16
_ASKED_HERE = 4


class Finding(StrEnum):
    ARRIVED = "arrived"
    MISSING = "missing"
    MISMATCH = "mismatch"


@dataclass(frozen=True)
class Upload:
    """A copy that should be in the store by now. Mounted clients hand it over under the name of its generation."""

    copy_id: int
    key: ObjectKey
    stored_bytes: int
    stored_digest: str


@dataclass(frozen=True)
class Verdict:
    upload: Upload
    finding: Finding
    proof: Proof | None = None
    version_id: str | None = None
    detail: str = ""


def verify_uploads(database: Database, store: Store, uploads: Sequence[Upload]) -> list[Verdict]:
    """One verdict per upload, in their order, settled in the catalog. Raises StoreError if the store does not say."""
    verdicts = ask_for_all(store, uploads)
    if verdicts:
        with database.transaction() as session:
            settle(session, verdicts, database_now(session))
    return verdicts


def ask_for_all(store: Store, uploads: Sequence[Upload]) -> list[Verdict]:
    """The same, and not settled yet."""
    here = _ASKED_HERE if isinstance(store, MountedStore) else 1
    if len(uploads) <= here:  # to start threads takes longer
        return [ask_store(store, upload) for upload in uploads]
    with ThreadPoolExecutor(min(_AT_ONCE, len(uploads)), thread_name_prefix="holdfast-verify") as threads:
        return list(threads.map(lambda upload: ask_store(store, upload), uploads))


def ask_store(store: Store, upload: Upload) -> Verdict:
    """What the store says of this upload. Raises StoreError other than a missing or a wrong object."""
    try:
        facts = _facts(store, upload)
    except ObjectMissing:
        return Verdict(upload, Finding.MISSING, detail="the store does not have it")
    except ObjectMismatch as error:
        return Verdict(upload, Finding.MISMATCH, detail=str(error))
    if facts.bytes != upload.stored_bytes:
        return Verdict(
            upload, Finding.MISMATCH, detail=f"the store has {facts.bytes} bytes, announced {upload.stored_bytes}"
        )
    if facts.sha256 is not None and facts.sha256 != upload.stored_digest:
        return Verdict(upload, Finding.MISMATCH, detail="the store's SHA-256 of it is another one")
    # What it decodes to is the client's word: the store's SHA-256 proves the chunk only if it is stored raw.
    raw = upload.stored_digest == upload.key.digest
    proof = proof_of(facts, store.capabilities) if raw else Proof.UNPROVEN
    return Verdict(upload, Finding.ARRIVED, proof, facts.version_id)


def proof_of(facts: ObjectFacts, capabilities: Capabilities | None) -> Proof:
    """A checksum proves something only if the store was seen to compute it; none at all proves nothing."""
    enforced = capabilities is not None and capabilities.sha256_enforced
    return Proof.STORE_SHA256 if facts.sha256 is not None and enforced else Proof.UNPROVEN


def _facts(store: Store, upload: Upload) -> ObjectFacts:
    if isinstance(store, MountedStore):
        # A client with the mount may have written it for us to publish. If it is there already, only this says that
        # it stays: the service may have died before its name was durable.
        store.publish(upload.key.generation, upload.key, upload.stored_bytes)
    return store.head(upload.key)


def settle(session: Session, verdicts: Sequence[Verdict], now: datetime) -> None:
    """What has arrived and what is wrong stands in the catalog. What is missing may still come."""
    settled = [verdict for verdict in verdicts if verdict.finding is not Finding.MISSING]
    if not settled:
        return
    alike: defaultdict[tuple[Finding, Proof | None, str | None], list[int]] = defaultdict(list)
    for verdict in settled:
        alike[verdict.finding, verdict.proof, verdict.version_id].append(verdict.upload.copy_id)
    connection = session.connection()
    if len(alike) <= _FEW_KINDS:
        for kind, copy_ids in alike.items():
            connection.execute(_SETTLED_ALIKE, {"copy_ids": sorted(copy_ids), **_columns(*kind, now)})
        return
    # A store with versions names another one for each object.
    each = sorted((copy_id, kind) for kind, copy_ids in alike.items() for copy_id in copy_ids)
    connection.execute(_SETTLED, [{"copy_id": copy_id, **_columns(*kind, now)} for copy_id, kind in each])


_FEW_KINDS = 2
# Only from `pending`: whatever else has happened to the copy meanwhile weighs more.
_FROM_PENDING = (
    update(Copy)
    .where(Copy.state == CopyState.PENDING)
    .values({name: bindparam(f"new_{name}") for name in ("state", "proof", "version_id", "verified_at")})
)
_SETTLED = _FROM_PENDING.where(Copy.id == bindparam("copy_id"))
_SETTLED_ALIKE = _FROM_PENDING.where(Copy.id.in_(bindparam("copy_ids", expanding=True)))


def _columns(finding: Finding, proof: Proof | None, version_id: str | None, now: datetime) -> dict[str, Any]:
    arrived = finding is Finding.ARRIVED
    return {
        "new_state": CopyState.VERIFIED if arrived else CopyState.BAD,
        "new_proof": proof,
        "new_version_id": version_id,
        "new_verified_at": now if arrived else None,
    }


_COUNTED_AFTER = 16
_AGAIN_AFTER_SECONDS = 2.0
_RETRY_AFTER_SECONDS = 5


@dataclass
class _Known:
    in_flight: int = 0
    handed_out: int = 0
    """Since they were counted."""
    counted_at: float = float("-inf")


class TicketsInFlight:
    """How many tickets of a project are in flight: handed out, not expired, and their chunk not verified yet.

    The copies' rows say it, so it is the same for all processes and nothing can drift. They are counted seldom: a
    process counts once it has handed out a sixteenth of the limit since it counted last, so the limit is exceeded by
    about that much for each process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._projects: dict[str, _Known] = {}

    def hand_out(self, session: Session, project: Project, wanted: int, most: int) -> None:
        """Called before so many tickets are made. A project that has none in flight may have any number. Raises
        `rate_limited`."""
        with self._lock:
            known = self._projects.setdefault(project.id, _Known())
            full = known.in_flight + wanted > most and known.in_flight > 0
            stale = time.monotonic() - known.counted_at > _AGAIN_AFTER_SECONDS
            count = stale if full else (known.handed_out + wanted) * _COUNTED_AFTER > most
        in_flight = _in_flight(session, project.id, most) if count else None
        with self._lock:
            if in_flight is not None:
                known.in_flight, known.handed_out, known.counted_at = in_flight, 0, time.monotonic()
            if known.in_flight + wanted > most and known.in_flight > 0:
                raise ProblemError(
                    ProblemCode.RATE_LIMITED,
                    f"{known.in_flight} chunks of the project {project.name!r} are being sent, and "
                    f"HOLDFAST_PROJECT_TICKETS allows {most}. Try again in {_RETRY_AFTER_SECONDS} s.",
                    limit="HOLDFAST_PROJECT_TICKETS",
                    retry_after_seconds=_RETRY_AFTER_SECONDS,
                )
            known.handed_out += wanted


def _in_flight(session: Session, project_id: str, most: int) -> int:
    """No more than `most` are counted."""
    pending = (
        select(Copy.id)
        .where(
            Copy.project_id == project_id,
            Copy.state == CopyState.PENDING,
            Copy.ticket_expires_at > database_now(session),
        )
        .limit(most)
    )
    return session.execute(select(func.count()).select_from(pending.subquery())).scalar_one()
