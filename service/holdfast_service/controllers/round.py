"""One round of a controller: begin, tick, note. Whatever a tick raises ends its round and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import structlog

from holdfast_protocol.redaction import without_secrets
from holdfast_service.catalog.rounds import Round, RoundReport
from holdfast_service.context import ServiceContext
from holdfast_service.controllers.begin import begin_round
from holdfast_service.controllers.note import note_round
from holdfast_service.errors import ProblemError
from holdfast_service.stores.base import StoreError

_log = structlog.get_logger("holdfast.background")


def run_round(
    context: ServiceContext,
    each: Round,
    *,
    due: bool = True,
    keeping: Callable[[str | None], AbstractContextManager[object]] = nullcontext,
) -> RoundReport | None:
    """None if no round began. `keeping` renews the round's lease meanwhile. Raises ProblemError if the database is
    away."""
    begun = begin_round(context, each, due=due)
    if begun is None:
        return None
    began = time.monotonic()
    with keeping(begun.lease_token):
        report = _tick(context, each)
    note_round(context, begun, report, time.monotonic() - began)
    return report


def _tick(context: ServiceContext, each: Round) -> RoundReport:
    try:
        report = each.tick(context)
    except (ProblemError, StoreError) as error:  # database or store are away
        _log.warning("round_failed", controller=each.name, error=str(error))
        return RoundReport(failed=1, error=without_secrets(str(error)))
    except Exception as error:
        _log.exception("round_failed", controller=each.name)
        where = f"the log of {context.process_id} says where"
        return RoundReport(failed=1, error=f"A bug ({type(error).__name__}); {where}. Report it.")
    _log.debug("round", controller=each.name, report=str(report))
    return report
