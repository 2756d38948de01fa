"""A view is a list of columns and where they come from. Its SQL, its page and its test are all made of this."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

PREFIX = "dashboard_v1_"
"""Every view's name begins with it. A view of this version keeps its names, types and meanings; columns are only added,
at the end. Another meaning is another version, beside this one."""


class Kind(Enum):
    """The type of a column: in Postgres, and as SQLite writes it, which has no type for a view's column."""

    TEXT = ("text", "text")
    INTEGER = ("bigint", "integer")
    NUMBER = ("double precision", "real")
    BOOLEAN = ("boolean", "0 or 1")
    MOMENT = ("timestamp with time zone", "text, UTC")
    DAY = ("date", "text")
    DOCUMENT = ("jsonb", "text, JSON")

    def __init__(self, postgres: str, sqlite: str) -> None:
        self.postgres = postgres
        self.sqlite = sqlite


@dataclass(frozen=True)
class Column:
    """`sql`: the expression over the view's source. `unit`: bytes, seconds, …; empty: none."""

    name: str
    kind: Kind
    meaning: str
    sql: str
    unit: str = ""


@dataclass(frozen=True)
class View:
    """`row`: what one row is. `source`: from FROM on; `before`: the WITH that it needs, if any."""

    subject: str
    row: str
    columns: tuple[Column, ...]
    source: str
    before: str = ""

    @property
    def name(self) -> str:
        return PREFIX + self.subject

    def create_statement(self, dialect: Dialect) -> str:
        shown = ",\n".join(f"  {dialect.typed(column)} AS {column.name}" for column in self.columns)
        # A barrier: a function of the reader's own must not see rows before the view has left them out.
        barrier = " WITH (security_barrier = true)" if dialect.is_postgres else ""
        return f"CREATE VIEW {self.name}{barrier} AS\n{self.before}SELECT\n{shown}\n{self.source}"


@dataclass(frozen=True)
class Dialect:
    """The words in which the two databases differ. All arguments are SQL."""

    is_postgres: bool

    @property
    def now(self) -> str:
        return "CURRENT_TIMESTAMP" if self.is_postgres else "strftime('%Y-%m-%d %H:%M:%f000', 'now')"

    @property
    def is_shown(self) -> str:
        """Asked about the project `p`: it is not purged, and the reader may see it."""
        return f"p.purged_at IS NULL AND {self.may_see('p.id')}"

    def may_see(self, project_id: str) -> str:
        """A role of `holdfast admin dashboard-role` sees its projects; who may read the tables sees all; others none.
        The table is named by its number: a reader's own table of that name is another one."""
        if not self.is_postgres:
            return "true"
        return (
            "(has_table_privilege('projects'::regclass, 'SELECT') OR EXISTS (SELECT 1 FROM dashboard_grants g "
            f"WHERE g.role_name = current_user::text AND g.project_id IN ('', {project_id})))"
        )

    def typed(self, column: Column) -> str:
        return f"CAST({column.sql} AS {column.kind.postgres})" if self.is_postgres else column.sql

    def hex(self, data: str) -> str:
        return f"encode({data}, 'hex')" if self.is_postgres else f"lower(hex({data}))"

    def least(self, *values: str) -> str:
        """No value may be null."""
        return f"{'LEAST' if self.is_postgres else 'MIN'}({', '.join(values)})"

    def greatest(self, *values: str) -> str:
        """No value may be null."""
        return f"{'GREATEST' if self.is_postgres else 'MAX'}({', '.join(values)})"

    def number(self, value: str) -> str:
        return f"CAST({value} AS {'double precision' if self.is_postgres else 'REAL'})"

    def seconds(self, since: str, until: str) -> str:
        if self.is_postgres:
            return f"CAST(EXTRACT(EPOCH FROM ({until}) - ({since})) AS double precision)"
        return f"((julianday({until}) - julianday({since})) * 86400.0)"

    def day(self, moment: str) -> str:
        """In UTC."""
        return f"CAST(({moment}) AT TIME ZONE 'UTC' AS date)" if self.is_postgres else f"date({moment})"

    def next_day(self, day: str) -> str:
        return f"({day} + 1)" if self.is_postgres else f"date({day}, '+1 day')"

    def begin_of(self, day: str) -> str:
        """The moment at which it begins, in UTC."""
        return (
            f"(CAST({day} AS timestamp) AT TIME ZONE 'UTC')" if self.is_postgres else f"({day} || ' 00:00:00.000000')"
        )


POSTGRES, SQLITE = Dialect(is_postgres=True), Dialect(is_postgres=False)

RUN_COLUMNS = (
    Column("project_id", Kind.TEXT, "The project's id.", "p.id"),
    Column("project", Kind.TEXT, "The project's name.", "p.name"),
    Column("run_id", Kind.TEXT, "The run's id.", "r.id"),
    Column("run", Kind.TEXT, "The run's name in its project.", "r.name"),
)
"""Over `runs r` and `projects p`."""

RUNS = "runs r JOIN projects p ON p.id = r.project_id"


def shown_runs(dialect: Dialect) -> str:
    """The condition on `RUNS`."""
    return f"r.purged_at IS NULL AND {dialect.is_shown}"
