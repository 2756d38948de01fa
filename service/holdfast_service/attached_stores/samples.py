"""What `holdfast doctor` asks of the stores: a sample object there and back, and their clocks.

A client that dies before it deletes its sample leaves the object; the next sample removes it. Samples count against no
quota, so each project has so many in an hour.
"""

from __future__ import annotations

import re
import secrets
from datetime import UTC, datetime, timedelta

from holdfast_protocol.checkpoints import UploadTicket
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.restores import ReadTicket
from holdfast_protocol.stores import MakeSample, SampleChecked, SampleOffer, StoreClock
from holdfast_service.attached_stores.attached import AttachedStore
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError
from holdfast_service.stores.base import MountedStore, ObjectKey, ObjectMismatch, StoreError

# No project's id: those are random.
_PROJECT = "samples"
_TICKET_SECONDS = 300
_LEFT_BEHIND = timedelta(hours=1)
_ID = re.compile(r"([0-9a-f]{64})-([0-9a-f]{32})")
MOST_OF_A_PROJECT = 500
"""In the time that one may be left behind, for each process."""
_RETRY_AFTER_SECONDS = 60


def make_sample(context: ServiceContext, caller: Principal, request: MakeSample) -> SampleOffer:
    """Raises StoreError and `rate_limited`."""
    context.store_watch.refuse_hanging()
    _note_one_more(context, caller)
    _clear(context)
    key = ObjectKey(_PROJECT, request.digest, secrets.token_hex(16))
    put = context.store.presign_put(
        key,
        stored_bytes=request.bytes,
        stored_sha256=request.digest,
        md5=request.md5,
        expires_in_seconds=_TICKET_SECONDS,
    )
    ticket = UploadTicket(
        kind="http",
        method=put.method,
        url=put.url,
        headers=put.headers,
        expires_in_seconds=put.expires_in_seconds,
        answers=put.answers,
    )
    return SampleOffer(id=f"{key.digest}-{key.generation}", ticket=ticket)


def _note_one_more(context: ServiceContext, caller: Principal) -> None:
    owner = caller.project_id or caller.token_id
    if context.load.may_sample(owner, most=MOST_OF_A_PROJECT, within_seconds=_LEFT_BEHIND.total_seconds()):
        return
    raise ProblemError(
        ProblemCode.RATE_LIMITED,
        f"{MOST_OF_A_PROJECT} samples were made by this token or its project within an hour, as many as a process of "
        "the service lets be. Try again later.",
        retry_after_seconds=_RETRY_AFTER_SECONDS,
    )


def check_sample(context: ServiceContext, sample_id: str) -> SampleChecked:
    """What the store says of it, and a ticket to read it. Raises StoreError, ObjectMissing if it has not arrived."""
    key = _key(sample_id)
    context.store_watch.refuse_hanging()
    facts = context.store.head(key)
    if facts.sha256 not in (None, key.digest):
        raise ObjectMismatch("the store says another SHA-256 than the sample's")
    get = context.store.presign_get(key, expires_in_seconds=_TICKET_SECONDS)
    ticket = ReadTicket(
        digest=key.digest,
        bytes=facts.bytes,
        stored_bytes=facts.bytes,
        kind="http",
        url=get.url,
        headers=get.headers,
        expires_in_seconds=get.expires_in_seconds,
        answers=get.answers,
    )
    return SampleChecked(hashed_by_store=facts.sha256 is not None, ticket=ticket)


def delete_sample(context: ServiceContext, sample_id: str) -> None:
    """Its absence is fine. Raises StoreError."""
    key = _key(sample_id)
    context.store_watch.refuse_hanging()
    context.store.delete(key)


def _key(sample_id: str) -> ObjectKey:
    match = _ID.fullmatch(sample_id)
    if match is None:
        raise ProblemError(ProblemCode.INVALID_REQUEST, "This is not the id of a sample. Make one first.")
    return ObjectKey(_PROJECT, match[1], match[2])


def _clear(context: ServiceContext) -> None:
    before = context.store.clock() - _LEFT_BEHIND
    for left in context.store.list_objects(_PROJECT):
        if left.modified_at < before:
            context.store.delete(left.key)


SIGNATURE_SKEW_SECONDS = 900
"""S3 and GCS refuse what was signed so long ago, or so far ahead of their time."""


def store_clocks(context: ServiceContext) -> list[StoreClock]:
    """How far the clocks of the attached stores are from this process's own, which dates what it signs. By role, the
    primary store first. Asks each of them."""
    return [_compared(attached, context.settings.ticket_seconds) for attached in context.stores]


def _compared(attached: AttachedStore, ticket_seconds: int) -> StoreClock:
    asked_at = datetime.now(UTC)
    try:
        attached.watch.refuse_hanging()
        told = attached.store.clock()
    except StoreError as error:
        return StoreClock(role=attached.role, ahead_seconds=None, tolerated_seconds=None, problem=str(error))
    ahead = (told - asked_at - (datetime.now(UTC) - asked_at) / 2).total_seconds()
    return StoreClock(
        role=attached.role, ahead_seconds=ahead, tolerated_seconds=_tolerated(attached, ahead, ticket_seconds)
    )


def _tolerated(attached: AttachedStore, ahead_seconds: float, ticket_seconds: int) -> float | None:
    """A mounted store's URLs are signed and checked by the service. By a store that is ahead a ticket ends early."""
    if isinstance(attached.store, MountedStore):
        return None
    return min(SIGNATURE_SKEW_SECONDS, ticket_seconds) if ahead_seconds > 0 else SIGNATURE_SKEW_SECONDS
