"""A role of Postgres that sees the views, and nothing else: for a dashboard tool, or a person with psql.

It may select from the views. Which projects it sees is in the table `dashboard_grants`, which the views ask by the
role's name. Those rows travel with a dump, and roles belong to the server: a comment on the role says which catalog it
was made for, and this command touches no other role. All is one transaction. At its end the command asks the server
what the role can reach. If that is more than the views, or less, nothing stays.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import URL, delete, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from holdfast_service.audit.record import Actor, record_event
from holdfast_service.dashboards.views import ROLE_MARK, all_views, grant_views, missing_views
from holdfast_service.db.engine import Database
from holdfast_service.db.migrate import revisions
from holdfast_service.db.tables.core import CatalogIdentity, Project
from holdfast_service.db.tables.operations import DashboardGrant

EVERY = "*"
"""In place of projects' names."""
_EVERY_ID = ""
_SHORTEST_PASSWORD = 12
# duplicate_object, unique_violation, and "tuple concurrently updated" or "deleted", which has no state of its own
_AT_ONCE = {"42710", "23505", "XX000"}
# What may stand in a statement without another thought. Postgres keeps names with pg_ and these two for itself.
_NAME = re.compile(r"^(?!pg_|public\Z|none\Z)[a-z_][a-z0-9_]{0,62}\Z")
_MOST_CONNECTIONS = 20
_LIMITS = {
    "default_transaction_read_only": "on",
    "statement_timeout": "60s",
    "idle_in_transaction_session_timeout": "60s",
    "timezone": "UTC",
}
"""A dashboard that hangs must not keep the catalog from cleaning up, or from the next upgrade. These are defaults: the
role can change them for its own sessions. Set when the role is made, and then left to the operator."""
_URL_OPTIONS = ("host", "port", "dbname", "sslmode", "sslrootcert")
NEEDS_POSTGRES = (
    "A role needs a catalog on Postgres, and this one is SQLite, which has no roles. The views are there: any tool "
    "that may read the file sees them, with all the other tables. Set HOLDFAST_DATABASE_URL to a Postgres."
)


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
    one that is there keeps what it sees unless `projects` or `every_project` is given, its password unless `password`
    or `new_password` is, and its settings always. Raises DashboardRoleError."""
    _check_name(database, name)
    if password is not None and len(password) < _SHORTEST_PASSWORD:
        raise DashboardRoleError(f"The password is too short. Give one of {_SHORTEST_PASSWORD} characters or more.")
    with _refusals_told(name), database.transaction() as session:
        mark = _check_catalog(session)
        is_there, before = _is_ours(session, name, mark), _seen(session, name)
        if is_there and before is None and not (projects or every_project):
            raise DashboardRoleError(
                f"The role {name!r} is there, and this catalog does not know which projects it may see. Name them with "
                "`--project`, or say `--every-project`."
            )
        if password is None and (new_password or not is_there):
            password = secrets.token_urlsafe(24)
        if not is_there:
            _make_role(session, name, mark)
        if password is not None:
            # As the server keeps it: what is sent can stand in its log.
            _run(session, f"ALTER ROLE \"{name}\" PASSWORD '{_verifier(session, name, password)}'")
        # A catalog that came from a dump knows roles that its server does not: they see what they saw.
        chosen = bool(projects or every_project or before is None)
        if chosen:
            _grant_projects(session, name, projects)
        _open_the_way(session, name)
        grant_views(session.connection(), name)
        _refuse_more(session, name)
        _refuse_less(session, name)
        seen = _seen(session, name) or []
        if not is_there or chosen or password is not None:
            after = {"role": name, "projects": seen, "new_password": password is not None}
            record_event(
                session, Actor.at_the_database(), "dashboard_role.put", before={"projects": before}, after=after
            )
    return DashboardRole(name, not is_there, seen, password, _url(database, name))


def remove_role(database: Database, name: str) -> bool:
    """Whether the role is gone from the server. False: it is a superuser or a member of another role by now, which
    this command did not make it. Then the catalog shows it nothing any more, and the role stays. Raises
    DashboardRoleError."""
    _check_name(database, name)
    with _refusals_told(name), database.transaction() as session:
        mark = _check_catalog(session)
        is_there, before = _is_ours(session, name, mark), _seen(session, name)
        if before is None and not is_there:
            raise DashboardRoleError(f"`holdfast admin dashboard-role` has made no role {name!r} for this catalog.")
        session.execute(delete(DashboardGrant).where(DashboardGrant.role_name == name))
        dropped = not is_there or not session.scalar(_IS_MORE, {"name": name})
        if is_there and dropped:
            views = ", ".join(view.name for view in all_views())
            for what in (views, *(named for _, _, named in _way(session))):
                _run(session, f'REVOKE ALL ON {what} FROM "{name}"')
            _run(session, f'DROP ROLE "{name}"')
        gone = {"role": name, "projects": before, "dropped": dropped}
        record_event(session, Actor.at_the_database(), "dashboard_role.delete", before=gone)
    return dropped


def _check_name(database: Database, name: str) -> None:
    if not database.is_postgres:
        raise DashboardRoleError(NEEDS_POSTGRES)
    if _NAME.match(name) is None:
        raise DashboardRoleError(
            f"{name!r} is no name for a role. Take lower-case letters, digits and _, at most 63, without pg_ in front. "
            "`public` and `none` are the server's own words."
        )


def _check_catalog(session: Session) -> str:
    """The comment that a role of this catalog has. This command makes no tables: what an upgrade makes would belong to
    the administrator who runs it, and the service could not use it."""
    current, newest = revisions(session.connection())
    catalog_id = session.scalar(select(CatalogIdentity.catalog_id)) if current == newest else None
    if current is None or (current == newest and catalog_id is None):
        raise DashboardRoleError(
            "There is no catalog in this database. Correct HOLDFAST_DATABASE_URL or `--database-url`, or start the "
            "service first, which makes it. Nothing was changed."
        )
    if current != newest:
        raise DashboardRoleError(
            f"The catalog is at revision {current}, and this version of Holdfast works with {newest}. Start the "
            "service of this version first, which brings an older catalog up to date; or run the command of the "
            "service's version. Nothing was changed."
        )
    missing = missing_views(session.connection())
    if missing:
        raise DashboardRoleError(
            f"The catalog lacks the view {missing[0]}. Start the service, which makes it. Nothing was changed."
        )
    return f"{ROLE_MARK}{catalog_id}"


def _is_ours(session: Session, name: str, mark: str) -> bool:
    """Whether the server has this role. Raises DashboardRoleError if it has one that was not made for this catalog."""
    comments = session.scalars(
        text("SELECT shobj_description(oid, 'pg_authid') FROM pg_roles WHERE rolname = :name"), {"name": name}
    ).all()
    if comments and comments[0] != mark:
        raise DashboardRoleError(
            f"The server has a role {name!r} that `holdfast admin dashboard-role` has not made for this catalog: its "
            f"comment is not {mark!r}. Nothing was changed. Take another name, or drop that role if nobody needs it."
        )
    return bool(comments)


def _make_role(session: Session, name: str, mark: str) -> None:
    _run(session, f'CREATE ROLE "{name}" LOGIN CONNECTION LIMIT {_MOST_CONNECTIONS}')
    _run(session, f"COMMENT ON ROLE \"{name}\" IS '{mark}'")
    for setting, value in _LIMITS.items():
        _run(session, f"ALTER ROLE \"{name}\" SET {setting} = '{value}'")


def _url(database: Database, name: str) -> str:
    """To connect with: nothing else of the service's URL, which may hold its password or its key."""
    url = database.url
    query = {each: url.query[each] for each in _URL_OPTIONS if each in url.query}
    return URL.create("postgresql", name, None, url.host, url.port, url.database, query).render_as_string()


def _seen(session: Session, name: str) -> list[str] | None:
    """The projects that it sees, by name, or by id if the project has no row any more. None: the catalog has no grant
    of this role."""
    rows = session.execute(
        select(DashboardGrant.project_id, Project.name)
        .outerjoin(Project, Project.id == DashboardGrant.project_id)
        .where(DashboardGrant.role_name == name)
    ).all()
    if any(row.project_id == _EVERY_ID for row in rows):
        return [EVERY]
    return sorted(row.name or row.project_id for row in rows) or None


def _grant_projects(session: Session, name: str, projects: Sequence[str]) -> None:
    """These in place of the projects before; every project if none is named."""
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
    """If PUBLIC has not opened it. A user without the right to grant gets a warning alone: `_refuse_less` asks."""
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


_NOT_OF_THE_SYSTEM = "n.nspname !~ '^pg_' AND n.nspname <> 'information_schema'"
_MEMBER = "EXISTS (SELECT 1 FROM pg_auth_members m WHERE m.member = r.oid)"
_IS_MORE = text(f"SELECT r.rolsuper OR {_MEMBER} FROM pg_roles r WHERE r.rolname = :name")
# What belongs to an extension is left out: pg_stat_statements and PostGIS show parts of theirs to everybody.
_REACHED = text(f"""
SELECT CASE
  WHEN r.rolsuper THEN 'is a superuser'
  WHEN {_MEMBER} THEN 'is a member of another role'
  WHEN r.rolreplication THEN 'can copy the whole server (REPLICATION)'
  WHEN r.rolcreaterole THEN 'can make roles (CREATEROLE)'
  WHEN r.rolcreatedb THEN 'can make databases (CREATEDB)'
  WHEN r.rolbypassrls THEN 'passes by row-level security (BYPASSRLS)'
  WHEN has_database_privilege(r.oid, current_database(), 'CREATE')
  THEN 'can make schemas (CREATE on the database ' || current_database() || ')'
  ELSE COALESCE((
    SELECT 'can make tables and functions (CREATE on the schema ' || n.nspname || ')' FROM pg_namespace n
    WHERE {_NOT_OF_THE_SYSTEM} AND has_schema_privilege(r.oid, n.oid, 'CREATE') ORDER BY n.nspname LIMIT 1
  ), (
    SELECT 'can use ' || CAST(CAST(c.oid AS regclass) AS text) FROM pg_class c
    JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE {_NOT_OF_THE_SYSTEM} AND has_schema_privilege(r.oid, n.oid, 'USAGE')
      AND NOT (n.nspname = current_schema() AND c.relname = ANY(:views))
      AND NOT EXISTS (
        SELECT 1 FROM pg_depend d
        WHERE d.classid = CAST('pg_class' AS regclass) AND d.objid = c.oid AND d.deptype = 'e'
      )
      AND CASE
        WHEN c.relkind = 'S' THEN has_sequence_privilege(r.oid, c.oid, 'USAGE, SELECT, UPDATE')
        WHEN c.relkind IN ('r', 'p', 'v', 'm', 'f') THEN
          has_table_privilege(r.oid, c.oid, 'SELECT, INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER')
          OR has_any_column_privilege(r.oid, c.oid, 'SELECT, INSERT, UPDATE, REFERENCES')
        ELSE false END
    ORDER BY c.relname LIMIT 1
  )) END
FROM pg_roles r WHERE r.rolname = :name
""")
_LACKED = text("""
SELECT CASE
  WHEN NOT r.rolcanlogin THEN 'LOGIN'
  WHEN NOT has_database_privilege(r.oid, current_database(), 'CONNECT')
  THEN 'CONNECT on the database ' || current_database()
  WHEN NOT has_schema_privilege(r.oid, current_schema(), 'USAGE') THEN 'USAGE on the schema ' || current_schema()
  ELSE (
    SELECT 'SELECT on ' || c.relname FROM pg_class c
    WHERE c.relnamespace = CAST(quote_ident(current_schema()) AS regnamespace) AND c.relname = ANY(:views)
      AND NOT has_table_privilege(r.oid, c.oid, 'SELECT') ORDER BY c.relname LIMIT 1
  ) END
FROM pg_roles r WHERE r.rolname = :name
""")


def _refuse_more(session: Session, name: str) -> None:
    """A role has what its server gives to everybody (PUBLIC) as well, or a person has given it more."""
    told = session.scalar(_REACHED, {"name": name, "views": [view.name for view in all_views()]})
    if told is not None:
        raise DashboardRoleError(
            f"The role would see more than the views: it {told}. Nothing was changed. Take that from the role, or from "
            "PUBLIC, which every role is: `REVOKE CREATE ON SCHEMA public FROM PUBLIC`, `REVOKE ALL ON … FROM PUBLIC`."
        )


def _refuse_less(session: Session, name: str) -> None:
    """The server answers a grant that this user may not give with a warning, and does nothing."""
    told = session.scalar(_LACKED, {"name": name, "views": [view.name for view in all_views()]})
    if told is not None:
        raise DashboardRoleError(
            f"The role would lack {told}, and this user cannot give it. Nothing was changed. Name the owner of the "
            "database and the views, or an administrator, in HOLDFAST_DATABASE_URL or `--database-url`."
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
                f"The database refuses this user: {_reason(error)}. Nothing was changed. Name a user that may make "
                "roles and grant the views in HOLDFAST_DATABASE_URL or `--database-url` for this command: an "
                "administrator, or the service's own after `ALTER ROLE … CREATEROLE`."
            ) from None
        if state in _AT_ONCE:
            raise DashboardRoleError(
                f"Another command changed the role {name!r} at the same time ({_reason(error)}). Nothing was changed. "
                "Try again."
            ) from None
        if state == "2BP01":
            raise DashboardRoleError(
                f"The role {name!r} has rights or owns something besides the views, so it was not removed. Take these "
                f'away first: `REASSIGN OWNED BY "{name}" TO …`, `DROP OWNED BY "{name}"`.'
            ) from None
        raise


def _reason(error: DBAPIError) -> str:
    return str(error.orig).strip().splitlines()[0]
