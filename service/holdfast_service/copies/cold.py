"""Copies in a class that must be thawed: what their store says of them, and what a reader is told."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import CopyState, Proof, Tier
from holdfast_protocol.tiers import ARCHIVED, ClassTerms, ThawSpeed
from holdfast_service.audit.record import Actor
from holdfast_service.context import ServiceContext
from holdfast_service.copies.corruption import lock_users, mark_cold
from holdfast_service.copies.predicates import proof_of
from holdfast_service.copies.read_back import Claim, Finding, refuse_emptied_store, refuse_wrong_store, store_of_copy
from holdfast_service.db import lease
from holdfast_service.db.tables.core import Checkpoint, Chunk, Copy, Project, Run
from holdfast_service.errors import ProblemError
from holdfast_service.stores.base import ClassedStore, ClassFacts, ObjectMismatch, ObjectMissing, StoreRefused


def how_to_thaw(tier: Tier, selector: str, expected_at: datetime | None) -> str:
    """What a person is told of a checkpoint that must be thawed before a read, in a sentence or two: how long that
    takes, and the command. Pure."""
    if tier is Tier.THAWING:
        when = "" if expected_at is None else f", expected by {expected_at:%Y-%m-%d %H:%M} UTC"
        return f"It is being thawed{when}; `holdfast checkpoints thaw {selector} --status` tells how far that is."
    return f"`holdfast checkpoints thaw {selector}` makes it readable; with --status it tells first what that takes."


def takes_words(terms: ClassTerms) -> str:
    """Such as `5 hours (standard), 12 hours (bulk) or 5 minutes (expedited)`; empty if none is needed."""
    seconds = terms.thaw_seconds
    speeds = [each for each in (ThawSpeed.STANDARD, ThawSpeed.BULK, ThawSpeed.EXPEDITED) if each in seconds]
    told = [f"{_readable(seconds[speed])} ({speed})" for speed in speeds]
    return " or ".join(filter(None, [", ".join(told[:-1]), told[-1]])) if told else ""


def cold_problem(session: Session, checkpoint: Checkpoint) -> ProblemError:
    """`checkpoint_cold`, with the command to type."""
    selector = selector_of(session, checkpoint)
    # What cannot be read is not hot, whatever the row still says.
    tier = Tier.THAWING if checkpoint.thawed_until is not None and checkpoint.tier != Tier.HOT else Tier.COLD
    said = how_to_thaw(tier, selector, checkpoint.thaw_expected_at)
    return ProblemError(
        ProblemCode.CHECKPOINT_COLD,
        f"Step {checkpoint.step} is {tier}: it was moved to where it cannot be read at once. {said}",
        checkpoint_id=checkpoint.id,
        tier=tier.value,
        place=checkpoint.cold_class,
        command=f"holdfast checkpoints thaw {selector}",
    )


def selector_of(session: Session, checkpoint: Checkpoint) -> str:
    """As a person types it."""
    project, run = session.execute(
        select(Project.name, Run.name).join(Run, Run.project_id == Project.id).where(Run.id == checkpoint.run_id)
    ).one()
    return f"{project}/{run}@{checkpoint.step}#{checkpoint.attempt_number}"


def _readable(seconds: int) -> str:
    count, unit = (seconds // 3600, "hour") if seconds >= 3600 else (seconds // 60, "minute")
    return f"{count} {unit}{'' if count == 1 else 's'}"


@dataclass(frozen=True)
class StoreSays:
    """The store's word on an unread object. `finding` is None if its size is right and the store has not hashed it."""

    storage_class: str | None
    finding: Finding | None


def store_says(context: ServiceContext, claimed: Claim) -> StoreSays | None:
    """None if the store has no classes: it is to be read. Raises StoreError if the store cannot tell."""
    store = store_of_copy(context, claimed)
    if not isinstance(store, ClassedStore):
        return None
    try:
        told: ClassFacts = store.class_facts(claimed.key)
    except ObjectMissing:
        refuse_wrong_store(context, store)
        refuse_emptied_store(context, store, claimed)
        return StoreSays(None, Finding.MISSING)
    except ObjectMismatch:
        refuse_wrong_store(context, store)
        return StoreSays(None, Finding.WRONG_SIZE)
    finding = None
    if told.facts.bytes != claimed.stored_bytes:
        finding = Finding.WRONG_SIZE
    elif proof_of(told.facts, store.capabilities) is Proof.STORE_SHA256:
        finding = Finding.GOOD if told.facts.sha256 == claimed.stored_digest else Finding.WRONG_BYTES
    if finding not in (None, Finding.GOOD):
        refuse_wrong_store(context, store)
    return StoreSays(told.storage_class, finding)


def note_archived(context: ServiceContext, claimed: Claim, actor: Actor) -> Finding | None:
    """After ObjectArchived, a fact about this one copy and no failure of the store: the row says cold and the class
    that the store names, the lease is given back, and the caller goes on with the others. Nothing is thawed by it: a
    person asks for that. Otherwise returns what the store says against the copy, which the caller must settle. Raises
    StoreError if the store cannot tell."""
    says = store_says(context, claimed)
    if says is not None and says.finding not in (None, Finding.GOOD):
        return says.finding
    if says is None or says.storage_class not in ARCHIVED:
        raise StoreRefused("the store calls an object archived, and does not say that it is in a class for that")
    note_class(context, claimed, says.storage_class, actor)
    return None


def note_class(context: ServiceContext, claimed: Claim, storage_class: str | None, actor: Actor) -> None:
    """The copy was moved in the bucket. In an archive it is cold there; otherwise the next process that reads it
    settles it."""
    context.database.run(lambda session: _note(session, context, claimed, storage_class, actor=actor))


def _note(
    session: Session, context: ServiceContext, claimed: Claim, storage_class: str | None, *, actor: Actor
) -> None:
    state = CopyState.COLD if storage_class in ARCHIVED else CopyState.SUSPECT
    if claimed.state_before is CopyState.BAD:
        state = CopyState.BAD  # nothing was read
    lock_users(session, claimed.chunk_id)
    session.execute(select(Chunk.id).where(Chunk.id == claimed.chunk_id).with_for_update())
    values: dict[str, Any] = {"state": state, "storage_class": storage_class, "readable_until": None}
    if lease.give_back(session, Copy, claimed.lease_token, Copy.id == claimed.copy_id, **values):
        mark_cold(session, [claimed.chunk_id], actor=actor, target=storage_class)
