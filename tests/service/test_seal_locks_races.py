"""Seals of one checkpoint wait for each other's locks no longer than they need."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from sqlalchemy import event, select, update

from holdfast_service.db.tables.core import Attempt
from holdfast_service.settings import ServiceSettings
from tests.support.rank import Job
from tests.support.service import RunningService


@pytest.fixture
def settings(database_url: str, tmp_path: Path) -> ServiceSettings:
    """No heartbeat is due while a test runs, but for one that a test makes due."""
    return ServiceSettings(
        database_url=database_url,
        store=f"posix://{tmp_path / 'store'}",
        data_dir=tmp_path / "data",
        port=0,
        lost_after_seconds=86400,
    )


def test_a_seal_does_nothing_between_its_count_and_its_commit(service: RunningService) -> None:
    said: list[str] = []
    engine = service.context.database.engine
    with service.http() as http, ExitStack() as listening:
        save = Job(http, world_size=2).begin(1)
        for name, listener in {
            "before_cursor_execute": lambda _connection, _cursor, statement, *_: said.append(statement),
            "commit": lambda _connection: said.append("COMMIT"),
        }.items():
            event.listen(engine, name, listener)
            listening.callback(event.remove, engine, name, listener)
        view = save.write(0, [b"state", b"index"])
    counted = [at for at, statement in enumerate(said) if "sealed_ranks=" in statement.replace(" ", "")]
    assert [said[at + 1] for at in counted] == ["COMMIT"]
    assert (view["state"], view["sealed_ranks"], view["missing_ranks"]) == ("uploading", 1, [1])


@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
def test_no_rank_waits_to_write_a_heartbeat_while_another_call_holds_the_attempt(service: RunningService) -> None:
    with service.http() as http:
        job = Job(http, world_size=2)
        save = job.begin(1)
        with service.context.database.transaction() as session:
            session.execute(update(Attempt).values(heartbeat_at=None))
        with service.context.database.transaction() as holder:
            holder.execute(select(Attempt.id).with_for_update(key_share=True))
            assert save.write(0, [b"state", b"index"])["sealed_ranks"] == 1
        assert job.view()["heartbeat_at"] is None
        save.write(1, [b"state", b"index"])
        assert job.view()["heartbeat_at"] is not None
