"""The errors of this library, grouped by what the caller does about them. Each one is in this tree.

HoldfastError
├── ConfigurationError          fix the setting that it names
│   └── HostNotAllowed  ClientCertificateRequired
├── InvalidRequest              fix the call
│   └── BodyTooLarge
├── UnsupportedProtocol         upgrade the older side
├── NewerFormat                 a newer holdfast saved this checkpoint: upgrade this one
├── UnexpectedReply             a program that is not Holdfast answers at this URL
├── TokenProblem                get another token
│   ├── Unauthenticated  Forbidden
│   └── IdentityRefused         get another token of the identity, or have a rule made
│       ├── IdentityTokenInvalid  IdentityTokenExpired  IdentityTokenEarly  IdentityTokenUsed
│       ├── IdentityIssuerUnknown  IdentityAudienceWrong  IdentityNotGranted
│       └── IdentityProjectNeeded  IdentityNotConfigured  SignInFailed
├── NotFound                    fix the name
│   ├── ProjectNotFound  RunNotFound  AttemptNotFound  CheckpointNotFound  ChunkNotFound  TokenNotFound
│   ├── PolicyNotFound  HoldNotFound  ControllerNotFound  OperationNotFound  WebhookNotFound
│   ├── RouteNotFound
│   └── NoRestorePoint
├── StaleAttempt                stop: a newer attempt has taken over, or this one has ended
├── Conflict                    read again, then decide
│   ├── AttemptConflict  CheckpointConflict  CheckpointAborted  DetachedBranch  ManifestConflict
│   ├── IncompleteCheckpoint  ChunkNotNegotiated  ChunkGone  ShardSealed  EditConflict
│   ├── EditNeedsVersion  EventsForgotten
│   ├── ControllerPaused
│   ├── PolicyChanged  CheckpointProtected  CheckpointHeld  CheckpointCold  StoreForeign
│   └── CommitsUnknown  RunExists  CheckpointUnproven
├── QuotaExceeded               prune, or raise the quota
├── IntegrityError              the bytes are not the expected ones
│   ├── ChecksumMismatch
│   ├── ChunkCorrupt            one read gave wrong bytes
│   └── ChunkLost               no copy could be read
├── TicketProblem               ask for a new ticket
│   ├── SignatureInvalid
│   └── TicketExpired
├── ServiceUnavailable          try again later
│   ├── StoreUnavailable  DatabaseUnavailable  CatalogReadOnly  Busy  BodyTooSlow  RateLimited
│   ├── TooManyFailures  CatalogWentBack  IdentityProviderUnavailable  IdentityKeyUnknown
├── StoreProblem                an operator must act
│   ├── StoreFull
│   ├── StoreRefused
│   └── ReadsWrongHere          the checkpoint is whole, and this machine reads it wrong
├── DirectFileRefused           use HTTP instead
├── LocalReadFailed             try again; if it stays, check this node's disk and limits
├── TransferStopped             the caller asked this transfer to stop
└── ServiceFault                report a bug in the service
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from holdfast_protocol.problems import PROBLEM_KINDS, Problem, ProblemCode


def certificate_refused(error: BaseException) -> bool:
    """Whether a connection failed for an untrusted certificate, which no retry fixes. Follows the causes of `error`."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


# ruff: noqa: N818  (the names are those of the problem codes)


class HoldfastError(Exception):
    """The message is made for people: what is wrong, then what to do.

    `code` is stable and for programs, `context` holds the facts by code, `request_id` finds the service's log line.
    `earlier_try_ambiguous` is true if an earlier try of the same call was sent and never answered: it may have been
    carried out.
    """

    code: str = "client"
    remedy: str = ""

    def __init__(
        self,
        detail: str,
        *,
        title: str = "",
        code: str | None = None,
        request_id: str | None = None,
        context: Mapping[str, Any] | None = None,
        earlier_try_ambiguous: bool = False,
    ) -> None:
        self.code = code or type(self).code
        self.detail = detail
        self.request_id = request_id
        self.context = dict(context or {})
        self.earlier_try_ambiguous = earlier_try_ambiguous
        parts = [title, detail, self.remedy]
        super().__init__(" ".join(part if part[-1] in ".!?" else f"{part}." for part in parts if part))

    def __reduce__(self) -> tuple[Any, ...]:
        # torch and launchers send exceptions from rank to rank by pickle, which would call __init__ with the message.
        return rebuild_error, (type(self), self.args, vars(self))


ErrorT = TypeVar("ErrorT", bound=BaseException)


def rebuild_error(kind: type[ErrorT], args: tuple[Any, ...], facts: Mapping[str, Any]) -> ErrorT:
    """The exception as it was, without a call of its constructor, whose arguments are unknown."""
    error = kind.__new__(kind)
    error.args = args
    vars(error).update(facts)
    return error


class ConfigurationError(HoldfastError):
    code = "configuration"


class InvalidRequest(HoldfastError):
    code = ProblemCode.INVALID_REQUEST


class BodyTooLarge(InvalidRequest):
    code = ProblemCode.BODY_TOO_LARGE


class HostNotAllowed(ConfigurationError):
    code = ProblemCode.HOST_NOT_ALLOWED


class ClientCertificateRequired(ConfigurationError):
    code = ProblemCode.CLIENT_CERTIFICATE_REQUIRED


class UnsupportedProtocol(HoldfastError):
    code = ProblemCode.UNSUPPORTED_PROTOCOL
    remedy = "Install the version of holdfast that the other side runs."


class NewerFormat(HoldfastError):
    """A document of a checkpoint has a newer format than this version reads. No IntegrityError: the checkpoint is
    whole."""

    code = "newer_format"
    remedy = (
        "Install the holdfast that saved it, or a newer one. To go on from an older checkpoint, restore it by its name."
    )


class UnexpectedReply(HoldfastError):
    code = "unexpected_reply"
    remedy = "Check HOLDFAST_URL and any proxy in between."


class TokenProblem(HoldfastError):
    pass


class Unauthenticated(TokenProblem):
    code = ProblemCode.UNAUTHENTICATED

    @property
    def remedy(self) -> str:  # type: ignore[override]  # it follows from where the token came from
        if "login" in self.context:
            return "Sign in again: `holdfast login`."
        return (
            "Set HOLDFAST_TOKEN to a valid token; `holdfast tokens create` makes one. A person runs `holdfast login`."
        )


class Forbidden(TokenProblem):
    code = ProblemCode.FORBIDDEN
    remedy = "Use a token with the scope and the project that this needs; `holdfast tokens create` makes one."


class CsrfFailed(TokenProblem):
    code = ProblemCode.CSRF_FAILED
    remedy = "Call with a token in place of a browser's cookie."


class IdentityRefused(TokenProblem):
    """The service does not take the token of the identity, or gives it nothing."""


class IdentityTokenInvalid(IdentityRefused):
    code = ProblemCode.IDENTITY_TOKEN_INVALID


class IdentityTokenExpired(IdentityRefused):
    code = ProblemCode.IDENTITY_TOKEN_EXPIRED


class IdentityTokenEarly(IdentityRefused):
    code = ProblemCode.IDENTITY_TOKEN_EARLY


class IdentityTokenUsed(IdentityRefused):
    code = ProblemCode.IDENTITY_TOKEN_USED


class IdentityIssuerUnknown(IdentityRefused):
    code = ProblemCode.IDENTITY_ISSUER_UNKNOWN


class IdentityAudienceWrong(IdentityRefused):
    code = ProblemCode.IDENTITY_AUDIENCE_WRONG


class IdentityNotGranted(IdentityRefused):
    code = ProblemCode.IDENTITY_NOT_GRANTED


class IdentityProjectNeeded(IdentityRefused):
    code = ProblemCode.IDENTITY_PROJECT_NEEDED


class IdentityNotConfigured(IdentityRefused):
    code = ProblemCode.IDENTITY_NOT_CONFIGURED


class SignInFailed(IdentityRefused):
    code = ProblemCode.SIGN_IN_FAILED


class NotFound(HoldfastError):
    pass


class ProjectNotFound(NotFound):
    code = ProblemCode.PROJECT_NOT_FOUND


class RunNotFound(NotFound):
    code = ProblemCode.RUN_NOT_FOUND


class AttemptNotFound(NotFound):
    code = ProblemCode.ATTEMPT_NOT_FOUND


class CheckpointNotFound(NotFound):
    code = ProblemCode.CHECKPOINT_NOT_FOUND


class ChunkNotFound(NotFound):
    code = ProblemCode.CHUNK_NOT_FOUND


class TokenNotFound(NotFound):
    code = ProblemCode.TOKEN_NOT_FOUND


class PolicyNotFound(NotFound):
    code = ProblemCode.POLICY_NOT_FOUND


class HoldNotFound(NotFound):
    code = ProblemCode.HOLD_NOT_FOUND


class ControllerNotFound(NotFound):
    code = ProblemCode.CONTROLLER_NOT_FOUND


class OperationNotFound(NotFound):
    code = ProblemCode.OPERATION_NOT_FOUND


class WebhookNotFound(NotFound):
    code = ProblemCode.WEBHOOK_NOT_FOUND


class DeliveryNotFound(NotFound):
    code = ProblemCode.DELIVERY_NOT_FOUND


class SessionNotFound(NotFound):
    code = ProblemCode.SESSION_NOT_FOUND


class RouteNotFound(NotFound):
    code = ProblemCode.ROUTE_NOT_FOUND
    remedy = "The service is older than this client, or HOLDFAST_URL has a wrong path."


class MethodNotAllowed(HoldfastError):
    code = ProblemCode.METHOD_NOT_ALLOWED
    remedy = "The service is older than this client, or HOLDFAST_URL has a wrong path."


class NoRestorePoint(NotFound):
    code = ProblemCode.NO_RESTORE_POINT


class StaleAttempt(HoldfastError):
    """`is_fenced`: a newer attempt has the run. If not, this attempt has ended, or its catalog was restored or cloned
    since: a new launch goes on."""

    code = ProblemCode.STALE_ATTEMPT

    @property
    def is_fenced(self) -> bool:
        return "latest_attempt" in self.context

    @property
    def remedy(self) -> str:  # type: ignore[override]  # elsewhere a class attribute, here it follows from the facts
        return "This job must stop and must not be restarted." if self.is_fenced else "This job must stop."


class Conflict(HoldfastError):
    pass


class AttemptConflict(Conflict):
    code = ProblemCode.ATTEMPT_CONFLICT


class CheckpointConflict(Conflict):
    code = ProblemCode.CHECKPOINT_CONFLICT


class CheckpointAborted(Conflict):
    code = ProblemCode.CHECKPOINT_ABORTED


class DetachedBranch(Conflict):
    code = ProblemCode.DETACHED_BRANCH


class ManifestConflict(Conflict):
    code = ProblemCode.MANIFEST_CONFLICT


class IncompleteCheckpoint(Conflict):
    code = ProblemCode.INCOMPLETE_CHECKPOINT


class ChunkNotNegotiated(Conflict):
    code = ProblemCode.CHUNK_NOT_NEGOTIATED


class ChunkGone(Conflict):
    code = ProblemCode.CHUNK_GONE


class EventsForgotten(Conflict):
    code = ProblemCode.EVENTS_FORGOTTEN


class ShardSealed(Conflict):
    code = ProblemCode.SHARD_SEALED


class EditConflict(Conflict):
    code = ProblemCode.EDIT_CONFLICT


class EditNeedsVersion(Conflict):
    code = ProblemCode.EDIT_NEEDS_VERSION


class IdempotencyKeyReused(Conflict):
    code = ProblemCode.IDEMPOTENCY_KEY_REUSED


class AlreadyMade(Conflict):
    """The first call made the thing, and only its reply showed the secret. `context["id"]` names the thing."""

    code = ProblemCode.ALREADY_MADE


class ControllerPaused(Conflict):
    code = ProblemCode.CONTROLLER_PAUSED


class PolicyChanged(Conflict):
    code = ProblemCode.POLICY_CHANGED


class CheckpointProtected(Conflict):
    code = ProblemCode.CHECKPOINT_PROTECTED


class CheckpointHeld(Conflict):
    code = ProblemCode.CHECKPOINT_HELD


class CheckpointCold(Conflict):
    code = ProblemCode.CHECKPOINT_COLD


class StoreForeign(Conflict):
    code = ProblemCode.STORE_FOREIGN


class CommitsUnknown(Conflict):
    code = ProblemCode.COMMITS_UNKNOWN


class RunExists(Conflict):
    code = ProblemCode.RUN_EXISTS


class CheckpointUnproven(Conflict):
    code = ProblemCode.CHECKPOINT_UNPROVEN


class QuotaExceeded(HoldfastError):
    code = ProblemCode.QUOTA_EXCEEDED


class IntegrityError(HoldfastError):
    pass


class ChecksumMismatch(IntegrityError):
    code = ProblemCode.CHECKSUM_MISMATCH


class ChunkCorrupt(IntegrityError):
    """One read of a chunk gave other bytes, too few, or none. Another copy may still be good."""

    code = "chunk_corrupt"

    def __init__(self, digest: str, problem: Literal["missing", "truncated", "mismatch"], detail: str) -> None:
        self.digest = digest
        self.problem: Literal["missing", "truncated", "mismatch"] = problem
        super().__init__(f"Chunk {digest[:12]} is {problem}: {detail}", context={"digest": digest, "problem": problem})


class ChunkLost(IntegrityError):
    """No copy of a chunk gave the right bytes. `corrupt_checkpoints`: those that the service marked for it."""

    code = "chunk_lost"
    remedy = "Restore an earlier checkpoint; `holdfast runs restore-point` names it."

    def __init__(self, digest: str, verdict: str, corrupt_checkpoints: list[str]) -> None:
        self.digest = digest
        self.verdict = verdict
        self.corrupt_checkpoints = corrupt_checkpoints
        super().__init__(
            f"Chunk {digest[:12]} cannot be read with its right bytes: {verdict}",
            context={"digest": digest, "corrupt_checkpoints": corrupt_checkpoints},
        )


class TicketProblem(HoldfastError):
    pass


class SignatureInvalid(TicketProblem):
    code = ProblemCode.SIGNATURE_INVALID


class TicketExpired(TicketProblem):
    code = ProblemCode.TICKET_EXPIRED


class ServiceUnavailable(HoldfastError):
    code = "service_unavailable"


class StoreUnavailable(ServiceUnavailable):
    code = ProblemCode.STORE_UNAVAILABLE


class DatabaseUnavailable(ServiceUnavailable):
    code = ProblemCode.DATABASE_UNAVAILABLE


class CatalogReadOnly(ServiceUnavailable):
    code = ProblemCode.CATALOG_READ_ONLY


class Busy(ServiceUnavailable):
    code = ProblemCode.BUSY


class BodyTooSlow(ServiceUnavailable):
    code = ProblemCode.BODY_TOO_SLOW


class RateLimited(ServiceUnavailable):
    """The service shares its time between projects, and a token may have a limit of its own. Nothing was done, and it
    says when to retry."""

    code = ProblemCode.RATE_LIMITED


class TooManyFailures(ServiceUnavailable):
    code = ProblemCode.TOO_MANY_FAILURES


class CatalogWentBack(ServiceUnavailable):
    code = ProblemCode.CATALOG_WENT_BACK


class IdentityProviderUnavailable(ServiceUnavailable):
    code = ProblemCode.IDENTITY_PROVIDER_UNAVAILABLE


class IdentityKeyUnknown(ServiceUnavailable):
    code = ProblemCode.IDENTITY_KEY_UNKNOWN


class StoreProblem(HoldfastError):
    pass


class StoreFull(StoreProblem):
    code = ProblemCode.STORE_FULL
    remedy = "Free space in the store, or prune checkpoints."


class StoreRefused(StoreProblem):
    code = ProblemCode.STORE_REFUSED
    remedy = "Check the store's credentials, permissions and clock; `holdfast doctor` tells more."


class ReadsWrongHere(StoreProblem):
    """The service reads a chunk well, and it arrives wrong on this machine, twice. No IntegrityError: the checkpoint is
    whole, and an older one would cost training time and may arrive no better."""

    code = "reads_wrong_here"
    remedy = "Look at this machine's memory, network and mounts, or run on another machine."


class DirectFileRefused(HoldfastError):
    code = "direct_file_refused"


class LocalReadFailed(HoldfastError):
    """Data of the local tier could not be read just now; it may well be whole."""

    code = "local_read_failed"
    remedy = "Look at this node's disk, and at the process's limits (`ulimit -n`)."


class TransferStopped(HoldfastError):
    code = "transfer_stopped"


class ServiceFault(HoldfastError):
    code = ProblemCode.INTERNAL


def _codes(kind: type[HoldfastError]) -> dict[str, type[HoldfastError]]:
    found = {str(kind.code): kind} if isinstance(kind.code, ProblemCode) else {}
    for child in kind.__subclasses__():
        found |= _codes(child)
    return found


_BY_CODE = _codes(HoldfastError)
_BY_STATUS: dict[int, type[HoldfastError]] = {
    401: Unauthenticated,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    412: EditConflict,
    422: InvalidRequest,
    507: StoreFull,
}


def from_problem(problem: Problem, *, earlier_try_ambiguous: bool = False) -> HoldfastError:
    """The exception of a problem's code. A code that is newer than this client is judged by `retryable` and the
    status."""
    kind = _BY_CODE.get(problem.code)
    if kind is None:
        by_status = ServiceFault if problem.status >= 500 else InvalidRequest
        kind = ServiceUnavailable if problem.retryable else _BY_STATUS.get(problem.status, by_status)
    known = PROBLEM_KINDS.get(ProblemCode(problem.code)) if problem.code in _BY_CODE else None
    return kind(
        problem.detail,
        title=known.title if known else problem.title,
        code=problem.code,
        request_id=problem.request_id,
        context=problem.context,
        earlier_try_ambiguous=earlier_try_ambiguous,
    )
