"""A reader says that a chunk is missing or wrong. The service looks for itself before anything is marked (rule
report-is-suspicion)."""

from __future__ import annotations

from collections.abc import Mapping

import structlog
from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.restores import ChunkVerdict, ReportChunk
from holdfast_protocol.states import CopyState
from holdfast_service.attached_stores.attached import ask_stores
from holdfast_service.audit.record import Actor
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext, waiting_for_store
from holdfast_service.copies.cold import cold_problem, note_archived
from holdfast_service.copies.corruption import lock_users, mark_users
from holdfast_service.copies.predicates import is_readable, keeps_anywhere
from holdfast_service.copies.read_back import (
    READABLE,
    Claim,
    Finding,
    claim,
    copy_is_free,
    found_bad,
    let_go,
    read_back,
    settle,
)
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Copy
from holdfast_service.errors import ProblemError
from holdfast_service.lineage.restore_choice import available_stores
from holdfast_service.restore.read_checkpoint import chunks_of_checkpoint
from holdfast_service.runs.views import checkpoint_by_id, refuse_unless_whole
from holdfast_service.stores.base import ObjectArchived, StoreError, StoreUnavailable

_log = structlog.get_logger("holdfast.reports")


def report_chunk(context: ServiceContext, caller: Principal, checkpoint_id: str, request: ReportChunk) -> ChunkVerdict:
    """Reads every copy of the chunk again, in each store that answers, and marks what cannot be read.

    Raises `checkpoint_not_found`, `chunk_not_found`, `busy` while another report of this chunk is looked into, and
    `store_unavailable` where no store could tell, which proves nothing and marks nothing, or where a store that may
    soon answer has a copy and the others have none; `checkpoint_cold` where what is left has to be thawed first.
    """
    digest = request.digest
    with waiting_for_store():
        ask_stores(context)
    claims = context.database.run(lambda session: _claim_copies(session, context, caller, checkpoint_id, digest))
    with waiting_for_store():  # to hash a chunk needs no interpreter either
        findings = _read_back_all(context, claims, Actor.person(caller))
    corrupt: set[str] = set()
    for claimed, finding in sorted(findings.items(), key=lambda item: item[1] is not Finding.GOOD):
        corrupt.update(settle(context, claimed, finding, Actor.person(caller)) or [])
    if not findings:
        corrupt.update(_mark_without_copies(context, caller, checkpoint_id, digest))
    readable = Finding.GOOD in findings.values()
    if not readable:
        _refuse_what_is_not_lost(context, caller, checkpoint_id, digest, findings)
    found = " and ".join(sorted(set(findings.values()))) or "has no copy left that can be read now"
    _log.warning(
        "chunk_reported",
        checkpoint_id=checkpoint_id,
        digest=digest,
        reported=request.problem,
        found=found,
        corrupt_checkpoints=len(corrupt),
    )
    remedy = "Try again." if readable else "Take another restore point."
    return ChunkVerdict(
        digest=digest,
        readable=readable,
        detail=f"The chunk {found}. {remedy}",
        corrupt_checkpoints=sorted(corrupt),
    )


def _read_back_all(context: ServiceContext, claims: list[Claim], actor: Actor) -> dict[Claim, Finding]:
    """By copy; those that their store could not give are let go, and what was archived is written down as cold. Raises
    StoreError if their stores could give none."""
    findings: dict[Claim, Finding] = {}
    failures: list[StoreError] = []
    watches = {attached.store_id: attached.watch for attached in context.stores}
    try:
        for claimed in claims:
            try:
                watches[claimed.store_id].refuse_hanging()
                finding = _read(context, claimed, actor)
                if finding is not None:
                    findings[claimed] = finding
            except StoreError as error:
                failures.append(error)
        if failures and not findings and any(each.state_before is not CopyState.BAD for each in claims):
            raise failures[0]
    except BaseException:
        for claimed in claims:
            let_go(context, claimed)
        raise
    for claimed in claims:
        if claimed not in findings:
            let_go(context, claimed)
    return findings


def _read(context: ServiceContext, claimed: Claim, actor: Actor) -> Finding | None:
    """None: a lifecycle rule or a person has archived it."""
    try:
        return read_back(context, claimed)
    except ObjectArchived:
        return note_archived(context, claimed, actor)


def _claim_copies(
    session: Session, context: ServiceContext, caller: Principal, checkpoint_id: str, digest: str
) -> list[Claim]:
    project, _, checkpoint = checkpoint_by_id(session, caller, checkpoint_id)
    refuse_unless_whole(checkpoint)
    chunk = chunks_of_checkpoint(session, project.id, checkpoint, [digest])[digest]
    copies = session.scalars(
        select(Copy)
        .where(
            Copy.chunk_id == chunk.id,
            Copy.store_id.in_(_worth_asking(context)),
            # What was found bad before may be good by now, and is read before anything is called lost.
            or_(Copy.state.in_(READABLE), found_bad()),
        )
        .order_by(Copy.id)
        .with_for_update(),
        execution_options={"populate_existing": True},
    ).all()
    now = database_now(session)
    at_work = select(Copy.id).where(
        Copy.id.in_([copy.id for copy in copies]), Copy.state != CopyState.BAD, ~copy_is_free(now)
    )
    if session.scalars(at_work).first() is not None:
        raise ProblemError(ProblemCode.BUSY, "This chunk is being read again at this moment. Ask again in a second.")
    seconds = context.settings.chunk_lease_seconds
    # A report proves nothing and the copies stay what they are: an upload that relies on one now goes on.
    return [claim(session, chunk, copy, seconds=seconds) for copy in copies]


def _refuse_what_is_not_lost(
    context: ServiceContext, caller: Principal, checkpoint_id: str, digest: str, findings: Mapping[Claim, Finding]
) -> None:
    """What is called lost sends a job to an older checkpoint, and no job is sent to one for a store's short silence.
    Raises StoreUnavailable if a store has a copy to read that was not read now, as long as the restore point waits for
    that store; `checkpoint_cold` if a copy can be thawed."""
    available = available_stores(context)
    store_ids = context.store_ids if available is None else available.store_ids
    with context.database.read() as session:
        project, _, checkpoint = checkpoint_by_id(session, caller, checkpoint_id)
        chunk = chunks_of_checkpoint(session, project.id, checkpoint, [digest])[digest]
        unheard = select(Copy.id).where(
            Copy.chunk_id == chunk.id,
            Copy.id.not_in([claimed.copy_id for claimed in findings]),
            is_readable(store_ids, checkpoint.attempt_id),
        )
        if session.scalars(unheard).first() is not None:
            raise StoreUnavailable(f"the chunk {digest} may be whole in a store that does not answer at this moment")
        cold = select(Copy.id).where(
            Copy.chunk_id == chunk.id,
            Copy.store_id.in_(context.store_ids),
            Copy.state.in_((CopyState.COLD, CopyState.THAWING)),
            or_(Copy.readable_until.is_(None), Copy.readable_until <= database_now(session)),
            keeps_anywhere(checkpoint.attempt_id),
        )
        if session.scalars(cold).first() is not None:
            raise cold_problem(session, checkpoint)


def _worth_asking(context: ServiceContext) -> list[int]:
    """Those that are known to be unavailable are not waited for, unless there is no other."""
    answering = [attached.store_id for attached in context.stores if not attached.watch.unavailable]
    return answering or list(context.store_ids)


def _mark_without_copies(context: ServiceContext, caller: Principal, checkpoint_id: str, digest: str) -> list[str]:
    def mark(session: Session) -> list[str]:
        project, _, checkpoint = checkpoint_by_id(session, caller, checkpoint_id)
        chunk = chunks_of_checkpoint(session, project.id, checkpoint, [digest])[digest]
        lock_users(session, chunk.id)
        why = f"The chunk {digest} has no copy left."
        return mark_users(session, chunk.id, why, actor=Actor.person(caller))

    return context.database.run(mark)
