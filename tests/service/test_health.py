"""What /healthz and /readyz say of a process, and of one whose stores are others than those of its peers."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from sqlalchemy import update

from holdfast_service.db.tables.core import Copy
from holdfast_service.service import close_service, open_service
from holdfast_service.settings import ServiceSettings
from holdfast_service.web import health
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


@pytest.mark.rule("limits-before-work")
def test_however_many_ask_there_is_one_check_at_a_time_and_none_is_older_than_its_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health, "LEAST_PAUSE_SECONDS", 0.0)
    running, most_running, made = 0, 0, 0
    goes_on = threading.Event()

    def check() -> int:
        nonlocal running, most_running, made
        running += 1
        most_running = max(most_running, running)
        made += 1
        number = made
        goes_on.wait(60)
        running -= 1
        return number

    shared = health.SharedCheck(check)

    async def ask() -> tuple[int, list[int], int]:
        first = asyncio.ensure_future(shared.answer())
        while not made:
            await asyncio.sleep(0.001)
        others = [asyncio.ensure_future(shared.answer()) for _ in range(50)]
        await asyncio.sleep(0)
        others.pop().cancel()
        goes_on.set()
        return await first, await asyncio.gather(*others), await shared.answer()

    first, others, last = asyncio.run(ask())
    assert (first, set(others), last, most_running) == (1, {2}, 3, 1)


def test_a_check_that_fails_fails_its_callers_alone() -> None:
    answers = iter([ValueError("broken"), 7])

    def check() -> int:
        if isinstance(answer := next(answers), ValueError):
            raise answer
        return answer

    shared = health.SharedCheck(check)
    with pytest.raises(ValueError, match="broken"):
        asyncio.run(shared.answer())
    assert asyncio.run(shared.answer()) == 7
