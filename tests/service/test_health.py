"""What /healthz and /readyz say of a process, and of one whose stores are others than those of its peers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import anyio
import anyio.to_thread
import httpx
import pytest
from sqlalchemy import update

import holdfast_service.retention.purge
from holdfast_service.attached_stores import attached
from holdfast_service.db.tables.core import Copy
from holdfast_service.service import close_service, open_service
from holdfast_service.settings import ServiceSettings
from holdfast_service.stores.base import StoreUnavailable
from holdfast_service.web import health
from holdfast_service.work.processes import Presence, attached_here, say_alive
from tests.support.interleave import refused
from tests.support.rank import Job, answer, digest_of, redeem
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


@contextmanager
def hanging(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The store hangs, and the pass that asks it has waited for longer than a store may take."""
    watch, answers = service.context.store_watch, threading.Event()

    def hangs() -> None:
        assert answers.wait(60)

    monkeypatch.setattr(service.context.store, "ping", hangs)
    monkeypatch.setattr(attached, "_ANSWERS_WITHIN_SECONDS", 0.2)
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(watch.reconcile)
        try:
            deadline = time.monotonic() + 30
            while not watch.unavailable:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            yield
        finally:
            answers.set()
        assert asking.result() is None


@pytest.mark.rule("store-outage-degrades")
def test_a_store_that_hangs_keeps_no_thread_of_those_who_ask_whether_it_is_well(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe comes every few seconds, and all calls share forty threads."""
    with ThreadPoolExecutor(2) as threads, service.http(token=None) as http:
        with hanging(service, monkeypatch):
            for _ in range(2):
                reply = threads.submit(http.get, "/readyz").result(timeout=30)
                assert (reply.status_code, reply.json()["ready"]) == (503, False)
                (store,) = [check for check in reply.json()["checks"] if check["name"] == "store"]
                assert store["detail"] == "The store takes long to answer."
        assert http.get("/readyz").status_code == 200


@pytest.mark.rule("store-outage-degrades")
def test_no_call_begins_to_wait_for_a_store_that_hangs(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would keep its place until the store is back, and soon no job could say that it lives."""
    chunks = [b"weights", b"index"]
    with service.http() as http:
        job = Job(http)
        save = job.begin(1)
        save.send(chunks, save.negotiate(0, chunks)["chunks"])
        proof = {"proof_id": "0" * 32, "content": "0" * 64}
        with hanging(service, monkeypatch):
            for call in (
                lambda: save.seal(0, chunks),
                lambda: save.negotiate(0, finished=chunks),
                lambda: save.negotiate(0, [b"more"], mount_proof=proof),
                lambda: answer(http.post("/v1/mount-proofs")),
                lambda: answer(http.post("/v1/store-samples", json={"digest": digest_of(b"x"), "bytes": 1})),
            ):
                with refused("store_unavailable"):
                    call()
            (clock,) = answer(http.get("/v1/store-clocks"))["items"]
            assert clock["problem"] == "The store takes long to answer."
            assert job.heartbeat(1)
            assert save.negotiate(0, [b"more"])["chunks"][0]["ticket"]["kind"] == "http"
        assert save.seal(0, chunks)["state"] == "committed"


@pytest.mark.rule("store-outage-degrades")
def test_while_a_store_hangs_a_report_is_refused_and_who_lists_the_controllers_does_not_ask_it(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def disk_usage(path: object) -> NoReturn:
        asked.append(path)
        raise OSError

    monkeypatch.setattr(holdfast_service.retention.purge.shutil, "disk_usage", disk_usage)
    with service.http() as http:
        saved = Job(http).save(1, content=b"weights")
        reports = f"/v1/checkpoints/{saved['id']}/chunk-reports"
        report = {"digest": digest_of(b"weights"), "problem": "missing"}
        with hanging(service, monkeypatch):
            assert http.get("/v1/controllers").status_code == 200
            assert asked == []
            with refused("store_unavailable"):
                answer(http.post(reports, json=report))
        assert answer(http.post(reports, json=report))["readable"]
        assert http.get("/v1/controllers").status_code == 200
        assert len(asked) == 1


@pytest.mark.rule("store-outage-degrades")
def test_objects_that_a_mount_stopped_to_give_while_they_were_sent_keep_no_thread_of_calls(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = int(anyio.run(total_threads)) + 1
    begun, answers = threading.Semaphore(0), threading.Event()

    def hangs() -> None:
        begun.release()
        assert answers.wait(60)

    async def opens(*_: object, **__: object) -> NoReturn:
        await anyio.to_thread.run_sync(hangs)
        raise OSError("the mount is gone")

    with service.http() as http, ThreadPoolExecutor(readers + 1) as threads:
        job = Job(http)
        save = job.begin(1)
        save.write(0, [b"weights", b"index"])
        asked = {"digests": [digest_of(b"weights")]}
        (ticket,) = answer(http.post(f"/v1/checkpoints/{save.id}/reads", json=asked))["chunks"]
        monkeypatch.setattr(anyio, "open_file", opens)
        reading = [threads.submit(redeem, http, ticket) for _ in range(readers)]
        try:
            for _ in range(readers - 1):  # one waits for its thread
                assert begun.acquire(timeout=30)
            assert threads.submit(job.heartbeat, 2).result(timeout=30)
            assert threads.submit(http.get, "/readyz").result(timeout=30).status_code == 200
        finally:
            answers.set()
        for each in reading:
            with pytest.raises(httpx.RemoteProtocolError):
                each.result(timeout=30)


async def total_threads() -> float:
    """How many threads the framework has, on an event loop."""
    return anyio.to_thread.current_default_thread_limiter().total_tokens


@pytest.mark.rule("store-outage-degrades")
def test_a_store_that_was_silent_for_long_counts_as_hanging_until_it_answers(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, store = service.context.store_watch, service.context.store

    def silent() -> None:
        time.sleep(0.05)
        raise StoreUnavailable("no answer")

    with monkeypatch.context() as broken:
        broken.setattr(store, "ping", silent)
        watch.reconcile()
        watch.refuse_hanging()  # it answers nothing, at once
        broken.setattr(attached, "_ANSWERS_WITHIN_SECONDS", 0.01)
        watch.reconcile()
        with pytest.raises(StoreUnavailable, match="takes long"):
            watch.refuse_hanging()
    assert watch.reconcile() is None
    watch.refuse_hanging()
