"""Where the database's settings can lose a commit that it has acknowledged: said at the start and by /readyz.

Nothing is refused: a failover that has lost something is noticed all the same (`went_back.py`), and then costs an
operator's time and the checkpoints of the last moments.
"""

from __future__ import annotations

from sqlalchemy import text

from holdfast_service.database import Database

_SETTINGS = text(
    "SELECT name, setting FROM pg_settings WHERE name IN "
    "('fsync', 'full_page_writes', 'synchronous_commit', 'synchronous_standby_names')"
)
# How many there are is told to everybody; who they are is not.
_REPLICAS = text("SELECT count(*) FROM pg_stat_replication")


def what_can_be_lost(database: Database) -> list[str]:
    """A sentence for each setting, with what to set. Empty on SQLite, which writes through. Raises ProblemError."""
    if not database.is_postgres:
        return []
    with database.read() as session:
        settings = {row.name: row.setting for row in session.execute(_SETTINGS)}
        replicas = session.execute(_REPLICAS).scalar_one()
    return lossy_settings(settings, replicas)


def lossy_settings(settings: dict[str, str], replicas: int) -> list[str]:
    """Pure."""
    told = []
    if settings.get("fsync") == "off":
        told.append("fsync is off: a crash of its machine can lose acknowledged commits and damage the database.")
    if settings.get("full_page_writes") == "off":
        told.append("full_page_writes is off: a crash of its machine can damage the database.")
    commit = settings.get("synchronous_commit")
    if commit == "off":
        told.append("synchronous_commit is off: a crash of Postgres loses the last acknowledged commits. Set it to on.")
    elif replicas and (commit == "local" or not settings.get("synchronous_standby_names")):
        told.append(
            "It has a replica that no commit waits for: a failover to it loses the last acknowledged commits. Name it "
            "in synchronous_standby_names, with synchronous_commit on."
        )
    return told
