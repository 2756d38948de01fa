"""A service with two stores, and a run whose chunks are collected."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import select

from holdfast_service.db.tables.core import Project
from holdfast_service.settings import ServiceSettings
from tests.support.rank import Job
from tests.support.service import RunningService


@pytest.fixture
def settings(settings: ServiceSettings, tmp_path: Path) -> ServiceSettings:
    return settings.model_copy(update={"second_store": f"posix://{tmp_path / 'second'}"})


@pytest.fixture
def job(service: RunningService) -> Job:
    return Job(service.http())


@pytest.fixture
def project_id(job: Job, service: RunningService) -> str:
    with service.context.database.read() as session:
        return str(session.execute(select(Project.id)).scalar_one())
