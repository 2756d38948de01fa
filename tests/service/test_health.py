"""What /healthz and /readyz say of a process, and of one whose stores are others than those of its peers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import update

from holdfast_service.attached_stores import attached
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


@pytest.mark.rule("store-outage-degrades")
def test_a_store_that_hangs_keeps_no_thread_of_those_who_ask_whether_it_is_well(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe comes every few seconds, and all calls share forty threads."""
    asked, go_on = threading.Event(), threading.Event()

    def hangs() -> None:
        asked.set()
        assert go_on.wait(60)

    monkeypatch.setattr(service.context.store, "ping", hangs)
    monkeypatch.setattr(attached, "_ANSWERS_WITHIN_SECONDS", 0.2)
    with ThreadPoolExecutor(2) as threads, service.http(token=None) as http:
        first = threads.submit(service.context.store_watch.reconcile)
        try:
            assert asked.wait(30)
            for _ in range(2):
                reply = threads.submit(http.get, "/readyz").result(timeout=30)
                assert (reply.status_code, reply.json()["ready"]) == (503, False)
                (store,) = [check for check in reply.json()["checks"] if check["name"] == "store"]
                assert store["detail"] == "The store takes long to answer."
        finally:
            go_on.set()
        assert first.result() is None
        assert http.get("/readyz").status_code == 200
