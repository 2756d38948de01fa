"""The catalog's own numbers, read for `/metrics`: true for all processes together, and across restarts.

Every process shows the same values, so dashboards take `max`, not `sum`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from holdfast_protocol.states import CheckpointState, QuotaKind
from holdfast_protocol.text import unfold_hosts
from holdfast_service.context import ServiceContext
from holdfast_service.db.cached_read import CachedRead
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Attempt, Checkpoint, Project, Run
from holdfast_service.db.tables.operations import ForgottenTotal
from holdfast_service.lineage.restore_choice import newest_restore_points
from holdfast_service.quotas.limits import HARD, SOFT, used_of
from holdfast_service.runs.views import MOST_RUNS_TOLD, live_runs
from holdfast_service.tallies.sums import Sums, stored_bytes, sums_of_projects

MOST_HOSTS_TOLD = 2000
"""Of all live runs together."""


@dataclass(frozen=True)
class _ProjectNumbers:
    """`forgotten`: what the checkpoints were whose rows are gone."""

    name: str
    stored_bytes: int
    sums: Sums
    forgotten: ForgottenTotal | None
    corrupt: int
    hard: Mapping[QuotaKind, int]
    soft: Mapping[QuotaKind, int]
    used: Mapping[QuotaKind, int]

    def ever(self, name: str) -> int:
        """Of all checkpoints that there ever were: a column of ForgottenTotal."""
        gone = 0 if self.forgotten is None else getattr(self.forgotten, name)
        return int(gone + getattr(self.sums, f"ever_{name}"))


@dataclass(frozen=True)
class _LiveRun:
    """The newest attempt of a run, which has not ended. `values` by the name of the metric."""

    project: str
    run: str
    hosts: list[str]
    values: dict[str, float]


@dataclass(frozen=True)
class _Numbers:
    projects: tuple[_ProjectNumbers, ...]
    live_runs: tuple[_LiveRun, ...]


class CatalogNumbers(Collector):
    """Registered once per application."""

    def __init__(self, context: ServiceContext) -> None:
        self._numbers: CachedRead[_Numbers | None] = CachedRead(
            context.database, functools.partial(_read, context=context), None
        )

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not read the catalog."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        numbers = self._numbers()
        up = GaugeMetricFamily("holdfast_catalog_up", "1 if the catalog's numbers could be read.")
        up.add_metric([], 0 if numbers is None else 1)
        yield up
        if numbers is not None:
            yield from _families(numbers)


def _families(numbers: _Numbers) -> Iterator[Metric]:
    ended = CounterMetricFamily(
        "holdfast_checkpoints", "Checkpoints that were committed or aborted.", labels=("project", "outcome")
    )
    moved = CounterMetricFamily(
        "holdfast_checkpoint_bytes",
        "Of all checkpoints that were ever committed: negotiated (the chunks that they need), uploaded (what was sent, "
        "as it is stored), deduplicated (what was not sent, because it was there).",
        labels=("project", "kind"),
    )
    uploading = GaugeMetricFamily("holdfast_checkpoints_uploading", "Checkpoints in the making.", labels=("project",))
    stored = GaugeMetricFamily("holdfast_stored_bytes", "Bytes in the store.", labels=("project",))
    logical = GaugeMetricFamily(
        "holdfast_logical_bytes", "Bytes of the states that committed checkpoints hold now.", labels=("project",)
    )
    deduplicated = GaugeMetricFamily(
        "holdfast_deduplicated_bytes",
        "Bytes that the checkpoints that are committed now did not send, because they were there.",
        labels=("project",),
    )
    corrupt = GaugeMetricFamily(
        "holdfast_checkpoints_corrupt", "Committed checkpoints that cannot be restored now.", labels=("project",)
    )
    quota = GaugeMetricFamily("holdfast_quota_bytes", "The quota of each project that has one.", labels=("project",))
    used = GaugeMetricFamily("holdfast_quota_used_bytes", "What counts against that quota.", labels=("project",))
    quotas = GaugeMetricFamily(
        "holdfast_quota", "The hard and soft quotas that a project has.", labels=("project", "quota", "limit")
    )
    used_of_each = GaugeMetricFamily(
        "holdfast_quota_used", "What counts against each of these quotas.", labels=("project", "quota")
    )
    for project in numbers.projects:
        ended.add_metric([project.name, "committed"], project.ever("committed"))
        ended.add_metric([project.name, "aborted"], project.ever("aborted"))
        moved.add_metric([project.name, "negotiated"], project.ever("chunk_bytes"))
        moved.add_metric([project.name, "uploaded"], project.ever("uploaded_bytes"))
        moved.add_metric([project.name, "deduplicated"], project.ever("deduplicated_bytes"))
        uploading.add_metric([project.name], project.sums.uploading)
        stored.add_metric([project.name], project.stored_bytes)
        logical.add_metric([project.name], project.sums.logical_bytes)
        deduplicated.add_metric([project.name], project.sums.deduplicated_bytes)
        corrupt.add_metric([project.name], project.corrupt)
        if QuotaKind.BYTES in project.hard:
            quota.add_metric([project.name], project.hard[QuotaKind.BYTES])
            used.add_metric([project.name], project.used[QuotaKind.BYTES])
        for limit, of_kind in (("hard", project.hard), ("soft", project.soft)):
            for kind, most in of_kind.items():
                quotas.add_metric([project.name, kind.value, limit], most)
        for kind in project.hard.keys() | project.soft.keys():
            used_of_each.add_metric([project.name, kind.value], project.used[kind])
    yield from (ended, moved, uploading, stored, logical, deduplicated, corrupt, quota, used, quotas, used_of_each)
    yield from _families_of_live_runs(numbers.live_runs)


_OF_LIVE_RUNS = {
    "holdfast_restore_point_age_seconds": "Age of the newest restore point",
    "holdfast_restore_point_step": "Step of the newest restore point",
    "holdfast_attempt_number": "How many attempts there were",
    "holdfast_attempt_age_seconds": "Since the attempt was opened",
    "holdfast_attempt_step": "The last step that the attempt told",
    "holdfast_attempt_steps_per_second": "Its speed lately, without saves and restores",
    "holdfast_attempt_stalled": "1 if the attempt is alive and ends no step",
}


def _families_of_live_runs(live: Sequence[_LiveRun]) -> Iterator[Metric]:
    of_which = f"of each run whose newest attempt has not ended: of the {MOST_RUNS_TOLD} that were opened last."
    for name, told in _OF_LIVE_RUNS.items():
        gauge = GaugeMetricFamily(name, f"{told}, {of_which}", labels=("project", "run"))
        for each in live:
            if name in each.values:
                gauge.add_metric([each.project, each.run], each.values[name])
        yield gauge
    hosts = GaugeMetricFamily(
        "holdfast_attempt_host_info",
        f"1 for each host, by its own name, {of_which} At most {MOST_HOSTS_TOLD} hosts.",
        labels=("project", "run", "host"),
    )
    every = ((each, host) for each in live for host in each.hosts)
    for each, host in islice(every, MOST_HOSTS_TOLD):
        hosts.add_metric([each.project, each.run, host], 1)
    yield hosts


def _read(session: Session, context: ServiceContext) -> _Numbers:
    rows = session.scalars(select(Project).where(Project.purged_at.is_(None))).all()
    names = {project.id: project.name for project in rows}
    hard, soft = ({project.id: _quotas(project, of) for project in rows} for of in (HARD, SOFT))
    sizes = stored_bytes(session, names)
    used = used_of(session, context, [each for each in names if hard[each] or soft[each]])
    sums = sums_of_projects(session, names)
    corrupt = dict(
        session.execute(
            select(Run.project_id, func.count())
            .join(Checkpoint, Checkpoint.run_id == Run.id)
            # The text of the partial index, so that it is used.
            .where(text("health = 'corrupt'"), Checkpoint.state == CheckpointState.COMMITTED)
            .group_by(Run.project_id)
        ).all()
    )
    # Rows that are gone were counted with these, in the transaction that took them away.
    forgotten = {gone.project_id: gone for gone in session.scalars(select(ForgottenTotal))}
    projects = tuple(
        _ProjectNumbers(
            name,
            sizes[project_id],
            sums[project_id],
            forgotten.get(project_id),
            corrupt.get(project_id, 0),
            hard[project_id],
            soft[project_id],
            used.get(project_id, {}),
        )
        for project_id, name in sorted(names.items(), key=lambda item: item[1])
    )
    return _Numbers(projects, tuple(_live(session)))


def _quotas(project: Project, columns: Mapping[QuotaKind, str]) -> dict[QuotaKind, int]:
    found = {kind: getattr(project, column) for kind, column in columns.items()}
    return {kind: quota for kind, quota in found.items() if quota is not None}


def _live(session: Session) -> Iterator[_LiveRun]:
    """Only of runs that are being trained: how far back they would fall now. The others need no alarm."""
    now = database_now(session)
    live = session.execute(live_runs().add_columns(Attempt)).all()
    points = newest_restore_points(session, [run_id for run_id, *_ in live])
    for run_id, project, run, attempt in live:
        values: dict[str, float | None] = {
            "holdfast_attempt_number": attempt.number,
            "holdfast_attempt_age_seconds": max(0.0, (now - attempt.opened_at).total_seconds()),
            "holdfast_attempt_step": attempt.last_step,
            "holdfast_attempt_steps_per_second": attempt.steps_per_second,
            "holdfast_attempt_stalled": attempt.stalled_at is not None,
        }
        if run_id in points:
            values["holdfast_restore_point_step"] = points[run_id].step
            values["holdfast_restore_point_age_seconds"] = max(0.0, (now - points[run_id].committed_at).total_seconds())
        yield _LiveRun(project, run, _hosts_of(attempt), {name: v for name, v in values.items() if v is not None})


def _hosts_of(attempt: Attempt) -> list[str]:
    """Those of all its ranks if it told them, and rank 0's in any case."""
    others = unfold_hosts(attempt.environment.get("hosts", ""), most=MOST_HOSTS_TOLD)
    return [host for host in dict.fromkeys((attempt.host, *others)) if host]
