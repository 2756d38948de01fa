"""Rebuilds the exception from a problem's code: what the service raised is what the caller catches."""

from __future__ import annotations

from holdfast_client.errors import (
    Conflict,
    EditConflict,
    Forbidden,
    HoldfastError,
    InvalidRequest,
    NotFound,
    ServiceFault,
    ServiceUnavailable,
    StoreFull,
    Unauthenticated,
)
from holdfast_protocol.problems import PROBLEM_KINDS, Problem, ProblemCode


def _codes(kind: type[HoldfastError]) -> dict[str, type[HoldfastError]]:
    found = {str(kind.code): kind} if isinstance(kind.code, ProblemCode) else {}
    for child in kind.__subclasses__():
        found |= _codes(child)
    return found


_BY_CODE = _codes(HoldfastError)
_BY_STATUS: dict[int, type[HoldfastError]] = {
    401: Unauthenticated,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    412: EditConflict,
    422: InvalidRequest,
    507: StoreFull,
}


def from_problem(problem: Problem, *, earlier_try_ambiguous: bool = False) -> HoldfastError:
    """The exception of a problem's code. A code that is newer than this client goes by `retryable` and the status."""
    kind = _BY_CODE.get(problem.code)
    if kind is None:
        by_status = ServiceFault if problem.status >= 500 else InvalidRequest
        kind = ServiceUnavailable if problem.retryable else _BY_STATUS.get(problem.status, by_status)
    known = PROBLEM_KINDS.get(ProblemCode(problem.code)) if problem.code in _BY_CODE else None
    return kind(
        problem.detail,
        title=known.title if known else problem.title,
        code=problem.code,
        request_id=problem.request_id,
        context=problem.context,
        earlier_try_ambiguous=earlier_try_ambiguous,
    )
