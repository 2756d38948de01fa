"""The goodput of one run, as it is now. For tokens that read."""

from __future__ import annotations

from holdfast_protocol.goodput import Goodput
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.attempt_histories import attempt_histories
from holdfast_service.catalog.attempt_time import goodput_of
from holdfast_service.catalog.resolve import run_named
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext


def read_goodput(context: ServiceContext, caller: Principal, project: str, run: str) -> Goodput:
    """Raises `forbidden`, `project_not_found` and `run_not_found`."""
    with context.database.read() as session:
        _, found = run_named(session, caller, project, run)
        history = attempt_histories(session, [found.id]).get(found.id, [])
        return goodput_of(history, database_now(session))
