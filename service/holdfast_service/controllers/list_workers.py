"""The processes that serve or work now, and those that fell silent without a good-bye within the last day."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import select

from holdfast_protocol.controllers import WorkerView
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.custody_tables import Worker
from holdfast_service.catalog.processes import SILENT_AFTER
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext

_SHOWN_FOR = timedelta(days=1)


def list_workers(context: ServiceContext, caller: Principal) -> list[WorkerView]:
    """Raises `forbidden` for a project's token."""
    caller.check_every_project()
    with context.database.read() as session:
        now = database_now(session)
        rows = session.scalars(
            select(Worker)
            .where(Worker.ended_at.is_(None), Worker.seen_at > now - _SHOWN_FOR)
            .order_by(Worker.started_at, Worker.id)
        ).all()
    return [
        WorkerView(
            id=row.id,
            kind="serve" if row.kind == "serve" else "worker",
            host=row.host,
            pid=row.pid,
            version=row.version,
            started_at=row.started_at,
            seen_at=row.seen_at,
            silent=now - row.seen_at > SILENT_AFTER,
            stores=row.stores,
            done=row.done,
        )
        for row in rows
    ]
