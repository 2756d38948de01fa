"""Which policy holds for a run: its own, else its project's. Every controller that follows a policy asks here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.policies import PolicyKind
from holdfast_service.catalog.custody_tables import Policy


@dataclass(frozen=True)
class StoredPolicy:
    """`document` as it was put: whoever follows it reads it with `holdfast_protocol.policies.read_policy`, and does
    nothing where that refuses. `run_id` None: the project's."""

    kind: PolicyKind
    project_id: str
    run_id: str | None
    document: dict[str, Any]
    version: int
    updated_at: datetime
    updated_by: str

    @property
    def level(self) -> Literal["project", "run"]:
        return "project" if self.run_id is None else "run"

    @property
    def etag(self) -> str:
        return f'"{self.version}"'

    @classmethod
    def of(cls, row: Policy) -> StoredPolicy:
        return cls(
            kind=PolicyKind(row.kind),
            project_id=row.project_id,
            run_id=row.run_id or None,
            document=dict(row.document),
            version=row.version,
            updated_at=row.updated_at,
            updated_by=row.updated_by,
        )


def effective_policy(session: Session, kind: PolicyKind, project_id: str, run_id: str | None) -> StoredPolicy | None:
    """The run's own, else the project's; None if neither has one. Without a run, the project's."""
    # Later than any lock that the caller holds, whatever the session has read before.
    rows = session.scalars(
        select(Policy)
        .where(Policy.project_id == project_id, Policy.kind == kind, Policy.run_id.in_({"", run_id or ""}))
        .order_by(Policy.run_id.desc()),
        execution_options={"populate_existing": True},
    )
    row = rows.first()
    return None if row is None else StoredPolicy.of(row)


def effective_policies(session: Session, kind: PolicyKind) -> Callable[[str, str], StoredPolicy | None]:
    """The same for every run, in one statement: (project_id, run_id) -> policy. For a look that locks nothing."""
    rows = session.scalars(select(Policy).where(Policy.kind == kind), execution_options={"populate_existing": True})
    found = {(row.project_id, row.run_id): StoredPolicy.of(row) for row in rows}
    return lambda project_id, run_id: found.get((project_id, run_id)) or found.get((project_id, ""))
