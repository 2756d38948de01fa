"""A receiver of webhooks that says what a test tells it to, and a webhook of it."""

from __future__ import annotations

import ssl
from typing import Any

from tests.support.rank import answer
from tests.support.scripted_http import Reply, ScriptedServer
from tests.support.service import RunningService


class Receiver(ScriptedServer):
    """Takes what it gets, unless `says` something else."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.says: Reply = Reply(204)
        super().__init__(lambda seen: self.says, tls)


def make_hook(service: RunningService, url: str, *events: str, project: str = "demo") -> dict[str, Any]:
    body = {"url": url, "events": events}
    return dict(answer(service.http().post(f"/v1/projects/{project}/webhooks", json=body)))


def deliveries(service: RunningService, hook: dict[str, Any]) -> list[dict[str, Any]]:
    return list(answer(service.http().get(f"/v1/webhooks/{hook['id']}/deliveries"))["items"])
