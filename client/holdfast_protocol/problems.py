"""Problem codes: failures, grouped by what the caller does about them (RFC 9457, `application/problem+json`).

Codes are append-only, because a client that was built against an older service must still know their meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import Field

from holdfast_protocol.base import Reply


class ProblemCode(StrEnum):
    # Fix the call.
    INVALID_REQUEST = "invalid_request"
    BODY_TOO_LARGE = "body_too_large"
    UNSUPPORTED_PROTOCOL = "unsupported_protocol"
    HOST_NOT_ALLOWED = "host_not_allowed"
    CLIENT_CERTIFICATE_REQUIRED = "client_certificate_required"
    # Fix the token.
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    CSRF_FAILED = "csrf_failed"
    # Fix the identity's token (`POST /v1/tokens/exchange`), or ask for a rule.
    IDENTITY_TOKEN_INVALID = "identity_token_invalid"  # noqa: S105
    IDENTITY_TOKEN_EXPIRED = "identity_token_expired"  # noqa: S105
    IDENTITY_TOKEN_EARLY = "identity_token_early"  # noqa: S105
    IDENTITY_TOKEN_USED = "identity_token_used"  # noqa: S105
    IDENTITY_ISSUER_UNKNOWN = "identity_issuer_unknown"
    IDENTITY_AUDIENCE_WRONG = "identity_audience_wrong"
    IDENTITY_NOT_GRANTED = "identity_not_granted"
    IDENTITY_PROJECT_NEEDED = "identity_project_needed"
    IDENTITY_NOT_CONFIGURED = "identity_not_configured"
    SIGN_IN_FAILED = "sign_in_failed"
    # Fix the name.
    PROJECT_NOT_FOUND = "project_not_found"
    RUN_NOT_FOUND = "run_not_found"
    ATTEMPT_NOT_FOUND = "attempt_not_found"
    CHECKPOINT_NOT_FOUND = "checkpoint_not_found"
    CHUNK_NOT_FOUND = "chunk_not_found"
    TOKEN_NOT_FOUND = "token_not_found"  # noqa: S105
    POLICY_NOT_FOUND = "policy_not_found"
    HOLD_NOT_FOUND = "hold_not_found"
    CONTROLLER_NOT_FOUND = "controller_not_found"
    OPERATION_NOT_FOUND = "operation_not_found"
    WEBHOOK_NOT_FOUND = "webhook_not_found"
    DELIVERY_NOT_FOUND = "delivery_not_found"
    SESSION_NOT_FOUND = "session_not_found"
    NO_RESTORE_POINT = "no_restore_point"
    ROUTE_NOT_FOUND = "route_not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    # The caller's view is out of date.
    RUN_EXISTS = "run_exists"
    STALE_ATTEMPT = "stale_attempt"
    ATTEMPT_CONFLICT = "attempt_conflict"
    CHECKPOINT_CONFLICT = "checkpoint_conflict"
    CHECKPOINT_ABORTED = "checkpoint_aborted"
    DETACHED_BRANCH = "detached_branch"
    MANIFEST_CONFLICT = "manifest_conflict"
    INCOMPLETE_CHECKPOINT = "incomplete_checkpoint"
    CHUNK_NOT_NEGOTIATED = "chunk_not_negotiated"
    CHUNK_GONE = "chunk_gone"
    EVENTS_FORGOTTEN = "events_forgotten"
    SHARD_SEALED = "shard_sealed"
    EDIT_CONFLICT = "edit_conflict"
    EDIT_NEEDS_VERSION = "edit_needs_version"
    IDEMPOTENCY_KEY_REUSED = "idempotency_key_reused"
    ALREADY_MADE = "already_made"
    POLICY_CHANGED = "policy_changed"
    CONTROLLER_PAUSED = "controller_paused"
    CHECKPOINT_PROTECTED = "checkpoint_protected"
    CHECKPOINT_HELD = "checkpoint_held"
    CHECKPOINT_COLD = "checkpoint_cold"
    CHECKPOINT_UNPROVEN = "checkpoint_unproven"
    STORE_FOREIGN = "store_foreign"
    COMMITS_UNKNOWN = "commits_unknown"
    QUOTA_EXCEEDED = "quota_exceeded"
    # The bytes are not the expected ones.
    CHECKSUM_MISMATCH = "checksum_mismatch"
    SIGNATURE_INVALID = "signature_invalid"
    TICKET_EXPIRED = "ticket_expired"
    # Retry later.
    STORE_UNAVAILABLE = "store_unavailable"
    DATABASE_UNAVAILABLE = "database_unavailable"
    CATALOG_READ_ONLY = "catalog_read_only"
    BUSY = "busy"
    BODY_TOO_SLOW = "body_too_slow"
    RATE_LIMITED = "rate_limited"
    TOO_MANY_FAILURES = "too_many_failures"
    CATALOG_WENT_BACK = "catalog_went_back"
    IDENTITY_PROVIDER_UNAVAILABLE = "identity_provider_unavailable"
    IDENTITY_KEY_UNKNOWN = "identity_key_unknown"
    # An operator must act.
    STORE_FULL = "store_full"
    STORE_REFUSED = "store_refused"
    # A bug.
    INTERNAL = "internal"


@dataclass(frozen=True)
class ProblemKind:
    status: int
    title: str
    retryable: bool = False


PROBLEM_KINDS: dict[ProblemCode, ProblemKind] = {
    ProblemCode.INVALID_REQUEST: ProblemKind(422, "The request is not valid"),
    ProblemCode.BODY_TOO_LARGE: ProblemKind(413, "The body is too large"),
    ProblemCode.HOST_NOT_ALLOWED: ProblemKind(400, "The service does not go by this name"),
    ProblemCode.CLIENT_CERTIFICATE_REQUIRED: ProblemKind(403, "The caller has shown no certificate"),
    ProblemCode.UNSUPPORTED_PROTOCOL: ProblemKind(426, "Client and service speak different protocol versions"),
    ProblemCode.UNAUTHENTICATED: ProblemKind(401, "The token is missing, wrong, expired or revoked"),
    ProblemCode.FORBIDDEN: ProblemKind(403, "The token may not do this"),
    ProblemCode.CSRF_FAILED: ProblemKind(403, "The call does not show that the service's own page made it"),
    ProblemCode.IDENTITY_TOKEN_INVALID: ProblemKind(401, "The identity's token is not valid"),
    ProblemCode.IDENTITY_TOKEN_EXPIRED: ProblemKind(401, "The identity's token has expired"),
    ProblemCode.IDENTITY_TOKEN_EARLY: ProblemKind(401, "The identity's token is not valid yet"),
    ProblemCode.IDENTITY_TOKEN_USED: ProblemKind(401, "The identity's token was used already"),
    ProblemCode.IDENTITY_ISSUER_UNKNOWN: ProblemKind(401, "The service does not know this issuer"),
    ProblemCode.IDENTITY_AUDIENCE_WRONG: ProblemKind(401, "The identity's token is for another service"),
    ProblemCode.IDENTITY_NOT_GRANTED: ProblemKind(403, "No rule gives this identity what it asks for"),
    ProblemCode.IDENTITY_PROJECT_NEEDED: ProblemKind(409, "The identity must name a project"),
    ProblemCode.SIGN_IN_FAILED: ProblemKind(403, "Nobody was signed in"),
    ProblemCode.IDENTITY_NOT_CONFIGURED: ProblemKind(409, "The service takes no identities of others"),
    ProblemCode.PROJECT_NOT_FOUND: ProblemKind(404, "No such project"),
    ProblemCode.RUN_NOT_FOUND: ProblemKind(404, "No such run"),
    ProblemCode.ATTEMPT_NOT_FOUND: ProblemKind(404, "No such attempt"),
    ProblemCode.CHECKPOINT_NOT_FOUND: ProblemKind(404, "No such checkpoint"),
    ProblemCode.CHUNK_NOT_FOUND: ProblemKind(404, "No such chunk in this checkpoint"),
    ProblemCode.TOKEN_NOT_FOUND: ProblemKind(404, "No such token"),
    ProblemCode.POLICY_NOT_FOUND: ProblemKind(404, "No such policy"),
    ProblemCode.HOLD_NOT_FOUND: ProblemKind(404, "No such hold"),
    ProblemCode.CONTROLLER_NOT_FOUND: ProblemKind(404, "No such controller"),
    ProblemCode.OPERATION_NOT_FOUND: ProblemKind(404, "No such operation"),
    ProblemCode.WEBHOOK_NOT_FOUND: ProblemKind(404, "No such webhook"),
    ProblemCode.DELIVERY_NOT_FOUND: ProblemKind(404, "No such call of this webhook"),
    ProblemCode.SESSION_NOT_FOUND: ProblemKind(404, "There is no such session"),
    ProblemCode.NO_RESTORE_POINT: ProblemKind(404, "There is no valid restore point"),
    ProblemCode.ROUTE_NOT_FOUND: ProblemKind(404, "No such route"),
    ProblemCode.METHOD_NOT_ALLOWED: ProblemKind(405, "This route has no such method"),
    ProblemCode.RUN_EXISTS: ProblemKind(409, "There is a run of this name already"),
    ProblemCode.STALE_ATTEMPT: ProblemKind(409, "This attempt may not write to its run any more"),
    ProblemCode.ATTEMPT_CONFLICT: ProblemKind(409, "Another attempt was opened in between"),
    ProblemCode.CHECKPOINT_CONFLICT: ProblemKind(409, "This step was begun differently"),
    ProblemCode.CHECKPOINT_ABORTED: ProblemKind(409, "This checkpoint was aborted"),
    ProblemCode.DETACHED_BRANCH: ProblemKind(409, "The run has gone on without this late save"),
    ProblemCode.MANIFEST_CONFLICT: ProblemKind(409, "This shard was sealed with other content"),
    ProblemCode.INCOMPLETE_CHECKPOINT: ProblemKind(409, "Chunks of this shard are not in the store"),
    ProblemCode.CHUNK_NOT_NEGOTIATED: ProblemKind(409, "A chunk was not negotiated under this shard"),
    ProblemCode.CHUNK_GONE: ProblemKind(409, "A chunk is not readable any more"),
    ProblemCode.EVENTS_FORGOTTEN: ProblemKind(410, "These events are not known any more"),
    ProblemCode.SHARD_SEALED: ProblemKind(409, "This shard is sealed already"),
    ProblemCode.EDIT_CONFLICT: ProblemKind(412, "It was edited in between"),
    ProblemCode.EDIT_NEEDS_VERSION: ProblemKind(428, "An edit needs the version that was seen"),
    ProblemCode.IDEMPOTENCY_KEY_REUSED: ProblemKind(422, "This Idempotency-Key belongs to another call"),
    ProblemCode.ALREADY_MADE: ProblemKind(409, "The first call has made it"),
    ProblemCode.CONTROLLER_PAUSED: ProblemKind(409, "This controller is paused"),
    ProblemCode.POLICY_CHANGED: ProblemKind(409, "The policy is not the one that was shown"),
    ProblemCode.CHECKPOINT_PROTECTED: ProblemKind(409, "This checkpoint must stay"),
    ProblemCode.CHECKPOINT_HELD: ProblemKind(409, "A hold keeps this checkpoint"),
    ProblemCode.CHECKPOINT_COLD: ProblemKind(409, "This checkpoint must be thawed before it can be read"),
    ProblemCode.CHECKPOINT_UNPROVEN: ProblemKind(409, "The service must still read chunks of this checkpoint"),
    ProblemCode.STORE_FOREIGN: ProblemKind(409, "The store does not say that it is this catalog's"),
    ProblemCode.COMMITS_UNKNOWN: ProblemKind(409, "It is unknown whether anything was ever committed"),
    ProblemCode.QUOTA_EXCEEDED: ProblemKind(409, "The project's quota is used up"),
    ProblemCode.CHECKSUM_MISMATCH: ProblemKind(422, "The bytes are not those that were announced"),
    ProblemCode.SIGNATURE_INVALID: ProblemKind(403, "The signature of this URL is not valid"),
    ProblemCode.TICKET_EXPIRED: ProblemKind(403, "This ticket has expired; ask for a new one"),
    ProblemCode.STORE_UNAVAILABLE: ProblemKind(503, "The store does not answer", retryable=True),
    ProblemCode.DATABASE_UNAVAILABLE: ProblemKind(503, "The database does not answer", retryable=True),
    ProblemCode.CATALOG_READ_ONLY: ProblemKind(503, "The catalog takes no writes now", retryable=True),
    ProblemCode.BUSY: ProblemKind(503, "Too busy; try again", retryable=True),
    ProblemCode.BODY_TOO_SLOW: ProblemKind(408, "The body did not come in time", retryable=True),
    ProblemCode.RATE_LIMITED: ProblemKind(429, "This project or this token has too much under way", retryable=True),
    ProblemCode.TOO_MANY_FAILURES: ProblemKind(429, "Too many calls with wrong tokens", retryable=True),
    ProblemCode.CATALOG_WENT_BACK: ProblemKind(503, "The catalog went back to an older state", retryable=True),
    ProblemCode.IDENTITY_PROVIDER_UNAVAILABLE: ProblemKind(
        503, "The identity's provider does not answer", retryable=True
    ),
    ProblemCode.IDENTITY_KEY_UNKNOWN: ProblemKind(
        503, "The key of the identity's token is not known yet", retryable=True
    ),
    ProblemCode.STORE_FULL: ProblemKind(507, "The store is full"),
    ProblemCode.STORE_REFUSED: ProblemKind(502, "The store refuses the service"),
    ProblemCode.INTERNAL: ProblemKind(500, "A bug in the service"),
}


class Problem(Reply):
    """The body of every reply that is not a success."""

    type: str = Field(examples=["https://holdfast.dev/problems/stale_attempt"])
    title: str
    status: int
    code: str = Field(description="Stable; see ProblemCode.", examples=["stale_attempt"])
    detail: str = Field(description="The failure, and what to do about it.")
    retryable: bool = Field(description="The same call may succeed later without any change.")
    request_id: str
    context: dict[str, Any] = Field(default_factory=dict, description="Facts for programs, by code.")
