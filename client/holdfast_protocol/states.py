"""Every state that a noun of the catalog can be in, and every kind. The service's catalog has the transitions of a
checkpoint's."""

from __future__ import annotations

from enum import StrEnum


class CredentialKind(StrEnum):
    """How the text of a secret begins that says who calls: `<kind>_<id>_<secret>`."""

    TOKEN = "hold"  # noqa: S105
    SESSION = "session"
    CODE = "code"


class CheckpointState(StrEnum):
    UPLOADING = "uploading"
    COMMITTED = "committed"
    ABORTED = "aborted"
    TRASHED = "trashed"
    DELETING = "deleting"
    DELETED = "deleted"


class CheckpointKind(StrEnum):
    PERIODIC = "periodic"
    EMERGENCY = "emergency"
    FINAL = "final"


class AbortCause(StrEnum):
    """Why a checkpoint was given up, for programs; `abort_reason` is for people."""

    JOB = "job"
    """Its own job gave it up."""
    RANK_FAILED = "rank_failed"
    FENCED = "fenced"
    SILENT = "silent"
    """No rank called for too long. The network may be at fault: living ranks begin the checkpoint again."""
    ATTEMPT_ENDED = "attempt_ended"
    CHUNK_GONE = "chunk_gone"
    """Chunks that a rank had sealed cannot be read any more."""


class Health(StrEnum):
    OK = "ok"
    DIVERGED = "diverged"
    CORRUPT = "corrupt"
    QUARANTINED = "quarantined"


class Tier(StrEnum):
    HOT = "hot"
    COLD = "cold"
    THAWING = "thawing"


class StoreRole(StrEnum):
    """The purpose of a store. Trainers write to the primary one only."""

    PRIMARY = "primary"
    SECOND = "second"
    """Holds further copies, for when the primary store is unavailable or has lost a chunk."""
    COLD = "cold"
    """A second folder or bucket for rarely read chunks."""


class ShardState(StrEnum):
    OPEN = "open"
    SEALED = "sealed"
    FAILED = "failed"


class CopyState(StrEnum):
    """A chunk's presence in one store."""

    PENDING = "pending"
    """A client must send it."""
    COPYING = "copying"
    """A controller writes it, from another copy of the chunk."""
    VERIFIED = "verified"
    COLD = "cold"
    """There and proven, but not readable before a thaw."""
    THAWING = "thawing"
    SUSPECT = "suspect"
    BAD = "bad"
    DELETING = "deleting"
    GONE = "gone"


class Proof(StrEnum):
    """Who has computed the SHA-256 of a copy's bytes. Only the client: `unproven` (rule reuse-only-hashed). The
    service, while a ticket could still overwrite them: `read_early`, no proof for others (rule no-ticket-reuse)."""

    STORE_SHA256 = "store_sha256"
    READ = "read"
    READ_EARLY = "read_early"
    UNPROVEN = "unproven"


class AttemptOutcome(StrEnum):
    FINISHED = "finished"
    FAILED = "failed"
    PREEMPTED = "preempted"
    FENCED = "fenced"
    LOST = "lost"


class RunStatus(StrEnum):
    """How a run fares: the state of its newest attempt, or how it ended."""

    TRAINING = "training"
    STALLED = "stalled"
    """Its job is alive and makes no progress."""
    LOST = "lost"
    FAILED = "failed"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    IDLE = "idle"
    """It has no attempt, or only a record of one that was fenced."""


class Doing(StrEnum):
    """The activity of an attempt's training thread."""

    RESTORING = "restoring"
    TRAINING = "training"
    SAVING = "saving"


class OperationState(StrEnum):
    """A long piece of work that a person started."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self in {OperationState.DONE, OperationState.FAILED, OperationState.CANCELLED}


class QuotaKind(StrEnum):
    """What a quota counts, by project."""

    BYTES = "bytes"
    """In the primary store."""
    OBJECTS = "objects"
    """Copies of chunks, in the primary store."""
    RUNS = "runs"
    """That are not in the trash."""
    CHECKPOINTS = "checkpoints"
    """Committed or uploading."""
    ROWS = "rows"
    """Of the catalog: one for each copy of a chunk in the primary store, one for each entry of a chunk list."""


class Scope(StrEnum):
    """The rights of a token. `train`: open attempts and write checkpoints; `read`: read everything;
    `operate`: edit and prune; `admin`: projects and tokens; `metrics`: `/metrics` and nothing else. Each stands alone,
    none implies another."""

    TRAIN = "train"
    READ = "read"
    OPERATE = "operate"
    ADMIN = "admin"
    METRICS = "metrics"


class Role(StrEnum):
    """What a rule of the identity file gives, on one project or on every one: the service makes it into scopes."""

    READER = "reader"
    """Reads everything."""
    TRAINER = "trainer"
    """Reads, opens attempts and writes checkpoints."""
    OPERATOR = "operator"
    """Reads, edits and prunes."""
    ADMIN = "admin"
    """All of it, and projects and tokens."""
