"""What /healthz and /readyz say of a process, and of one whose stores are others than those of its peers."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import update

from holdfast_service.db.tables.core import Copy
from holdfast_service.service import close_service, open_service
from holdfast_service.settings import ServiceSettings
from holdfast_service.work.processes import Presence, attached_here, say_alive
from tests.support.rank import Job
from tests.support.service import RunningService


def test_a_started_service_is_alive_and_ready(service: RunningService) -> None:
    with service.http(token=None) as http:
        assert http.get("/healthz").json() == {"status": "alive"}
        reply = http.get("/readyz")
    assert reply.status_code == 200, reply.text
    assert reply.json()["ready"] is True
    assert {check["name"] for check in reply.json()["checks"]} == {"database", "migrations", "store"}


def test_a_process_whose_stores_differ_says_which_setting_it_is(
    settings: ServiceSettings, service: RunningService, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert service.http(token=None).get("/readyz").json()["warnings"] == []
    other = open_service(settings.model_copy(update={"second_store": f"posix://{tmp_path / 'second'}"}))
    presence = Presence(other, "worker")
    try:
        presence.enter()
        with service.http(token=None) as http:
            reply = http.get("/readyz")
        assert (reply.status_code, reply.json()["ready"]) == (200, True)
        (told,) = reply.json()["warnings"]
        assert told.startswith("HOLDFAST_SECOND_STORE is not set here, but for another process.")
        with service.context.database.transaction() as session:
            say_alive(session, service.context.process_id, "serve", attached_here(service.context))
        presence._say()
        assert "HOLDFAST_SECOND_STORE is set here, but not for another process." in caplog.text
        # Nobody has it any more, and it holds what somebody may need.
        Job(service.http()).save(1)
        with service.context.database.transaction() as session:
            second = attached_here(other)["second"]
            session.execute(update(Copy).values(store_id=second))
    finally:
        presence.leave()
        close_service(other)
    (told,) = service.http(token=None).get("/readyz").json()["warnings"]
    assert told.startswith(f"No process has store {second} of the catalog attached, and copies are in it.")
