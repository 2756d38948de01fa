"""The catalog's tables for those who keep it: what is wanted, who works on it, and who changed what.

projects ── policies       runs ── retention_marks       checkpoints ── holds
stores ── store_maintenance
controllers, workers, operations, audit_events, collect_candidates, price_lists and idempotency_keys stand by
themselves
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, Boolean, Float, ForeignKey, Index, Integer, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from holdfast_service.db.dialect import Digest, Document, Moment, RowId, partial_index
from holdfast_service.db.lease import Leased
from holdfast_service.db.tables.core import Table

_UNDER_WAY = "ended_at IS NULL AND cancel_requested_at IS NULL"


class Controller(Leased, Table):
    """One background controller, over all processes.

    `reconciled_at`: the last pass of the reaper, or of the purge, while the service was up (rule database-clock). A
    pass that only one process may do holds the lease, and so does a requested pass; `lease_token`
    settles it.
    """

    __tablename__ = "controllers"
    name: Mapped[str] = mapped_column(Text, primary_key=True)
    reconciled_at: Mapped[datetime] = mapped_column(Moment)
    paused_at: Mapped[datetime | None] = mapped_column(Moment)
    paused_by: Mapped[str | None] = mapped_column(Text)
    pause_reason: Mapped[str | None] = mapped_column(Text)
    run_requested_at: Mapped[datetime | None] = mapped_column(Moment)  # a person wants a pass now
    run_answered_at: Mapped[datetime | None] = mapped_column(Moment)  # the newest request that a pass has answered
    began_at: Mapped[datetime | None] = mapped_column(Moment)  # the last pass under a lease
    ended_at: Mapped[datetime | None] = mapped_column(Moment)  # the last whole pass anywhere
    pass_seconds: Mapped[float | None] = mapped_column(Float)  # how long the last pass that found work took
    report: Mapped[dict[str, Any] | None] = mapped_column(Document)  # what that pass did
    report_at: Mapped[datetime | None] = mapped_column(Moment)
    done: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")  # rows, since the catalog was made
    failed: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    error: Mapped[str | None] = mapped_column(Text)  # the last failure; later passes that go well leave it here
    error_at: Mapped[datetime | None] = mapped_column(Moment)


class Worker(Table):
    """A process that serves, runs controllers, or both. It says so again and again; a silent one is gone."""

    __tablename__ = "workers"
    id: Mapped[str] = mapped_column(Text, primary_key=True)
    kind: Mapped[str] = mapped_column(Text)  # serve or worker
    host: Mapped[str] = mapped_column(Text)
    pid: Mapped[int] = mapped_column(Integer)
    version: Mapped[str] = mapped_column(Text)
    started_at: Mapped[datetime] = mapped_column(Moment)
    seen_at: Mapped[datetime] = mapped_column(Moment)
    ended_at: Mapped[datetime | None] = mapped_column(Moment)  # it has said good-bye
    stores: Mapped[dict[str, int]] = mapped_column(Document)  # those that it has attached, by role
    done: Mapped[dict[str, int]] = mapped_column(Document)  # rows that it has settled, by controller
    # The stores that it cannot use now, by id, each with its role.
    unavailable: Mapped[dict[str, str]] = mapped_column(Document, default=dict, server_default="{}")


class Policy(Table):
    """What a project, or one run of it, wants of a controller: data without code, checked when it is put."""

    __tablename__ = "policies"
    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    # Empty: for every run that has none of its own.
    run_id: Mapped[str] = mapped_column(Text, default="", server_default="")
    kind: Mapped[str] = mapped_column(Text)
    document: Mapped[dict[str, Any]] = mapped_column(Document)
    version: Mapped[int] = mapped_column(Integer, default=1)  # with `updated_at` the ETag
    updated_at: Mapped[datetime] = mapped_column(Moment)
    updated_by: Mapped[str] = mapped_column(Text)
    __table_args__ = (UniqueConstraint("project_id", "run_id", "kind"),)


class RetentionMark(Leased, Table):
    """How far the controller `retention` has come with a run. Beside `runs`, whose rows every save locks."""

    __tablename__ = "retention_marks"
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    looked_at: Mapped[datetime | None] = mapped_column(Moment)
    policy_digest: Mapped[str | None] = mapped_column(Text)  # by which policy
    newest_at: Mapped[datetime | None] = mapped_column(Moment)  # the newest commit that it has seen


class Hold(Table):
    """Refuses every deletion until it is over (rule holds-outrank)."""

    __tablename__ = "holds"
    id: Mapped[str] = mapped_column(Text, primary_key=True)
    checkpoint_id: Mapped[str] = mapped_column(ForeignKey("checkpoints.id"), index=True)
    kind: Mapped[str] = mapped_column(Text)  # legal, or retain_until
    reason: Mapped[str] = mapped_column(Text)
    retain_until: Mapped[datetime | None] = mapped_column(Moment)
    mirror: Mapped[bool] = mapped_column(Boolean)  # to the store's Object Lock
    mirrored_at: Mapped[datetime | None] = mapped_column(Moment)
    mirror_error: Mapped[str | None] = mapped_column(Text)
    placed_at: Mapped[datetime] = mapped_column(Moment)
    placed_by_token: Mapped[str] = mapped_column(Text)
    placed_by: Mapped[str] = mapped_column(Text)
    released_at: Mapped[datetime | None] = mapped_column(Moment)
    released_by: Mapped[str | None] = mapped_column(Text)
    release_reason: Mapped[str | None] = mapped_column(Text)


class Operation(Leased, Table):
    """A long piece of work that a person started. A worker claims it with a lease, and may have to do it again.

    `fingerprint` names what is done to what: the same is under way once, however often the call is repeated.
    `leased_until` of a queued one says from when on it may be claimed.
    """

    __tablename__ = "operations"
    id: Mapped[str] = mapped_column(Text, primary_key=True)
    kind: Mapped[str] = mapped_column(Text)
    project_id: Mapped[str | None] = mapped_column(ForeignKey("projects.id"))
    run_id: Mapped[str | None] = mapped_column(ForeignKey("runs.id"))
    checkpoint_id: Mapped[str | None] = mapped_column(ForeignKey("checkpoints.id"))
    arguments: Mapped[dict[str, Any]] = mapped_column(Document)
    fingerprint: Mapped[str] = mapped_column(Digest)
    state: Mapped[str] = mapped_column(Text)
    progress: Mapped[dict[str, Any]] = mapped_column(Document)
    kept: Mapped[dict[str, Any] | None] = mapped_column(Document)  # with what its handler goes on, in the next try
    result: Mapped[dict[str, Any] | None] = mapped_column(Document)
    error: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[datetime] = mapped_column(Moment)
    created_by: Mapped[str] = mapped_column(Text)
    created_by_token: Mapped[str] = mapped_column(Text)
    started_at: Mapped[datetime | None] = mapped_column(Moment)
    ended_at: Mapped[datetime | None] = mapped_column(Moment)
    cancel_requested_at: Mapped[datetime | None] = mapped_column(Moment)
    worker_id: Mapped[str | None] = mapped_column(Text)  # the process that has or had the lease
    tries: Mapped[int] = mapped_column(Integer, default=0)
    __table_args__ = (
        Index("ix_operations_state", "state", "created_at"),
        Index("ix_operations_project_id", "project_id", "created_at"),
        partial_index("uq_operations_open_fingerprint", "fingerprint", where=_UNDER_WAY, unique=True),
    )


class AuditEvent(Table):
    """Who changed what, and why. Append-only: a trigger of the database refuses to change or delete one."""

    __tablename__ = "audit_events"
    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    at: Mapped[datetime] = mapped_column(Moment)
    actor_kind: Mapped[str] = mapped_column(Text)  # person (a token) or controller
    actor: Mapped[str] = mapped_column(Text)
    token_id: Mapped[str | None] = mapped_column(Text)
    action: Mapped[str] = mapped_column(Text)
    # No foreign keys: an event outlives what it speaks of.
    project_id: Mapped[str | None] = mapped_column(Text)
    run_id: Mapped[str | None] = mapped_column(Text)
    checkpoint_id: Mapped[str | None] = mapped_column(Text)
    reason: Mapped[str | None] = mapped_column(Text)
    before: Mapped[dict[str, Any] | None] = mapped_column(Document)
    after: Mapped[dict[str, Any] | None] = mapped_column(Document)
    __table_args__ = (
        Index("ix_audit_events_project_id", "project_id", "id"),
        Index("ix_audit_events_checkpoint_id", "checkpoint_id", "id"),
    )


class ScrubTotal(Table):
    """What was read back in one store since the catalog was made, and what came of it. For the metrics: a pass that is
    killed is not counted."""

    __tablename__ = "scrub_totals"
    store_id: Mapped[int] = mapped_column(ForeignKey("stores.id"), primary_key=True)
    read_copies: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    read_bytes: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    bad_copies: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    repaired_copies: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")


class ForgottenTotal(Table):
    """What the checkpoints of a project were whose rows are gone, for the metrics that count over all time."""

    __tablename__ = "forgotten_totals"
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"), primary_key=True)
    committed: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    aborted: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    chunk_bytes: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    uploaded_bytes: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    deduplicated_bytes: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")


class CollectCandidate(Table):
    """A chunk that may have lost its last reference: the collector looks at it, until it is needed again or gone.

    Only a hint, and never a reason to delete. It has no foreign key, so that leaving one locks no chunk.
    """

    __tablename__ = "collect_candidates"
    chunk_id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    due_at: Mapped[datetime] = mapped_column(Moment, index=True)


class StoreMaintenance(Leased, Table):
    """How far the collector's full scan has come in a store, and what the last sweep found there; the lease is the
    sweep's. Beside `stores`, whose rows every new copy refers to."""

    __tablename__ = "store_maintenance"
    store_id: Mapped[int] = mapped_column(ForeignKey("stores.id"), primary_key=True)
    scan_began_at: Mapped[datetime | None] = mapped_column(Moment)
    # The table that the scan is in, and the last id of it that was looked at; null: the scan is over.
    scanning: Mapped[str | None] = mapped_column(Text)
    scanned_id: Mapped[int | None] = mapped_column(BigInteger)
    swept_at: Mapped[datetime | None] = mapped_column(Moment)
    sweep: Mapped[dict[str, Any] | None] = mapped_column(Document)  # a StoreSweep of the protocol


# What a second store lacks. A query that says exactly this can use the partial index.
TO_COPY = "wanted AND complete_at IS NULL"


class CheckpointCopy(Table):
    """Whether one checkpoint is whole in one store beside the primary. A row is made soon after the commit, where a
    policy asks for copies; `policy_at` and `checkpoint_version` say by which policy and which state it was judged."""

    __tablename__ = "checkpoint_copies"
    checkpoint_id: Mapped[str] = mapped_column(ForeignKey("checkpoints.id"), primary_key=True)
    store_id: Mapped[int] = mapped_column(ForeignKey("stores.id"), primary_key=True)
    wanted: Mapped[bool] = mapped_column(Boolean)
    policy_at: Mapped[datetime | None] = mapped_column(Moment)
    checkpoint_version: Mapped[int] = mapped_column(Integer)
    missing_bytes: Mapped[int] = mapped_column(BigInteger)  # of its chunks, when it was last looked at
    complete_at: Mapped[datetime | None] = mapped_column(Moment)
    retry_at: Mapped[datetime | None] = mapped_column(Moment)  # not before: the last try failed
    error: Mapped[str | None] = mapped_column(Text)
    __table_args__ = (partial_index("ix_checkpoint_copies_to_copy", "store_id", "checkpoint_id", where=TO_COPY),)


class PriceList(Table):
    """What a byte costs, by kind of store and storage class. The newest row counts; there are defaults without any."""

    __tablename__ = "price_lists"
    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    document: Mapped[dict[str, Any]] = mapped_column(Document)
    updated_at: Mapped[datetime] = mapped_column(Moment)
    updated_by: Mapped[str] = mapped_column(Text)


class IdempotencyKey(Table):
    """A call that makes something, and what it has made: see `db/repeats.py`."""

    __tablename__ = "idempotency_keys"
    token_id: Mapped[str] = mapped_column(Text, primary_key=True)
    key: Mapped[str] = mapped_column(Text, primary_key=True)
    asked: Mapped[str] = mapped_column(Digest)  # of the call
    made_id: Mapped[str | None] = mapped_column(Text)  # written in the transaction that made it
    created_at: Mapped[datetime] = mapped_column(Moment)
    __table_args__ = (Index("ix_idempotency_keys_created_at", "created_at"),)


class DashboardGrant(Table):
    """That a role of the database, made for dashboards, sees a project in the views. Rows of its own and not the role's
    privileges: the views ask for them (`dashboards/definition.py`), and a migration makes the views anew."""

    __tablename__ = "dashboard_grants"
    role_name: Mapped[str] = mapped_column(Text, primary_key=True)
    project_id: Mapped[str] = mapped_column(Text, primary_key=True)  # empty: every project, those to come too
