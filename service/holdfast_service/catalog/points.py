"""What a request's selector means; the wire's grammar is holdfast_protocol.selectors."""

from __future__ import annotations

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.selectors import Point, SelectorError, parse_point
from holdfast_service.errors import ProblemError


def point_of(selector: str) -> Point:
    """Raises `invalid_request`."""
    try:
        return parse_point(selector)
    except SelectorError as error:
        raise ProblemError(ProblemCode.INVALID_REQUEST, f"{error}.", selector=selector[:200]) from None
