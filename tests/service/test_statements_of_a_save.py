"""A rank's two calls make few statements: no more for many chunks than for few, and no more for a host than for a rank
(docs/adr/0054, 0060). A heartbeat and a read make few, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import event

from holdfast_service.db.engine import Database
from holdfast_service.settings import ServiceSettings
from tests.support.rank import Job, answer, digest_of, offer_of
from tests.support.service import RunningService

MOST = {"begin": 9, "seal": 14, "heartbeat": 4}


@pytest.fixture
def settings(settings: ServiceSettings) -> ServiceSettings:
    """However slow the machine is, no heartbeat becomes due between two calls."""
    return settings.model_copy(update={"lost_after_seconds": 86_400.0})


@contextmanager
def statements_of(database: Database) -> Iterator[list[str]]:
    """What the database is asked within the block; a statement with many rows is one."""
    said: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if not statement.startswith("BEGIN"):
            said.append(" ".join(statement.split()))

    event.listen(database.engine, "before_cursor_execute", note)
    try:
        yield said
    finally:
        event.remove(database.engine, "before_cursor_execute", note)


@pytest.mark.parametrize("count", [2, 600])
def test_the_two_calls_of_a_rank_make_few_statements(service: RunningService, count: int) -> None:
    database = service.context.database
    chunks = [f"chunk {number} of {count}".encode() for number in range(count)]
    with service.http() as http:
        job = Job(http, world_size=2)
        job.begin(1)  # by the first rank, which makes the checkpoint's row
        job.heartbeat(1)
        with statements_of(database) as begin:
            save = job.begin(1, offers=[offer_of(1, chunks)])
        save.send(chunks, save.view["negotiated"][0]["chunks"])
        if count > 100:  # the store would be asked for all of them in the seal
            save.negotiate(1, finished=chunks)
        with statements_of(database) as seal:
            view = save.seal(1, chunks)
    assert (view["sealed_ranks"], view["missing_ranks"]) == (1, [0])
    said = {"begin": begin, "seal": seal}
    assert {name: len(each) for name, each in said.items() if len(each) > MOST[name]} == {}, "\n".join(begin + seal)


def test_the_two_calls_of_a_host_make_no_more_statements_than_those_of_a_rank(service: RunningService) -> None:
    database = service.context.database
    shards = {rank: [f"weights of {rank}".encode(), f"index of {rank}".encode()] for rank in range(1, 9)}
    with service.http() as http:
        job = Job(http, world_size=9)
        job.begin(1)
        job.heartbeat(1)
        with statements_of(database) as begin:
            save = job.begin(1, offers=[offer_of(rank, chunks) for rank, chunks in shards.items()])
        for negotiated in save.view["negotiated"]:
            save.send(shards[negotiated["rank"]], negotiated["chunks"])
        with statements_of(database) as seal:
            view = save.seal_together(shards)
    assert (view["sealed_ranks"], view["missing_ranks"]) == (8, [0])
    said = {"begin": begin, "seal": seal}
    assert {name: len(each) for name, each in said.items() if len(each) > MOST[name]} == {}, "\n".join(begin + seal)


def test_a_heartbeat_makes_few_statements_and_writes_its_attempt_once(service: RunningService) -> None:
    with service.http() as http:
        job = Job(http)
        job.heartbeat(1, steps_run=1)
        with statements_of(service.context.database) as said:
            job.heartbeat(2, steps_run=2)
    assert sum(each.startswith("UPDATE attempts ") for each in said) == 1
    assert len(said) <= MOST["heartbeat"], "\n".join(said)


@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
def test_a_begin_does_not_ask_for_the_time_by_itself_and_a_read_asks_once(service: RunningService) -> None:
    chunks = [b"weights", b"index"]
    with service.http() as http:
        job = Job(http)
        with statements_of(service.context.database) as begin:
            save = job.begin(1, offers=[offer_of(0, chunks)])
        save.send(chunks, save.view["negotiated"][0]["chunks"])
        save.seal(0, chunks)
        with statements_of(service.context.database) as read:
            wanted = {"digests": [digest_of(b"weights")], "shard": 0}
            assert answer(http.post(f"/v1/checkpoints/{save.id}/reads", json=wanted))["shard"]["rank"] == 0
    alone = [[each for each in said if each == "SELECT clock_timestamp() AS anon_1"] for said in (begin, read)]
    assert [len(each) for each in alone] == [0, 1], "\n".join(begin + read)
