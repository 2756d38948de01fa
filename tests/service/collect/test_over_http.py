"""Collection and sweeps as people ask for them: what waits for what, a pass now, a sweep, and who may."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import update

from holdfast_protocol.states import Scope
from holdfast_service.background.registry import OPERATION_KINDS
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Copy
from holdfast_service.operations.controller import reconcile as operations_tick
from tests.service.conftest import Clock
from tests.support.garbage import given_up, orphan
from tests.support.rank import Job, Refused, answer
from tests.support.service import RunningService


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_sweep_is_an_operation_with_its_report(service: RunningService, project_id: str) -> None:
    orphan(service, project_id)
    http = service.http()
    started = answer(http.post("/v1/sweeps", json={"store": "primary"}))
    operations_tick(service.context, kinds=OPERATION_KINDS)
    ended = answer(http.get(f"/v1/operations/{started['id']}"))
    assert ended["state"] == "done", ended
    (report,) = ended["result"]["stores"]
    assert (report["store"], report["deleted"]) == ("primary", 1)
    assert answer(http.get("/v1/sweeps"))["stores"][0]["deleted"] == 1


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_who_may_not_is_refused(service: RunningService, project_id: str) -> None:
    cases: list[tuple[tuple[Scope, ...], str | None, dict[str, Any], str]] = [
        ((Scope.OPERATE,), None, {"force": True}, "forbidden"),
        ((Scope.OPERATE, Scope.ADMIN), "demo", {}, "forbidden"),
        ((Scope.READ,), None, {}, "forbidden"),
        ((Scope.OPERATE,), None, {"store": "cold"}, "invalid_request"),
    ]
    for scopes, project, body, code in cases:
        http = service.http(token=service.token(*scopes, project=project))
        with pytest.raises(Refused) as refused:
            answer(http.post("/v1/sweeps", json=body))
        assert refused.value.code == code


def test_a_round_of_the_collector_now_and_what_it_would_delete(service: RunningService, job: Job, clock: Clock) -> None:
    given_up(job, b"given up")
    http = service.http()
    (primary, second) = answer(http.get("/v1/collections/plan"))["stores"]
    assert (primary["copies"], primary["problem"], second["copies"]) == (0, None, 0)
    (waiting,) = primary["waiting"]
    assert (waiting["waits_for"], waiting["copies"], waiting["bytes"]) == ("ticket", 1, 8)
    assert waiting["until"] is not None
    clock.let_tickets_expire(service.context.settings)
    primary = answer(http.get("/v1/collections/plan", params={"project": "demo"}))["stores"][0]
    assert (primary["copies"], primary["bytes"], primary["waiting"]) == (1, 8, [])
    started = answer(http.post("/v1/collections"))
    operations_tick(service.context, kinds=OPERATION_KINDS)
    result = answer(http.get(f"/v1/operations/{started['id']}"))["result"]
    assert (result["deleted_copies"], result["deleted_bytes"], result["problems"]) == (1, 8, [])
    assert answer(http.get("/v1/collections/plan"))["stores"][0]["copies"] == 0


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_token_of_a_project_sees_only_its_own_garbage(service: RunningService, job: Job) -> None:
    given_up(job, b"given up")
    service.make_project("other")
    http = service.http(token=service.token(Scope.READ, Scope.OPERATE, project="other"))
    assert answer(http.get("/v1/collections/plan"))["stores"][0]["waiting"] == []
    for path, parameters in (("/v1/collections/plan", {"project": "demo"}), ("/v1/sweeps", {})):
        with pytest.raises(Refused) as refused:
            answer(http.get(path, params=parameters))
        assert refused.value.code == "forbidden"
    with pytest.raises(Refused):
        answer(http.post("/v1/collections"))


def test_an_upload_that_relies_on_a_copy_is_told_as_what_it_waits_for(service: RunningService, job: Job) -> None:
    save = job.begin(2)
    save.upload(0, [b"under way"])
    with service.context.database.transaction() as session:
        session.execute(update(Copy).values(ticket_expires_at=database_now(session) - timedelta(days=1)))
    (waiting,) = answer(service.http().get("/v1/collections/plan"))["stores"][0]["waiting"]
    assert (waiting["waits_for"], waiting["copies"], waiting["until"]) == ("upload", 1, None)
