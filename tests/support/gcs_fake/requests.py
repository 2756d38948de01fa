"""One HTTP request, as much of it as the fake looks at."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote

from starlette.types import Receive, Scope

from tests.support.gcs_fake.replies import Refusal

_LONGEST_BODY = 32 * 1024 * 1024


class BodyCutOff(Exception):
    """The client went away in the middle. Nobody reads an answer."""


@dataclass
class Request:
    """`headers` by lower-case name, in the order of their coming."""

    method: str
    raw_path: str
    raw_query: str
    headers: dict[str, list[str]]
    _receive: Receive = field(repr=False)
    _more: bool = True

    @classmethod
    def of(cls, scope: Scope, receive: Receive) -> Request:
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        return cls(scope["method"], scope["raw_path"].decode(), scope["query_string"].decode(), headers, receive)

    @property
    def path(self) -> str:
        return unquote(self.raw_path)

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(self.raw_query, keep_blank_values=True))

    def header(self, name: str) -> str | None:
        """Several of a name are one, as HTTP has it."""
        values = self.headers.get(name)
        return None if values is None else ",".join(values)

    def number(self, value: str | None, what: str) -> int | None:
        if value is None:
            return None
        if not value.isdecimal():
            raise Refusal(400, "InvalidArgument", f"{what} is no number.")
        return int(value)

    async def pieces(self) -> AsyncIterator[bytes]:
        while self._more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise BodyCutOff
            self._more = message.get("more_body", False)
            yield message.get("body", b"")

    async def body(self) -> bytes:
        whole = bytearray()
        async for piece in self.pieces():
            whole += piece
            if len(whole) > _LONGEST_BODY:
                raise Refusal(413, "EntityTooLarge")
        return bytes(whole)

    async def drain(self) -> None:
        """A refusal that comes while the client still sends would reach it as a broken connection."""
        async for _ in self.pieces():
            pass
