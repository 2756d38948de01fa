"""Sums of the catalog's rows, kept beside them, so that nobody counts a million rows to show one number.

    checkpoints ── trigger ─> checkpoint_deltas ── controller `tally` ─> checkpoint_tallies
    copies ─────── trigger ─> byte_deltas ──────── controller `tally` ─> byte_tallies
    chunk_lists ── trigger ─> list_deltas ──────── controller `tally` ─> list_tallies
    whatever can change what a byte is kept for ── trigger ─> recount_marks ─> copies.counted, byte_deltas

The triggers are in `db/triggers.py`. A delta is a row of its own: a sum that each transaction updates would be one row
that all of them queue for. What a sum is now is its tally and its deltas together, read in one statement.
"""

from __future__ import annotations

from datetime import datetime
from enum import IntEnum

from sqlalchemy import BigInteger, Boolean, Index, SmallInteger, Text
from sqlalchemy.orm import Mapped, mapped_column

from holdfast_service.db.dialect import Moment, RowId, partial_index
from holdfast_service.db.tables.core import Table


class CheckpointSums:
    """What is added up over checkpoints. `logical_bytes` and `deduplicated_bytes` are of those that are committed now;
    from `ever_committed` on of all rows, whatever became of them."""

    uploading: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    committed: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    logical_bytes: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    deduplicated_bytes: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    ever_committed: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    ever_aborted: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    ever_chunk_bytes: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    ever_uploaded_bytes: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    ever_deduplicated_bytes: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")


class CheckpointTally(CheckpointSums, Table):
    """Of one run, or with an empty `run_id` of its whole project."""

    __tablename__ = "checkpoint_tallies"
    project_id: Mapped[str] = mapped_column(Text, primary_key=True)
    run_id: Mapped[str] = mapped_column(Text, primary_key=True)


class CheckpointDelta(CheckpointSums, Table):
    """What one change of a checkpoint has changed, until the controller has added it to the tallies."""

    __tablename__ = "checkpoint_deltas"
    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    project_id: Mapped[str] = mapped_column(Text)
    run_id: Mapped[str] = mapped_column(Text)
    __table_args__ = (Index("ix_checkpoint_deltas_project_id_run_id", "project_id", "run_id"),)


class Counted(IntEnum):
    """`copies.counted`: as what a copy is in the sums. One of the first four, and flags that are added to it."""

    ARRIVING = 0
    COMMITTED = 1
    TRASHED = 2
    PENDING_COLLECTION = 3
    PINNED = 4
    HELD = 8
    COLD = 16
    THAWING = 32


class ByteSums:
    """Of the copies that are not gone, by where they are and as what they are counted."""

    project_id: Mapped[str] = mapped_column(Text, primary_key=True)
    store_id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    storage_class: Mapped[str] = mapped_column(Text, primary_key=True)  # empty: none
    counted: Mapped[int] = mapped_column(SmallInteger, primary_key=True, autoincrement=False)
    copies: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    bytes: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")


class ByteTally(ByteSums, Table):
    __tablename__ = "byte_tallies"


class ByteDelta(Table):
    __tablename__ = "byte_deltas"
    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    project_id: Mapped[str] = mapped_column(Text, index=True)
    store_id: Mapped[int] = mapped_column(BigInteger)
    storage_class: Mapped[str] = mapped_column(Text)
    counted: Mapped[int] = mapped_column(SmallInteger)
    copies: Mapped[int] = mapped_column(BigInteger)
    bytes: Mapped[int] = mapped_column(BigInteger)


class ListTally(Table):
    """Entries of a project's chunk lists."""

    __tablename__ = "list_tallies"
    project_id: Mapped[str] = mapped_column(Text, primary_key=True)
    entries: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")


class ListDelta(Table):
    __tablename__ = "list_deltas"
    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    project_id: Mapped[str] = mapped_column(Text, index=True)
    entries: Mapped[int] = mapped_column(BigInteger)


class RecountMark(Table):
    """Copies whose bytes may be kept for something else from `due_at` on: those of a chunk, or of all the chunks of a
    checkpoint. Nobody refers to what it names: that may be gone. Many marks may name the same."""

    __tablename__ = "recount_marks"
    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    chunk_id: Mapped[int | None] = mapped_column(BigInteger)
    checkpoint_id: Mapped[str | None] = mapped_column(Text)
    keeps: Mapped[bool] = mapped_column(Boolean)  # pins and holds as well: to look for them takes longest
    after_shard_id: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")  # how far it is taken up
    due_at: Mapped[datetime] = mapped_column(Moment)
    __table_args__ = (
        Index("ix_recount_marks_due_at", "due_at", "id"),
        partial_index("ix_recount_marks_checkpoint_id", "checkpoint_id", where="checkpoint_id IS NOT NULL"),
    )


class TallyComparison(Table):
    """How far the comparison of a kind of tally with the rows has come, and what it has found. One row a kind."""

    __tablename__ = "tally_comparisons"
    kind: Mapped[str] = mapped_column(Text, primary_key=True)  # checkpoints, copies, lists
    position: Mapped[str | None] = mapped_column(Text)  # the last key that was compared; null: the next one begins
    began_at: Mapped[datetime | None] = mapped_column(Moment)
    ended_at: Mapped[datetime | None] = mapped_column(Moment)  # of the last whole one
    drifted: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")  # since the catalog was made
