"""Refusals of a caller that comes again without waiting: the first ones go out at once, later ones after a while.

A refusal says when to retry, and is cheap: no statement, no turn, no thread. It is not free: it costs a quarter of a
small call, on the event loop, where the calls of all meet before anybody's turn is asked. 64 connections that call
again at once left a saving project a seventh of its rate (`make siege`). The call itself is held and not its
connection, because behind a proxy the next call of that connection is another's.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.requests import Request

from holdfast_protocol.problems import ProblemCode
from holdfast_service.auth.principal import address_of, network_of
from holdfast_service.errors import ProblemError
from holdfast_service.web.connections import CONNECTION
from holdfast_service.web.fair_queue import TokenLimits

HELD_SECONDS = 5.0
"""Who has shown wrong tokens is held so long. Who has a good one is held no longer than the refusal tells it to wait,
and what was held is taken off that: a job that does as it is told comes again when it would have come anyway."""
AT_ONCE_PER_SECOND = 2.0
BURST_SECONDS = 50.0
"""A hundred ranks may be told at once."""
_HELD = frozenset({ProblemCode.RATE_LIMITED, ProblemCode.BUSY, ProblemCode.TOO_MANY_FAILURES})


class HeldRefusals:
    """One per application, used on event loops. Counts by project, and by address for callers that are not known."""

    def __init__(self) -> None:
        self._at_once = TokenLimits(BURST_SECONDS)

    async def wait(self, request: Request, refusal: ProblemError) -> None:
        """Before the refusal is sent. Its connection may make room for others meanwhile, as an idle one. Ends when the
        server does."""
        if refusal.code not in _HELD:
            return
        connection = request.scope.get(CONNECTION)
        is_known = refusal.code is not ProblemCode.TOO_MANY_FAILURES
        if connection is not None and not is_known:
            connection.had_wrong_token()
        owner: str = getattr(request.state, "owner", None) or f"({network_of(address_of(request))})"
        now = asyncio.get_running_loop().time()
        bucket = self._at_once.bucket_of(owner, AT_ONCE_PER_SECOND, now)
        if bucket is None or bucket.take(now) is None:
            return
        if connection is None:
            return
        connection.makes_room()
        told: int = refusal.context.get("retry_after_seconds", 1)
        with suppress(TimeoutError):
            async with asyncio.timeout(min(HELD_SECONDS, told) if is_known else HELD_SECONDS):
                await connection.ending.wait()
        held = asyncio.get_running_loop().time() - now
        refusal.context["retry_after_seconds"] = max(0, round(told - held))
