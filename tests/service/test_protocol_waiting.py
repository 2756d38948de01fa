"""Verification while the upload goes on (rule verify-while-uploading), waiting without holding anything (rule
waiting-holds-nothing), and the catalog's clock (rule database-clock)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import select, text
from sqlalchemy.pool import QueuePool

from holdfast_protocol.states import CopyState
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Chunk, Copy
from holdfast_service.stores.base import ObjectKey
from tests.support.rank import Job, Save, digest_of
from tests.support.service import RunningService, running_service

# More than the server has threads for plain endpoints (40), and more than the pool has sessions (50).
WAITERS = 63


@pytest.fixture
def job(service: RunningService) -> Job:
    return Job(service.http())


@pytest.fixture
def waiters() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(WAITERS) as pool:
        yield pool


def wait_for(save: Save, waiters: ThreadPoolExecutor, count: int, service: RunningService) -> list[Future[Any]]:
    """Starts that many long polls and returns once all of them wait."""
    waiting = [waiters.submit(save.now, 60) for _ in range(count)]
    deadline = time.monotonic() + 50
    while service.context.notifier.waiting < count:
        assert time.monotonic() < deadline, "the waiters did not all come to wait"
        time.sleep(0.01)
    return waiting


@pytest.mark.rule("waiting-holds-nothing")
def test_waiting_ranks_hold_no_thread_and_no_session(
    service: RunningService, job: Job, waiters: ThreadPoolExecutor
) -> None:
    save = job.begin(100)
    save.upload(0, [b"weights", b"index"])
    waiting = wait_for(save, waiters, WAITERS, service)
    pool = service.context.database.engine.pool
    assert isinstance(pool, QueuePool)
    # Each waiter asks once when it comes, and gives its session back; after that only the poller has one, for all.
    deadline = time.monotonic() + 50
    while pool.checkedout() > 1:
        assert time.monotonic() < deadline, "those who wait hold sessions"
        time.sleep(0.01)
    in_requests = [thread for thread in threading.enumerate() if "AnyIO worker" in thread.name]
    assert len(in_requests) < WAITERS
    assert save.seal(0, [b"weights", b"index"])["state"] == "committed"
    assert {future.result()["state"] for future in waiting} == {"committed"}
    assert service.context.notifier.waiting == 0


@pytest.mark.rule("waiting-holds-nothing")
def test_who_waits_is_told_while_a_mount_keeps_the_threads_that_move_objects(service: RunningService, job: Job) -> None:
    saved, answers = job.save(100), threading.Event()

    async def wait() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        moving = loop.run_in_executor(None, answers.wait, 60)
        try:
            await asyncio.wait_for(service.context.notifier.wait(saved["id"], 60), 30)
        finally:
            answers.set()
            await moving

    asyncio.run(wait())


@pytest.mark.rule("waiting-holds-nothing")
def test_a_commit_in_another_process_wakes_the_waiters_too(
    service: RunningService, job: Job, waiters: ThreadPoolExecutor
) -> None:
    save = job.begin(100)
    save.upload(0, [b"weights", b"index"])
    (waiting,) = wait_for(save, waiters, 1, service)
    with running_service(service.context.settings) as other:
        job.http = other.http()
        assert save.seal(0, [b"weights", b"index"])["state"] == "committed"
        assert waiting.result()["state"] == "committed"


@pytest.mark.rule("verify-while-uploading")
def test_what_is_reported_is_verified_while_the_rest_goes_up(
    service: RunningService, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    real = service.context.store.head

    def head(key: ObjectKey) -> Any:
        asked.append(key.digest)
        return real(key)

    first, second, third = b"first", b"second", b"third"
    save = job.begin(100)
    answers = save.negotiate(0, [first, second, third])["chunks"]
    save.send([first, second], [each for each in answers if each["digest"] != digest_of(third)])
    monkeypatch.setattr(service.context.store, "head", head)
    reported = save.negotiate(0, finished=[first, second])["finished"]
    assert {each["state"] for each in reported} == {"verified"}
    with service.context.database.read() as session:
        states = dict(session.execute(select(Chunk.digest, Copy.state).join(Copy, Copy.chunk_id == Chunk.id)).all())
    assert states == {
        digest_of(first): CopyState.VERIFIED,
        digest_of(second): CopyState.VERIFIED,
        digest_of(third): CopyState.PENDING,
    }
    save.send([third], [each for each in answers if each["digest"] == digest_of(third)])
    asked.clear()
    assert save.seal(0, [first, second, third])["state"] == "committed"
    # A mounted store looks for what it has published before, so it may ask twice.
    assert set(asked) == {digest_of(third)}, "the seal asks only for what nobody has reported"


@pytest.mark.rule("database-clock")
def test_the_catalogs_clock_goes_on_within_a_transaction(service: RunningService) -> None:
    """After a wait for a lock `now()` would be the transaction's start, and a lease would look longer than it is."""
    with service.context.database.transaction() as session:
        before = database_now(session)
        if service.context.database.is_postgres:
            session.execute(text("SELECT pg_sleep(0.2)"))
        else:
            time.sleep(0.2)
        assert (database_now(session) - before).total_seconds() >= 0.2
