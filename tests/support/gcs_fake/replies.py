"""Refusals as Google words them: XML for the XML API, JSON for the others."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from xml.sax.saxutils import escape


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class Refusal(Exception):
    """`code` is the XML API's; `reason` the JSON API's."""

    def __init__(self, status: int, code: str, details: str = "", *, reason: str = "invalid") -> None:
        super().__init__(f"{status} {code}: {details}")
        self.status = status
        self.code = code
        self.details = details
        self.reason = reason

    def as_xml(self) -> Reply:
        text = (
            f"<Error><Code>{self.code}</Code><Message>{self.code}.</Message><Details>{escape(self.details)}</Details>"
        )
        body = f"<?xml version='1.0' encoding='UTF-8'?>{text}</Error>".encode()
        return Reply(self.status, {"content-type": "application/xml; charset=UTF-8"}, body)

    def as_json(self) -> Reply:
        errors = [{"message": self.details or self.code, "domain": "global", "reason": self.reason}]
        return json_reply(
            {"error": {"code": self.status, "message": errors[0]["message"], "errors": errors}}, self.status
        )


def json_reply(document: object, status: int = 200) -> Reply:
    return Reply(status, {"content-type": "application/json; charset=UTF-8"}, json.dumps(document).encode())


def no_such_bucket() -> Refusal:
    return Refusal(404, "NoSuchBucket", "The specified bucket does not exist.", reason="notFound")


def no_such_key(bucket: str, name: str) -> Refusal:
    return Refusal(404, "NoSuchKey", f"No such object: {bucket}/{name}", reason="notFound")


def precondition_failed() -> Refusal:
    details = "At least one of the pre-conditions you specified did not hold."
    return Refusal(412, "PreconditionFailed", details, reason="conditionNotMet")
