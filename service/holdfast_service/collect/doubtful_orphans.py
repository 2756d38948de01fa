"""When orphans are more likely another's than nobody's: then a sweep deletes nothing, unless it is forced (rules
fencing-token and rebuild-doubts)."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta

from sqlalchemy import func, select, text

from holdfast_service.context import ServiceContext
from holdfast_service.db.tables.core import Attempt, Checkpoint, Project, Run, Shard
from holdfast_service.runs.views import WHOLE
from holdfast_service.stores.base import StoredObject
from holdfast_service.training.fencing import heartbeat_interval


def why_unknown(context: ServiceContext, project_ids: Collection[str]) -> str | None:
    """A sentence where a rebuild brought a checkpoint of these projects back without all of its chunk lists: none of
    its chunks may have a row."""
    listed = select(func.count()).where(Shard.checkpoint_id == Checkpoint.id, Shard.chunk_list_id.is_not(None))
    with context.database.read() as session:
        found = session.execute(
            select(Checkpoint.id, Run.name, Project.name)
            .join(Run, Run.id == Checkpoint.run_id)
            .join(Project, Project.id == Run.project_id)
            .where(
                # The text of the partial index, so that it is used.
                text("health = 'corrupt'"),
                Checkpoint.state.in_(WHOLE),
                Run.project_id.in_(project_ids),
                listed.scalar_subquery() < Checkpoint.world_size,
            )
            .order_by(Checkpoint.id)
            .limit(1)
        ).first()
    if found is None:
        return None
    checkpoint_id, run, project = found
    return (
        f"The checkpoint {checkpoint_id} of {project}/{run} is back from a rebuild without all of its chunk lists, so "
        "what looks like orphans may be its chunks, and nothing was deleted. Rebuild with another store that has its "
        "records, or delete the checkpoint; an administrator may sweep with --force."
    )


def why_anothers(context: ServiceContext, orphans: Collection[StoredObject]) -> str | None:
    """A sentence where one of the orphans is younger than any ticket of this database allows: jobs of another one save
    into the store. The catalog was moved, say, and a worker of the old database runs on.

    A ticket is given in a call of a job, and each call beats for its attempt.
    """
    youngest = max((each.modified_at for each in orphans), default=None)
    with context.database.read() as session:
        called_at = session.scalar(select(func.max(func.coalesce(Attempt.heartbeat_at, Attempt.opened_at))))
    settings = context.settings
    longest = heartbeat_interval(settings) + timedelta(
        seconds=settings.ticket_seconds + settings.longest_upload_seconds
    )
    if youngest is None or called_at is None or youngest <= called_at + longest:
        return None
    return (
        f"An object that no row knows was written at {youngest:%Y-%m-%d %H:%M} UTC, and the last call of a job was at "
        f"{called_at:%Y-%m-%d %H:%M} UTC: jobs of another database save into this store, and nothing was deleted. End "
        "the processes of the database that is the catalog no more. If there is no other (this one was restored), wait "
        "for the next save of a job; an administrator may sweep with --force."
    )
