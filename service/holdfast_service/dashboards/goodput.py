"""Where the time of attempts and days went: `insights/goodput.py` in SQL. A test compares the two."""

from __future__ import annotations

from holdfast_service.dashboards.definition import RUN_COLUMNS, RUNS, Column, Dialect, Kind, View, shown_runs

_RUN_COLUMNS = tuple(Column(each.name, each.kind, each.meaning, f"s.{each.name}") for each in RUN_COLUMNS)


def _parts(of: str, steps: Kind) -> tuple[Column, ...]:
    """`of`: the expression for the column `{}` of the source."""

    def seconds(name: str, meaning: str) -> Column:
        return Column(f"{name}_seconds", Kind.NUMBER, meaning, of.format(name), "seconds")

    return (
        seconds("wall", "All of it: the sum of the next six columns."),
        seconds("productive", "In steps that the run still has."),
        seconds("lost", "In steps that ran and were lost."),
        seconds("saving", "Training stood still for saves."),
        seconds("restoring", "In restores."),
        seconds(
            "restarting", "From the end of the attempt before, or its last sign, to the first step, without restoring."
        ),
        seconds("idle", "The rest: after the last step that ended, and after a finished attempt until the next one."),
        Column("steps_run", steps, "Steps that ran.", of.format("steps_run"), "steps"),
        Column("steps_kept", steps, "Those of them on the run's present lineage.", of.format("steps_kept"), "steps"),
        Column("steps_lost", steps, "The others.", f"{of.format('steps_run')} - {of.format('steps_kept')}", "steps"),
    )


def attempt_goodput(dialect: Dialect) -> View:
    return View(
        subject="attempt_goodput",
        row="An attempt of a run that is not purged, with the time since the attempt before it; but not attempt 1 of a "
        "fork, which runs nothing: `GET /v1/projects/{project}/runs/{run}/goodput` shows the same as `attempts`.",
        columns=(
            *_RUN_COLUMNS,
            Column("attempt", Kind.INTEGER, "Its number in the run.", "s.number"),
            Column("outcome", Kind.TEXT, "How it ended; null: it has not.", "s.outcome"),
            Column("opened_at", Kind.MOMENT, "When it was opened.", "s.opened_at"),
            Column(
                "last_alive_at",
                Kind.MOMENT,
                "Its end, or the last sign of one that fell silent; of one that has not ended the moment of the query.",
                "s.ended",
            ),
            Column(
                "step_seconds",
                Kind.NUMBER,
                "How long a step takes, without saves; null: not known.",
                "s.step_seconds",
                "seconds",
            ),
            *_parts("s.{}", Kind.INTEGER),
        ),
        before=_spent(dialect),
        source="FROM spent s",
    )


def goodput_by_day(dialect: Dialect) -> View:
    return View(
        subject="goodput_by_day",
        row="A day (UTC) on which a run had an attempt, or waited for one. What is told of an attempt is told of all "
        "of its life: its seconds and steps are spread evenly over it, from its opening to its end, and the time since "
        "the attempt before is spread over that time. So the days of a run add up to what REST shows of it, and a day "
        "of a long attempt has its average. Days that are over change: steps that are lost tomorrow were run today. "
        "What a clock that was ahead has dated later than now is in no day before its own.",
        columns=(
            Column("day", Kind.DAY, "The day, in UTC.", "d.day"),
            *(Column(each.name, each.kind, each.meaning, f"d.{each.name}") for each in RUN_COLUMNS),
            Column(
                "goodput",
                Kind.NUMBER,
                "`productive_seconds / wall_seconds`, from 0 to 1; null while no step's time of the run is known. "
                "Over several rows divide the sums, and never average this column.",
                "CASE WHEN max(d.known) = 1 AND sum(d.wall) > 0 THEN sum(d.productive) / sum(d.wall) END",
            ),
            *_parts("SUM(d.{})", Kind.NUMBER),
        ),
        before=f"""{_spent(dialect)},
pieces AS (
  SELECT s.project_id, s.project, s.run_id, s.run, s.known, s.opened_at AS since, s.ended AS until, s.lived AS wall,
    s.productive, s.lost, s.saving, s.restoring, s.starting AS restarting, s.unused AS idle, s.steps_run, s.steps_kept
  FROM spent s
  UNION ALL
  SELECT s.project_id, s.project, s.run_id, s.run, s.known, s.ended_before, s.opened_at, s.gap, 0, 0, 0, 0,
    s.gap - s.idle_gap, s.idle_gap, 0, 0
  FROM spent s WHERE s.gap > 0
),
spans AS (
  SELECT q.*, {dialect.day("q.since")} AS first_day,
    {dialect.least(dialect.day("q.until"), dialect.day(dialect.now))} AS last_day
  FROM pieces q
),
days AS (
  SELECT w.*, w.first_day AS day FROM spans w WHERE w.first_day <= w.last_day
  UNION ALL
  SELECT {", ".join(f"w.{name}" for name in _PIECE)}, {dialect.next_day("w.day")} FROM days w WHERE w.day < w.last_day
),
cut AS (
  SELECT w.*, CASE WHEN w.wall > 0 THEN
    {
            dialect.seconds(
                dialect.greatest("w.since", dialect.begin_of("w.day")),
                dialect.least("w.until", dialect.begin_of(dialect.next_day("w.day"))),
            )
        } / w.wall
    ELSE 1.0 END AS share
  FROM days w
),
d AS (
  SELECT c.day, c.project_id, c.project, c.run_id, c.run, c.known,
    {", ".join(f"c.{name} * c.share AS {name}" for name in _SHARED)}
  FROM cut c WHERE c.share > 0
)
""",
        source="FROM d GROUP BY d.day, d.project_id, d.project, d.run_id, d.run",
    )


_SHARED = ("wall", "productive", "lost", "saving", "restoring", "restarting", "idle", "steps_run", "steps_kept")
_PIECE = ("project_id", "project", "run_id", "run", "known", "since", "until", *_SHARED, "first_day", "last_day")


def _spent(dialect: Dialect) -> str:
    """WITH … `spent`: a row for each attempt. Its columns follow `goodput_of` step by step."""

    def zero_or(value: str) -> str:
        return dialect.greatest("0.0", value)

    steps_between = "COALESCE(f.last_step - f.base_step, 0)"
    return f"""WITH RECURSIVE shown AS (
  SELECT p.id AS project_id, p.name AS project, r.id AS run_id, r.name AS run,
    CASE WHEN r.forked_from IS NULL THEN 1 ELSE 2 END AS first_number
  FROM {RUNS} WHERE {shown_runs(dialect)}
),
facts AS (
  SELECT h.*, a.number, a.outcome, a.opened_at, a.first_step_at, a.progressed_at, a.last_step,
    CASE WHEN a.steps_run > 0 THEN a.steps_run END AS told_steps, a.steps_per_second,
    {zero_or("COALESCE(a.restore_seconds, 0.0)")} AS told_restoring,
    {zero_or("COALESCE(a.save_blocked_seconds, 0.0)")} AS told_saving,
    c.attempt_number AS from_attempt, c.step AS from_step,
    CASE
      WHEN a.outcome IS NULL OR a.ended_at IS NULL THEN {dialect.now}
      WHEN a.outcome = 'lost' OR a.outcome = 'fenced' AND a.refused_at IS NULL AND a.rolled_back_at IS NULL
      THEN {
        dialect.least(
            "a.ended_at",
            dialect.greatest(
                "a.opened_at", "COALESCE(a.heartbeat_at, a.opened_at)", "COALESCE(a.progressed_at, a.opened_at)"
            ),
        )
    }
      ELSE a.ended_at
    END AS told_end,
    CASE
      WHEN c.step IS NOT NULL THEN c.step
      WHEN a.first_step IS NOT NULL THEN a.first_step - 1
      WHEN a.resumed_from_id IS NULL THEN 0
    END AS base_step
  FROM shown h JOIN attempts a ON a.run_id = h.run_id AND a.number >= h.first_number
  LEFT JOIN checkpoints c ON c.id = a.resumed_from_id
),
line (run_id, number, last_kept) AS (
  SELECT f.run_id, max(f.number), CAST(NULL AS BIGINT) FROM facts f
  WHERE f.from_step IS NOT NULL OR f.last_step IS NOT NULL GROUP BY f.run_id
  UNION ALL
  SELECT f.run_id, f.from_attempt, f.from_step
  FROM line JOIN facts f ON f.run_id = line.run_id AND f.number = line.number WHERE f.from_attempt < f.number
),
ended AS (
  SELECT f.*, line.number IS NOT NULL AS on_line, COALESCE(line.last_kept, f.last_step) AS last_kept,
    {dialect.greatest("f.opened_at", dialect.least("f.told_end", "COALESCE(LEAD(f.opened_at) OVER w, f.told_end)"))}
      AS ended,
    {dialect.greatest("0", "COALESCE(f.told_steps, 0)", steps_between)} AS steps_run,
    CASE
      WHEN f.first_step_at IS NULL OR f.progressed_at IS NULL THEN NULL
      WHEN f.told_steps > 1
      THEN {zero_or(dialect.seconds("f.first_step_at", "f.progressed_at") + " - f.told_saving")} / (f.told_steps - 1)
      WHEN f.told_steps = 1 AND f.steps_per_second > 0 THEN 1.0 / f.steps_per_second
    END AS own_step_seconds
  FROM facts f LEFT JOIN line ON line.run_id = f.run_id AND line.number = f.number
  WINDOW w AS (PARTITION BY f.run_id ORDER BY f.number)
),
paced AS (
  SELECT e.*, LAG(e.ended) OVER w AS ended_before, LAG(e.outcome) OVER w AS outcome_before,
    {dialect.seconds("e.opened_at", "e.ended")} AS lived,
    CASE WHEN e.on_line AND e.base_step IS NOT NULL AND e.last_step IS NOT NULL
      THEN {
        dialect.least(
            "e.steps_run", dialect.greatest("0", dialect.least("e.last_step", "e.last_kept") + " - e.base_step")
        )
    }
      ELSE 0 END AS steps_kept,
    COALESCE(e.own_step_seconds, CASE WHEN e.steps_run > 0 THEN
      SUM(e.own_step_seconds * e.told_steps) OVER whole
      / SUM(CASE WHEN e.own_step_seconds IS NOT NULL THEN e.told_steps END) OVER whole
    END) AS step_seconds
  FROM ended e
  WINDOW w AS (PARTITION BY e.run_id ORDER BY e.number), whole AS (PARTITION BY e.run_id)
),
restored AS (
  SELECT p.*, {dialect.least("p.lived", "p.told_restoring")} AS restoring,
    {zero_or(dialect.seconds("COALESCE(p.ended_before, p.opened_at)", "p.opened_at"))} AS gap,
    MAX(CASE WHEN p.step_seconds IS NOT NULL THEN 1 ELSE 0 END) OVER (PARTITION BY p.run_id) AS known
  FROM paced p
),
saved AS (
  SELECT t.*, {dialect.least("t.lived - t.restoring", "t.told_saving")} AS saving,
    CASE WHEN t.outcome_before = 'finished' THEN t.gap ELSE 0.0 END AS idle_gap
  FROM restored t
),
stepped AS (
  SELECT v.*, {dialect.least("v.lived - v.restoring - v.saving", "v.steps_run * COALESCE(v.step_seconds, 0.0)")}
    AS in_steps
  FROM saved v
),
started AS (
  SELECT i.*, CASE WHEN i.steps_run > 0 THEN i.in_steps * i.steps_kept / i.steps_run ELSE 0.0 END AS productive,
    {
        dialect.least(
            "i.lived - i.restoring - i.saving - i.in_steps",
            zero_or(
                dialect.seconds(
                    "i.opened_at",
                    "COALESCE(i.first_step_at, CASE WHEN i.steps_run = 0 THEN i.ended ELSE i.opened_at END)",
                )
                + " - i.restoring - COALESCE(CASE WHEN i.first_step_at IS NOT NULL THEN i.step_seconds END, 0.0)"
            ),
        )
    }
      AS starting
  FROM stepped i
),
spent AS (
  SELECT g.*, g.lived + g.gap AS wall, g.in_steps - g.productive AS lost,
    g.starting + g.gap - g.idle_gap AS restarting,
    {zero_or("g.lived - g.restoring - g.saving - g.in_steps - g.starting")} AS unused,
    {zero_or("g.lived - g.restoring - g.saving - g.in_steps - g.starting")} + g.idle_gap AS idle
  FROM started g
)
"""
