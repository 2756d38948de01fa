"""How a run saves, by its newest saves: how often, what each adds to the store, and what all of them share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from statistics import mean, median
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import CheckpointKind, CheckpointState
from holdfast_service.catalog.stored_bytes import stored_bytes_of_checkpoint
from holdfast_service.catalog.tables import Checkpoint, Run
from holdfast_service.errors import ProblemError

_NEWEST = 200


@dataclass(frozen=True)
class Save:
    """What a rule may look at."""

    kind: CheckpointKind
    labels: Sequence[str]
    metrics: dict[str, Any]


@dataclass(frozen=True)
class Rhythm:
    """`saves` in the order of their making; they are thought to come again and again."""

    saves: Sequence[Save]
    newest_at: datetime
    newest_step: int
    interval_seconds: float
    steps_between: int
    bytes_per_save: int
    shared_bytes: int


def read_rhythm(session: Session, run: Run) -> Rhythm:
    """Of all that were ever committed on the line, expired ones too. Raises `invalid_request` for fewer than two."""
    rows = session.execute(
        select(
            Checkpoint.id,
            Checkpoint.committed_at,
            Checkpoint.step,
            Checkpoint.uploaded_bytes,
            Checkpoint.kind,
            Checkpoint.labels,
            Checkpoint.metrics,
            Checkpoint.state,
        )
        .where(Checkpoint.run_id == run.id, Checkpoint.committed_at.is_not(None), ~Checkpoint.off_line)
        .order_by(Checkpoint.committed_at.desc(), Checkpoint.id.desc())
        .limit(_NEWEST)
    ).all()[::-1]
    if len(rows) < 2:
        raise ProblemError(
            ProblemCode.INVALID_REQUEST,
            f"The run {run.name!r} has {len(rows)} committed checkpoints, and how it goes on is told by its saves. Ask "
            "again when it has at least two.",
        )
    times = [row.committed_at for row in rows]
    gaps = [(later - earlier).total_seconds() for earlier, later in pairwise(times)]
    steps = [later.step - earlier.step for earlier, later in pairwise(rows)]
    # The first one of all sends what later ones share; it would look like growth.
    per_save = round(mean(row.uploaded_bytes for row in rows[1:]))
    there = [row.id for row in rows if row.state == CheckpointState.COMMITTED]
    whole = stored_bytes_of_checkpoint(session, there[-1]) if there else per_save
    return Rhythm(
        saves=[Save(CheckpointKind(row.kind), list(row.labels), dict(row.metrics)) for row in rows],
        newest_at=times[-1],
        newest_step=rows[-1].step,
        # Of a job that was away for a night, the median is how it saves while it runs.
        interval_seconds=max(1.0, median(gaps)),
        steps_between=max(1, round(median(steps))),
        bytes_per_save=per_save,
        shared_bytes=max(0, whole - per_save),
    )
