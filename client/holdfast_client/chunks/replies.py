"""What a store's refusal means. Pure: status and body in, exception out; upload and download share it.

The body is S3's or GCS's XML, or problem+json where the ticket led to the service itself.
"""

from __future__ import annotations

import re

from pydantic import ValidationError

from holdfast_client.errors import (
    ChecksumMismatch,
    ChunkNotFound,
    HoldfastError,
    ServiceUnavailable,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
    TicketExpired,
)
from holdfast_client.rebuild import from_problem
from holdfast_protocol.problems import Problem

LONGEST_BODY_BYTES = 64 * 1024
_CODE = re.compile(rb"<Code>\s*([A-Za-z0-9._-]{1,100})\s*</Code>")

_EXPIRED_CODES = {"ExpiredToken", "TokenRefreshRequired", "RequestExpired", "RequestTimeTooSkewed"}
_CHECKSUM_CODES = {"BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"}
_TRANSIENT_CODES = {
    "SlowDown",
    "RequestTimeout",
    "IncompleteBody",  # something in between has cut the body off
    "ServiceUnavailable",
    "InternalError",
    "OperationAborted",
    "ConditionalRequestConflict",
    "Throttling",
    "ThrottlingException",
    "RequestLimitExceeded",
    "TooManyRequests",
}
_FULL_CODES = {"XMinioStorageFull", "QuotaExceeded", "InsufficientStorage"}
_TRANSIENT_STATUSES = {408, 409, 425, 429}
_FINAL_SERVER_STATUSES = {501, 505, 511}
"""Of the server's own; each other one may pass, also those that only one vendor's gateway knows (520 to 530)."""


def refusal(status: int, body: bytes) -> HoldfastError:
    """ServiceUnavailable: try the same again. TicketProblem: ask for a new ticket. The others are final."""
    try:
        return _of_the_service(from_problem(Problem.model_validate_json(body)))
    except ValidationError:
        pass
    match = _CODE.search(body)
    code = match[1].decode() if match else ""
    said = f"{status} {code}".strip()
    if code in _CHECKSUM_CODES:
        return ChecksumMismatch(f"The store received other bytes than were announced ({said})")
    if status == 507 or code in _FULL_CODES:
        return StoreFull(f"The store has no room left ({said})")
    if code in _EXPIRED_CODES or status in (401, 403):
        return TicketExpired(f"The store does not accept this ticket ({said})", context={"said": said})
    if code in _TRANSIENT_CODES or status in _TRANSIENT_STATUSES or _may_pass(status):
        return StoreUnavailable(f"The store asks to try later ({said})", context={"said": said})
    if status == 404 and code in ("", "NoSuchKey", "NotFound"):
        return ChunkNotFound("The store does not have this chunk")
    return StoreRefused(f"The store refuses the transfer ({said})", context={"said": said})


def _may_pass(status: int) -> bool:
    return status >= 500 and status not in _FINAL_SERVER_STATUSES


def _of_the_service(error: HoldfastError) -> HoldfastError:
    """A restarting service may answer with a bug's 500 once; a transfer can simply be tried again."""
    if error.code == "internal":
        return ServiceUnavailable(error.detail, request_id=error.request_id)
    return error
