"""The catalog's tables.

    catalog_identity
    projects ─┬─ tokens
              ├─ runs ── attempts ── checkpoints ── shards ──┬─ shard_chunks ─────── chunks ── copies ── stores
              │                          └ read_leases       └─ chunk_lists ── chunk_list_entries ─┘
              └─ chunks

What operators and controllers keep (policies, holds, operations, events) stands in `operations.py`.

There are no reference counters, which would be hot rows: a caller that asks whether a chunk is needed reads the
references, `shard_chunks` (negotiated under an open shard) and `chunk_list_entries` (sealed). Sums are in `tallies.py`.
Enumerations are kept as text; what a checkpoint may become stands in `training.commit`.
Locks are taken in one order everywhere (rule lock-order), those of chunks by digest.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Text,
    UniqueConstraint,
    false,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from holdfast_protocol.checkpoints import ShardSummary
from holdfast_protocol.states import QuotaKind
from holdfast_service.db.dialect import Digest, Document, Hex, Moment, RowId, partial_index
from holdfast_service.db.lease import Leased


class Table(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


class CatalogIdentity(Table):
    """One row. The epoch is half of the fencing token: a restored or cloned catalog raises it (rule fencing-token)."""

    __tablename__ = "catalog_identity"
    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    catalog_id: Mapped[str] = mapped_column(Text)
    epoch: Mapped[int] = mapped_column(Integer)
    # Drawn with each new epoch but the first: two copies of one catalog can hold the same number.
    claim: Mapped[str] = mapped_column(Text, default="", server_default="")
    signing_key: Mapped[bytes] = mapped_column(LargeBinary)
    encrypted_with: Mapped[str | None] = mapped_column(Text)  # the id of the key that its signing key is encrypted with
    created_at: Mapped[datetime] = mapped_column(Moment)
    # Which database this is. A copy of it somewhere else is known by that, whatever else it says of itself.
    place: Mapped[str | None] = mapped_column(Text)
    rebuilding_from: Mapped[str | None] = mapped_column(Text)  # a rebuild began and has not ended
    # What the database has lost of what it had acknowledged, until an operator has accepted it; and in which epoch that
    # was found (rule database-went-back).
    went_back: Mapped[str | None] = mapped_column(Text)
    went_back_epoch: Mapped[int | None] = mapped_column(Integer)
    # Marks that were moved until then may have been forgotten (`db/engine.py`). Null: none that is known.
    marks_forgotten_until: Mapped[datetime | None] = mapped_column(Moment)
    # The oldest revision whose code works with this catalog. Revisions set it; see docs/adr/0076.
    works_from: Mapped[str] = mapped_column(Text, server_default="0035")


class Store(Table):
    __tablename__ = "stores"
    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    url: Mapped[str] = mapped_column(Text, unique=True)  # never holds credentials
    kind: Mapped[str] = mapped_column(Text)
    capabilities: Mapped[dict[str, Any] | None] = mapped_column(Document)
    created_at: Mapped[datetime] = mapped_column(Moment)
    # The last whole comparison with the catalog: in which epoch, and whether it allows to adopt the store (rule
    # fencing-token).
    checked_at: Mapped[datetime | None] = mapped_column(Moment)
    checked_epoch: Mapped[int | None] = mapped_column(Integer)
    checked_whole: Mapped[bool | None] = mapped_column(Boolean)
    # The role under which it was announced as unavailable; null: it is available, as far as was announced.
    unavailable_as: Mapped[str | None] = mapped_column(Text)


class Deletable:
    """What a person may delete as a whole (docs/adr/0044). It is hidden from `deleted_at` on; the row itself stays, and
    says that its name was used. `purged_at`: it cannot be taken back any more, and what belongs to it goes."""

    deleted_at: Mapped[datetime | None] = mapped_column(Moment)
    deleted_by: Mapped[str | None] = mapped_column(Text)
    delete_reason: Mapped[str | None] = mapped_column(Text)
    purge_at: Mapped[datetime | None] = mapped_column(Moment)
    purged_at: Mapped[datetime | None] = mapped_column(Moment)


QUOTA_COLUMNS = tuple(f"{soft}quota_{kind}" for soft in ("", "soft_") for kind in QuotaKind)
"""Of `projects`: what people set."""


class Project(Deletable, Table):
    __tablename__ = "projects"
    id: Mapped[str] = mapped_column(Text, primary_key=True)
    name: Mapped[str] = mapped_column(Text, unique=True)
    quota_bytes: Mapped[int | None] = mapped_column(BigInteger)
    created_at: Mapped[datetime] = mapped_column(Moment)
    quota_objects: Mapped[int | None] = mapped_column(BigInteger)
    quota_runs: Mapped[int | None] = mapped_column(BigInteger)
    quota_checkpoints: Mapped[int | None] = mapped_column(BigInteger)
    soft_quota_bytes: Mapped[int | None] = mapped_column(BigInteger)
    soft_quota_objects: Mapped[int | None] = mapped_column(BigInteger)
    soft_quota_runs: Mapped[int | None] = mapped_column(BigInteger)
    soft_quota_checkpoints: Mapped[int | None] = mapped_column(BigInteger)
    quota_rows: Mapped[int | None] = mapped_column(BigInteger)
    soft_quota_rows: Mapped[int | None] = mapped_column(BigInteger)
    # By the name of a quota's column: the level that was told of it last, of which quota, and what was used when it
    # refused a call, if it has (quotas/crossings.py).
    quota_levels: Mapped[dict[str, list[int]]] = mapped_column(Document, default=dict, server_default="{}")


class Token(Table):
    __tablename__ = "tokens"
    id: Mapped[str] = mapped_column(Text, primary_key=True)
    name: Mapped[str] = mapped_column(Text)
    secret_sha256: Mapped[str] = mapped_column(Digest)
    project_id: Mapped[str | None] = mapped_column(ForeignKey("projects.id"))
    scopes: Mapped[list[str]] = mapped_column(Document)
    created_at: Mapped[datetime] = mapped_column(Moment)
    created_by_token: Mapped[str | None] = mapped_column(Text)  # null: made at the database, or before it was kept
    expires_at: Mapped[datetime | None] = mapped_column(Moment)
    revoked_at: Mapped[datetime | None] = mapped_column(Moment)
    last_used_at: Mapped[datetime | None] = mapped_column(Moment)  # some minutes late: auth/credentials.py
    # Null: what the settings say.
    requests_per_second: Mapped[float | None] = mapped_column(Float)
    concurrent_requests: Mapped[int | None] = mapped_column(Integer)
    # Of the identity that it was made for: identity/exchange.py. Null: made by another token, or at the database.
    issuer: Mapped[str | None] = mapped_column(Text)
    subject: Mapped[str | None] = mapped_column(Text)


class Run(Deletable, Table):
    __tablename__ = "runs"
    id: Mapped[str] = mapped_column(Text, primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    name: Mapped[str] = mapped_column(Text)
    latest_attempt: Mapped[int] = mapped_column(Integer, default=0)
    created_at: Mapped[datetime] = mapped_column(Moment)
    # By people. The ETag is a hash of both.
    tags: Mapped[list[str]] = mapped_column(Document, default=list, server_default="[]")
    note: Mapped[str] = mapped_column(Text, default="", server_default="")
    forked_from: Mapped[dict[str, Any] | None] = mapped_column(Document)  # ForkedFrom, of the checkpoint it begins with
    __table_args__ = (
        UniqueConstraint("project_id", "name"),
        Index("ix_runs_created_at", "created_at", "id"),  # the list of all projects' runs
    )


# Living attempts, and fenced ones that may have been dead before: few of all. A query that says exactly this can use
# the partial index.
OPEN = "ended_at IS NULL"
SILENT = "outcome = 'fenced' AND refused_at IS NULL AND rolled_back_at IS NULL"


class Attempt(Table):
    __tablename__ = "attempts"
    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"))
    number: Mapped[int] = mapped_column(Integer)
    launch_id: Mapped[str] = mapped_column(Text)
    world_size: Mapped[int] = mapped_column(Integer)
    host: Mapped[str] = mapped_column(Text)
    environment: Mapped[dict[str, str]] = mapped_column(Document)
    # Read only by those who ask for it: it may be large.
    config: Mapped[dict[str, Any] | None] = mapped_column(Document, deferred=True)
    opened_at: Mapped[datetime] = mapped_column(Moment)
    heartbeat_at: Mapped[datetime | None] = mapped_column(Moment)
    last_step: Mapped[int | None] = mapped_column(BigInteger)
    # What it tells of itself: when its training thread last came on, and sums since it was opened.
    first_step: Mapped[int | None] = mapped_column(BigInteger)
    first_step_at: Mapped[datetime | None] = mapped_column(Moment)
    steps_run: Mapped[int | None] = mapped_column(BigInteger)
    doing: Mapped[str | None] = mapped_column(Text)
    progressed_at: Mapped[datetime | None] = mapped_column(Moment)
    stalled_at: Mapped[datetime | None] = mapped_column(Moment)  # alive without progress since; null: it goes on
    steps_per_second: Mapped[float | None] = mapped_column(Float)
    restore_seconds: Mapped[float | None] = mapped_column(Float)
    saves_begun: Mapped[int | None] = mapped_column(Integer)
    save_blocked_seconds: Mapped[float | None] = mapped_column(Float)  # training stood still for saves
    error_type: Mapped[str | None] = mapped_column(Text)
    error_rank: Mapped[int | None] = mapped_column(Integer)
    notice: Mapped[dict[str, Any] | None] = mapped_column(Document)  # of a preemption: source, deadline
    refused_at: Mapped[datetime | None] = mapped_column(Moment)  # called after it was fenced: it was alive then
    # The service was unavailable until then, so silence before it means nothing.
    excused_until: Mapped[datetime | None] = mapped_column(Moment)
    ended_at: Mapped[datetime | None] = mapped_column(Moment)
    outcome: Mapped[str | None] = mapped_column(Text)
    outcome_detail: Mapped[str | None] = mapped_column(Text)
    resumed_from_id: Mapped[str | None] = mapped_column(Text)  # a checkpoint; no key, for checkpoints refer to attempts
    offered_id: Mapped[str | None] = mapped_column(Text)  # the restore point that its opening was told
    # The newer checkpoints that were skipped for it, the newest first. Deferred: each call of a rank reads its attempt.
    skipped: Mapped[list[dict[str, Any]] | None] = mapped_column(Document, deferred=True)
    rolled_back_at: Mapped[datetime | None] = mapped_column(Moment)  # its own job left it, to go back; it did not fail
    # First commit or explicit rollback: from here on this attempt's line is the run's line (rule
    # latest-follows-lineage).
    cut_at: Mapped[datetime | None] = mapped_column(Moment)
    __table_args__ = (
        UniqueConstraint("run_id", "number"),
        UniqueConstraint("run_id", "launch_id"),
        partial_index("ix_attempts_open", "id", where=OPEN),
        partial_index("ix_attempts_silent", "ended_at", where=SILENT),
    )


# Over, and what it referred to is still in the catalog. A query that says exactly this can use the partial index.
TO_FORGET = "state IN ('aborted', 'deleted') AND forgotten_at IS NULL"
# Over, and nothing refers to it any more. A query that says exactly this can use the partial index.
FORGOTTEN = "forgotten_at IS NOT NULL"
# Whose commit record beside the data is older than the row. A query that says exactly this can use the partial index.
TO_RECORD = "recorded_version < version AND state IN ('committed', 'trashed')"

# Whose bytes go or are gone, until the row goes too.
GOING = "state IN ('deleting', 'deleted')"

# Whose chunks may have to be moved, and for whom chunks are kept readable, likewise.
TO_COOL = "tier_wanted IS NOT NULL AND state = 'committed'"
THAWED = "thawed_until IS NOT NULL"


# What people look for over all runs: few of all. A query that says exactly this can use the partial index.
UNWELL = "health <> 'ok'"
IN_TRASH = "state IN ('trashed', 'deleting')"


class Checkpoint(Table):
    __tablename__ = "checkpoints"
    id: Mapped[str] = mapped_column(Text, primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"))
    attempt_id: Mapped[int] = mapped_column(ForeignKey("attempts.id"))
    attempt_number: Mapped[int] = mapped_column(Integer)
    # Late saves only (rule late-save-adoption): the attempt that pushes, while attempt_id and attempt_number are the
    # origin's; and whether the run had gone on without it, so that it is never latest.
    pushed_by: Mapped[int | None] = mapped_column(Integer)
    detached: Mapped[bool] = mapped_column(Boolean, default=False, server_default=false())
    # ForkedFrom: the chunk lists are another run's checkpoint's (runs/fork.py). Null: its own ranks have saved it.
    forked_from: Mapped[dict[str, Any] | None] = mapped_column(Document)
    step: Mapped[int] = mapped_column(BigInteger)
    # Which save of its attempt it is; null: its ranks have not said. Only a later one takes the step from it.
    save_number: Mapped[int | None] = mapped_column(BigInteger)
    kind: Mapped[str] = mapped_column(Text)
    world_size: Mapped[int] = mapped_column(Integer)
    sealed_ranks: Mapped[int] = mapped_column(Integer, default=0, server_default="0")  # moved by each rank's seal
    state: Mapped[str] = mapped_column(Text)
    health: Mapped[str] = mapped_column(Text)
    health_reason: Mapped[str | None] = mapped_column(Text)
    # If corrupt: a needed chunk that was not whole at the last check; 0 if the needed chunks are unknown.
    lost_chunk_id: Mapped[int | None] = mapped_column(BigInteger)
    tier: Mapped[str] = mapped_column(Text)
    digest: Mapped[str | None] = mapped_column(Digest)
    logical_bytes: Mapped[int] = mapped_column(BigInteger, default=0)
    chunk_bytes: Mapped[int] = mapped_column(BigInteger, default=0)
    uploaded_bytes: Mapped[int] = mapped_column(BigInteger, default=0)
    deduplicated_bytes: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    metrics: Mapped[dict[str, Any]] = mapped_column(Document)
    labels: Mapped[list[str]] = mapped_column(Document)
    components: Mapped[dict[str, Any]] = mapped_column(Document)
    missing_components: Mapped[list[str] | None] = mapped_column(Document)  # which the run's first checkpoint has
    blocked_seconds: Mapped[float | None] = mapped_column(Float)  # training stood still for it, on its slowest rank
    version: Mapped[int] = mapped_column(Integer, default=1)  # the ETag
    created_at: Mapped[datetime] = mapped_column(Moment)
    deadline_at: Mapped[datetime] = mapped_column(Moment)  # moved by each call of a rank; the reaper aborts after it
    committed_at: Mapped[datetime | None] = mapped_column(Moment)
    aborted_at: Mapped[datetime | None] = mapped_column(Moment)
    abort_reason: Mapped[str | None] = mapped_column(Text)
    abort_rank: Mapped[int | None] = mapped_column(Integer)
    abort_cause: Mapped[str | None] = mapped_column(Text)  # null: aborted before there were causes
    # Kept whatever the policy says, until a person takes the pin away or its end has come.
    pinned_at: Mapped[datetime | None] = mapped_column(Moment)
    pinned_by: Mapped[str | None] = mapped_column(Text)
    pin_reason: Mapped[str | None] = mapped_column(Text)
    pinned_until: Mapped[datetime | None] = mapped_column(Moment)  # null: for ever
    # In the trash since, for whom and why; its bytes may go from `purge_at` on (rule trash-first).
    trashed_at: Mapped[datetime | None] = mapped_column(Moment)
    trashed_by: Mapped[str | None] = mapped_column(Text)  # policy, person, or run: with its whole run
    trash_reason: Mapped[str | None] = mapped_column(Text)
    purge_at: Mapped[datetime | None] = mapped_column(Moment)
    deleted_at: Mapped[datetime | None] = mapped_column(Moment)
    # A thaw that a person asked for: readable from its end, at least until `thawed_until`.
    thaw_requested_at: Mapped[datetime | None] = mapped_column(Moment)
    thaw_expected_at: Mapped[datetime | None] = mapped_column(Moment)
    thawed_until: Mapped[datetime | None] = mapped_column(Moment)
    thaw_speed: Mapped[str | None] = mapped_column(Text)
    thaw_days: Mapped[int | None] = mapped_column(Integer)
    # What its policy wants of it: a storage class or `cold`, null: hot; and when its chunks were last all in place.
    tier_wanted: Mapped[str | None] = mapped_column(Text)
    tier_checked_at: Mapped[datetime | None] = mapped_column(Moment)
    cold_class: Mapped[str | None] = mapped_column(Text)  # the coldest place where chunks of it were moved to
    # Its tier is hot only until then, for what is thawed in a bucket; null: no end.
    readable_until: Mapped[datetime | None] = mapped_column(Moment)
    # The version that the commit record beside the data has; it is due while it is lower than `version` (rule
    # record-outbox).
    recorded_version: Mapped[int] = mapped_column(Integer, default=0, server_default="0")
    forgotten_at: Mapped[datetime | None] = mapped_column(Moment)  # the collector has dropped its references
    __table_args__ = (
        # Identity (rule one-checkpoint-per-step): after an abort the same step can be begun anew. A detached branch
        # stands beside the line's own, or pushing it would keep the newest attempt from adopting the step.
        partial_index(
            "uq_checkpoints_live_step",
            "run_id",
            "attempt_number",
            "step",
            "detached",
            where="state IN ('uploading', 'committed')",
            unique=True,
        ),
        Index("ix_checkpoints_run_id_step", "run_id", "step", "id"),
        partial_index("ix_checkpoints_unwell", "run_id", "step", "id", where=UNWELL),
        partial_index("ix_checkpoints_in_trash", "run_id", "step", "id", where=IN_TRASH),
        partial_index("ix_checkpoints_corrupt", "id", where="health = 'corrupt'"),
        partial_index("ix_checkpoints_uploading_deadline", "deadline_at", where="state = 'uploading'"),
        partial_index("ix_checkpoints_trashed_purge", "purge_at", where="state = 'trashed'"),
        # What a run has committed since a moment, and its newest commit.
        partial_index("ix_checkpoints_committed", "run_id", "committed_at", where="committed_at IS NOT NULL"),
        partial_index("ix_checkpoints_going", "state", "id", where=GOING),
        partial_index("ix_checkpoints_to_cool", "tier_checked_at", "id", where=TO_COOL),
        partial_index("ix_checkpoints_thawed", "id", where=THAWED),
        partial_index("ix_checkpoints_to_record", "id", where=TO_RECORD),
        partial_index("ix_checkpoints_to_forget", "id", where=TO_FORGET),
        partial_index("ix_checkpoints_forgotten", "forgotten_at", where=FORGOTTEN),
    )


class ChunkList(Table):
    """An ordered list of chunks; one row for all the shards that have this very list."""

    __tablename__ = "chunk_lists"
    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    digest: Mapped[str] = mapped_column(Digest)  # shard_digest of the list
    entries_digest: Mapped[str] = mapped_column(Digest)  # of the rows' ids: the digests do not say which sizes
    # How many it has. Null: made before this was kept; the controller `tally` counts them.
    entries: Mapped[int | None] = mapped_column(Integer)
    __table_args__ = (UniqueConstraint("project_id", "entries_digest"),)


class ChunkListEntry(Table):
    __tablename__ = "chunk_list_entries"
    chunk_list_id: Mapped[int] = mapped_column(ForeignKey("chunk_lists.id"), primary_key=True)
    ordinal: Mapped[int] = mapped_column(Integer, primary_key=True)
    chunk_id: Mapped[int] = mapped_column(ForeignKey("chunks.id"), index=True)


class Shard(Table):
    """One rank's share of a checkpoint."""

    __tablename__ = "shards"
    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    checkpoint_id: Mapped[str] = mapped_column(ForeignKey("checkpoints.id"))
    rank: Mapped[int] = mapped_column(Integer)
    state: Mapped[str] = mapped_column(Text)
    digest: Mapped[str | None] = mapped_column(Digest)
    chunk_list_id: Mapped[int | None] = mapped_column(ForeignKey("chunk_lists.id"), index=True)
    index_ordinal: Mapped[int | None] = mapped_column(Integer)
    layout_ordinal: Mapped[int | None] = mapped_column(Integer)
    logical_bytes: Mapped[int] = mapped_column(BigInteger, default=0)
    uploaded_bytes: Mapped[int] = mapped_column(BigInteger, default=0)  # as stored
    deduplicated_bytes: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")  # raw
    components: Mapped[dict[str, Any]] = mapped_column(Document)
    metrics: Mapped[dict[str, Any] | None] = mapped_column(Document)
    finite: Mapped[bool] = mapped_column(Boolean, default=True)
    verdict: Mapped[dict[str, Any] | None] = mapped_column(Document)  # HealthVerdict; null: the trainer has none
    dropped_components: Mapped[list[str] | None] = mapped_column(Document)  # rank 0's; null: none
    blocked_seconds: Mapped[float | None] = mapped_column(Float)  # training stood still for it
    upload_seconds: Mapped[float | None] = mapped_column(Float)  # from its begin until its last chunk was verified
    sealed_at: Mapped[datetime | None] = mapped_column(Moment)
    __table_args__ = (UniqueConstraint("checkpoint_id", "rank"),)

    @property
    def summary(self) -> ShardSummary:
        """What its rank said, a column for each field. A column that is null has its field's default: the shard was
        sealed by an older client, or before the column was there."""
        said = {name: getattr(self, name) for name in ShardSummary.model_fields}
        return ShardSummary.model_validate({name: value for name, value in said.items() if value is not None})

    @summary.setter
    def summary(self, said: ShardSummary) -> None:
        for name, value in said.model_dump(mode="json").items():
            setattr(self, name, value)


class Chunk(Table):
    """An immutable piece of content. No cross-project reuse (rule project-in-key).

    The size belongs to the identity: a client states it with the chunk, and a wrong size must bind no other client.
    One shard, and one committed checkpoint, has each digest with one size.
    """

    __tablename__ = "chunks"
    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    digest: Mapped[str] = mapped_column(Digest)
    bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[datetime] = mapped_column(Moment)
    # How often one of its copies was found bad: what orders findings and readings of its copies, and no clock does.
    damages: Mapped[int] = mapped_column(Integer, default=0, server_default="0")
    __table_args__ = (UniqueConstraint("project_id", "digest", "bytes"),)


# What the service still must read itself. A query that says exactly this can use the partial index.
COPY_TO_READ = "state = 'suspect' OR (state = 'verified' AND proof IN ('unproven', 'read_early'))"
# What the store may hold for us, likewise.
COPY_LOCKED = "lock IS NOT NULL"
# Copies that a process works on, or whose worker died: few, whatever there is.
COPY_LEASED = "leased_until IS NOT NULL"
# What was found bad and is not repaired: its store may need another copy of the chunk.
COPY_DAMAGED = "state = 'bad' AND bad_at IS NOT NULL AND repaired_at IS NULL"


class Copy(Leased, Table):
    """A chunk's presence in one store, at the key that ends in this copy's own generation (rule random-generation).

    A controller has the lease. What waits before it goes, or is tried again, has `leased_until` and no token.
    """

    __tablename__ = "copies"
    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    chunk_id: Mapped[int] = mapped_column(ForeignKey("chunks.id"), index=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    store_id: Mapped[int] = mapped_column(ForeignKey("stores.id"))
    attempt_id: Mapped[int] = mapped_column(
        ForeignKey("attempts.id")
    )  # who uploads it; an unproven copy is good for it
    generation: Mapped[str] = mapped_column(Hex(16), insert_sentinel=True)  # by it many new copies are inserted at once
    state: Mapped[str] = mapped_column(Text)
    proof: Mapped[str | None] = mapped_column(Text)
    codec: Mapped[str] = mapped_column(Text)
    stored_digest: Mapped[str] = mapped_column(Digest)
    stored_bytes: Mapped[int] = mapped_column(BigInteger)
    version_id: Mapped[str | None] = mapped_column(Text)
    ticket_expires_at: Mapped[datetime] = mapped_column(Moment)  # no PUT can begin after it (rule late-put-window)
    # Until then a ticket may put other bytes there (rule no-ticket-reuse); null: its store never lets one.
    overwritable_until: Mapped[datetime | None] = mapped_column(Moment)
    created_at: Mapped[datetime] = mapped_column(Moment)
    verified_at: Mapped[datetime | None] = mapped_column(Moment)
    storage_class: Mapped[str | None] = mapped_column(Text)  # null: the bucket's default, or a filesystem
    # As what its bytes are in the sums (a `Counted` of tallies.py); only `tallies/recount.py` changes it.
    counted: Mapped[int] = mapped_column(SmallInteger, default=0, server_default="0")
    thaw_requested_at: Mapped[datetime | None] = mapped_column(Moment)
    readable_until: Mapped[datetime | None] = mapped_column(Moment)  # a thawed copy is cold again afterwards
    # A CopyLock, what the store was told of a hold (Object Lock); null: nothing. What may be locked is not deleted.
    lock: Mapped[str | None] = mapped_column(Text)
    # Once good and then found bad: when, what, and since when its store has another copy that was read. Null for an
    # upload that never arrived as announced.
    bad_at: Mapped[datetime | None] = mapped_column(Moment)
    finding: Mapped[str | None] = mapped_column(Text)
    repaired_at: Mapped[datetime | None] = mapped_column(Moment)
    # By the count of its chunk: which finding made it bad, and after how many findings it was read or made.
    damage: Mapped[int | None] = mapped_column(Integer)
    read_after: Mapped[int] = mapped_column(Integer, default=0, server_default="0")
    # If it is bad: how often it was read again since, and when it is to be.
    looks: Mapped[int] = mapped_column(Integer, default=0, server_default="0")
    look_at: Mapped[datetime | None] = mapped_column(Moment)
    __table_args__ = (
        UniqueConstraint("chunk_id", "store_id", "generation"),
        Index("ix_copies_project_id_state", "project_id", "state"),
        Index("ix_copies_store_id_state_verified_at", "store_id", "state", "verified_at"),
        partial_index("ix_copies_to_read", "id", where=COPY_TO_READ),
        partial_index("ix_copies_locked", "id", where=COPY_LOCKED),
        partial_index("ix_copies_leased", "leased_until", where=COPY_LEASED),
        partial_index("ix_copies_damaged", "id", where=COPY_DAMAGED),
    )


class ShardChunk(Table):
    """A chunk negotiated under an open shard, and the copy that it relies on: a reference the collector respects.

    The seal turns these rows into a chunk list.
    """

    __tablename__ = "shard_chunks"
    shard_id: Mapped[int] = mapped_column(ForeignKey("shards.id"), primary_key=True)
    chunk_id: Mapped[int] = mapped_column(ForeignKey("chunks.id"), primary_key=True, index=True)
    copy_id: Mapped[int] = mapped_column(ForeignKey("copies.id"), index=True)
    uploading: Mapped[bool] = mapped_column(Boolean)  # this shard was told to send it


class ReadLease(Table):
    """A reader has this checkpoint open; nothing of it is purged until the lease ends (rule read-lease)."""

    __tablename__ = "read_leases"
    id: Mapped[str] = mapped_column(Text, primary_key=True)
    checkpoint_id: Mapped[str] = mapped_column(ForeignKey("checkpoints.id"), index=True)
    token_id: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime] = mapped_column(Moment)
    expires_at: Mapped[datetime] = mapped_column(Moment)
