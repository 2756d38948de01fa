"""What is said of a checkpoint that must be thawed before it can be read: how long that takes, and the command."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import Tier
from holdfast_protocol.tiers import TERMS, StorageClass, ThawSpeed
from holdfast_service.catalog.tables import Checkpoint, Project, Run
from holdfast_service.errors import ProblemError


def how_to_thaw(tier: Tier, place: str | None, selector: str, expected_at: datetime | None) -> str:
    """A sentence or two. Pure. `place`: the coldest one that its chunks are in."""
    if tier is Tier.THAWING:
        when = "" if expected_at is None else f", expected by {expected_at:%Y-%m-%d %H:%M} UTC"
        return f"It is being thawed{when}; `holdfast thaw {selector} --status` tells how far that is."
    takes = takes_words(place)
    return f"`holdfast thaw {selector}` makes it readable{f' within {takes}' if takes else ''}."


def takes_words(place: str | None) -> str:
    """Such as `5 hours (standard), 12 hours (bulk) or 5 minutes (expedited)`; empty where nobody has promised it."""
    if place not in {each.value for each in StorageClass}:
        return ""
    seconds = TERMS[StorageClass(place)].thaw_seconds
    speeds = [each for each in (ThawSpeed.STANDARD, ThawSpeed.BULK, ThawSpeed.EXPEDITED) if each in seconds]
    told = [f"{_readable(seconds[speed])} ({speed})" for speed in speeds]
    return " or ".join(filter(None, [", ".join(told[:-1]), told[-1]])) if told else ""


def cold_problem(session: Session, checkpoint: Checkpoint) -> ProblemError:
    """`checkpoint_cold`, with the command to type."""
    selector = selector_of(session, checkpoint)
    # What cannot be read is not hot, whatever the row still says.
    tier = Tier.THAWING if checkpoint.thawed_until is not None and checkpoint.tier != Tier.HOT else Tier.COLD
    said = how_to_thaw(tier, checkpoint.cold_class, selector, checkpoint.thaw_expected_at)
    return ProblemError(
        ProblemCode.CHECKPOINT_COLD,
        f"Step {checkpoint.step} is {tier}: it was moved to where it cannot be read at once. {said}",
        checkpoint_id=checkpoint.id,
        tier=tier.value,
        place=checkpoint.cold_class,
        command=f"holdfast thaw {selector}",
    )


def selector_of(session: Session, checkpoint: Checkpoint) -> str:
    """As a person types it."""
    project, run = session.execute(
        select(Project.name, Run.name).join(Run, Run.project_id == Project.id).where(Run.id == checkpoint.run_id)
    ).one()
    return f"{project}/{run}@{checkpoint.step}#{checkpoint.attempt_number}"


def _readable(seconds: int) -> str:
    count, unit = (seconds // 3600, "hour") if seconds >= 3600 else (seconds // 60, "minute")
    return f"{count} {unit}{'' if count == 1 else 's'}"
