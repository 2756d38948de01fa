"""Refuses a body that no call of the protocol can have: it would be held in memory before the token is looked at.

The largest is a seal with its list of chunks. Objects stream through and have their own limit, in their signed URL.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast_protocol.problems import ProblemCode
from holdfast_service.errors import ProblemError
from holdfast_service.stores.signed_urls import OBJECTS_PATH
from holdfast_service.web.problem_reply import problem_response

LARGEST_BODY_BYTES = 32 * 1024**2


class BodyLimit:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(f"{OBJECTS_PATH}/"):
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced) > LARGEST_BODY_BYTES:
            await problem_response(_too_large(), scope["state"]["request_id"], status=413)(scope, receive, send)
            return
        received = 0

        async def receive_so_much() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > LARGEST_BODY_BYTES:  # sent in pieces, without a length
                return {"type": "http.disconnect"}
            return message

        await self._app(scope, receive_so_much, send)


def _too_large() -> ProblemError:
    return ProblemError(
        ProblemCode.INVALID_REQUEST,
        f"The body has more than {LARGEST_BODY_BYTES} bytes. Send fewer chunks at once, or cut the state into larger "
        "chunks.",
    )
