"""Rows that are over go after their time, and what a decision still rests on stays."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select, update

from holdfast_service.auth.principal import new_token_text
from holdfast_service.auth.tokens import insert_token
from holdfast_service.collect.controller import reconcile as collect
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Checkpoint, Project, Token
from holdfast_service.db.tables.operations import AuditEvent, Hold, Operation
from tests.service.conftest import Clock
from tests.support.rank import Job, answer
from tests.support.rebuilt import check_all, record_all
from tests.support.retention import HOUR, RUN, prune, purge, states
from tests.support.service import RunningService

DAY = 24 * HOUR


def forgotten(service: RunningService) -> list[dict[str, Any] | None]:
    with service.context.database.read() as session:
        events = select(AuditEvent.after).where(AuditEvent.action == "catalog.forget").order_by(AuditEvent.id)
        return list(session.scalars(events))


@pytest.mark.rule("latest-follows-lineage")
def test_what_is_left_of_a_checkpoint_goes_but_not_what_is_still_asked_about(
    service: RunningService, clock: Clock
) -> None:
    job = Job(service.http())
    for step in (1, 2, 3, 4):
        job.save(step)
    job.end()
    second = Job(service.http(), after=1)
    second.resumed_from(second.opened["restore_point"]["checkpoint_id"])
    second.save(5)
    for step in (6, 7):
        second.begin(step).abort()
    for step in (8, 9, 10):
        second.save(step)
    second.end()
    before = answer(service.http().get(f"{RUN}/goodput"))
    prune(service, filter={"before_step": 9})
    clock.advance(73 * HOUR)
    purge(service)
    settings = service.context.settings
    clock.advance(settings.ticket_seconds + settings.longest_upload_seconds + 25 * HOUR)
    collect(service.context)
    clock.advance(25 * HOUR)
    record_all(service.context)
    clock.advance(settings.keep_checkpoint_rows_days * DAY - 26 * HOUR)
    assert purge(service).forgotten_rows == 0
    clock.advance(2 * HOUR)
    assert purge(service).forgotten_rows == 6
    assert purge(service).forgotten_rows == 0
    assert forgotten(service) == [{"checkpoints": 6}]
    # The first that was committed, what attempt 2 resumed from, and what is committed.
    assert states(service) == {1: "deleted", 4: "deleted", 9: "committed", 10: "committed"}
    record_all(service.context)
    assert [each.findings for each in check_all(service.context).stores] == [[]]
    after = answer(service.http().get(f"{RUN}/goodput"))
    assert after["steps_lost"] == before["steps_lost"]
    assert Job(service.http(), after=2).opened["components"] == Job(service.http(), after=3).opened["components"]
    assert answer(service.http().get(f"{RUN}/restore-point"))["restore_point"]["step"] == 10


@pytest.mark.rule("holds-outrank")
def test_operations_and_tokens_go_but_not_who_made_whom(service: RunningService, clock: Clock) -> None:
    service.make_project("demo")
    with service.context.database.transaction() as session:
        now = database_now(session)
        for number, (state, project) in enumerate(
            [("done", True), ("failed", True), ("done", False), ("cancelled", True), ("queued", True)]
        ):
            session.add(operation(service, number, state, project=project, at=now + timedelta(seconds=number)))
        tokens: dict[str, str] = {}
        for name, maker, end in [
            ("alice", None, -1),
            ("of alice", "alice", None),
            ("bob", None, -1),
            ("carol", None, -1),
            ("dave", None, 1000),
        ]:
            token = insert_token(
                session,
                new_token_text(),
                name=name,
                scopes=(),
                project_id=None,
                expires_at=None if end is None else now + timedelta(days=end),
                created_by_token=tokens.get(maker or ""),
            )
            session.flush()
            tokens[name] = token.id
    Job(service.http()).save(1)
    (held,) = checkpoint_ids(service)
    answer(service.http().post(f"/v1/checkpoints/{held}/holds", json={"reason": "evidence"}))
    with service.context.database.transaction() as session:
        session.execute(update(Hold).values(placed_by_token=tokens["carol"]))
    clock.advance(88 * DAY)
    assert purge(service).forgotten_rows == 0
    clock.advance(3 * DAY)
    assert purge(service).forgotten_rows == 3
    assert forgotten(service) == [{"operations": 2}, {"tokens": 1}]
    with service.context.database.read() as session:
        assert sorted(session.scalars(select(Operation.id))) == ["op_1", "op_2", "op_4"]
        left = set(session.scalars(select(Token.name)))
    assert {"alice", "of alice", "carol", "dave"} <= left
    assert "bob" not in left


def operation(service: RunningService, number: int, state: str, *, project: bool, at: Any) -> Operation:
    with service.context.database.read() as session:
        project_id = session.execute(select(Project.id)).scalar_one()
    return Operation(
        id=f"op_{number}",
        kind="sweep",
        project_id=project_id if project else None,
        arguments={},
        fingerprint=f"{number:064x}",
        state=state,
        progress={},
        created_at=at,
        created_by="test",
        created_by_token="",
        ended_at=None if state == "queued" else at,
    )


def checkpoint_ids(service: RunningService) -> list[str]:
    with service.context.database.read() as session:
        return list(session.scalars(select(Checkpoint.id)))
