"""Revisions that come after the newest one, so that a test or a benchmark has something to migrate: a column of a big
table that may be null, and an index of it that is made concurrently."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import holdfast_service.db.migrate as migrate

_REVISION = '''"""{title}

Revision: {revision}. Of a trial.
"""

import sqlalchemy as sa
from alembic import op

from holdfast_service.db import online

revision = "{revision}"
down_revision = "{before}"
branch_labels = None
depends_on = None


def upgrade() -> None:
    {work}
'''
COLUMN = 'op.add_column("checkpoints", sa.Column("trial", sa.Integer(), nullable=True))'
INDEX = 'online.create_index("ix_checkpoints_trial", "checkpoints", ["run_id", "trial", "step"])'


@contextmanager
def later_revisions(folder: Path, *works: str) -> Iterator[list[str]]:
    """In this process the migrations are a copy in `folder` with one more for each of `works`; their names."""
    newest = migrate._newest_revision()
    copied = folder / "migrations"
    shutil.copytree(migrate.migrations_folder(), copied, ignore=shutil.ignore_patterns("__pycache__"))
    names = [f"trial_{number}" for number in range(1, len(works) + 1)]
    for name, before, work in zip(names, [newest, *names], works, strict=False):
        script = _REVISION.format(title=f"The trial {name}", revision=name, before=before, work=work)
        (copied / "versions" / f"{name}.py").write_text(script)
    with mock.patch.object(migrate, "migrations_folder", return_value=copied):
        migrate._known_revisions.cache_clear()
        try:
            yield names
        finally:
            migrate._known_revisions.cache_clear()
