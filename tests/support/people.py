"""People who sign in at the real provider: the identity file that knows them, and a browser without a screen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

import httpx

from holdfast_protocol.service import SIGN_IN_COOKIE
from tests.support.oidc_provider import PUBLIC_CLIENT, SCOPE, OidcProvider
from tests.support.service import RunningService


def identity_file(path: Path, provider: OidcProvider, *rules: dict[str, Any], **more: Any) -> Path:
    """`rules`: without their names and their provider. `more`: of the provider."""
    told = {"name": "corp", "title": "Corp", "issuer": provider.issuer, "client_id": PUBLIC_CLIENT, **more}
    named = [{"name": f"rule {at}", "provider": "corp", **rule} for at, rule in enumerate(rules)]
    path.write_text(json.dumps({"providers": [{"scopes": SCOPE.split(), **told}], "rules": named}), encoding="utf-8")
    return path


READERS = {"groups": ["readers"], "role": "reader", "projects": ["demo"], "longest_seconds": 1800}
OPERATORS = {"groups": ["operators"], "role": "operator", "every_project": True, "longest_seconds": 3600}
TWO_PROJECTS = {"groups": ["both"], "role": "trainer", "projects": ["demo", "other"]}


class PersonsBrowser:
    """Keeps the cookies of the service and of the provider, each for itself, and makes the page's calls."""

    def __init__(self, service: RunningService, provider: OidcProvider) -> None:
        self.at_service = service.http(token=None)
        self.at_provider = provider.http()
        self._provider = provider

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.at_service.close()
        self.at_provider.close()

    def begin(self, **more: Any) -> httpx.Response:
        return self.at_service.post("/v1/sign-ins", json={"provider": "corp", **more})

    def visit(self, begun: httpx.Response, subject: str, *, cancel: bool = False) -> dict[str, str]:
        """What the provider sends back, as the page passes it on."""
        url = begun.raise_for_status().json()["url"]
        back = urlsplit(self._provider.visit(self.at_provider, url, subject=subject, cancel=cancel))
        answer = dict(parse_qsl(back.query))
        if "iss" in answer:
            answer["issuer"] = answer.pop("iss")
        return answer

    def finish(self, answer: dict[str, str]) -> httpx.Response:
        return self.at_service.post("/v1/sign-ins/finish", json=answer)

    def sign_in(self, subject: str, **more: Any) -> httpx.Response:
        return self.finish(self.visit(self.begin(**more), subject))

    @property
    def cookie(self) -> str | None:
        return self.at_service.cookies.get(SIGN_IN_COOKIE)

    @cookie.setter
    def cookie(self, text: str) -> None:
        self.at_service.cookies.delete(SIGN_IN_COOKIE) if self.cookie is not None else None
        self.at_service.cookies.set(SIGN_IN_COOKIE, text, domain="127.0.0.1", path="/")
