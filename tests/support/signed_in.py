"""A session of the web page without a browser: its cookie, and calls by it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx

from holdfast_protocol.service import CSRF_HEADER, SESSION_COOKIE
from tests.support.service import RunningService


@dataclass(frozen=True)
class SignedIn:
    """`view` is the SessionView."""

    service: RunningService
    cookie: str
    view: dict[str, Any]

    def http(self, *, csrf: str | None = "", **headers: str) -> httpx.Client:
        """Calls as the page makes them. `csrf`: another text than the session's own, or None for none."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        sent["Cookie"] = f"{SESSION_COOKIE}={self.cookie}"
        if csrf is not None:
            sent[CSRF_HEADER] = csrf or self.view["csrf_token"]
        http = self.service.http(token=None)
        http.headers = httpx.Headers({**http.headers, **sent}, encoding="utf-8")
        return http


def sign_in(service: RunningService, credential: str) -> SignedIn:
    """`credential`: the text of a token or of a one-time code."""
    reply = service.http(token=credential).post("/v1/sessions")
    assert reply.status_code == 201, reply.text
    return SignedIn(service, reply.cookies[SESSION_COOKIE], reply.json())
