"""Both sides tell their protocol's version; what does not fit is refused with both numbers (protocol rule 35).

A caller that says nothing (curl, a browser, a store's ticket) is served.
"""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.version import PROTOCOL_HEADER, PROTOCOL_VERSION, speaks_with
from holdfast_service.errors import ProblemError
from holdfast_service.web.problem_reply import problem_response

_SHOWN_CHARACTERS = 20


class ProtocolHeader:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_version(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[PROTOCOL_HEADER] = PROTOCOL_VERSION
            await send(message)

        theirs = Headers(scope=scope).get(PROTOCOL_HEADER)
        if theirs is not None and not speaks_with(theirs):
            refusal = problem_response(_unsupported(theirs), scope["state"]["request_id"])
            await refusal(scope, receive, send_with_version)
            return
        await self._app(scope, receive, send_with_version)


def _unsupported(theirs: str) -> ProblemError:
    shown = theirs[:_SHOWN_CHARACTERS]
    return ProblemError(
        ProblemCode.UNSUPPORTED_PROTOCOL,
        f"The client speaks protocol {shown} and this service {PROTOCOL_VERSION}. Install a client of the same major "
        "version as the service.",
        client=shown,
        service=PROTOCOL_VERSION,
    )
