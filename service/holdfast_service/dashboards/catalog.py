"""Views of what the catalog has now: projects, runs, attempts, checkpoints, restore points, events."""

from __future__ import annotations

from holdfast_service.dashboards.definition import RUN_COLUMNS, RUNS, Column, Dialect, Kind, View, shown_runs

_SUMMED = "committed, logical_bytes, deduplicated_bytes"
_SUMS = """SUM(t.committed) AS committed, SUM(t.logical_bytes) AS logical_bytes,
    SUM(t.deduplicated_bytes) AS deduplicated_bytes"""
_SUMS_OF_BYTES = (
    Column(
        "logical_bytes",
        Kind.INTEGER,
        "Bytes of their states in the trainer.",
        "COALESCE(s.logical_bytes, 0)",
        "bytes",
    ),
    Column(
        "deduplicated_bytes",
        Kind.INTEGER,
        "Bytes that they did not send, because the store had them.",
        "COALESCE(s.deduplicated_bytes, 0)",
        "bytes",
    ),
)
"""Of the committed checkpoints in `checkpoint_tallies`, whose sums the view joins as `s`."""


def _deletion(of: str, noun: str) -> tuple[Column, ...]:
    return (
        Column(
            "deleted_at",
            Kind.MOMENT,
            f"When the {noun} was put into the trash; null: it is not there.",
            f"{of}.deleted_at",
        ),
        Column("deleted_by", Kind.TEXT, "Who did that: the name of a token.", f"{of}.deleted_by"),
        Column("purge_at", Kind.MOMENT, "When it goes for good, if nobody takes it back.", f"{of}.purge_at"),
    )


def projects(dialect: Dialect) -> View:
    def kept_for(why: int) -> str:
        return f"COALESCE(SUM(CASE WHEN b.counted & 3 = {why} THEN b.bytes ELSE 0 END), 0)"

    lagging = "Lags a change by some seconds, as `GET /v1/projects/{project}/usage` does."
    return View(
        subject="projects",
        row="A project, until it is purged.",
        columns=(
            Column("project_id", Kind.TEXT, "The project's id.", "p.id"),
            Column("project", Kind.TEXT, "The project's name.", "p.name"),
            Column("created_at", Kind.MOMENT, "When it was made.", "p.created_at"),
            Column(
                "quota_bytes",
                Kind.INTEGER,
                "The most that its copies in the primary store may take; null: no limit. `stored_bytes` "
                "counts the copies in all stores, so it can be more.",
                "p.quota_bytes",
                "bytes",
            ),
            Column(
                "runs",
                Kind.INTEGER,
                "Its runs that are not in the trash.",
                "(SELECT count(*) FROM runs r WHERE r.project_id = p.id AND r.deleted_at IS NULL)",
            ),
            Column("committed_checkpoints", Kind.INTEGER, "Its committed checkpoints.", "COALESCE(s.committed, 0)"),
            *_SUMS_OF_BYTES,
            Column(
                "stored_bytes",
                Kind.INTEGER,
                "Bytes of all copies in all stores: the sum of the next four columns.",
                "COALESCE(k.stored, 0)",
                "bytes",
            ),
            Column(
                "committed_bytes",
                Kind.INTEGER,
                f"Copies of chunks that a committed checkpoint needs. {lagging}",
                "COALESCE(k.committed, 0)",
                "bytes",
            ),
            Column(
                "arriving_bytes",
                Kind.INTEGER,
                f"Copies in transfer, and copies that only an upload needs. {lagging}",
                "COALESCE(k.arriving, 0)",
                "bytes",
            ),
            Column(
                "trashed_bytes",
                Kind.INTEGER,
                f"Copies that only checkpoints in the trash need. {lagging}",
                "COALESCE(k.trashed, 0)",
                "bytes",
            ),
            Column(
                "pending_collection_bytes",
                Kind.INTEGER,
                f"Copies that no checkpoint needs: the collector will free them. {lagging}",
                "COALESCE(k.pending, 0)",
                "bytes",
            ),
            *_deletion("p", "project"),
        ),
        source=f"""FROM projects p
LEFT JOIN (
  SELECT t.project_id, {_SUMS}
  FROM (
    SELECT project_id, {_SUMMED} FROM checkpoint_tallies WHERE run_id = ''
    UNION ALL SELECT project_id, {_SUMMED} FROM checkpoint_deltas
  ) t GROUP BY t.project_id
) s ON s.project_id = p.id
LEFT JOIN (
  SELECT b.project_id, SUM(b.bytes) AS stored, {kept_for(0)} AS arriving, {kept_for(1)} AS committed,
    {kept_for(2)} AS trashed, {kept_for(3)} AS pending
  FROM (
    SELECT project_id, counted, bytes FROM byte_tallies UNION ALL SELECT project_id, counted, bytes FROM byte_deltas
  ) b GROUP BY b.project_id
) k ON k.project_id = p.id
WHERE {dialect.is_shown}""",
    )


def runs(dialect: Dialect) -> View:
    ended = " ".join(f"WHEN a.outcome = '{each}' THEN '{each}'" for each in ("finished", "failed", "preempted", "lost"))
    return View(
        subject="runs",
        row="A run, until it is purged.",
        columns=(
            *RUN_COLUMNS,
            Column("created_at", Kind.MOMENT, "When it was made.", "r.created_at"),
            Column(
                "status",
                Kind.TEXT,
                "How it fares, from its newest attempt: `training`, `stalled`, `lost`, `failed`, `preempted`, "
                "`finished`, `idle`.",
                f"CASE {ended} WHEN a.stalled_at IS NOT NULL THEN 'stalled' "
                "WHEN a.id IS NOT NULL AND a.ended_at IS NULL THEN 'training' ELSE 'idle' END",
            ),
            Column(
                "latest_attempt", Kind.INTEGER, "The number of its newest attempt; 0: it has none.", "r.latest_attempt"
            ),
            Column("last_step", Kind.INTEGER, "The last known step of its newest attempt.", "a.last_step"),
            Column(
                "last_heard_at",
                Kind.MOMENT,
                "The last sign of its newest attempt: a heartbeat, or its opening.",
                "COALESCE(a.heartbeat_at, a.opened_at)",
            ),
            Column("committed_checkpoints", Kind.INTEGER, "Its committed checkpoints.", "COALESCE(s.committed, 0)"),
            Column(
                "newest_step",
                Kind.INTEGER,
                "The greatest step of these, whether it can be restored or not.",
                "(SELECT max(c.step) FROM checkpoints c WHERE c.run_id = r.id AND c.state = 'committed')",
            ),
            *_SUMS_OF_BYTES,
            *_deletion("r", "run"),
        ),
        source=f"""FROM {RUNS}
LEFT JOIN attempts a ON a.run_id = r.id AND a.number = r.latest_attempt
LEFT JOIN (
  SELECT t.run_id, {_SUMS}
  FROM (
    SELECT run_id, {_SUMMED} FROM checkpoint_tallies UNION ALL SELECT run_id, {_SUMMED} FROM checkpoint_deltas
  ) t GROUP BY t.run_id
) s ON s.run_id = r.id
WHERE {shown_runs(dialect)}""",
    )


def attempts(dialect: Dialect) -> View:
    return View(
        subject="attempts",
        row="An attempt of a run that is not purged.",
        columns=(
            *RUN_COLUMNS,
            Column("attempt", Kind.INTEGER, "Its number in the run, from 1 on.", "a.number"),
            Column("launch_id", Kind.TEXT, "The launch that opened it.", "a.launch_id"),
            Column("world_size", Kind.INTEGER, "Its ranks.", "a.world_size", "ranks"),
            Column("host", Kind.TEXT, "The host of rank 0.", "a.host"),
            Column(
                "environment",
                Kind.DOCUMENT,
                "What it runs in, as it told: an object of texts, such as `torch`.",
                "a.environment",
            ),
            Column("opened_at", Kind.MOMENT, "When it was opened.", "a.opened_at"),
            Column("heartbeat_at", Kind.MOMENT, "Its last heartbeat; null: none yet.", "a.heartbeat_at"),
            Column("first_step", Kind.INTEGER, "The first step that it ran.", "a.first_step"),
            Column("last_step", Kind.INTEGER, "The last step that it is known to have reached.", "a.last_step"),
            Column("steps_run", Kind.INTEGER, "Steps that it ran, as it told.", "a.steps_run", "steps"),
            Column(
                "steps_per_second", Kind.NUMBER, "At its last heartbeat, without saves.", "a.steps_per_second", "1/s"
            ),
            Column("doing", Kind.TEXT, "`restoring`, `training` or `saving`, at its last heartbeat.", "a.doing"),
            Column("progressed_at", Kind.MOMENT, "When its training thread last came on.", "a.progressed_at"),
            Column(
                "stalled_at", Kind.MOMENT, "Alive and without progress since then; null: it goes on.", "a.stalled_at"
            ),
            Column("restore_seconds", Kind.NUMBER, "How long its restores took.", "a.restore_seconds", "seconds"),
            Column("saves_begun", Kind.INTEGER, "Saves that it began.", "a.saves_begun"),
            Column(
                "save_blocked_seconds",
                Kind.NUMBER,
                "How long training stood still for saves.",
                "a.save_blocked_seconds",
                "seconds",
            ),
            Column("ended_at", Kind.MOMENT, "When it ended; null: it has not.", "a.ended_at"),
            Column(
                "outcome",
                Kind.TEXT,
                "`finished`, `failed`, `preempted`, `fenced` or `lost`; null: it has not ended.",
                "a.outcome",
            ),
            Column("outcome_detail", Kind.TEXT, "Why, for people.", "a.outcome_detail"),
            Column("error_type", Kind.TEXT, "The type of the error that a rank raised.", "a.error_type"),
            Column("error_rank", Kind.INTEGER, "That rank.", "a.error_rank"),
            Column(
                "resumed_from",
                Kind.TEXT,
                "The checkpoint that its ranks loaded; null: none.",
                "a.resumed_from_id",
            ),
            Column(
                "rolled_back_at",
                Kind.MOMENT,
                "When its own job left it, to go back to an older checkpoint.",
                "a.rolled_back_at",
            ),
        ),
        source=f"FROM attempts a JOIN runs r ON r.id = a.run_id JOIN projects p ON p.id = r.project_id\n"
        f"WHERE {shown_runs(dialect)}",
    )


def checkpoints(dialect: Dialect) -> View:
    return View(
        subject="checkpoints",
        row="A checkpoint of a run that is not purged, in whatever state, while the catalog has its row "
        "(`HOLDFAST_KEEP_CHECKPOINT_ROWS_DAYS` after it was aborted or deleted).",
        columns=(
            *RUN_COLUMNS,
            Column("checkpoint_id", Kind.TEXT, "The checkpoint's id.", "c.id"),
            Column("attempt", Kind.INTEGER, "The attempt that staged it.", "c.attempt_number"),
            Column("step", Kind.INTEGER, "The step after which it was taken.", "c.step"),
            Column("kind", Kind.TEXT, "`periodic`, `emergency` or `final`.", "c.kind"),
            Column("world_size", Kind.INTEGER, "The ranks that wrote it.", "c.world_size", "ranks"),
            Column(
                "state",
                Kind.TEXT,
                "`uploading`, `committed`, `aborted`, `trashed`, `deleting` or `deleted`.",
                "c.state",
            ),
            Column("health", Kind.TEXT, "`ok`, `diverged`, `corrupt` or `quarantined`.", "c.health"),
            Column("health_reason", Kind.TEXT, "Why it is not `ok`, for people.", "c.health_reason"),
            Column("tier", Kind.TEXT, "`hot`, `cold` or `thawing`.", "c.tier"),
            Column(
                "detached",
                Kind.BOOLEAN,
                "Pushed late, when the run had gone on without it: never the latest, unless an attempt has since "
                "gone on from it.",
                "c.detached",
            ),
            Column("digest", Kind.TEXT, "The checkpoint's SHA-256 in hex; null: not committed.", _hex_digest(dialect)),
            Column("logical_bytes", Kind.INTEGER, "Bytes of its state in the trainer.", "c.logical_bytes", "bytes"),
            Column("chunk_bytes", Kind.INTEGER, "Bytes of its chunks, each counted once.", "c.chunk_bytes", "bytes"),
            Column("uploaded_bytes", Kind.INTEGER, "Bytes that it sent to the store.", "c.uploaded_bytes", "bytes"),
            Column(
                "deduplicated_bytes",
                Kind.INTEGER,
                "Bytes that it did not send, because the store had them.",
                "c.deduplicated_bytes",
                "bytes",
            ),
            Column(
                "metrics",
                Kind.DOCUMENT,
                'An object by metric: `{"loss": {"value": 1.5}}`. What is not finite has `nonfinite` and no `value`.',
                "c.metrics",
            ),
            Column("labels", Kind.DOCUMENT, "An array of texts.", "c.labels"),
            Column(
                "blocked_seconds",
                Kind.NUMBER,
                "How long training stood still for it, on its slowest rank.",
                "c.blocked_seconds",
                "seconds",
            ),
            Column("created_at", Kind.MOMENT, "When its first rank began it.", "c.created_at"),
            Column("committed_at", Kind.MOMENT, "When it was committed; null: it never was.", "c.committed_at"),
            Column("aborted_at", Kind.MOMENT, "When it was aborted; null: it was not.", "c.aborted_at"),
            Column("abort_cause", Kind.TEXT, "Why it was aborted, for programs.", "c.abort_cause"),
            Column("abort_reason", Kind.TEXT, "Why it was aborted, for people.", "c.abort_reason"),
            Column("pinned_at", Kind.MOMENT, "When a person pinned it; null: it has no pin.", "c.pinned_at"),
            Column(
                "pinned_until",
                Kind.MOMENT,
                "When the pin ends by itself, and keeps nothing any more; null: never, or no pin.",
                "c.pinned_until",
            ),
            Column("trashed_at", Kind.MOMENT, "When it was put into the trash; null: it was not.", "c.trashed_at"),
            Column("trashed_by", Kind.TEXT, "For whom: `policy`, `person` or `run`.", "c.trashed_by"),
            Column("trash_reason", Kind.TEXT, "Why, for people.", "c.trash_reason"),
            Column("purge_at", Kind.MOMENT, "When its bytes may go, if nobody takes it back.", "c.purge_at"),
            Column("deleted_at", Kind.MOMENT, "When its bytes went; null: they have not.", "c.deleted_at"),
        ),
        source=f"FROM checkpoints c JOIN runs r ON r.id = c.run_id JOIN projects p ON p.id = r.project_id\n"
        f"WHERE {shown_runs(dialect)}",
    )


def _hex_digest(dialect: Dialect) -> str:
    return f"CASE WHEN c.digest IS NOT NULL THEN {dialect.hex('c.digest')} END"


def restore_points(dialect: Dialect) -> View:
    """As `lineage/restore_choice.py` chooses `latest`: `lineage` is its line, `not_restorable` its conditions."""
    line = """WITH RECURSIVE line (attempt, last_step) AS (
    SELECT max(a.number), CAST(NULL AS BIGINT) FROM attempts a
    WHERE a.run_id = r.id AND a.cut_at IS NOT NULL HAVING max(a.number) IS NOT NULL
    UNION ALL
    SELECT parent.attempt_number, parent.step
    FROM line JOIN attempts a ON a.run_id = r.id AND a.number = line.attempt
    JOIN checkpoints parent ON parent.id = a.resumed_from_id
    JOIN attempts older ON older.run_id = r.id AND older.number = parent.attempt_number
    WHERE parent.attempt_number < line.attempt
  )"""
    return View(
        subject="restore_points",
        row="A run, until it is purged, with the checkpoint that a job would resume from if it was launched now. It is "
        "what `GET /v1/projects/{project}/runs/{run}` shows as `restore_point`: every store is taken to answer. If one "
        "has been unavailable for a while, a launch may be offered an older checkpoint. A run in the trash has a row "
        "with nulls, because its checkpoints are in the trash as well.",
        columns=(
            *RUN_COLUMNS,
            Column(
                "checkpoint_id",
                Kind.TEXT,
                "The newest checkpoint on the lineage that is committed, `ok` and `hot`; null: there is none, and all "
                "columns below are null.",
                "c.id",
            ),
            Column("attempt", Kind.INTEGER, "The attempt that staged it.", "c.attempt_number"),
            Column("step", Kind.INTEGER, "Its step.", "c.step"),
            Column("world_size", Kind.INTEGER, "The ranks that wrote it.", "c.world_size", "ranks"),
            Column("digest", Kind.TEXT, "Its SHA-256 in hex.", _hex_digest(dialect)),
            Column("logical_bytes", Kind.INTEGER, "Bytes of its state in the trainer.", "c.logical_bytes", "bytes"),
            Column("committed_at", Kind.MOMENT, "When it was committed.", "c.committed_at"),
            Column(
                "age_seconds",
                Kind.NUMBER,
                "The time since then.",
                dialect.seconds("c.committed_at", dialect.now),
                "seconds",
            ),
            Column(
                "newer_checkpoints",
                Kind.INTEGER,
                "Committed checkpoints of a greater step that will not do: diverged, corrupt, quarantined, cold, or "
                "not on the lineage.",
                "CASE WHEN c.id IS NOT NULL THEN (SELECT count(*) FROM checkpoints n WHERE n.run_id = r.id "
                "AND n.state = 'committed' AND n.step > c.step) END",
            ),
        ),
        source=f"""FROM {RUNS}
LEFT JOIN checkpoints c ON c.id = (
  {line}
  SELECT o.id FROM checkpoints o
  WHERE o.run_id = r.id AND o.state = 'committed' AND o.health = 'ok' AND o.tier = 'hot'
    AND (o.readable_until IS NULL OR o.readable_until > {dialect.now})
    AND EXISTS (
      SELECT 1 FROM line WHERE line.attempt = o.attempt_number AND (line.last_step IS NULL OR o.step <= line.last_step)
    )
    AND (NOT o.detached OR EXISTS (
      SELECT 1 FROM line JOIN attempts a ON a.run_id = r.id AND a.number = line.attempt
      WHERE a.resumed_from_id = o.id AND o.attempt_number < line.attempt
    ))
  ORDER BY o.step DESC, o.attempt_number DESC, o.detached, o.id LIMIT 1
)
WHERE {shown_runs(dialect)}""",
    )


def events(dialect: Dialect) -> View:
    return View(
        subject="events",
        row="An event, as `GET /v1/events` lists it, for `HOLDFAST_KEEP_EVENTS_DAYS`. What happens to a store concerns "
        "all projects, and every role sees it.",
        columns=(
            Column("number", Kind.INTEGER, "Its place in the stream of events.", "e.number"),
            Column(
                "event_id",
                Kind.TEXT,
                "The same with the catalog's epoch: the `id` that REST shows.",
                "i.epoch || '-' || e.number",
            ),
            Column("type", Kind.TEXT, "What happened, such as `checkpoint.committed`.", "e.type"),
            Column("happened_at", Kind.MOMENT, "When it happened.", "e.happened_at"),
            Column("project_id", Kind.TEXT, "The project's id; null: it concerns all of them.", "e.project_id"),
            Column(
                "project",
                Kind.TEXT,
                "Its name now; its id, if it has no row any more.",
                "COALESCE(p.name, e.project_id)",
            ),
            Column("run_id", Kind.TEXT, "The run's id; null: it is not about a run.", "e.run_id"),
            Column("run", Kind.TEXT, "Its name now.", "r.name"),
            Column("attempt", Kind.INTEGER, "The attempt's number.", "e.attempt"),
            Column("step", Kind.INTEGER, "The checkpoint's step.", "e.step"),
            Column("checkpoint_id", Kind.TEXT, "The checkpoint's id.", "e.checkpoint_id"),
            Column("operation", Kind.TEXT, "The operation's id.", "e.operation"),
            Column("store", Kind.TEXT, "The store's role: `primary`, `second` or `cold`.", "e.store"),
            Column("reason", Kind.TEXT, "Why, for people.", "e.reason"),
            Column(
                "quota",
                Kind.TEXT,
                "What the quota of the event counts: `bytes`, or `soft bytes` of a soft one.",
                "e.quota",
            ),
        ),
        source=f"""FROM events e CROSS JOIN catalog_identity i
LEFT JOIN projects p ON p.id = e.project_id
LEFT JOIN runs r ON r.id = e.run_id
WHERE e.number IS NOT NULL AND (e.project_id IS NULL OR {dialect.may_see("e.project_id")})""",
    )
