"""What a job was told to train: read, and compared with what an earlier attempt was told."""

from __future__ import annotations

from sqlalchemy import select

from holdfast_protocol.attempts import MOST_DIFFERENCES, ConfigView, config_differences
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.db.tables.core import Attempt
from holdfast_service.runs.views import attempt_numbered, run_named


def read_config(
    context: ServiceContext, caller: Principal, project: str, run_name: str, number: int, *, against: int | None
) -> ConfigView:
    """`against`: another attempt's number, else the newest one before that gave a configuration. Raises
    `attempt_not_found`."""
    with context.database.read() as session:
        _, run = run_named(session, caller, project, run_name)
        config = attempt_numbered(session, run, number).config
        if against is None:
            against = session.scalar(
                select(Attempt.number)
                .where(Attempt.run_id == run.id, Attempt.number < number, Attempt.config.is_not(None))
                .order_by(Attempt.number.desc())
                .limit(1)
            )
        before = None if against is None else attempt_numbered(session, run, against).config
    found = [] if config is None or before is None else config_differences(before, config)
    return ConfigView(
        attempt=number,
        config=config,
        compared_with=against,
        differences=found[:MOST_DIFFERENCES],
        differences_left_out=max(len(found) - MOST_DIFFERENCES, 0),
    )
