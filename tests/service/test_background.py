"""The threads that run controllers: in a service, in a worker, and not in a second process on SQLite."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import holdfast_service.serve
from holdfast_client.cli.main import app
from holdfast_protocol.problems import ProblemCode
from holdfast_service.background.registry import Background, loops_of
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError
from holdfast_service.serve import serve
from holdfast_service.service import close_service
from holdfast_service.settings import ServiceSettings, SettingsError
from holdfast_service.work.report import ControllerLoop, ReconcileReport
from tests.support.rank import answer
from tests.support.service import RunningService

WAIT_SECONDS = 60


class Called:
    """Counts the ticks of a pass, each of which `what` carries out."""

    def __init__(self, what: Callable[[], ReconcileReport] = ReconcileReport) -> None:
        self._what = what
        self._more = threading.Condition()
        self.count = 0

    def reconcile(self, _context: ServiceContext) -> ReconcileReport:
        with self._more:
            self.count += 1
            self._more.notify_all()
        return self._what()

    def wait_for(self, count: int) -> None:
        with self._more:
            assert self._more.wait_for(lambda: self.count >= count, WAIT_SECONDS)


@pytest.fixture
def settings(settings: ServiceSettings) -> ServiceSettings:
    return settings.model_copy(update={"controller_interval_seconds": 0.01})


@pytest.fixture
def context(service: RunningService) -> ServiceContext:
    return replace(service.context, process_id="node-1", stopping=threading.Event())


def test_each_controller_has_its_threads_and_one_that_fails_goes_on(
    service: RunningService, context: ServiceContext
) -> None:
    def fails() -> ReconcileReport:
        raise RuntimeError("a bug")

    failing, together = Called(fails), Called()
    meeting = threading.Barrier(2)
    pair = ControllerLoop(
        "pair", 3600.0, lambda _: (meeting.wait(WAIT_SECONDS), together.reconcile(context))[1], threads=2
    )
    passes = (ControllerLoop("failing", 0.01, failing.reconcile), pair)
    background = Background(context, passes, "worker")
    background.start()
    failing.wait_for(3)
    together.wait_for(2)
    (listed,) = answer(service.http().get("/v1/workers"))["items"]
    assert (listed["id"], listed["kind"]) == ("node-1", "worker")
    assert background.stop(timeout_seconds=WAIT_SECONDS)
    assert answer(service.http().get("/v1/workers"))["items"] == [], "it has said good-bye"
    assert together.count == 2, "the next pass of the pair was an hour away"


def test_a_round_that_is_far_away_comes_at_once_when_somebody_wants_it(
    service: RunningService, context: ServiceContext
) -> None:
    collect = Called()
    background = Background(context, (ControllerLoop("collect", 3600.0, collect.reconcile),), "worker")
    background.start()
    collect.wait_for(1)
    answer(service.http().post("/v1/controllers/collect/run"))
    collect.wait_for(2)
    assert background.stop(timeout_seconds=WAIT_SECONDS)
    assert collect.count == 2


def test_a_process_that_leaves_the_controllers_to_others_still_looks_after_itself(
    service: RunningService, context: ServiceContext
) -> None:
    own, shared = Called(), Called()
    passes = (ControllerLoop("shared", 0.01, shared.reconcile), ControllerLoop("own", 0.01, own.reconcile, own=True))
    background = Background(context, passes, "serve", controllers=False)
    background.start()
    own.wait_for(3)
    assert background.stop(timeout_seconds=WAIT_SECONDS)
    assert shared.count == 0
    assert [each.name for each in loops_of(context.settings) if each.own] == ["stores"]


def test_a_round_under_way_may_end_before_its_process_does(context: ServiceContext) -> None:
    gate = threading.Event()
    slow = Called(lambda: ReconcileReport(done=int(gate.wait(WAIT_SECONDS))))
    background = Background(context, (ControllerLoop("slow", 0.01, slow.reconcile),), "worker")
    background.start()
    slow.wait_for(1)
    assert not background.stop(timeout_seconds=0), "it says that something was cut off"
    gate.set()
    assert background.stop(timeout_seconds=WAIT_SECONDS)
    assert slow.count == 1, "a process that ends begins no other pass"


@pytest.fixture
def _process_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For tests that serve in their own process."""
    monkeypatch.setattr(holdfast_service.serve, "_allow_connections", lambda _: None)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_process_as_it_was")
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_database_that_fails_just_after_the_start_says_why_and_the_service_is_closed(
    settings: ServiceSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise ProblemError(ProblemCode.DATABASE_UNAVAILABLE, "the database has gone")

    closed: list[ServiceContext] = []
    monkeypatch.setattr("holdfast_service.work.processes.say_alive", fails)
    monkeypatch.setattr(holdfast_service.serve, "close_service", closed.append)
    with pytest.raises(ProblemError, match="the database has gone"):
        serve(settings, lambda *_: None)
    (context,) = closed
    close_service(context)


@pytest.mark.usefixtures("_process_as_it_was")
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_service_that_is_asked_to_end_before_it_listens_ends(
    settings: ServiceSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def serves(_: object) -> None:
        raise AssertionError("it was asked to end")

    monkeypatch.setattr(holdfast_service.serve._Server, "main_loop", serves)
    serve(settings, lambda *_: signal.raise_signal(signal.SIGTERM))


def test_a_second_process_on_sqlite_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOLDFAST_DATA_DIR", str(tmp_path / "data"))
    refused = CliRunner().invoke(app, ["workers", "run"])
    assert refused.exit_code == 2
    assert "HOLDFAST_DATABASE_URL names SQLite" in refused.stderr
    assert "one `holdfast serve` does everything" in refused.stderr
    with pytest.raises(SettingsError, match="HOLDFAST_SERVE_CONTROLLERS=false"):
        serve(ServiceSettings(serve_controllers=False, port=0), lambda *_: None)
    assert not (tmp_path / "data").exists(), "a start that fails must not touch anything"
