"""EC2's instance metadata service, version 2 only (HttpTokens: required)."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime, timedelta

from tests.support.scripted_http import Reply, Seen, as_json

TOKEN = "x-aws-ec2-metadata-token"


class FakeAws:
    def __init__(self) -> None:
        self.tokens_given = 0
        self.looks = 0
        self.refused: list[str] = []
        self._tokens: set[str] = set()
        self._documents: dict[str, dict[str, str]] = {}

    def interrupt(self, seconds: float, action: str = "terminate") -> None:
        at = (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")
        self._documents["/latest/meta-data/spot/instance-action"] = {"action": action, "time": at}

    def recommend_rebalance(self) -> None:
        at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self._documents["/latest/meta-data/events/recommendations/rebalance"] = {"noticeTime": at}

    def forget_tokens(self) -> None:
        self._tokens.clear()

    def end(self) -> None:
        """Nobody waits here."""

    def answer(self, seen: Seen) -> Reply:
        reply = self._token(seen) if seen.path == "/latest/api/token" else self._document(seen)
        if reply.status not in (200, 404):
            self.refused.append(f"{reply.status} {seen.method} {seen.path}")
        return reply

    def _token(self, seen: Seen) -> Reply:
        if seen.method != "PUT":
            return Reply(405, protocol=None)
        if "x-forwarded-for" in seen.headers:
            return Reply(403, protocol=None)
        seconds = seen.headers.get(f"{TOKEN}-ttl-seconds", "")
        if not seconds.isdecimal() or not 1 <= int(seconds) <= 21600:
            return Reply(400, protocol=None)
        token = secrets.token_urlsafe(40)
        self._tokens.add(token)
        self.tokens_given += 1
        return Reply(200, token.encode(), {f"{TOKEN}-ttl-seconds": seconds}, protocol=None)

    def _document(self, seen: Seen) -> Reply:
        if seen.method != "GET":
            return Reply(405, protocol=None)
        if seen.headers.get(TOKEN) not in self._tokens:
            return Reply(401, protocol=None)
        self.looks += seen.path.endswith("/rebalance")
        document = self._documents.get(seen.path)
        return Reply(404, protocol=None) if document is None else as_json(document)
