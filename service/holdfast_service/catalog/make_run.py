"""Makes projects and runs where they are not there yet; the same again gives the row that is there."""

from __future__ import annotations

import uuid

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_service.catalog.insert import insert_absent
from holdfast_service.catalog.tables import Project, Run
from holdfast_service.clock import database_now


def ensure_project(session: Session, name: str) -> Project:
    now = database_now(session)
    insert_absent(session, Project, [{"id": uuid.uuid4().hex, "name": name, "quota_bytes": None, "created_at": now}])
    return session.execute(select(Project).where(Project.name == name)).scalar_one()


def ensure_run(session: Session, project: Project, name: str) -> Run:
    row = {
        "id": uuid.uuid4().hex,
        "project_id": project.id,
        "name": name,
        "latest_attempt": 0,
        "created_at": database_now(session),
    }
    insert_absent(session, Run, [row])
    return session.execute(select(Run).where(Run.project_id == project.id, Run.name == name)).scalar_one()
