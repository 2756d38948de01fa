"""When nothing is at work any more: what is still on the way, and what has leaked. It asks the database and the stores
themselves, so that no part judges itself; the soak and the Jepsen trial end with it."""

from __future__ import annotations

import time
from collections import Counter
from datetime import UTC, datetime, timedelta

from sqlalchemy import ColumnElement, exists, func, select
from sqlalchemy.orm import Session

from holdfast_client.client import Client
from holdfast_protocol.states import CheckpointState, CopyState
from holdfast_protocol.stores import StartSweep, SweepReport
from holdfast_service.context import ServiceContext
from holdfast_service.db.tables.core import Checkpoint, Chunk, ChunkListEntry, Copy, Project, ReadLease, Shard
from holdfast_service.db.tables.operations import Operation

_POLL_SECONDS = 1.0
KEPT = (CheckpointState.COMMITTED, CheckpointState.TRASHED)
_ON_THE_WAY = (CopyState.PENDING, CopyState.COPYING, CopyState.DELETING, CopyState.SUSPECT)


class Quiet:
    """`context` is a service's of its own, on the same catalog and stores; it runs no controllers."""

    def __init__(self, client: Client, context: ServiceContext, facts: Counter[str]) -> None:
        self._client = client
        self._context = context
        self._facts = facts

    def wait(self, retry_deadline_seconds: float) -> list[str]:
        """What is still on the way after that time; nothing if all has come to its end."""
        deadline = time.monotonic() + retry_deadline_seconds
        while True:
            left = self.on_the_way()
            if not left or time.monotonic() > deadline:
                return left
            self._client.operations.wait(self._client.collections.start().id, timeout_seconds=60)
            time.sleep(_POLL_SECONDS)

    def on_the_way(self) -> list[str]:
        """A sentence for each kind; nothing if all has come to its end."""
        with self._context.database.read() as session:
            counts = {
                "checkpoints that upload or are being deleted": select(func.count()).where(
                    Checkpoint.state.in_((CheckpointState.UPLOADING, CheckpointState.DELETING))
                ),
                "checkpoints whose purge is due": select(func.count()).where(
                    Checkpoint.state == CheckpointState.TRASHED, Checkpoint.purge_at <= datetime.now(UTC)
                ),
                "checkpoints that are over and still refer to chunks": select(func.count()).where(
                    Checkpoint.state.in_((CheckpointState.ABORTED, CheckpointState.DELETED)),
                    Checkpoint.forgotten_at.is_(None),
                ),
                "copies that are pending, copying, suspect or deleting": select(func.count()).where(
                    Copy.state.in_(_ON_THE_WAY)
                ),
                "copies with a lease": select(func.count()).where(Copy.leased_until > func.now()),
                "copies that nothing needs": select(func.count()).where(
                    Copy.state.not_in((CopyState.GONE, *_ON_THE_WAY)), ~self._needed(), ~self._waits_out_a_jump()
                ),
                "leases on reading": select(func.count()).where(ReadLease.expires_at > func.now()),
                "operations": select(func.count()).select_from(Operation).where(Operation.ended_at.is_(None)),
            }
            return [f"{count} {what}" for what, query in counts.items() if (count := session.scalar(query))]

    def _waits_out_a_jump(self) -> ColumnElement[bool]:
        """Its ticket is of a database whose clock was ahead: until then a late PUT may land, and it rightly stays."""
        settings = self._context.settings
        longest = timedelta(seconds=settings.ticket_seconds + settings.longest_upload_seconds)
        return Copy.ticket_expires_at > datetime.now(UTC) + longest

    @staticmethod
    def _needed() -> ColumnElement[bool]:
        return exists().where(
            ChunkListEntry.chunk_id == Copy.chunk_id,
            ChunkListEntry.chunk_list_id == Shard.chunk_list_id,
            Shard.checkpoint_id == Checkpoint.id,
            Checkpoint.state.in_(KEPT),
        )

    def leaked(self) -> list[str]:
        """The stores' own listings against the rows, both ways."""
        found = []
        for attached in self._context.stores:
            with self._context.database.read() as session:
                rows = self._rows(session, attached.store_id)
                projects = list(session.scalars(select(Project.id)))
            there = {
                (each.key.project_id, each.key.digest, each.key.generation)
                for project_id in projects
                for each in attached.store.list_objects(project_id)
            }
            self._facts[f"objects in the {attached.role.value} store at the end"] = len(there)
            found += [f"the {attached.role.value} store has {key}, which no row knows" for key in sorted(there - rows)]
            found += [f"the {attached.role.value} store lacks {key}" for key in sorted(rows - there)]
        return found

    @staticmethod
    def _rows(session: Session, store_id: int) -> set[tuple[str, str, str]]:
        return {
            (row.project_id, row.digest, row.generation)
            for row in session.execute(
                select(Copy.project_id, Chunk.digest, Copy.generation)
                .join(Chunk, Chunk.id == Copy.chunk_id)
                .where(Copy.store_id == store_id, Copy.state != CopyState.GONE)
            )
        }

    def swept(self) -> list[str]:
        """The service's own sweep must find the same: nothing."""
        view = self._client.operations.wait(self._client.sweeps.start(StartSweep(dry_run=True)).id, timeout_seconds=60)
        if view.error:
            return [f"the last sweep failed: {view.error}"]
        report = SweepReport.model_validate(view.result)
        return [
            f"a sweep finds {one.orphans} orphans in the {one.store.value} store"
            for one in report.stores
            if one.orphans
        ]
