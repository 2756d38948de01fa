"""The catalog's tables for what lies beside the data: which records are due, and which are written where (rule
record-outbox).

checkpoints, record_subjects ── written_records ── stores
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger, ForeignKey, Index, Integer, Text
from sqlalchemy.orm import Mapped, mapped_column

from holdfast_service.db.dialect import Digest, Moment, partial_index
from holdfast_service.db.lease import Leased
from holdfast_service.db.tables.core import Table

# Whose record is older than what it speaks of. A query that says exactly this can use the partial index.
SUBJECT_TO_RECORD = "recorded_version < version"


class RecordSubject(Table):
    """A project or a run that has a record beside the data. Checkpoints keep their version in their own row.

    It stands apart from `projects` and `runs`: every write of a training job holds the run's row in share mode, so
    nothing that happens often may write there.
    """

    __tablename__ = "record_subjects"
    kind: Mapped[str] = mapped_column(Text, primary_key=True)  # project or run
    subject_id: Mapped[str] = mapped_column(Text, primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    version: Mapped[int] = mapped_column(Integer, default=1)
    recorded_version: Mapped[int] = mapped_column(Integer, default=0, server_default="0")
    __table_args__ = (partial_index("ix_record_subjects_to_record", "subject_id", where=SUBJECT_TO_RECORD),)


class WrittenRecord(Leased, Table):
    """Which version of a record one store has. A row is made before the first write, so what may be there is known.

    `name`: the newest document, to be taken away once a newer one is there. `removed_at`: the record is gone from the
    store, and a later write of it counts for nothing.
    """

    __tablename__ = "written_records"
    kind: Mapped[str] = mapped_column(Text, primary_key=True)  # project, run or checkpoint
    subject_id: Mapped[str] = mapped_column(Text, primary_key=True)
    store_id: Mapped[int] = mapped_column(ForeignKey("stores.id"), primary_key=True)
    version: Mapped[int] = mapped_column(Integer, default=0, server_default="0")
    name: Mapped[str | None] = mapped_column(Text)
    removed_at: Mapped[datetime | None] = mapped_column(Moment)
    __table_args__ = (
        Index("ix_written_records_store_id_kind", "store_id", "kind"),
        partial_index("ix_written_records_removed", "store_id", "removed_at", where="removed_at IS NOT NULL"),
        partial_index("ix_written_records_leased", "leased_until", where="leased_until IS NOT NULL"),
    )


class HistoryMark(Table):
    """How many changes one slot of one process's memory has seen acknowledged (`db/engine.py`). Each process writes its
    own, and a copy of the numbers lies beside the data."""

    __tablename__ = "history_marks"
    memory_id: Mapped[str] = mapped_column(Text, primary_key=True)
    slot: Mapped[int] = mapped_column(Integer, primary_key=True)
    number: Mapped[int] = mapped_column(BigInteger)
    moved_at: Mapped[datetime] = mapped_column(Moment)


class RebuildDoubt(Table):
    """What a rebuild could not know, by the names of project and run (lineage/restore_choice.py says what an empty one
    stands for). `reason` null: nothing, or a person has confirmed that nothing is missing. Empty in a catalog that was
    never rebuilt; names, because what is in doubt may have no row."""

    __tablename__ = "rebuild_doubts"
    project: Mapped[str] = mapped_column(Text, primary_key=True)
    run: Mapped[str] = mapped_column(Text, primary_key=True)
    reason: Mapped[str | None] = mapped_column(Text)


class FoundEncoding(Table):
    """Only while a catalog is rebuilt: how an object of this size holds this chunk, as the records tell it. The store's
    listing, which comes afterwards, knows sizes and no codecs."""

    __tablename__ = "found_encodings"
    project_id: Mapped[str] = mapped_column(Text, primary_key=True)
    digest: Mapped[str] = mapped_column(Digest, primary_key=True)
    stored_bytes: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    codec: Mapped[str] = mapped_column(Text)
    stored_digest: Mapped[str] = mapped_column(Digest)
