"""All views, and how they come into the catalog.

The migrations take them away first and make them last, as they do with triggers, because no database alters a table
freely under a view. So no revision has to know of them. A change here needs a revision, even an empty one, and
tests/service/dashboards/test_dashboard_contract.py says so.
"""

from __future__ import annotations

import re

import structlog
from sqlalchemy import Connection, inspect, text
from sqlalchemy.exc import DBAPIError

from holdfast_service.dashboards.catalog import attempts, checkpoints, events, projects, restore_points, runs
from holdfast_service.dashboards.curves import curve_points
from holdfast_service.dashboards.definition import POSTGRES, SQLITE, Column, Dialect, View
from holdfast_service.dashboards.goodput import attempt_goodput, goodput_by_day
from holdfast_service.dashboards.samples import project_samples, run_samples
from holdfast_service.dashboards.usage_by_day import usage_by_day
from holdfast_service.db.engine import Database
from holdfast_service.db.migrate import exclusive_connection, revisions

_log = structlog.get_logger("holdfast.dashboards")

_MAKERS = (
    projects,
    runs,
    attempts,
    checkpoints,
    restore_points,
    usage_by_day,
    attempt_goodput,
    goodput_by_day,
    events,
    project_samples,
    run_samples,
    curve_points,
)
GRANTS = "dashboard_grants"
ROLE_MARK = "Holdfast dashboards of catalog "
"""With the catalog's id behind it: the comment of a role that `role.py` has made."""
_OURS = re.compile(r"^dashboard_v[0-9]+_")


def all_views(dialect: Dialect = POSTGRES) -> tuple[View, ...]:
    return tuple(make(dialect) for make in _MAKERS)


def missing_views(connection: Connection) -> list[str]:
    there = set(inspect(connection).get_view_names())
    return [view.name for view in all_views() if view.name not in there]


def ensure_views(database: Database) -> None:
    """A catalog that is up to date gets back the views that a person has dropped. A database that refuses that does not
    keep the service from its start: no job needs a view."""
    try:
        with database.read() as session:
            if _are_right(session.connection()):
                return
        with exclusive_connection(database) as connection:
            if not _are_right(connection):
                drop_views(connection)
                create_views(connection)
    except DBAPIError as error:
        _log.warning("views_not_made", reason=str(error.orig).strip().splitlines()[0])


def _are_right(connection: Connection) -> bool:
    """Or not this version's to make: those of a newer catalog are not known here."""
    found, known = revisions(connection)
    return found != known or not missing_views(connection)


def drop_views(connection: Connection) -> None:
    """The views of every version; also if there are none. Views that people have made on top go too, on SQLite every
    view, because it alters no table while any view cannot be read. Their definitions are in the log."""
    is_postgres = connection.dialect.name == "postgresql"
    kept = {view.name for view in all_views()}
    there = [name for name in inspect(connection).get_view_names() if not is_postgres or _OURS.match(name)]
    for name, definition in connection.execute(_ON_TOP, {"names": there}) if is_postgres else connection.execute(_ALL):
        if name not in kept:
            _log.warning("view_on_top_dropped", view=name, definition=definition)
    cascade = " CASCADE" if is_postgres else ""
    quoted = connection.dialect.identifier_preparer.quote_identifier
    for name in there:
        connection.exec_driver_sql(f"DROP VIEW IF EXISTS {quoted(name)}{cascade}")


def create_views(connection: Connection) -> None:
    """On a catalog that has the tables of this version. There must be none of them yet. The roles that people have made
    for dashboards see them at once."""
    dialect = POSTGRES if connection.dialect.name == "postgresql" else SQLITE
    for view in all_views(dialect):
        connection.exec_driver_sql(view.create_statement(dialect))
        if dialect.is_postgres:
            connection.exec_driver_sql("; ".join(_comments(view)))
    if dialect.is_postgres:
        for role in connection.execute(_GRANTED).scalars():
            grant_views(connection, role)


def grant_views(connection: Connection, role: str) -> None:
    """`role` is a name as `role.py` lets it be: it needs no quotes within quotes."""
    names = ", ".join(view.name for view in all_views())
    connection.exec_driver_sql(f'GRANT SELECT ON {names} TO "{role}"')


def meaning_of(column: Column) -> str:
    return f"{column.meaning} In {column.unit}." if column.unit else column.meaning


def _comments(view: View) -> list[str]:
    return [
        f"COMMENT ON VIEW {view.name} IS {_literal(view.row)}",
        *(f"COMMENT ON COLUMN {view.name}.{each.name} IS {_literal(meaning_of(each))}" for each in view.columns),
    ]


def _literal(told: str) -> str:
    return "'" + told.replace("'", "''").replace("%", "%%") + "'"


# Roles belong to the server. A catalog that came from a dump may have grants of roles that its server does not know, or
# that a person has made there for another purpose.
_GRANTED = text(f"""
SELECT DISTINCT g.role_name FROM {GRANTS} g JOIN pg_roles r ON r.rolname = g.role_name
JOIN catalog_identity i ON shobj_description(r.oid, 'pg_authid') = :mark || i.catalog_id ORDER BY 1
""").bindparams(mark=ROLE_MARK)
_ALL = text("SELECT name, sql FROM sqlite_master WHERE type = 'view'")
_ON_TOP = text("""
WITH RECURSIVE on_top (oid) AS (
  SELECT c.oid FROM pg_class c WHERE c.relkind = 'v' AND c.relname = ANY(:names)
    AND c.relnamespace = CAST(quote_ident(current_schema()) AS regnamespace)
  UNION
  SELECT w.ev_class FROM on_top JOIN pg_depend d ON d.refobjid = on_top.oid AND d.classid = 'pg_rewrite'::regclass
  JOIN pg_rewrite w ON w.oid = d.objid
)
SELECT CAST(oid AS regclass)::text, pg_get_viewdef(oid) FROM on_top
""")
