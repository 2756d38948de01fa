"""The metric curves of runs, along their lineage: `curves/history.py` in SQL. A test compares the two."""

from __future__ import annotations

from holdfast_service.dashboards.definition import RUN_COLUMNS, RUNS, Column, Dialect, Kind, View, shown_runs

_NO_LIMIT = 2**63 - 1


def curve_points(dialect: Dialect) -> View:
    # Postgres follows the line of each run that a query wants. SQLite has no LATERAL, and follows all of them.
    lateral, of_run = ("LATERAL ", " AND a.run_id = r.id") if dialect.is_postgres else ("", "")
    return View(
        subject="curve_points",
        row="What a job measured after a step, where the step is on the run's lineage as it is now, and the catalog "
        "keeps the point: `GET /v1/projects/{project}/runs/{run}/metrics-history` shows the same. A long curve is "
        "thinned, and the least, the greatest and the last value of each bucket of steps stay: take no averages over "
        "it. What the run went back behind is in no row. A metric has one row for each step; two only if an attempt "
        "measured again a step that it had resumed after.",
        columns=(
            *RUN_COLUMNS,
            Column("metric", Kind.TEXT, "The metric's name.", "c.name"),
            Column("step", Kind.INTEGER, "The step after which it was measured.", "k.step"),
            Column("attempt", Kind.INTEGER, "The attempt that measured it.", "k.attempt"),
            Column("value", Kind.NUMBER, "The value; null: it was not finite.", "k.value"),
            Column("nonfinite", Kind.TEXT, "`nan`, `inf` or `-inf`; null: the value was finite.", "k.nonfinite"),
        ),
        source=f"""FROM {RUNS}
JOIN {lateral}(
  WITH RECURSIVE line (run_id, attempt, last_step) AS (
    SELECT a.run_id, max(a.number), CAST(NULL AS BIGINT)
    FROM attempts a LEFT JOIN checkpoints parent ON parent.id = a.resumed_from_id
    WHERE (a.cut_at IS NOT NULL OR a.last_step IS NOT NULL OR parent.id IS NOT NULL){of_run}
    GROUP BY a.run_id
    UNION ALL
    SELECT line.run_id, parent.attempt_number, parent.step
    FROM line JOIN attempts a ON a.run_id = line.run_id AND a.number = line.attempt
    JOIN checkpoints parent ON parent.id = a.resumed_from_id
    WHERE parent.attempt_number < line.attempt
  )
  SELECT line.run_id, line.attempt, COALESCE(line.last_step, {_NO_LIMIT}) AS last_step FROM line
) s ON s.run_id = r.id
JOIN curves c ON c.run_id = r.id
JOIN curve_points k ON k.curve_id = c.id AND k.attempt = s.attempt AND k.step <= s.last_step
WHERE {shown_runs(dialect)}""",
    )
