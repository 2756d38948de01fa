"""The names that a service goes by."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast_service.settings import ServiceSettings
from holdfast_service.web.frame import HostCheck

pytestmark = pytest.mark.rule("limits-before-work")


def status(called: str | None, **settings: Any) -> int:
    """What a call with this Host is answered; 200: it came through."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def receive() -> Any:
        raise AssertionError("the head says enough")

    headers = [] if called is None else [(b"host", called.encode("latin-1"))]
    scope = {"type": "http", "headers": headers, "state": {"request_id": "x"}}
    asyncio.run(HostCheck(inner, ServiceSettings(**settings).host_names)(scope, receive, send))  # type: ignore[arg-type]
    return int(sent[0]["status"])


@pytest.mark.parametrize(
    "host",
    ["localhost", "LocalHost:8400", "localhost.", "app.localhost:1", "127.0.0.1", "10.1.2.3:8400", "[::1]:8400", None],
)
def test_loopback_goes_by_its_own_names_and_by_addresses(host: str | None) -> None:
    assert status(host) == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example:1", "127.0.0.1.evil.example", "", "[", "ä"])
def test_a_page_that_points_its_name_at_this_machine_reads_nothing(host: str) -> None:
    assert status(host) == 400


def test_names_can_be_given_and_elsewhere_none_is_needed() -> None:
    assert status("anything.example", host="0.0.0.0") == 200
    given = {"host": "0.0.0.0", "allowed_hosts": "Holdfast.example, *.lab.example"}
    for host, answered in (("holdfast.example", 200), ("a.lab.example", 200), ("localhost", 400), ("lab.example", 400)):
        assert status(host, **given) == answered
    assert status("anything.example", allowed_hosts="*") == 200
