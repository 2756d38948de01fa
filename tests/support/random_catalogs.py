"""Runs as years of jobs leave them, made up: rows of every state, side by side. For what must say the same of any of
them in two ways."""

from __future__ import annotations

import random
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy.orm import Session

from holdfast_protocol.states import AttemptOutcome, CheckpointState, Health, Tier
from holdfast_service.db.tables.core import Attempt, Checkpoint, Project, Run
from holdfast_service.db.tables.curves import Curve, CurvePoint

DAY = timedelta(days=1)


def fill(session: Session, *, runs: int, seed: int) -> list[str]:
    """The ids of so many runs in two projects. Everything happened in the 20 days before now; of some runs the newest
    attempt is alive."""
    dice = random.Random(seed)
    now = datetime.now(UTC)
    projects = [Project(id=uuid.uuid4().hex, name=f"random-{n}", created_at=now - 21 * DAY) for n in range(2)]
    session.add_all(projects)
    session.flush()
    ids = []
    for number in range(runs):
        run = Run(
            id=uuid.uuid4().hex,
            project_id=dice.choice(projects).id,
            name=f"run-{number}",
            created_at=now - 20 * DAY,
            latest_attempt=0,
        )
        session.add(run)
        session.flush()
        _fill_run(session, dice, run, now)
        ids.append(run.id)
    return ids


def _fill_run(session: Session, dice: random.Random, run: Run, now: datetime) -> None:
    begin = now - 20 * DAY * dice.random()
    saved: list[Checkpoint] = []
    attempts = dice.randint(0, 5)
    for number in range(1, attempts + 1):
        lived = (now - begin) * dice.choice((0.0, 0.1, 0.4, 0.9))
        attempt = _attempt(dice, run, number, begin, lived, saved, lives=number == attempts and dice.random() < 0.4)
        session.add(attempt)
        session.flush()
        for _ in range(dice.randint(0, 5)):
            checkpoint = _checkpoint(dice, run, attempt, begin + lived * dice.random())
            live = {CheckpointState.UPLOADING, CheckpointState.COMMITTED}
            taken = {(each.attempt_number, each.step, each.detached) for each in saved if each.state in live}
            if (number, checkpoint.step, checkpoint.detached) not in taken:
                saved.append(checkpoint)
                session.add(checkpoint)
        begin += lived + (now - begin - lived) * dice.choice((0.0, 0.2))
    run.latest_attempt = attempts
    steps = range(0, 325, 25)
    curve = Curve(run_id=run.id, name="loss", points=attempts * len(steps))
    session.add(curve)
    session.flush()
    session.add_all(
        CurvePoint(curve_id=curve.id, attempt=number, step=step, value=1.0 / (number + step))
        for number in range(1, attempts + 1)
        for step in steps
    )
    session.flush()


def _attempt(
    dice: random.Random,
    run: Run,
    number: int,
    opened_at: datetime,
    lived: timedelta,
    saved: list[Checkpoint],
    *,
    lives: bool,
) -> Attempt:
    def maybe(value: Any, chance: float = 0.75) -> Any:
        return value if dice.random() < chance else None

    first = dice.randint(1, 300)
    # One of the run's own, none, or one that the catalog does not know any more.
    from_id = dice.choice([*(each.id for each in saved), None, "ck_" + "0" * 32])
    return Attempt(
        run_id=run.id,
        number=number,
        launch_id=uuid.uuid4().hex,
        world_size=1,
        host="host",
        environment={},
        opened_at=opened_at,
        heartbeat_at=maybe(opened_at + lived * dice.random()),
        first_step=maybe(first),
        first_step_at=maybe(opened_at + lived * 0.1),
        last_step=maybe(first + dice.randint(0, 200)),
        steps_run=maybe(dice.choice((0, 1, 50, 250))),
        steps_per_second=maybe(dice.choice((0.0, 0.01, 2.0))),
        progressed_at=maybe(opened_at + lived * dice.random() * 0.9 + lived * 0.1),
        restore_seconds=maybe(dice.choice((0.0, 30.0, 1e7))),
        save_blocked_seconds=maybe(dice.choice((0.0, 90.0, 1e7))),
        refused_at=maybe(opened_at + lived, 0.2),
        rolled_back_at=maybe(opened_at + lived, 0.2),
        stalled_at=maybe(opened_at + lived, 0.2),
        ended_at=None if lives else opened_at + lived,
        outcome=None if lives else dice.choice(list(AttemptOutcome)).value,
        resumed_from_id=from_id,
        cut_at=maybe(opened_at, 0.6),
    )


def _checkpoint(dice: random.Random, run: Run, attempt: Attempt, at: datetime) -> Checkpoint:
    state = dice.choice([*CheckpointState, *[CheckpointState.COMMITTED] * 6])
    over = state in {CheckpointState.TRASHED, CheckpointState.DELETING, CheckpointState.DELETED}
    was_committed = over or state is CheckpointState.COMMITTED
    return Checkpoint(
        id=f"ck_{uuid.UUID(int=dice.getrandbits(128)).hex}",
        run_id=run.id,
        attempt_id=attempt.id,
        attempt_number=attempt.number,
        step=dice.randint(1, 12) * 25,
        kind="periodic",
        world_size=1,
        sealed_ranks=1 if was_committed else 0,
        state=state.value,
        health=dice.choice([*Health, *[Health.OK] * 4]).value,
        tier=dice.choice([*Tier, *[Tier.HOT] * 6]).value,
        readable_until=dice.choice((None, None, None, at - DAY, datetime.now(UTC) + DAY)),
        detached=dice.random() < 0.15,
        digest=f"{dice.getrandbits(256):064x}" if was_committed else None,
        logical_bytes=dice.randint(0, 10**12),
        chunk_bytes=0,
        uploaded_bytes=dice.randint(0, 10**9),
        deduplicated_bytes=dice.randint(0, 10**9),
        metrics={"loss": {"value": dice.random()}} if was_committed else {},
        labels=[],
        components={},
        version=1,
        created_at=at,
        deadline_at=at,
        committed_at=at if was_committed else None,
        aborted_at=at if state is CheckpointState.ABORTED else None,
        trashed_at=at + (datetime.now(UTC) - at) * 0.5 if over else None,
        deleted_at=at + (datetime.now(UTC) - at) * 0.9 if state is CheckpointState.DELETED else None,
    )
