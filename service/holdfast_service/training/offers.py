"""What a rank offers: checked against itself, held against the quota, and decided chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from typing import NamedTuple

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.checkpoints import ChunkOffer
from holdfast_protocol.codecs import Codec
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import CopyState
from holdfast_service.context import ServiceContext
from holdfast_service.copies.predicates import PROVEN, usable_by
from holdfast_service.copies.stored_bytes import bytes_against_quota
from holdfast_service.db.tables.core import Copy, Project
from holdfast_service.errors import ProblemError

# Refuses offers that contradict themselves, before anything is reserved for them. Pure (rule reuse-only-hashed).
#
# What is stored is named by its own digest and size: those of the chunk where it is raw, and its own where it is
# encoded.


def check_offers(offers: Sequence[ChunkOffer], *, md5_needed: bool = False) -> None:
    """Raises `invalid_request`, which names the chunk. `md5_needed`: the store enforces MD5, and a ticket without one
    would let any bytes in."""
    seen: dict[str, ChunkOffer] = {}
    for offer in offers:
        if seen.setdefault(offer.digest, offer) != offer:
            raise _refusal(offer, "offered twice in one call, in two ways", "Offer it once")
        if offer.ask:
            _check_question(offer)
            continue
        if md5_needed and offer.md5 is None:
            raise _refusal(
                offer,
                "offered without the MD5 of its bytes on the wire, which is what this store compares",
                "Ask `/v1/service` (`store_asks_md5`), or start the job again with a current client",
            )
        if offer.codec is Codec.RAW:
            _check_raw(offer)
        else:
            _check_encoded(offer)


def _check_question(offer: ChunkOffer) -> None:
    if offer.codec is not Codec.RAW or offer.stored_digest or offer.stored_bytes is not None or offer.md5:
        raise _refusal(
            offer, "asked for and described at once", "To ask, give digest and bytes only; to offer it, leave `ask` out"
        )


def _check_raw(offer: ChunkOffer) -> None:
    if (offer.wire_digest, offer.wire_bytes) != (offer.digest, offer.bytes):
        raise _refusal(
            offer,
            "offered raw but with other bytes on the wire",
            "Leave stored_digest and stored_bytes out, or give the chunk's own",
        )


def _check_encoded(offer: ChunkOffer) -> None:
    if offer.stored_digest is None or offer.stored_bytes is None:
        raise _refusal(
            offer,
            f"offered as {offer.codec} without the digest and the size of its encoded bytes",
            "Give stored_digest and stored_bytes",
        )
    if not 0 < offer.stored_bytes < offer.bytes:
        raise _refusal(
            offer,
            f"offered as {offer.codec} with {offer.stored_bytes} bytes instead of {offer.bytes}",
            "Offer it raw where encoding does not make it smaller",
        )


def _refusal(offer: ChunkOffer, what: str, remedy: str) -> ProblemError:
    return ProblemError(
        ProblemCode.INVALID_REQUEST, f"The chunk {offer.digest} is {what}. {remedy}.", digest=offer.digest
    )


# Whether a chunk that a shard offers is there, must be sent, or is being sent already. Pure (rule reuse-only-hashed to
# 17).
#
# `present` needs a copy that the shard's attempt can rely on. A pending copy is no help to anybody but the shard that
# was told to send it: another may never finish, so it gets a generation of its own. And what is stored at a key is one
# sequence of bytes: a chunk that is offered in another codec than the pending copy's, or encoded to other bytes, gets a
# copy of its own too.


class Answer(StrEnum):
    PRESENT = "present"
    SEND_AGAIN = "send_again"  # into the same copy, with a fresh ticket
    SEND_ANEW = "send_anew"  # into a copy with a generation of its own
    ABSENT = "absent"  # it was only asked for, and nothing is reserved


class Decision(NamedTuple):
    answer: Answer
    copy: Copy | None


def decide(
    offer: ChunkOffer, copies: Sequence[Copy], *, attempt_id: int, own_copy_id: int | None, now: datetime
) -> Decision:
    """`copies`: the chunk's in the primary store. `own_copy_id`: the one that this shard relies on so far."""
    usable = [copy for copy in copies if usable_by(copy, attempt_id)]
    if usable:
        # What this shard has sent itself stays its own; else what is proven, for it is good for everybody.
        return Decision(
            Answer.PRESENT, min(usable, key=lambda copy: (copy.id != own_copy_id, copy.proof not in PROVEN, copy.id))
        )
    if offer.ask:
        return Decision(Answer.ABSENT, None)
    for copy in copies:
        own = copy.id == own_copy_id and copy.state == CopyState.PENDING
        if own and copy.ticket_expires_at > now and _holds(copy, offer):
            return Decision(Answer.SEND_AGAIN, copy)
    return Decision(Answer.SEND_ANEW, None)


def _holds(copy: Copy, offer: ChunkOffer) -> bool:
    return (copy.codec, copy.stored_digest, copy.stored_bytes) == (offer.codec, offer.wire_digest, offer.wire_bytes)


# A project's quota, reserved before a byte is sent (rule quota-reserved).
#
# The copies' rows are the reservation: whatever may be in the store counts. No counter that could drift.


def lock_quota(session: Session, project: Project) -> int | None:
    """The quota in bytes, its row locked until the transaction ends; None (and no lock) where `project`, as this
    transaction has read it, has none.

    Taken before any chunk is locked. FOR NO KEY UPDATE: rows that refer to the project can still be inserted.
    """
    if project.quota_bytes is None:
        return None
    return session.scalar(select(Project.quota_bytes).where(Project.id == project.id).with_for_update(key_share=True))


def refuse_over_quota(
    session: Session, context: ServiceContext, project: Project, quota_bytes: int, wanted_bytes: int
) -> None:
    """Called under `lock_quota`'s lock, when the wanted copies have their rows.

    Raises `quota_exceeded` with what is left.
    """
    used = bytes_against_quota(session, context, [project.id])[project.id] - wanted_bytes
    left = max(0, quota_bytes - used)
    if wanted_bytes > left:
        raise ProblemError(
            ProblemCode.QUOTA_EXCEEDED,
            f"The project {project.name!r} has {left} bytes left of its quota of {quota_bytes}, and {wanted_bytes} "
            "more are to be sent. Delete checkpoints, or raise the quota.",
            quota_bytes=quota_bytes,
            left_bytes=left,
            wanted_bytes=wanted_bytes,
        )
