"""A checkpoint that one attempt after another crashes from is quarantined, and not offered again.

Progress tells a bad checkpoint from bad luck: a commit that is not diverged, or more than a few steps beyond the
restore point. The first attempt that made some, looking back from the newest, ends the count, wherever it began.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from sqlalchemy import func, select
from sqlalchemy.orm import Session, aliased

from holdfast_protocol.restores import RestoreDecision, RestorePoint
from holdfast_protocol.runs import Latest
from holdfast_protocol.states import AttemptOutcome, CheckpointState, Health
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.db.tables.core import Attempt, Checkpoint, Run
from holdfast_service.db.tables.operations import AuditEvent
from holdfast_service.lineage.restore_choice import AvailableStores, choose_restore_point
from holdfast_service.runs.views import locked_checkpoint

FEW_STEPS = 10
"""So many steps beyond the restore point are no progress yet: what is wrong in a state may show only after some."""
IN_A_ROW = 2
"""So many checkpoints are quarantined before an attempt makes progress again. A job that crashes from each of them is
at fault itself, and must not eat its way down to its oldest state."""
_OURS = frozenset({"holdfast", "holdfast_client", "holdfast_protocol"})
_DAMAGED = frozenset(
    {
        "ChecksumMismatch",
        "ChunkCorrupt",
        "ChunkLost",
        "DecodeError",
        "DocumentError",
        "IntegrityError",
        "TreeFormatError",
    }
)
"""Only these of our own errors can be the checkpoint's: its bytes are wrong. All others say by their name that the job,
a person, the service, the store or the network was at fault, whatever classes are still to come."""
_RANK_LOST = "holdfast.errors.RankLost"
_NOT_THE_CHECKPOINT = frozenset(
    {
        "ImportError",
        "KeyboardInterrupt",
        "MemoryError",
        "ModuleNotFoundError",
        "SystemExit",
        "argparse.ArgumentError",
        "socket.gaierror",
        *(name for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, OSError)),
    }
)
"""A job that is set up wrongly, or stopped, or its machine, files and network: an earlier checkpoint meets the same."""
_NOT_THE_CHECKPOINT_IN_ANY_PACKAGE = (
    "ConnectError",
    "ConnectionError",
    "HTTPError",
    "OutOfMemoryError",
    "SSLError",
    "Timeout",
    "TimeoutError",
    "URLError",
)
"""How such errors are called in every package: requests, httpx, botocore, huggingface_hub, torch."""


@dataclass(frozen=True)
class Tried:
    """An attempt that is over. `point`: the checkpoint that it loaded, or was offered and may have died of loading;
    `point_step` is its step. `called_later`: it was alive when another one took over."""

    number: int
    point: str | None
    point_step: int | None
    outcome: AttemptOutcome | None
    error_type: str | None = None
    last_step: int | None = None
    committed: bool = False
    rolled_back: bool = False
    called_later: bool = False


@dataclass(frozen=True)
class CrashLoop:
    """`attempts` crashed from one checkpoint, the oldest first; `others`: the points that the job crashed from as well
    since it last made progress."""

    attempts: tuple[int, ...]
    others: frozenset[str]


class _End(Enum):
    PROGRESS = "progress"
    CRASH = "crash"
    SILENCE = "silence"
    NEITHER = "neither"


def crash_loop(
    newest_first: Sequence[Tried], point: str, *, attempts: int, released_after: int = 0
) -> CrashLoop | None:
    """None unless `attempts` of them crashed from `point` without progress. Those up to `released_after`, the newest
    attempt when a person released it, do not count. A node that was lost tells nothing once: silence counts if it
    repeats."""
    since_progress: list[tuple[Tried, _End]] = []
    for tried in newest_first:
        if (end := _end_of(tried)) is _End.PROGRESS:
            break
        since_progress.append((tried, end))
    from_point = [
        (tried, end) for tried, end in since_progress if tried.point == point and tried.number > released_after
    ]
    crashed = [tried.number for tried, end in from_point if end is _End.CRASH]
    silent = [tried.number for tried, end in from_point if end is _End.SILENCE]
    if len(silent) > 1:
        crashed += silent
    if len(crashed) < attempts:
        return None
    others = {tried.point for tried, end in since_progress if end is not _End.NEITHER and tried.point is not None}
    return CrashLoop(tuple(sorted(crashed)), frozenset(others - {point}))


def _end_of(tried: Tried) -> _End:
    if tried.outcome is AttemptOutcome.FINISHED or tried.committed:
        return _End.PROGRESS
    if tried.last_step is not None and tried.last_step - (tried.point_step or 0) > FEW_STEPS:
        return _End.PROGRESS
    if tried.rolled_back or tried.called_later or tried.outcome in (None, AttemptOutcome.PREEMPTED):
        return _End.NEITHER
    # Lost, or taken over without a word: killed, or a node that went away.
    return _end_by(tried.error_type) if tried.outcome is AttemptOutcome.FAILED else _End.SILENCE


def _end_by(error_type: str | None) -> _End:
    """How a job ended that failed by this error. Without one it has only heard that another rank is gone, as with the
    errors of a torch collective: that rank's end is unknown."""
    if error_type is None or error_type == _RANK_LOST:
        return _End.SILENCE
    module, _, name = error_type.rpartition(".")
    package = module.partition(".")[0]
    if package in _OURS:
        return _End.CRASH if name in _DAMAGED else _End.NEITHER
    if module == "torch.distributed" and name.startswith("Dist") and name.endswith("Error"):
        return _End.SILENCE
    elsewhere = error_type in _NOT_THE_CHECKPOINT or name.endswith(_NOT_THE_CHECKPOINT_IN_ANY_PACKAGE)
    return _End.NEITHER if elsewhere else _End.CRASH


_LOOKED_AT = 100
"""Attempts, from the newest back."""


def break_crash_loop(
    session: Session, run: Run, decision: RestoreDecision, *, attempts: int, available: AvailableStores | None
) -> RestoreDecision:
    """`decision`, or the one that comes after a quarantine, with a note for people either way. One checkpoint at most,
    never the last one that is left, and only IN_A_ROW of them until an attempt makes progress. `attempts`: as the
    setting, 0 for never.

    It runs in the transaction of the opening, under the run's lock: of two launches at once only one checks, and the
    other one sees the result. A person's release counts the attempts anew.
    """
    point = decision.restore_point
    # The last launch saved the point itself: that is progress, and nothing more has to be looked at.
    if point is None or attempts == 0 or point.attempt == run.latest_attempt - 1:
        return decision
    loop = crash_loop(
        _tried(session, run),
        point.checkpoint_id,
        attempts=attempts,
        released_after=_released_after(session, run, point),
    )
    if loop is None:
        return decision
    told = f"Attempts {', '.join(map(str, loop.attempts))} crashed from step {point.step} without progress"
    if len(_quarantined(session, loop)) >= IN_A_ROW:
        return _noted(
            decision,
            f"{told}, as others did from the checkpoints in quarantine before it. So the job seems to be at fault, and "
            "no further checkpoint is skipped. Fix it; `holdfast checkpoints edit --health ok` releases the newer.",
        )
    before = choose_restore_point(session, run.id, Latest(), before_step=point.step, available=available)
    if before.restore_point is None:
        return _noted(decision, f"{told}. It is offered all the same, for no other healthy checkpoint is left.")
    if not _quarantine(session, run, point, told):
        return decision
    after = choose_restore_point(session, run.id, Latest(), available=available)
    return _noted(
        after,
        f"{told}: it is in quarantine, and the one before is offered. `holdfast checkpoints edit --health ok` releases "
        "it, should it not have been at fault.",
    )


def _noted(decision: RestoreDecision, sentence: str) -> RestoreDecision:
    return decision.model_copy(update={"note": f"{decision.note} {sentence}".strip()})


def _tried(session: Session, run: Run) -> list[Tried]:
    """The attempts before the one that opens now, the newest first."""
    committed = set(
        session.scalars(
            select(Checkpoint.attempt_number)
            .where(
                Checkpoint.run_id == run.id,
                Checkpoint.attempt_number >= run.latest_attempt - _LOOKED_AT,
                Checkpoint.committed_at.is_not(None),
                ~Checkpoint.detached,
                # Saved by a bad restore point, it would hide the crashes that come of it.
                Checkpoint.health != Health.DIVERGED,
            )
            .distinct()
        )
    )
    point = aliased(Checkpoint)
    rows = session.execute(
        select(Attempt, point.id, point.step)
        .outerjoin(point, point.id == func.coalesce(Attempt.resumed_from_id, Attempt.offered_id))
        .where(Attempt.run_id == run.id, Attempt.number < run.latest_attempt)
        .order_by(Attempt.number.desc())
        .limit(_LOOKED_AT),
        execution_options={"populate_existing": True},
    )
    return [
        Tried(
            number=attempt.number,
            point=point_id,
            point_step=point_step,
            outcome=None if attempt.outcome is None else AttemptOutcome(attempt.outcome),
            error_type=attempt.error_type,
            last_step=attempt.last_step,
            committed=attempt.number in committed,
            rolled_back=attempt.rolled_back_at is not None,
            called_later=attempt.refused_at is not None,
        )
        for attempt, point_id, point_step in rows
    ]


def _released_after(session: Session, run: Run, point: RestorePoint) -> int:
    """The newest attempt when a person last said that it is healthy; 0 if nobody did. The event has its number: the
    clock may have gone back since those attempts were opened. An event of an older service has none."""
    edits = session.scalars(
        select(AuditEvent)
        .where(AuditEvent.checkpoint_id == point.checkpoint_id, AuditEvent.action == "checkpoint.edit")
        .order_by(AuditEvent.id.desc())
    )
    release = next((edit for edit in edits if (edit.after or {}).get("health") == Health.OK), None)
    if release is None:
        return 0
    if (number := (release.after or {}).get("latest_attempt")) is not None:
        return int(number)
    before = select(func.max(Attempt.number)).where(Attempt.run_id == run.id, Attempt.opened_at <= release.at)
    return session.scalar(before) or 0


def _quarantined(session: Session, loop: CrashLoop) -> list[str]:
    """The ids of the other points that the job crashed from and that are quarantined."""
    return list(
        session.scalars(
            select(Checkpoint.id).where(Checkpoint.id.in_(loop.others), Checkpoint.health == Health.QUARANTINED)
        )
    )


def _quarantine(session: Session, run: Run, point: RestorePoint, reason: str) -> bool:
    """False if it has changed since it was chosen: an edit takes only the checkpoint's lock."""
    checkpoint = locked_checkpoint(session, point.checkpoint_id)
    if (checkpoint.state, checkpoint.health) != (CheckpointState.COMMITTED, Health.OK):
        return False
    checkpoint.health = Health.QUARANTINED
    checkpoint.health_reason = reason
    checkpoint.version += 1
    record_event(
        session,
        Actor.controller("crash-loop"),
        "checkpoint.quarantine",
        project_id=run.project_id,
        run_id=run.id,
        checkpoint_id=checkpoint.id,
        reason=reason,
        before={"health": Health.OK.value},
        after={"health": Health.QUARANTINED.value, "health_reason": reason},
    )
    session.flush()
    return True
