"""What a record says against what the catalog says, field by field (protocol rule 42).

What never changes of a commit has to be the same in every version of its record, and in its manifest. The rest has to
be the same where record and row have the same version: what the service did not change keeps its version.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_service.catalog.record_content import checkpoint_record, gone_suffix, project_record, run_record
from holdfast_service.catalog.record_documents import (
    CheckpointFacts,
    CheckpointRecord,
    HoldFacts,
    ManifestRecord,
    ProjectFacts,
    ProjectRecord,
    RunFacts,
    RunRecord,
)
from holdfast_service.catalog.record_writing import RECORDED_STATES
from holdfast_service.catalog.tables import Checkpoint, Shard
from holdfast_service.context import ServiceContext

_LONGEST_SHOWN = 120
# With the version. Not what says where its chunks lie: that follows the copies.
_WITH_THE_VERSION = (
    "state",
    "health",
    "health_reason",
    "labels",
    "pinned_at",
    "pinned_by",
    "pin_reason",
    "pinned_until",
    "trashed_at",
    "trashed_by",
    "trash_reason",
    "purge_at",
)
# The store's own lock is told later, and by itself.
_OF_A_HOLD = tuple(name for name in HoldFacts.model_fields if name != "mirrored_at")


def subject_differences(
    session: Session, context: ServiceContext, document: ProjectRecord | RunRecord, version: int
) -> list[str]:
    """Of a project or a run that the catalog has in this version."""
    fresh: ProjectRecord | RunRecord
    named: dict[str, tuple[Any, Any]] = {}
    if isinstance(document, ProjectRecord):
        fresh = project_record(session, context, document.project.id, version)
        changing: tuple[str, ...] = ("quota_bytes", "policies")
    else:
        fresh = run_record(session, context, document.run.id, version)
        named["run"] = (_as_made(fresh.run), _as_made(document.run))
        changing = ("latest_attempt",)
    named["project"] = (_as_made(fresh.project), _as_made(document.project))
    if version == document.version:
        named |= {name: (getattr(fresh, name), getattr(document, name)) for name in changing}
    return list(_told(named))


def _as_made(named: ProjectFacts | RunFacts) -> tuple[str, str]:
    """The id, and the name without what a purge puts behind it: a run's record is not written again for what becomes
    of its project, and any record may be older than the purge."""
    return named.id, named.name.removesuffix(gone_suffix(named.id))


def checkpoint_differences(
    session: Session, context: ServiceContext, document: CheckpointRecord, manifest: ManifestRecord
) -> list[str]:
    """Of a checkpoint that is committed or in the trash."""
    row = session.get(Checkpoint, document.checkpoint.id)
    if row is None or row.state not in RECORDED_STATES:
        return []
    fresh = checkpoint_record(session, context, row)
    found: dict[str, tuple[Any, Any]] = {}
    for record in (document, manifest):
        found |= _different(
            {
                "project": (fresh.project, record.project),
                "run": (fresh.run, record.run),
                "attempt of the launch": (fresh.attempt.number, record.attempt.number),
            }
            | {
                name: (getattr(fresh.checkpoint, name), getattr(record.checkpoint, name))
                # A record of an earlier version does not know them all.
                for name in CheckpointFacts.model_fields
                if name in record.checkpoint.model_fields_set
            }
        )
    shards = select(Shard.rank, Shard.digest).where(Shard.checkpoint_id == row.id)
    sealed = {each.rank: each.digest for each in session.execute(shards)}
    found["shards"] = (sealed, {each.rank: each.digest for each in manifest.shards})
    if fresh.version == document.version:
        found |= {name: (getattr(fresh, name), getattr(document, name)) for name in _WITH_THE_VERSION}
        found["holds"] = (_holds(fresh.holds), _holds(document.holds))
    return list(_told(found))


def _holds(holds: list[HoldFacts]) -> dict[str, dict[str, Any]]:
    return {each.id: each.model_dump(include=set(_OF_A_HOLD)) for each in holds}


def _different(values: Mapping[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
    return {name: pair for name, pair in values.items() if pair[0] != pair[1]}


def _told(values: Mapping[str, tuple[Any, Any]]) -> Iterator[str]:
    for name, (here, there) in _different(values).items():
        yield f"{name} is {_short(here)} in the catalog and {_short(there)} in its record"


def _short(value: Any) -> str:
    text = "nothing" if value in (None, [], {}) else str(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"
