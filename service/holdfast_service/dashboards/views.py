"""All views, and how they come into the catalog.

The migrations take them away first and make them last, as they do with triggers, because no database alters a table
freely under a view. So no revision has to know of them. A change here needs a revision, even an empty one, and
tests/service/dashboards/test_contract.py says so.
"""

from __future__ import annotations

import structlog
from sqlalchemy import Connection, inspect, text

from holdfast_service.dashboards.catalog import attempts, checkpoints, events, projects, restore_points, runs
from holdfast_service.dashboards.definition import POSTGRES, SQLITE, Column, Dialect, View
from holdfast_service.dashboards.goodput import attempt_goodput, goodput_by_day
from holdfast_service.dashboards.usage_by_day import usage_by_day

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
)
GRANTS = "dashboard_grants"


def all_views(dialect: Dialect = POSTGRES) -> tuple[View, ...]:
    return tuple(make(dialect) for make in _MAKERS)


def drop_views(connection: Connection) -> None:
    """All of them; also where there are none. A view that people have made on top goes too, or the upgrade of the
    catalog would wait for them; its definition is in the log."""
    there = set(inspect(connection).get_view_names())
    if connection.dialect.name == "postgresql":
        for name, definition in connection.execute(_ON_TOP, {"names": [view.name for view in all_views()]}):
            _log.warning("view_on_top_dropped", view=name, definition=definition)
    cascade = " CASCADE" if connection.dialect.name == "postgresql" else ""
    for view in all_views():
        if view.name in there:
            connection.exec_driver_sql(f"DROP VIEW IF EXISTS {view.name}{cascade}")


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


# Made from a dump, a catalog may have grants of roles that its server does not know.
_GRANTED = text(f"SELECT DISTINCT role_name FROM {GRANTS} WHERE role_name IN (SELECT rolname FROM pg_roles) ORDER BY 1")
_ON_TOP = text("""
WITH RECURSIVE on_top (oid) AS (
  SELECT c.oid FROM pg_class c WHERE c.relkind = 'v' AND c.relname = ANY(:names) AND pg_table_is_visible(c.oid)
  UNION
  SELECT w.ev_class FROM on_top JOIN pg_depend d ON d.refobjid = on_top.oid AND d.classid = 'pg_rewrite'::regclass
  JOIN pg_rewrite w ON w.oid = d.objid
)
SELECT CAST(c.oid AS regclass)::text, pg_get_viewdef(c.oid) FROM on_top JOIN pg_class c ON c.oid = on_top.oid
WHERE NOT (c.relname = ANY(:names))
""")
