"""A rank's two calls make few statements, and no more of them for many chunks than for few (docs/adr/0054)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import event

from holdfast_service.db.engine import Database
from holdfast_service.settings import ServiceSettings
from tests.service.test_begin_with_offer import offer
from tests.support.rank import Job
from tests.support.service import RunningService

MOST = {"begin": 9, "seal": 14}


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
            save = job.begin(1, offer=offer(chunks, rank=1))
        save.send(chunks, save.view["negotiated"]["chunks"])
        if count > 100:  # the store would be asked for all of them in the seal
            save.negotiate(1, finished=chunks)
        with statements_of(database) as seal:
            view = save.seal(1, chunks)
    assert (view["sealed_ranks"], view["missing_ranks"]) == (1, [0])
    said = {"begin": begin, "seal": seal}
    assert {name: len(each) for name, each in said.items() if len(each) > MOST[name]} == {}, "\n".join(begin + seal)
