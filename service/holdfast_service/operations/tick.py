"""One round of the controller `operations`: claims what is due, one after the other, and runs its handler.

Every process has a few threads that do this, so a drill of an hour keeps no other operation waiting. A process that is
killed leaves its lease, which runs out; one that is asked to end gives its operation back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import structlog

from holdfast_protocol.canonical_json import canonical_bytes
from holdfast_protocol.problems import PROBLEM_KINDS
from holdfast_protocol.redaction import without_secrets
from holdfast_protocol.states import OperationState
from holdfast_service.catalog.operation_run import Handler, HandlerStopped, LeaseLost, OperationCancelled, OperationRun
from holdfast_service.catalog.rounds import RoundReport
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError
from holdfast_service.operations.claim import MOST_TRIES, claim_next
from holdfast_service.operations.settle import AGAIN_AFTER_SECONDS, CANCELLED, give_back, settle
from holdfast_service.stores.base import StoreError

_log = structlog.get_logger("holdfast.operations")


@dataclass(frozen=True, kw_only=True)
class OperationsReport(RoundReport):
    cancelled: int = 0
    again: int = 0


def tick(context: ServiceContext, *, kinds: Mapping[str, Handler]) -> OperationsReport:
    """Until none is due, or the process is asked to end. `kinds` are those that it can carry out; others wait for a
    process that can."""
    report = OperationsReport()
    while not context.stopping.is_set():
        run = claim_next(context, kinds.keys(), context.process_id)
        if run is None:
            break
        report = _carry_out(context, run, kinds[run.kind], report)
    return report


def _carry_out(
    context: ServiceContext, run: OperationRun, handler: Handler, report: OperationsReport
) -> OperationsReport:
    try:
        result = handler(context, run)
        canonical_bytes(result)  # what JSON cannot say is the handler's bug, and told as one
    except OperationCancelled:
        settle(context, run, OperationState.CANCELLED, error=CANCELLED)
        return replace(report, cancelled=report.cancelled + 1)
    except LeaseLost:
        _log.warning("operation_lost", operation=run.id, kind=run.kind)
        return replace(report, again=report.again + 1)
    except HandlerStopped:
        give_back(context, run, counted=False)
        return replace(report, again=report.again + 1)
    except (ProblemError, StoreError) as error:
        return _failed(context, run, report, without_secrets(str(error)), again=_is_passing(error))
    except Exception as error:
        _log.exception("operation_failed", operation=run.id, kind=run.kind)
        reason = f"A bug ({type(error).__name__}); the log of {context.process_id} says where. Report it."
        return _failed(context, run, report, reason, again=False)
    settle(context, run, OperationState.DONE, result=result)
    return replace(report, done=report.done + 1)


def _failed(
    context: ServiceContext, run: OperationRun, report: OperationsReport, reason: str, *, again: bool
) -> OperationsReport:
    if again and run.tries < MOST_TRIES:
        give_back(context, run, error=reason, counted=True, wait_seconds=AGAIN_AFTER_SECONDS)
        return replace(report, again=report.again + 1, error=reason)
    settle(context, run, OperationState.FAILED, error=reason)
    return replace(report, failed=report.failed + 1, error=f"{run.kind} {run.id}: {reason}")


def _is_passing(error: ProblemError | StoreError) -> bool:
    """A store or a database that is away comes back; what is wrong with the operation itself stays wrong."""
    if isinstance(error, StoreError):
        return error.retryable
    return PROBLEM_KINDS[error.code].retryable
