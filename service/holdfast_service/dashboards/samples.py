"""The hourly samples of projects and live runs, as they were taken: those that REST lists (`samples/list.py`)."""

from __future__ import annotations

from holdfast_service.dashboards.definition import RUN_COLUMNS, RUNS, Column, Dialect, Kind, View, shown_runs

_TAKEN = (
    "It is what was known at `taken_at`: steps that were lost later are not taken out. An hour in which the service "
    "was down has no row. Rows go after `HOLDFAST_KEEP_SAMPLES_DAYS`."
)


def _until_now(dialect: Dialect) -> str:
    """The condition on a sample `s`: what is dated later than now was taken by a clock that was ahead."""
    return f"s.hour <= {dialect.now}"


_BEGIN = (
    Column("hour", Kind.MOMENT, "The begin of the hour, in UTC.", "s.hour"),
    Column("taken_at", Kind.MOMENT, "When the sample was taken, after the end of the hour.", "s.taken_at"),
)
_COMMON = (
    Column("committed_checkpoints", Kind.INTEGER, "Committed checkpoints.", "s.committed_checkpoints"),
    Column("logical_bytes", Kind.INTEGER, "Bytes of their states in the trainer.", "s.logical_bytes", "bytes"),
    Column(
        "productive_seconds",
        Kind.NUMBER,
        "Of this hour, in steps that the runs still had at `taken_at`; null: no step's time was known, or not all of a "
        "project's runs were sampled. Goodput is the sum of this over the sum of `wall_seconds`.",
        "s.productive_seconds",
        "seconds",
    ),
    Column(
        "wall_seconds",
        Kind.NUMBER,
        "Of this hour, in which an attempt was open or awaited by one; null: as `productive_seconds`.",
        "s.wall_seconds",
        "seconds",
    ),
)


def project_samples(dialect: Dialect) -> View:
    return View(
        subject="project_samples",
        row=f"A project in an hour, as `GET /v1/projects/{{project}}/samples` shows it. {_TAKEN}",
        columns=(
            Column("project_id", Kind.TEXT, "The project's id.", "p.id"),
            Column("project", Kind.TEXT, "The project's name.", "p.name"),
            *_BEGIN,
            *_COMMON,
            Column("stored_bytes", Kind.INTEGER, "Bytes of all copies in all stores.", "s.stored_bytes", "bytes"),
            Column(
                "stores",
                Kind.DOCUMENT,
                'These by the role that the store had: `{"primary": 4096, "second": 4096}`; `detached`: the service '
                "had it no more.",
                "s.stores",
            ),
            Column("per_month", Kind.NUMBER, "What they cost a month, at the prices of then.", "s.per_month"),
            Column("currency", Kind.TEXT, "The currency of `per_month`.", "s.currency"),
            Column("unpriced_bytes", Kind.INTEGER, "Bytes that had no price.", "s.unpriced_bytes", "bytes"),
            Column("live_runs", Kind.INTEGER, "Runs whose newest attempt was open.", "s.live_runs"),
            Column(
                "runs_without_restore_point",
                Kind.INTEGER,
                "Those of them that had no restore point; if not all were sampled, that had committed nothing.",
                "s.runs_without_restore_point",
            ),
            Column(
                "restore_point_age_seconds",
                Kind.NUMBER,
                "The greatest age of a live run's restore point; null: no live run had one, or not all were sampled.",
                "s.restore_point_age_seconds",
                "seconds",
            ),
        ),
        source="FROM project_samples s JOIN projects p ON p.id = s.project_id\n"
        f"WHERE {dialect.is_shown} AND {_until_now(dialect)}",
    )


def run_samples(dialect: Dialect) -> View:
    return View(
        subject="run_samples",
        row="A run in an hour at whose end it had an open attempt, as "
        f"`GET /v1/projects/{{project}}/runs/{{run}}/samples` shows it. {_TAKEN}",
        columns=(
            *RUN_COLUMNS,
            *_BEGIN,
            *_COMMON,
            Column("last_step", Kind.INTEGER, "The last known step of its newest attempt.", "s.last_step"),
            Column(
                "restore_point_step",
                Kind.INTEGER,
                "The step of its restore point; null: it had none.",
                "s.restore_point_step",
            ),
            Column(
                "restore_point_age_seconds",
                Kind.NUMBER,
                "How long before `taken_at` that was committed; null: it had none.",
                "s.restore_point_age_seconds",
                "seconds",
            ),
        ),
        source=f"FROM {RUNS} JOIN run_samples s ON s.run_id = r.id\n"
        f"WHERE {shown_runs(dialect)} AND {_until_now(dialect)}",
    )
