"""The controller `tally`, and what it must come to: the bare rows added up in Python, with nothing of the code under
test."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from sqlalchemy import bindparam, func, select, text
from sqlalchemy.orm import Session

from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import database_now
from holdfast_service.db.engine import Database
from holdfast_service.db.tables.core import Project
from holdfast_service.db.tables.tallies import TallyComparison
from holdfast_service.tallies.controller import TallyReport, reconcile
from holdfast_service.tallies.sums import counted_bytes, stored_bytes, sums_of_projects, sums_of_runs
from tests.support.service import RunningService

Key = tuple[str, int, str | None, str, str]  # project, store, storage class, tier, kept for


def take_up(service: RunningService, *, whole: bool = False) -> TallyReport:
    """Everything that has changed is in the sums afterwards; `whole`: and was compared with the rows."""
    return reconcile(service.context, whole=whole)


def drifted(service: RunningService) -> int:
    return _drifted(service.context.database)


def check_sums(service: RunningService) -> None:
    """All is taken up, nothing has drifted, and a count by hand gives the same."""
    take_up(service)
    assert kept(service) == true(service)
    take_up(service, whole=True)
    assert drifted(service) == 0
    assert kept(service) == true(service)


def drifted_at_last(context: ServiceContext) -> list[str]:
    """After a trial: the sums must be those of the rows, and have been so all the time."""
    reconcile(context, whole=True)
    sums = _drifted(context.database)
    return [f"{sums} sums had drifted from their rows"] if sums else []


def _drifted(database: Database) -> int:
    with database.read() as session:
        return int(session.scalar(select(func.sum(TallyComparison.drifted))) or 0)


def kept(service: RunningService, project: str | None = None) -> dict[Key, tuple[int, int, int, int]]:
    """Copies, bytes, and pinned and held ones, as the sums have them."""
    added: defaultdict[Key, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    with service.context.database.read() as session:
        for each in counted_bytes(session, None if project is None else _ids(session, project)):
            sums = added[each.project_id, each.store_id, each.storage_class, each.tier.value, each.kept_for.value]
            for at, value in enumerate((each.copies, each.bytes, each.pinned_bytes, each.held_bytes)):
                sums[at] += value
    return {key: (one[0], one[1], one[2], one[3]) for key, one in added.items() if any(one)}


def true(service: RunningService, project: str | None = None) -> dict[Key, tuple[int, int, int, int]]:
    """The same from the bare rows."""
    with service.context.database.read() as session:
        now = database_now(session)
        rows = session.execute(
            text(
                "SELECT c.id, c.state, c.pinned_at, e.chunk_id, 'list' AS how FROM checkpoints c "
                "JOIN shards s ON s.checkpoint_id = c.id "
                "JOIN chunk_list_entries e ON e.chunk_list_id = s.chunk_list_id UNION ALL "
                "SELECT c.id, c.state, c.pinned_at, r.chunk_id, 'reference' FROM checkpoints c "
                "JOIN shards s ON s.checkpoint_id = c.id JOIN shard_chunks r ON r.shard_id = s.id"
            )
        ).all()
        in_force = {"now": now.replace(tzinfo=None) if not service.context.database.is_postgres else now}
        pinned = set(
            session.scalars(
                text(
                    "SELECT id FROM checkpoints WHERE pinned_at IS NOT NULL AND "
                    "(pinned_until IS NULL OR pinned_until > :now)"
                ),
                in_force,
            )
        )
        held = set(
            session.scalars(
                text(
                    "SELECT checkpoint_id FROM holds WHERE released_at IS NULL AND "
                    "(retain_until IS NULL OR retain_until > :now)"
                ),
                in_force,
            )
        )
        copies = session.execute(
            text(
                "SELECT project_id, store_id, storage_class, state, chunk_id, stored_bytes FROM copies "
                "WHERE project_id IN :ids"
            ).bindparams(bindparam("ids", expanding=True)),
            {"ids": _ids(session, project)},
        ).all()
    uses: defaultdict[int, set[str]] = defaultdict(set)
    for checkpoint_id, state, _, chunk_id, how in rows:
        if how == "reference" and state != "uploading":
            continue
        if state in ("uploading", "committed", "trashed", "deleting"):
            uses[chunk_id].add({"deleting": "trashed"}.get(state, state))
            uses[chunk_id] |= {"pinned"} if checkpoint_id in pinned and how == "list" else set()
            uses[chunk_id] |= {"held"} if checkpoint_id in held and how == "list" else set()
    added: defaultdict[Key, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for project_id, store_id, storage_class, state, chunk_id, size in copies:
        if state == "gone":
            continue
        if state == "deleting":
            why = "pending_collection"
        elif state in ("pending", "copying"):
            why = "arriving"
        elif "committed" in uses[chunk_id]:
            why = "committed"
        elif "uploading" in uses[chunk_id]:
            why = "arriving"
        else:
            why = "trashed" if "trashed" in uses[chunk_id] else "pending_collection"
        tier = state if state in ("cold", "thawing") else "hot"
        sums = added[project_id, store_id, storage_class or None, tier, why]
        needed = why in ("committed", "trashed")
        sums[0] += 1
        sums[1] += size
        sums[2] += size if needed and "pinned" in uses[chunk_id] else 0
        sums[3] += size if needed and "held" in uses[chunk_id] else 0
    return {key: (one[0], one[1], one[2], one[3]) for key, one in added.items() if any(one)}


def _ids(session: Session, project: str | None) -> list[str]:
    named = select(Project.id) if project is None else select(Project.id).where(Project.name == project)
    return list(session.scalars(named))


def check_exact_sums(service: RunningService, project: str) -> None:
    """What is exact at every moment, whatever the controller has done: all bytes, and the sums over checkpoints."""
    with service.context.database.read() as session:
        projects = _ids(session, project)
        copies = session.execute(
            text("SELECT project_id, store_id, state, stored_bytes FROM copies WHERE project_id = :id"),
            {"id": projects[0]},
        ).all()
        rows = session.execute(
            text(
                "SELECT r.project_id, r.id, c.state, c.committed_at, c.aborted_at, c.logical_bytes, c.chunk_bytes, "
                "c.uploaded_bytes, c.deduplicated_bytes FROM runs r JOIN checkpoints c ON c.run_id = r.id "
                "WHERE r.project_id = :id"
            ),
            {"id": projects[0]},
        ).all()
        size: Counter[tuple[str, int]] = Counter()
        for project_id, store_id, state, stored in copies:
            size[project_id, store_id] += stored if state != "gone" else 0
        for project_id in projects:
            of_stores = {store_id: value for (owner, store_id), value in size.items() if owner == project_id}
            assert stored_bytes(session, [project_id])[project_id] == sum(of_stores.values())
            for store_id, value in of_stores.items():
                assert stored_bytes(session, [project_id], store_id=store_id)[project_id] == value
        sums: defaultdict[str, Counter[str]] = defaultdict(Counter)
        owners = {}
        for row in rows:
            owners[row.id] = row.project_id
            for of in (row.project_id, row.id):
                sums[of] += Counter(_of_checkpoint(row))
        for run_id, project_id in owners.items():
            assert _shown(sums_of_runs(session, project_id, [run_id])[run_id]) == +sums[run_id]
        for project_id in projects:
            assert _shown(sums_of_projects(session, [project_id])[project_id]) == +sums[project_id]


def _of_checkpoint(row: Any) -> dict[str, int]:
    committed, ever = row.state == "committed", row.committed_at is not None
    return {
        "uploading": row.state == "uploading",
        "committed": committed,
        "logical_bytes": row.logical_bytes * committed,
        "deduplicated_bytes": row.deduplicated_bytes * committed,
        "ever_committed": ever,
        "ever_aborted": row.aborted_at is not None,
        "ever_chunk_bytes": row.chunk_bytes * ever,
        "ever_uploaded_bytes": row.uploaded_bytes * ever,
        "ever_deduplicated_bytes": row.deduplicated_bytes * ever,
    }


def _shown(sums: Any) -> Counter[str]:
    return +Counter(vars(sums))
