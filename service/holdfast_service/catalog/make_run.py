"""Makes projects and runs where they are not there yet; the same again gives the row that is there.

Only who made it is written down as its maker: of two at once, one. What is in the trash is refused by its name.
"""

from __future__ import annotations

import uuid

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_service.catalog.audit import Actor, record_event
from holdfast_service.catalog.insert import insert_absent
from holdfast_service.catalog.record_names import RecordKind
from holdfast_service.catalog.record_outbox import subject_changed
from holdfast_service.catalog.resolve import refuse_if_deleted
from holdfast_service.catalog.tables import Project, Run
from holdfast_service.clock import database_now


def ensure_project(session: Session, name: str, actor: Actor) -> Project:
    project_id = uuid.uuid4().hex
    row = {"id": project_id, "name": name, "quota_bytes": None, "created_at": database_now(session)}
    insert_absent(session, Project, [row])
    project = session.execute(select(Project).where(Project.name == name)).scalar_one()
    refuse_if_deleted(project)
    if project.id == project_id:
        record_event(session, actor, "project.create", project_id=project_id, after={"name": name})
        subject_changed(session, RecordKind.PROJECT, project_id, project_id)
    return project


def ensure_run(session: Session, project: Project, name: str, actor: Actor) -> Run:
    run_id = uuid.uuid4().hex
    row = {
        "id": run_id,
        "project_id": project.id,
        "name": name,
        "latest_attempt": 0,
        "created_at": database_now(session),
    }
    insert_absent(session, Run, [row])
    run = session.execute(select(Run).where(Run.project_id == project.id, Run.name == name)).scalar_one()
    # The insert has waited for whoever deletes the project, whose rows are read anew.
    session.refresh(project)
    refuse_if_deleted(project, run)
    if run.id == run_id:
        record_event(session, actor, "run.create", project_id=project.id, run_id=run_id, after={"name": name})
        subject_changed(session, RecordKind.RUN, run_id, project.id)
    return run
