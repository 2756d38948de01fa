"""What was committed and removed on a day, and what was kept at its end: from the rows of checkpoints."""

from __future__ import annotations

from holdfast_service.dashboards.definition import RUN_COLUMNS, RUNS, Column, Dialect, Kind, View, shown_runs

_CHANGES = (
    "committed_checkpoints",
    "committed_logical_bytes",
    "uploaded_bytes",
    "deduplicated_bytes",
    "aborted_checkpoints",
    "removed_checkpoints",
    "removed_logical_bytes",
    "deleted_checkpoints",
)


def usage_by_day(dialect: Dialect) -> View:
    def change(day: str, condition: str, **values: str) -> str:
        shown = ", ".join(f"{values.get(name, '0')} AS {name}" for name in _CHANGES)
        return (
            f"SELECT h.run_id, {dialect.day(dialect.least(day, dialect.now))} AS day, {shown}\n"
            f"  FROM shown h JOIN checkpoints c ON c.run_id = h.run_id WHERE {condition}"
        )

    removed_at = "COALESCE(c.trashed_at, c.deleted_at)"
    changes = "\n  UNION ALL ".join(
        (
            change(
                "c.committed_at",
                "c.committed_at IS NOT NULL",
                committed_checkpoints="1",
                committed_logical_bytes="c.logical_bytes",
                uploaded_bytes="c.uploaded_bytes",
                deduplicated_bytes="c.deduplicated_bytes",
            ),
            change("c.aborted_at", "c.aborted_at IS NOT NULL", aborted_checkpoints="1"),
            change(
                removed_at,
                f"c.committed_at IS NOT NULL AND c.state <> 'committed' AND {removed_at} IS NOT NULL",
                removed_checkpoints="1",
                removed_logical_bytes="c.logical_bytes",
            ),
            change("c.deleted_at", "c.deleted_at IS NOT NULL", deleted_checkpoints="1"),
        )
    )
    kept = "SUM(COALESCE({0}, 0) - COALESCE({1}, 0)) OVER (PARTITION BY d.run_id ORDER BY d.day)"

    def of_day(name: str, meaning: str, unit: str = "") -> Column:
        return Column(name, Kind.INTEGER, meaning, f"COALESCE(b.{name}, 0)", unit)

    return View(
        subject="usage_by_day",
        row="A day (UTC) of a run: each day from its first commit or abort until today, or until the run keeps "
        "nothing any more. The past shrinks: it is made from the checkpoints that have a row. A checkpoint that was "
        "aborted or deleted loses its row `HOLDFAST_KEEP_CHECKPOINT_ROWS_DAYS` later and leaves all days then, the "
        "past ones too; so do those of a purged run. Copy the days to another place if you want them for longer. A "
        "checkpoint that a person took back from the trash counts as if it had never been there. What a clock that was "
        "ahead has dated later than now counts today. What the copies of a "
        "project take in the stores is known as of now only: `dashboard_v1_projects`.",
        columns=(
            Column("day", Kind.DAY, "The day, in UTC.", "d.day"),
            *(Column(each.name, each.kind, each.meaning, f"h.{each.name}") for each in RUN_COLUMNS),
            of_day("committed_checkpoints", "Checkpoints that were committed on this day."),
            of_day("committed_logical_bytes", "Bytes of their states in the trainer.", "bytes"),
            of_day("uploaded_bytes", "Bytes that they sent to the store.", "bytes"),
            of_day("deduplicated_bytes", "Bytes that they did not send, because the store had them.", "bytes"),
            of_day("aborted_checkpoints", "Checkpoints that were aborted on this day."),
            of_day(
                "removed_checkpoints",
                "Committed checkpoints that were put into the trash on this day, and not taken back.",
            ),
            of_day("removed_logical_bytes", "Bytes of their states in the trainer.", "bytes"),
            of_day("deleted_checkpoints", "Checkpoints whose bytes went for good on this day."),
            Column(
                "kept_checkpoints",
                Kind.INTEGER,
                "Committed checkpoints at the end of this day; today: now.",
                kept.format("b.committed_checkpoints", "b.removed_checkpoints"),
            ),
            Column(
                "kept_logical_bytes",
                Kind.INTEGER,
                "Bytes of their states in the trainer.",
                kept.format("b.committed_logical_bytes", "b.removed_logical_bytes"),
                "bytes",
            ),
        ),
        before=f"""WITH RECURSIVE shown AS (
  SELECT p.id AS project_id, p.name AS project, r.id AS run_id, r.name AS run FROM {RUNS} WHERE {shown_runs(dialect)}
),
changes AS (
  {changes}
),
by_day AS (
  SELECT g.run_id, g.day, {", ".join(f"SUM(g.{name}) AS {name}" for name in _CHANGES)}
  FROM changes g GROUP BY g.run_id, g.day
),
spans AS (
  SELECT b.run_id, MIN(b.day) AS first_day,
    CASE WHEN SUM(b.committed_checkpoints) > SUM(b.removed_checkpoints) THEN {dialect.day(dialect.now)}
      ELSE MAX(b.day) END AS last_day
  FROM by_day b GROUP BY b.run_id
),
days (run_id, day, last_day) AS (
  SELECT w.run_id, w.first_day, w.last_day FROM spans w
  UNION ALL
  SELECT w.run_id, {dialect.next_day("w.day")}, w.last_day FROM days w WHERE w.day < w.last_day
)
""",
        source="FROM days d JOIN shown h ON h.run_id = d.run_id\n"
        "LEFT JOIN by_day b ON b.run_id = d.run_id AND b.day = d.day",
    )
