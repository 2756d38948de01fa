"""Controllers: a pass here and now or not, once over all processes, and what people see of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import Scope
from holdfast_service import app
from holdfast_service.background import reconcile as begin
from holdfast_service.background.reconcile import begin_pass, run_pass
from holdfast_service.background.registry import loops_of
from holdfast_service.context import ServiceContext
from holdfast_service.db import cached_read
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.operations import AuditEvent
from holdfast_service.errors import ProblemError
from holdfast_service.settings import ServiceSettings
from holdfast_service.stores.base import StoreUnavailable
from holdfast_service.work.processes import Presence, attached_here, say_alive, say_goodbye
from holdfast_service.work.report import Backlog, ControllerLoop, ReconcileReport
from tests.service.conftest import Clock
from tests.support.interleave import Gate, hold_after, in_background, refused
from tests.support.rank import answer
from tests.support.service import RunningService, running_service


@dataclass(frozen=True, kw_only=True)
class TriedReport(ReconcileReport):
    names: tuple[str, ...] = ()
    share: float = 0.0


class Tried:
    """A controller that a test watches: what its ticks answer, and how often it was called."""

    def __init__(self) -> None:
        self.calls = 0
        self.answer: Callable[[], ReconcileReport] = TriedReport
        self.waiting = Backlog(0)

    def reconcile(self, _context: ServiceContext) -> ReconcileReport:
        self.calls += 1
        return self.answer()

    def backlog(self, _session: Session, _context: ServiceContext) -> Backlog:
        return self.waiting


@pytest.fixture
def tried() -> Tried:
    return Tried()


@pytest.fixture
def loop_of(tried: Tried) -> ControllerLoop:
    return ControllerLoop("tried", 60.0, tried.reconcile, tried.backlog)


@pytest.fixture
def service(
    settings: ServiceSettings, loop_of: ControllerLoop, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RunningService]:
    """It has the controller `tried` beside its own."""
    monkeypatch.setattr(app, "loops_of", lambda settings: (*loops_of(settings), loop_of))
    with running_service(settings) as running:
        yield running


@pytest.fixture
def others(service: RunningService) -> list[ServiceContext]:
    """Three processes, as far as the catalog can tell."""
    return [replace(service.context, process_id=f"node-{number}") for number in range(3)]


def view(service: RunningService, name: str = "tried") -> dict[str, Any]:
    found: dict[str, Any] = answer(service.http().get(f"/v1/controllers/{name}"))
    return found


def tell(service: RunningService, what: str, **body: Any) -> dict[str, Any]:
    found: dict[str, Any] = answer(service.http().post(f"/v1/controllers/tried/{what}", json=body or None))
    return found


def events(service: RunningService) -> list[tuple[str, str, str | None]]:
    with service.context.database.read() as session:
        mine = select(AuditEvent).where(AuditEvent.action.like("controller.%"))
        rows = session.scalars(mine.order_by(AuditEvent.id)).all()
        return [(row.actor, row.action, row.reason) for row in rows]


def test_every_controller_is_listed_with_its_work_and_its_lag(
    service: RunningService, tried: Tried, loop_of: ControllerLoop
) -> None:
    with service.context.database.read() as session:
        since = database_now(session) - timedelta(seconds=300)
    tried.waiting = Backlog(7, 2, since)
    tried.answer = lambda: TriedReport(
        done=5, failed=1, error="rank 3 is away", names=tuple("abc") * 10, share=math.nan
    )
    run_pass(service.context, loop_of)
    tried.answer = TriedReport
    run_pass(service.context, loop_of)
    listed = {one["name"]: one for one in answer(service.http().get("/v1/controllers"))["items"]}
    assert {"reap", "stores", "collect", "operations"} <= set(listed)
    assert listed["tried"] == view(service) | {"lag_seconds": listed["tried"]["lag_seconds"]}
    seen = listed["tried"]
    assert (seen["due"], seen["leased"], seen["done"], seen["failed"]) == (7, 2, 5, 1)
    assert 300 <= seen["lag_seconds"] < 330
    assert seen["error"] == "rank 3 is away", "a pass that goes well leaves the last error where people find it"
    assert seen["report"]["names"] == [*(tuple("abc") * 10)[:20], "… and 10 more"]
    assert (seen["report"]["done"], seen["report"]["share"]) == (5, "nan"), (
        "a pass without work leaves the last report too"
    )
    assert seen["last_pass_at"] >= seen["report_at"]


def test_a_paused_controller_begins_no_round_in_any_process(
    service: RunningService, others: list[ServiceContext], tried: Tried, loop_of: ControllerLoop
) -> None:
    paused = tell(service, "pause", reason="the store is being moved")
    assert (paused["paused_by"], paused["pause_reason"]) == (
        "test train read operate admin metrics",
        "the store is being moved",
    )
    assert tell(service, "pause", reason="the store is being moved")["paused_at"] == paused["paused_at"]
    assert [run_pass(each, loop_of) for each in others] == [None] * 3
    with refused("controller_paused") as caught:
        tell(service, "run")
    assert "the store is being moved" in caught.value.detail
    assert "holdfast controllers resume tried" in caught.value.detail
    assert tell(service, "resume")["paused_at"] is None
    tell(service, "resume")
    assert run_pass(others[0], loop_of) == TriedReport()
    assert tried.calls == 1
    person = "test train read operate admin metrics"
    assert events(service) == [
        (person, "controller.pause", "the store is being moved"),
        (person, "controller.resume", None),
    ]


def test_a_round_that_somebody_wants_is_done_once_over_all_processes(
    service: RunningService, others: list[ServiceContext], tried: Tried, loop_of: ControllerLoop
) -> None:
    gate = Gate()

    def held() -> ReconcileReport:
        gate.hold()
        return TriedReport(done=1)

    tried.answer = held
    asked = tell(service, "run")
    assert asked["run_requested_at"] is not None
    with in_background(gate) as threads:
        passes = [threads.submit(run_pass, each, loop_of, due=False) for each in others]
        gate.wait_until_reached()
        ended = as_completed(passes, timeout=30)
        assert [next(ended).result(), next(ended).result()] == [None, None], "the lease was taken when they came"
        gate.open()
        reports = [each.result(30) for each in passes]
    assert reports.count(TriedReport(done=1)) == 1
    assert reports.count(None) == 2
    assert tried.calls == 1
    seen = view(service)
    assert (seen["run_requested_at"], seen["run_answered_at"]) == (None, asked["run_requested_at"])
    assert [run_pass(each, loop_of, due=False) for each in others] == [None] * 3


def test_a_process_that_has_only_seen_the_wish_comes_too_late_when_another_has_answered_it(
    service: RunningService,
    others: list[ServiceContext],
    tried: Tried,
    loop_of: ControllerLoop,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tell(service, "run")
    gate = hold_after(monkeypatch, begin, "_look")
    with in_background(gate) as threads:
        slow = threads.submit(run_pass, others[0], loop_of, due=False)
        gate.wait_until_reached()
        assert run_pass(others[1], loop_of, due=False) == TriedReport()
        gate.open()
        assert slow.result(30) is None
    assert tried.calls == 1


def test_a_wish_that_comes_while_a_round_is_under_way_gets_another_one(
    service: RunningService, tried: Tried, loop_of: ControllerLoop
) -> None:
    again: list[str] = []

    def asks_again() -> ReconcileReport:
        if not again:
            again.append(tell(service, "run")["run_requested_at"])
        return TriedReport()

    tried.answer = asks_again
    tell(service, "run")
    assert run_pass(service.context, loop_of, due=False) is not None
    assert view(service)["run_requested_at"] == again[0]
    assert run_pass(service.context, loop_of, due=False) is not None
    assert view(service)["run_answered_at"] == again[0]
    assert run_pass(service.context, loop_of, due=False) is None


def test_a_round_that_was_wanted_outlives_the_process_that_began_it(
    service: RunningService, others: list[ServiceContext], tried: Tried, loop_of: ControllerLoop, clock: Clock
) -> None:
    asked = tell(service, "run")
    assert begin_pass(others[0], loop_of, due=False) is not None  # and is killed
    assert run_pass(others[1], loop_of, due=False) is None
    clock.advance(service.context.settings.lease_seconds + 1)
    assert run_pass(others[1], loop_of, due=False) == TriedReport()
    assert run_pass(others[2], loop_of, due=False) is None
    assert view(service)["run_answered_at"] == asked["run_requested_at"]
    assert tried.calls == 1


def test_a_sole_round_is_under_way_in_one_process_at_a_time_and_comes_at_its_time_over_all(
    service: RunningService, others: list[ServiceContext], tried: Tried, clock: Clock
) -> None:
    sole = ControllerLoop("tried", 60.0, tried.reconcile, sole=True)
    held = begin_pass(others[0], sole, due=True)
    assert held is not None
    assert [begin_pass(each, sole, due=True) for each in others] == [None] * 3
    clock.advance(service.context.settings.lease_seconds + 1)
    with ThreadPoolExecutor(3) as threads:
        reports = list(threads.map(lambda each: run_pass(each, sole), others))
    assert sorted(reports, key=str).count(None) == 2
    assert tried.calls == 1
    clock.advance(30)
    assert [run_pass(each, sole) for each in others] == [None] * 3
    clock.advance(31)
    assert run_pass(others[2], sole) == TriedReport()


def test_a_clock_that_was_a_day_ahead_stops_no_round_for_a_day(
    service: RunningService, tried: Tried, clock: Clock
) -> None:
    sole = ControllerLoop("tried", 60.0, tried.reconcile, sole=True)
    clock.advance(86_400)
    assert run_pass(service.context, sole) == TriedReport()
    clock.advance(-86_400)
    assert run_pass(service.context, sole) == TriedReport()
    assert run_pass(service.context, sole) is None


def test_the_lease_of_a_process_that_was_killed_while_the_clock_was_ahead_does_not_outlive_that(
    others: list[ServiceContext], tried: Tried, clock: Clock
) -> None:
    sole = ControllerLoop("tried", 60.0, tried.reconcile, sole=True)
    clock.advance(86_400)
    assert begin_pass(others[0], sole, due=True) is not None
    clock.advance(-86_400)
    assert run_pass(others[1], sole) == TriedReport()


def test_a_lease_is_kept_while_its_round_is_under_way(
    service: RunningService, others: list[ServiceContext], tried: Tried, clock: Clock
) -> None:
    sole = ControllerLoop("tried", 60.0, tried.reconcile, sole=True)
    presence = Presence(others[0], "worker")
    held = begin_pass(others[0], sole, due=True)
    assert held is not None
    for _ in range(3):
        clock.advance(service.context.settings.lease_seconds - 1)
        with presence.keeping(held.lease_token):
            presence._say()
        assert run_pass(others[1], sole) is None
    presence._say()  # the pass is over for it: nothing is renewed
    clock.advance(service.context.settings.lease_seconds + 1)
    assert run_pass(others[1], sole) == TriedReport()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            StoreUnavailable("https://store/x?X-Amz-Signature=abc does not answer"),
            "https://store/x?*** does not answer",
        ),
        (ProblemError(ProblemCode.DATABASE_UNAVAILABLE, "The database did not answer. Try again."), "did not answer"),
        (RuntimeError("password=hunter2"), "A bug (RuntimeError); the log of "),
    ],
)
def test_a_round_that_fails_is_told_with_its_reason_and_the_next_one_comes(
    service: RunningService, tried: Tried, loop_of: ControllerLoop, error: Exception, told: str
) -> None:
    def fails() -> ReconcileReport:
        raise error

    tried.answer = fails
    assert run_pass(service.context, loop_of) is not None
    seen = view(service)
    assert told in seen["error"]
    assert "hunter2" not in seen["error"]
    assert seen["failed"] == 1
    tried.answer = TriedReport
    assert run_pass(service.context, loop_of) == TriedReport()


def test_processes_are_listed_until_they_say_good_bye(
    service: RunningService, others: list[ServiceContext], tried: Tried, loop_of: ControllerLoop, clock: Clock
) -> None:
    database = service.context.database
    for each in others:
        with database.transaction() as session:
            say_alive(session, each.process_id, "worker", attached_here(each))
    tried.answer = lambda: TriedReport(done=3)
    run_pass(others[1], loop_of)
    run_pass(others[1], loop_of)
    with database.transaction() as session:
        say_goodbye(session, others[0].process_id)
    clock.advance(60)
    with database.transaction() as session:
        say_alive(session, others[1].process_id, "worker", attached_here(others[1]))
    listed = answer(service.http().get("/v1/workers"))["items"]
    assert [(one["id"], one["silent"], one["done"]) for one in listed] == [
        ("node-1", False, {"tried": 6}),
        ("node-2", True, {}),
    ]
    clock.advance(2 * 86400)
    with database.transaction() as session:
        say_alive(session, "node-3", "serve", attached_here(service.context))
    assert [one["id"] for one in answer(service.http().get("/v1/workers"))["items"]] == ["node-3"]


def test_controllers_are_for_tokens_of_every_project(service: RunningService, tried: Tried) -> None:
    service.make_project("demo")
    one_project = service.http(token=service.token(project="demo"))
    reader = service.http(token=service.token(Scope.READ))
    for path in ("/v1/controllers", "/v1/controllers/tried", "/v1/workers"):
        assert one_project.get(path).json()["code"] == "forbidden"
        assert reader.get(path).status_code == 200
    for what in ("pause", "resume", "run"):
        path, body = f"/v1/controllers/tried/{what}", {"reason": "x"} if what == "pause" else None
        assert one_project.post(path, json=body).json()["code"] == "forbidden"
        assert reader.post(path, json=body).json()["code"] == "forbidden"
        unknown = service.http().post(f"/v1/controllers/no-such/{what}", json=body).json()
        assert unknown["code"] == "controller_not_found"
        assert "collect" in unknown["detail"]
    with refused("invalid_request"):
        answer(service.http().post("/v1/controllers/stores/pause", json={"reason": "x"}))


@pytest.fixture
def _no_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cached_read, "LONGEST_SECONDS", 0.0)
    return iter(())


@pytest.mark.usefixtures("_no_cache")
def test_the_metrics_tell_each_controllers_numbers(
    service: RunningService, tried: Tried, loop_of: ControllerLoop
) -> None:
    tried.waiting = Backlog(4, 1)
    tried.answer = lambda: TriedReport(done=9, failed=2)
    run_pass(service.context, loop_of)
    tell(service, "pause", reason="x")
    text = service.http().get("/metrics").text
    for line in (
        'holdfast_controller_due{controller="tried"} 4.0',
        'holdfast_controller_leased{controller="tried"} 1.0',
        'holdfast_controller_lag_seconds{controller="tried"} 0.0',
        'holdfast_controller_paused{controller="tried"} 1.0',
        'holdfast_controller_paused{controller="reap"} 0.0',
        'holdfast_controller_done_total{controller="tried"} 9.0',
        'holdfast_controller_failed_total{controller="tried"} 2.0',
    ):
        assert line in text
