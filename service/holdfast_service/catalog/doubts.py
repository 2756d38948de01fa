"""What a rebuilt catalog does not know, and who has looked into it (protocol rule 41).

A bucket may hold objects that no checkpoint refers to, and documents that cannot be read. A commit may have been
there: so of a run without one the service does not confirm that nothing was ever committed, until a person does. A
catalog that was never rebuilt has no row here.
"""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.restore import RestoreDecision
from holdfast_service.catalog.record_tables import RebuildDoubt
from holdfast_service.errors import ProblemError

EVERY = ""
"""In place of a run's name: all of the project's. In place of a project's: all that the rebuild did not find."""


def why_in_doubt(session: Session, project: str, run: str) -> str | None:
    """A sentence; None where the rebuild saw everything, or a person has confirmed. The word on the run counts before
    that on its project, and that before the one on all unknown projects."""
    rows = session.scalars(
        select(RebuildDoubt).where(RebuildDoubt.project.in_((project, EVERY)), RebuildDoubt.run.in_((run, EVERY)))
    )
    doubts = {(row.project, row.run): row.reason for row in rows}
    for key in ((project, run), (project, EVERY), (EVERY, EVERY)):
        if key in doubts:
            return doubts[key]
    return None


def without_doubt(session: Session, project: str, run: str, decision: RestoreDecision) -> RestoreDecision:
    """The decision, with a word on what may be missing. Raises `commits_unknown` where it would say that nothing was
    ever committed, and nobody knows."""
    why = why_in_doubt(session, project, run)
    if why is None:
        return decision
    if not decision.ever_committed:
        raise ProblemError(
            ProblemCode.COMMITS_UNKNOWN,
            f"The catalog was rebuilt, and something of {project} could not be known: {why} So nobody knows whether "
            f"{project}/{run} ever had a checkpoint. If it is new, or may begin from nothing, confirm that: `holdfast "
            f"catalog confirm {project}/{run}`; for every run of the project: `holdfast catalog confirm {project}`.",
            project=project,
            run=run,
        )
    told = (
        f"The catalog was rebuilt, and newer checkpoints may be missing: {why} This note ends with `holdfast catalog "
        f"confirm {project}/{run}`."
    )
    return decision.model_copy(update={"note": f"{decision.note} {told}".strip()})
