"""Long operations: by one worker at a time, by another when that is killed, told, cancelled, given up."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from sqlalchemy import select

from holdfast_client.client import Client
from holdfast_client.errors import OperationNotFound, ServiceUnavailable
from holdfast_client.settings import ClientSettings
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.service import OperationView
from holdfast_protocol.states import OperationState, Scope
from holdfast_service.background.reconcile import locked_row
from holdfast_service.background.registry import OPERATION_KINDS
from holdfast_service.context import ServiceContext
from holdfast_service.db.tables.operations import AuditEvent, Operation
from holdfast_service.errors import ProblemError
from holdfast_service.operations import controller as claim
from holdfast_service.operations import controller as operations
from holdfast_service.operations import queue as operation_run
from holdfast_service.operations.controller import (
    AGAIN_AFTER_SECONDS,
    MOST_OF_A_KIND,
    MOST_TRIES,
    OperationsReport,
    UnderWay,
    backlog,
    claim_next,
    settle,
)
from holdfast_service.operations.queue import Handler, LeaseLost, OperationRun, start_operation
from holdfast_service.stores.base import StoreUnavailable
from tests.service.conftest import Clock
from tests.support.interleave import Gate, hold_before, in_background, overlap, refused
from tests.support.rank import answer
from tests.support.service import RunningService

KIND = "count"
reconcile = partial(operations.reconcile, kinds=OPERATION_KINDS)


@pytest.fixture
def handle(monkeypatch: pytest.MonkeyPatch) -> Callable[[Handler], None]:
    """Makes a function the handler of the kind `count`. Each word of progress is written."""
    monkeypatch.setattr(operation_run, "WRITTEN_EVERY_SECONDS", 0.0)
    return lambda handler: monkeypatch.setitem(OPERATION_KINDS, KIND, handler)


@pytest.fixture
def others(service: RunningService) -> list[ServiceContext]:
    """Four processes, as far as the catalog can tell."""
    return [replace(service.context, process_id=f"node-{number}") for number in range(4)]


def counts(_context: ServiceContext, run: OperationRun) -> dict[str, Any]:
    to = run.arguments.get("to", 1)
    for done in range(to):
        run.progress(done=done, total=to, note="counting")
    return {"counted": to}


def start(service: RunningService, *, project_id: str | None = None, **arguments: Any) -> OperationView:
    with service.context.database.transaction() as session:
        return start_operation(session, service.caller(), KIND, project_id=project_id, arguments=arguments)


def view(service: RunningService, operation: OperationView) -> dict[str, Any]:
    found: dict[str, Any] = answer(service.http().get(f"/v1/operations/{operation.id}"))
    return found


def cancel(service: RunningService, operation: OperationView) -> dict[str, Any]:
    found: dict[str, Any] = answer(service.http().post(f"/v1/operations/{operation.id}/cancel"))
    return found


def test_an_operation_is_carried_out_and_tells_what_came_of_it(
    service: RunningService, handle: Callable[[Handler], None]
) -> None:
    seen: list[dict[str, Any]] = []

    def looked_at(context: ServiceContext, run: OperationRun) -> dict[str, Any]:
        run.progress(done=3, total=10, note="reading")
        seen.append(view(service, started))
        return counts(context, run)

    handle(looked_at)
    project_id = service.make_project("demo")
    started = start(service, project_id=project_id, to=10)
    assert (started.state, started.project, started.created_by) == (OperationState.QUEUED, "demo", "test")
    assert reconcile(service.context) == OperationsReport(done=1)
    assert (seen[0]["state"], seen[0]["progress"]) == ("running", {"done": 3, "total": 10, "note": "reading"})
    done = view(service, started)
    assert (done["state"], done["result"], done["error"], done["tries"]) == ("done", {"counted": 10}, None, 1)
    assert done["ended_at"] >= done["started_at"] >= done["created_at"]
    assert reconcile(service.context) == OperationsReport()
    with service.context.database.read() as session:
        events = session.scalars(select(AuditEvent).where(AuditEvent.action.like("operation.%"))).all()
    assert [(event.actor_kind, event.actor, event.action) for event in events] == [
        ("person", "test", "operation.start"),
        ("controller", "operations", "operation.end"),
    ]
    assert events[1].after == {"operation": started.id, "kind": KIND, "state": "done"}


def test_the_same_is_under_way_once_however_often_it_is_asked_for(
    service: RunningService, handle: Callable[[Handler], None]
) -> None:
    handle(counts)
    with ThreadPoolExecutor(4) as threads:
        started = {each.id for each in threads.map(lambda _: start(service, to=2), range(4))}
    assert len(started) == 1
    assert start(service, to=3).id not in started
    assert reconcile(service.context).done == 2
    again = start(service, to=2)
    assert again.id not in started
    cancel(service, again)
    assert start(service, to=2).id != again.id


def test_many_workers_carry_each_operation_out_once(
    service: RunningService, others: list[ServiceContext], handle: Callable[[Handler], None]
) -> None:
    began: list[str] = []

    def once(context: ServiceContext, run: OperationRun) -> dict[str, Any]:
        began.append(run.id)
        return counts(context, run)

    handle(once)
    started = [start(service, to=number).id for number in range(1, 13)]
    with ThreadPoolExecutor(4) as threads:
        assert sum(report.done for report in threads.map(reconcile, others)) == 12
    assert sorted(began) == sorted(started)


def test_one_kind_leaves_half_of_the_threads_to_the_others(
    service: RunningService, handle: Callable[[Handler], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a few comparisons, of hours, keep everything else waiting."""
    may_end, quick_ended, under_way = threading.Event(), threading.Event(), UnderWay()

    def hangs(context: ServiceContext, run: OperationRun) -> dict[str, Any]:
        assert may_end.wait(60)
        return counts(context, run)

    def quick(context: ServiceContext, run: OperationRun) -> dict[str, Any]:
        quick_ended.set()
        return counts(context, run)

    handle(hangs)
    monkeypatch.setitem(OPERATION_KINDS, "quick", quick)
    slow = [start(service, to=number + 1) for number in range(MOST_OF_A_KIND + 2)]
    with service.context.database.transaction() as session:
        start_operation(session, service.caller(), "quick", project_id=None, arguments={})
    with ThreadPoolExecutor(4) as threads:
        passes = [threads.submit(reconcile, service.context, under_way=under_way) for _ in range(4)]
        try:
            assert quick_ended.wait(60)
            states = Counter(view(service, each)["state"] for each in slow)
        finally:
            may_end.set()
    assert states == {"running": MOST_OF_A_KIND, "queued": 2}
    assert sum(each.result().done for each in passes) == len(slow) + 1, "those that waited had their turn"


def test_two_workers_that_look_at_once_do_not_both_take_it(
    service: RunningService,
    others: list[ServiceContext],
    handle: Callable[[Handler], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handle(counts)
    start(service)
    gate = hold_before(monkeypatch, claim, "_claim")
    first, second = overlap(
        service, gate, lambda: claim_next(others[0], [KIND], "node-0"), lambda: claim_next(others[1], [KIND], "node-1")
    )
    assert first.result() is not None
    assert second.result() is None


def test_the_operation_of_a_killed_worker_is_finished_by_another_when_its_lease_ends(
    service: RunningService, others: list[ServiceContext], handle: Callable[[Handler], None], clock: Clock
) -> None:
    handle(counts)
    started = start(service, to=5)
    killed = claim_next(others[0], [KIND], "node-0")
    assert killed is not None
    killed.progress(done=2, total=5)
    clock.advance(service.context.settings.lease_seconds - 1)
    killed.progress(done=3, total=5)  # it lives: its word renews the lease
    clock.advance(service.context.settings.lease_seconds - 60)
    assert reconcile(others[1]) == OperationsReport()
    clock.advance(61)
    assert reconcile(others[1]) == OperationsReport(done=1)
    with pytest.raises(LeaseLost):
        killed.progress(done=4)
    assert not settle(others[0], killed, OperationState.FAILED, error="too late")
    done = view(service, started)
    assert (done["state"], done["result"], done["tries"]) == ("done", {"counted": 5}, 2)


def test_one_that_takes_its_worker_with_it_is_given_up_and_says_so(
    service: RunningService, others: list[ServiceContext], handle: Callable[[Handler], None], clock: Clock
) -> None:
    handle(counts)
    started = start(service)
    for number in range(MOST_TRIES):
        assert claim_next(others[number], [KIND], others[number].process_id) is not None
        clock.advance(service.context.settings.lease_seconds + 1)
    assert reconcile(others[3]) == OperationsReport()
    failed = view(service, started)
    assert failed["state"] == "failed"
    assert failed["error"].startswith("Given up after 3 tries")
    assert "node-2" in failed["error"]


def test_the_operation_of_a_worker_that_was_killed_while_the_clock_was_ahead_is_finished_by_another(
    service: RunningService, others: list[ServiceContext], handle: Callable[[Handler], None], clock: Clock
) -> None:
    handle(counts)
    start(service)
    clock.advance(86_400)
    assert claim_next(others[0], [KIND], "node-0") is not None
    clock.advance(-86_400)
    assert reconcile(others[1]) == OperationsReport(done=1)


def test_a_queued_operation_is_cancelled_at_once_and_a_running_one_at_its_next_word(
    service: RunningService, handle: Callable[[Handler], None]
) -> None:
    gate = Gate()
    stopped_at: list[int] = []

    def long(_context: ServiceContext, run: OperationRun) -> dict[str, Any]:
        for done in range(1000):
            stopped_at[:] = [done]
            run.progress(done=done, total=1000)
            if done == 1:
                gate.hold()
        return {}

    handle(long)
    queued = start(service, to=1)
    assert cancel(service, queued)["state"] == "cancelled"
    assert reconcile(service.context) == OperationsReport()
    running = start(service, to=2)
    with in_background(gate) as threads:
        report = threads.submit(reconcile, service.context)
        gate.wait_until_reached()
        told = cancel(service, running)
        assert (told["state"], told["cancel_requested_at"] is None) == ("running", False)
        assert cancel(service, running)["cancel_requested_at"] == told["cancel_requested_at"]
        gate.open()
        assert report.result(30) == OperationsReport(cancelled=1)
    assert stopped_at == [2]
    ended = view(service, running)
    assert ended["state"] == "cancelled"
    assert "stays done" in ended["error"]
    assert cancel(service, running) == ended


def test_a_cancelled_operation_whose_worker_was_killed_is_not_begun_again(
    service: RunningService, others: list[ServiceContext], handle: Callable[[Handler], None], clock: Clock
) -> None:
    handle(counts)
    started = start(service)
    assert claim_next(others[0], [KIND], "node-0") is not None
    cancel(service, started)
    clock.advance(service.context.settings.lease_seconds + 1)
    assert reconcile(others[1]) == OperationsReport()
    assert view(service, started)["state"] == "cancelled"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            ProblemError(ProblemCode.CHECKPOINT_NOT_FOUND, "There is no checkpoint ck_1."),
            "There is no checkpoint ck_1.",
        ),
        (ProblemError(ProblemCode.STORE_FULL, "/x?X-Amz-Signature=secret is full."), "/x?*** is full."),
        (KeyError("password=secret"), "A bug (KeyError); the log of "),
    ],
)
def test_a_handler_that_fails_is_told_with_its_reason(
    service: RunningService, handle: Callable[[Handler], None], error: Exception, told: str
) -> None:
    def fails(_context: ServiceContext, _run: OperationRun) -> dict[str, Any]:
        raise error

    handle(fails)
    started = start(service)
    assert reconcile(service.context).failed == 1
    failed = view(service, started)
    assert (failed["state"], failed["tries"]) == ("failed", 1)
    assert told in failed["error"]
    assert "secret" not in failed["error"]


def test_a_result_that_is_no_json_is_a_bug_and_told_as_one(
    service: RunningService, handle: Callable[[Handler], None]
) -> None:
    handle(lambda _context, _run: {"when": object()})
    started = start(service)
    assert reconcile(service.context).failed == 1
    assert "A bug (DocumentError)" in view(service, started)["error"]


def test_while_the_store_is_unavailable_it_is_tried_again_later_and_then_fails_with_that_reason(
    service: RunningService, handle: Callable[[Handler], None], clock: Clock
) -> None:
    def unavailable(_context: ServiceContext, _run: OperationRun) -> dict[str, Any]:
        raise StoreUnavailable("the store does not answer")

    handle(unavailable)
    started = start(service)
    for tries in range(1, MOST_TRIES):
        assert reconcile(service.context) == OperationsReport(again=1, error="the store does not answer")
        waiting = view(service, started)
        assert (waiting["state"], waiting["error"], waiting["tries"]) == ("queued", "the store does not answer", tries)
        assert reconcile(service.context) == OperationsReport()
        clock.advance(AGAIN_AFTER_SECONDS + 1)
    assert reconcile(service.context).failed == 1
    assert (view(service, started)["state"], view(service, started)["tries"]) == ("failed", MOST_TRIES)


def test_a_process_that_is_asked_to_end_gives_its_operation_back(
    service: RunningService, others: list[ServiceContext], handle: Callable[[Handler], None]
) -> None:
    ending = replace(others[0], stopping=threading.Event())

    def asked_to_end(_context: ServiceContext, run: OperationRun) -> dict[str, Any]:
        ending.stopping.set()
        run.progress(done=1)
        raise AssertionError("it goes on")

    handle(asked_to_end)
    started = start(service)
    assert reconcile(ending) == OperationsReport(again=1)
    given_back = view(service, started)
    assert (given_back["state"], given_back["tries"]) == ("queued", 0)
    handle(counts)
    assert reconcile(others[1]) == OperationsReport(done=1)
    assert view(service, started)["state"] == "done"


def test_a_paused_controller_claims_nothing_and_a_kind_of_another_version_waits(
    service: RunningService, handle: Callable[[Handler], None], clock: Clock
) -> None:
    handle(counts)
    start(service)
    with service.context.database.transaction() as session:
        start_operation(session, service.caller(), "of-a-later-version", project_id=None, arguments={})
        row = locked_row(session, "operations")
        row.paused_at, row.paused_by, row.pause_reason = row.reconciled_at, "test", "x"
    assert reconcile(service.context) == OperationsReport()
    with service.context.database.transaction() as session:
        locked_row(session, "operations").paused_at = None
    assert reconcile(service.context) == OperationsReport(done=1)
    clock.advance(100)
    with service.context.database.read() as session:
        waiting = backlog(session, service.context)
        assert (waiting.due, waiting.leased) == (1, 0)
        found = session.scalar(select(Operation).where(Operation.state == OperationState.QUEUED))
    assert found is not None
    assert waiting.oldest_due_at == found.created_at


def test_a_projects_token_sees_and_cancels_its_own_only(
    service: RunningService, handle: Callable[[Handler], None]
) -> None:
    handle(counts)
    demo, other = service.make_project("demo"), service.make_project("other")
    mine, theirs, everybodys = (start(service, project_id=each) for each in (demo, other, None))
    http = service.http(token=service.token(project="demo"))
    assert [each["id"] for each in answer(http.get("/v1/operations"))["items"]] == [mine.id]
    for hidden in (theirs, everybodys):
        with refused("operation_not_found"):
            answer(http.get(f"/v1/operations/{hidden.id}"))
        with refused("operation_not_found"):
            answer(http.post(f"/v1/operations/{hidden.id}/cancel"))
    with refused("forbidden"):
        answer(http.get("/v1/operations", params={"project": "other"}))
    with refused("forbidden"):
        answer(service.http(token=service.token(Scope.READ)).post(f"/v1/operations/{mine.id}/cancel"))
    assert answer(http.post(f"/v1/operations/{mine.id}/cancel"))["state"] == "cancelled"


def test_the_list_is_cut_into_pages_and_narrowed(service: RunningService, handle: Callable[[Handler], None]) -> None:
    handle(counts)
    demo = service.make_project("demo")
    started = [start(service, project_id=demo, to=number).id for number in range(1, 6)]
    start(service)
    with Client(ClientSettings(url=service.url, token=service.token())) as client:
        first = client.operations.list(project="demo", limit=2)
        assert [each.id for each in first.items] == started[:2:-1]
        assert [each.id for each in client.operations.all(project="demo")] == started[::-1]
        reconcile(service.context)
        assert len(list(client.operations.all(state=OperationState.DONE, kind=KIND))) == 6
        assert not list(client.operations.all(state=OperationState.QUEUED))
        assert client.operations.list(kind="no-such").items == []
        with pytest.raises(OperationNotFound, match="holdfast operations list"):
            client.operations.get("op_none")
        with refused("invalid_request"):
            answer(service.http().get("/v1/operations", params={"run": "gpt"}))
        assert client.operations.wait(started[0]).result == {"counted": 1}
        waiting = start(service, to=99)
        with pytest.raises(ServiceUnavailable, match="holdfast operations wait"):
            client.operations.wait(waiting.id, timeout_seconds=0)
        assert client.operations.cancel(waiting.id).state is OperationState.CANCELLED
