"""Make, check and delete a sample object in the primary store.

A client that dies in between leaves its object; the next sample that anybody makes takes it away.
"""

from __future__ import annotations

import re
import secrets
from datetime import timedelta

from holdfast_protocol.chunks import UploadTicket
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.restore import ReadTicket
from holdfast_protocol.samples import MakeSample, SampleChecked, SampleOffer
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError
from holdfast_service.stores.base import ObjectKey, ObjectMismatch

# No project's id: those are random.
_PROJECT = "samples"
_TICKET_SECONDS = 300
_LEFT_BEHIND = timedelta(hours=1)
_ID = re.compile(r"([0-9a-f]{64})-([0-9a-f]{32})")


def make_sample(context: ServiceContext, request: MakeSample) -> SampleOffer:
    """Raises StoreError."""
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
        kind="http", method=put.method, url=put.url, headers=put.headers, expires_in_seconds=put.expires_in_seconds
    )
    return SampleOffer(id=f"{key.digest}-{key.generation}", ticket=ticket)


def check_sample(context: ServiceContext, sample_id: str) -> SampleChecked:
    """What the store says of it, and a ticket to read it. Raises StoreError, ObjectMissing where it has not arrived."""
    key = _key(sample_id)
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
    )
    return SampleChecked(hashed_by_store=facts.sha256 is not None, ticket=ticket)


def delete_sample(context: ServiceContext, sample_id: str) -> None:
    """Its absence is fine. Raises StoreError."""
    context.store.delete(_key(sample_id))


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
