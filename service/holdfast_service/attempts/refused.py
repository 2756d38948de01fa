"""A fenced attempt that calls was still alive when it was fenced: what the fence refuses is noted all the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import select

from holdfast_protocol.fencing import Fence
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import AttemptOutcome
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.fencing import is_of_launch
from holdfast_service.catalog.resolve import run_named
from holdfast_service.catalog.tables import Attempt
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError


@contextmanager
def hearing_the_refused(
    context: ServiceContext, caller: Principal, project_name: str, run_name: str, fence: Fence
) -> Iterator[None]:
    """Around the transaction that may be refused, which has left nothing. Should this process die before the note, the
    attempt's next call leaves it."""
    try:
        yield
    except ProblemError as error:
        if error.code is ProblemCode.STALE_ATTEMPT and fence.epoch == context.epoch:
            _note(context, caller, project_name, run_name, fence)
        raise


def _note(context: ServiceContext, caller: Principal, project_name: str, run_name: str, fence: Fence) -> None:
    with context.database.transaction() as session:
        _, run = run_named(session, caller, project_name, run_name, deleted=True)
        attempt = session.scalar(
            select(Attempt)
            .where(
                Attempt.run_id == run.id,
                Attempt.number == fence.attempt,
                Attempt.refused_at.is_(None),
                Attempt.outcome.in_((AttemptOutcome.FENCED, AttemptOutcome.LOST)),
            )
            .with_for_update(),
            execution_options={"populate_existing": True},
        )
        if attempt is None or attempt.number == run.latest_attempt or not is_of_launch(attempt, fence):
            return
        attempt.refused_at = database_now(session)
        if attempt.rolled_back_at is None:
            attempt.outcome = AttemptOutcome.FENCED
            attempt.outcome_detail = f"attempt {attempt.number + 1} has taken over while it was still alive"
