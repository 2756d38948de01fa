from __future__ import annotations

from tests.support.service import RunningService


def test_a_started_service_is_alive_and_ready(service: RunningService) -> None:
    with service.http(token=None) as http:
        assert http.get("/healthz").json() == {"status": "alive"}
        reply = http.get("/readyz")
    assert reply.status_code == 200, reply.text
    assert reply.json()["ready"] is True
    assert {check["name"] for check in reply.json()["checks"]} == {"database", "migrations", "store"}
