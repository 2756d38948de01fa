"""Refuses a Host that is not this service's name (protocol rule 43).

A web page whose name its owner has pointed at this machine's loopback could else read the open routes through the
browser of a person here (DNS rebinding). An address is always good: no page can choose one, and load balancers and
scrapers call by address.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from fnmatch import fnmatchcase

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast_protocol.problems import ProblemCode
from holdfast_service.errors import ProblemError
from holdfast_service.web.problem_reply import problem_response

_SHOWN_CHARACTERS = 100


class HostCheck:
    """`names`: lower-case, `*.example.org` for all below one."""

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host") if scope["type"] == "http" else None
        if host is None or _is_address(name := _without_port(host)) or self._allows(name):
            await self._app(scope, receive, send)
            return
        await problem_response(_refusal(name), scope["state"]["request_id"])(scope, receive, send)

    def _allows(self, name: str) -> bool:
        return any(fnmatchcase(name, allowed) for allowed in self._names)


def _without_port(host: str) -> str:
    name = host.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _refusal(name: str) -> ProblemError:
    shown = name[:_SHOWN_CHARACTERS]
    return ProblemError(
        ProblemCode.HOST_NOT_ALLOWED,
        f"This service does not go by the name {shown!r}. Call it by its address or by a name that "
        "HOLDFAST_ALLOWED_HOSTS lists.",
        host=shown,
    )
