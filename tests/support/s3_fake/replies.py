"""Refusals as Amazon words them, and answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from xml.sax.saxutils import escape


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class Refusal(Exception):
    def __init__(self, status: int, code: str, message: str = "") -> None:
        super().__init__(f"{status} {code}: {message}")
        self.status = status
        self.code = code
        self.message = message or code

    def as_reply(self) -> Reply:
        text = f"<Error><Code>{self.code}</Code><Message>{escape(self.message)}</Message></Error>"
        return xml(text, status=self.status)


def xml(text: str, *, status: int = 200) -> Reply:
    body = f'<?xml version="1.0" encoding="UTF-8"?>\n{text}'.encode()
    return Reply(status, {"content-type": "application/xml"}, body)
