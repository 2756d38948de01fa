"""A role of Postgres that sees the views, and nothing else: for a dashboard tool, or a person with psql.

It may select from the views. Which projects it sees is in the table `dashboard_grants`, which the views ask by the
role's name. All is one transaction. At its end it is asked what the role can reach, and whatever is more takes all of
it back.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from holdfast_service.audit.record import Actor, record_event
from holdfast_service.dashboards.views import all_views, grant_views
from holdfast_service.db.engine import Database
from holdfast_service.db.tables import Table
from holdfast_service.db.tables.core import Project
from holdfast_service.db.tables.operations import DashboardGrant

EVERY = "*"
"""In place of projects' names."""
_EVERY_ID = ""
_SHORTEST_PASSWORD = 12
# What may stand in a statement without another thought. Postgres keeps names with pg_ for itself.
_NAME = re.compile(r"^(?!pg_)[a-z_][a-z0-9_]{0,62}\Z")
_MOST_CONNECTIONS = 20
_LIMITS = {
    "default_transaction_read_only": "on",
    "statement_timeout": "60s",
    "idle_in_transaction_session_timeout": "60s",
}
"""A dashboard that hangs must not keep the catalog from cleaning up, or from the next upgrade."""


class DashboardRoleError(Exception):
    """Nothing was changed. The message says why, and what to do."""


@dataclass(frozen=True)
class DashboardRole:
    """`projects`: by name; EVERY alone: all. `password`: the new one, if it has got one. `url`: to connect with,
    without it."""

    name: str
    is_new: bool
    projects: Sequence[str]
    password: str | None
    url: str


def put_role(
    database: Database,
    name: str,
    *,
    projects: Sequence[str] = (),
    every_project: bool = False,
    password: str | None = None,
    new_password: bool = False,
) -> DashboardRole:
    """Makes the role, or changes the one that this command has made. A new one without `projects` sees every project;
    one that is there keeps what it sees unless `projects` or `every_project` is given, and its password unless
    `password` or `new_password` is. Raises DashboardRoleError."""
    _check_name(database, name)
    if password is not None and len(password) < _SHORTEST_PASSWORD:
        raise DashboardRoleError(f"The password is too short. Give one of {_SHORTEST_PASSWORD} characters or more.")
    with _refusals_told(name), database.transaction() as session:
        is_there, before = _exists(session, name), _seen(session, name)
        if is_there and before is None:
            raise DashboardRoleError(
                f"The server has a role {name!r} that `holdfast admin dashboard-role` has not made for this catalog. "
                "Take another name, or drop that one if nobody needs it."
            )
        if password is None and (new_password or not is_there):
            password = secrets.token_urlsafe(24)
        if not is_there:
            _run(session, f'CREATE ROLE "{name}" LOGIN')
        _run(session, f'ALTER ROLE "{name}" CONNECTION LIMIT {_MOST_CONNECTIONS}')
        for setting, value in _LIMITS.items():
            _run(session, f"ALTER ROLE \"{name}\" SET {setting} = '{value}'")
        if password is not None:
            # As the server keeps it: what is sent can stand in its log.
            _run(session, f"ALTER ROLE \"{name}\" PASSWORD '{_verifier(session, name, password)}'")
        # A catalog that came from a dump knows roles that its server does not: they see what they saw.
        if projects or every_project or before is None:
            _grant_projects(session, name, projects)
        _open_the_way(session, name)
        grant_views(session.connection(), name)
        _refuse_more(session, name)
        seen = _seen(session, name) or []
        after = {"role": name, "projects": seen, "new_password": password is not None}
        record_event(session, Actor.at_the_database(), "dashboard_role.put", before={"projects": before}, after=after)
    url = database.url.set(drivername="postgresql", username=name, password=None)
    return DashboardRole(name, not is_there, seen, password, url.render_as_string())


def remove_role(database: Database, name: str) -> None:
    """Raises DashboardRoleError."""
    _check_name(database, name)
    with _refusals_told(name), database.transaction() as session:
        before = _seen(session, name)
        if before is None:
            raise DashboardRoleError(f"`holdfast admin dashboard-role` has made no role {name!r} for this catalog.")
        session.execute(delete(DashboardGrant).where(DashboardGrant.role_name == name))
        if _exists(session, name):
            views = ", ".join(view.name for view in all_views())
            for what in (views, *(named for _, _, named in _way(session))):
                _run(session, f'REVOKE ALL ON {what} FROM "{name}"')
            _run(session, f'DROP ROLE "{name}"')
        gone = {"role": name, "projects": before}
        record_event(session, Actor.at_the_database(), "dashboard_role.delete", before=gone)


def _check_name(database: Database, name: str) -> None:
    if not database.is_postgres:
        raise DashboardRoleError(
            "A role needs a catalog on Postgres, and this one is SQLite, which has no roles. The views are there: any "
            "tool that may read the file sees them, with all the other tables. Set HOLDFAST_DATABASE_URL to a Postgres."
        )
    if _NAME.match(name) is None:
        raise DashboardRoleError(
            f"{name!r} is no name for a role. Take lower-case letters, digits and _, at most 63, without pg_ in front."
        )


def _exists(session: Session, name: str) -> bool:
    return session.scalar(text("SELECT 1 FROM pg_roles WHERE rolname = :name"), {"name": name}) is not None


def _seen(session: Session, name: str) -> list[str] | None:
    """The projects that it sees, by name, or by id where there is no row any more. None: this command has not made it
    for this catalog."""
    rows = session.execute(
        select(DashboardGrant.project_id, Project.name)
        .outerjoin(Project, Project.id == DashboardGrant.project_id)
        .where(DashboardGrant.role_name == name)
    ).all()
    if any(row.project_id == _EVERY_ID for row in rows):
        return [EVERY]
    return sorted(row.name or row.project_id for row in rows) or None


def _grant_projects(session: Session, name: str, projects: Sequence[str]) -> None:
    """In place of those before; without any, every project."""
    ids = [_EVERY_ID]
    if projects:
        found = {row.name: row.id for row in session.scalars(select(Project).where(Project.name.in_(projects)))}
        unknown = sorted(set(projects) - set(found))
        if unknown:
            raise DashboardRoleError(
                f"There is no project {unknown[0]!r}. Correct the name; `holdfast projects list` lists them."
            )
        ids = sorted(found.values())
    session.execute(delete(DashboardGrant).where(DashboardGrant.role_name == name))
    session.add_all(DashboardGrant(role_name=name, project_id=each) for each in ids)
    session.flush()


def _way(session: Session) -> list[tuple[str, str, str]]:
    """What must be open before a view can be read: the right, what it is of, and that by its name."""
    database, schema = session.execute(
        text("SELECT quote_ident(current_database()), quote_ident(current_schema())")
    ).one()
    return [("CONNECT", "database", f"DATABASE {database}"), ("USAGE", "schema", f"SCHEMA {schema}")]


def _open_the_way(session: Session, name: str) -> None:
    """Where the server's own rule for everybody does not."""
    for right, of, named in _way(session):
        asked = text(f"SELECT has_{of}_privilege(:name, current_{of}(), :right)")
        if not session.scalar(asked, {"name": name, "right": right}):
            _run(session, f'GRANT {right} ON {named} TO "{name}"')


def _run(session: Session, statement: str) -> None:
    """What takes no parameters. The role's name in it has passed `_NAME`."""
    session.connection().exec_driver_sql(statement)


def _verifier(session: Session, name: str, password: str) -> str:
    """SCRAM-SHA-256; made here, by libpq."""
    raw: Any = session.connection().connection.dbapi_connection
    made: bytes = raw.pgconn.encrypt_password(password.encode(), name.encode(), b"scram-sha-256")
    return made.decode()


_REACHED = text("""
SELECT CASE
  WHEN r.rolsuper THEN 'is a superuser'
  WHEN EXISTS (SELECT 1 FROM pg_auth_members m WHERE m.member = r.oid) THEN 'is a member of another role'
  WHEN has_schema_privilege(r.oid, current_schema(), 'CREATE') THEN 'may make tables and functions in the schema'
  ELSE (
    SELECT 'may use the table ' || c.relname FROM pg_class c
    WHERE c.relname = ANY(:tables) AND c.relkind IN ('r', 'p') AND pg_table_is_visible(c.oid) AND (
      has_table_privilege(r.oid, c.oid, 'SELECT, INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER')
      OR has_any_column_privilege(r.oid, c.oid, 'SELECT, INSERT, UPDATE, REFERENCES')
    ) ORDER BY c.relname LIMIT 1
  ) END
FROM pg_roles r WHERE r.rolname = :name
""")


def _refuse_more(session: Session, name: str) -> None:
    """A role has what its server gives to everybody (PUBLIC) as well, or a person has given it more."""
    told = session.scalar(_REACHED, {"name": name, "tables": list(Table.metadata.tables)})
    if told is not None:
        raise DashboardRoleError(
            f"The role would see more than the views: it {told}. Nothing was changed. Take that from the role, or from "
            "PUBLIC, which every role is: `REVOKE CREATE ON SCHEMA public FROM PUBLIC`, `REVOKE ALL ON … FROM PUBLIC`."
        )


@contextmanager
def _refusals_told(name: str) -> Iterator[None]:
    """What the server refuses, as a sentence."""
    try:
        yield
    except DBAPIError as error:
        state = getattr(error.orig, "sqlstate", None)
        if state == "42501":
            raise DashboardRoleError(
                "The database lets this user make or change no role. Name one that may in HOLDFAST_DATABASE_URL or "
                "`--database-url` for this command: an administrator, or the service's own after `ALTER ROLE … "
                "CREATEROLE`."
            ) from None
        if state == "2BP01":
            raise DashboardRoleError(
                f"The role {name!r} has rights or owns something besides the views, so it was not removed. Take these "
                f'away first: `REASSIGN OWNED BY "{name}" TO …`, `DROP OWNED BY "{name}"`.'
            ) from None
        raise
