"""How runs fare and where their time went: in REST, in lists, in /metrics, and on the command line."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

import holdfast_service.liveness.abandoned_uploads as reap
import holdfast_service.liveness.stalled_attempts as liveness
from holdfast_client.cli.main import app
from holdfast_protocol.states import Scope
from holdfast_service.insights import metrics as run_numbers
from holdfast_service.settings import ServiceSettings
from tests.service.conftest import Clock
from tests.support.rank import Job, answer
from tests.support.service import RunningService


@pytest.fixture
def settings(settings: ServiceSettings) -> ServiceSettings:
    return settings.model_copy(update={"lost_after_seconds": 50.0, "stall_seconds": 60.0})


def _trained(first: int, last: int, seconds: float, **more: Any) -> dict[str, Any]:
    """Its first step was over `seconds` ago, and its last one is over now."""
    progress: dict[str, Any] = {"first_step": first, "step": last, "steps_run": last - first + 1}
    return progress | {"first_step_age_seconds": seconds, "progress_age_seconds": 0.0, "doing": "training"} | more


def test_how_runs_fare(service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    http = service.http()
    names = ("training", "stalled", "lost", "failed", "preempted", "finished")
    jobs = {name: Job(http, f"demo/{name}", create=True) for name in names}
    http.put("/v1/projects/demo/runs/idle").raise_for_status()
    jobs["failed"].end("failed", error_type="E", error_rank=3, detail="E: no")
    jobs["preempted"].end("preempted")
    jobs["finished"].end("finished")
    reap.reconcile(service.context)
    for seconds in (30.0, 60.0, 90.0):
        clock.advance(30)
        jobs["training"].heartbeat(**_trained(0, 1, seconds))
        jobs["stalled"].heartbeat(**_trained(0, 1, seconds, progress_age_seconds=seconds))
        reap.reconcile(service.context)
    liveness.reconcile(service.context)
    runs = {run["name"]: run for run in answer(http.get("/v1/projects/demo/runs"))["items"]}
    assert {name: run["status"] for name, run in runs.items()} == {name: name for name in runs}
    assert len(runs) == 7
    assert runs["failed"]["status_detail"] == "rank 3: E: no"
    assert runs["stalled"]["status_detail"].startswith("alive, and no progress since ")
    assert runs["lost"]["status_detail"] == "not heard of for 50 seconds (HOLDFAST_LOST_AFTER_SECONDS)"
    for status, expected in (("stalled", ["stalled"]), ("lost&status=failed", ["failed", "lost"])):
        found = answer(http.get(f"/v1/projects/demo/runs?status={status}"))["items"]
        assert sorted(run["name"] for run in found) == expected
    assert http.get("/v1/projects/demo/runs?status=happy").status_code == 422
    metrics = http.get("/metrics").text
    for status in runs:
        assert f'holdfast_runs{{project="demo",status="{status}"}} 1.0' in metrics
    for outcome in ("lost", "failed", "preempted", "finished"):
        assert f'holdfast_attempts_ended{{outcome="{outcome}",project="demo"}} 1.0' in metrics
    monkeypatch.setenv("HOLDFAST_URL", service.url)
    monkeypatch.setenv("HOLDFAST_TOKEN", service.token(Scope.READ))
    shown = CliRunner().invoke(app, ["runs", "list", "demo", "--status", "stalled", "--json"])
    assert [run["name"] for run in json.loads(shown.stdout)] == ["stalled"]
    clock.advance(86_400)
    with service.context.database.read() as session:
        a_day_later = run_numbers._read(session).runs
    # Who was given up needs nobody any more; who is still alive as far as anybody knows does.
    assert {status for (_, status), count in a_day_later.items() if count} == {"training", "stalled", "idle"}
    listed = CliRunner().invoke(app, ["runs", "list", "demo"], env={"COLUMNS": "200"}).stdout
    assert "last heard (UTC)" in listed
    assert runs["lost"]["last_heard_at"][:19].replace("T", " ") in listed
    assert (
        "rank 3: E: no" in CliRunner().invoke(app, ["attempts", "list", "demo/failed"], env={"COLUMNS": "200"}).stdout
    )


def test_goodput_of_a_run_that_crashed_once(
    service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    http = service.http()
    first = Job(http)
    clock.advance(100)
    kept = first.save(49)
    first.heartbeat(**_trained(0, 79, 79.0, saves_begun=1))  # a second for a step, and 20 to start
    clock.advance(10)
    first.end("failed", **_trained(0, 89, 89.0), error_type="ValueError", error_rank=0)
    clock.advance(30)
    second = Job(http, after=1)
    second.resumed_from(kept["id"])
    clock.advance(60)
    second.end("finished", **_trained(50, 99, 49.0, restore_seconds=5.0))
    found = answer(http.get("/v1/projects/demo/runs/gpt/goodput"))
    assert (found["steps_run"], found["steps_kept"], found["steps_lost"]) == (140, 100, 40)
    assert found["wall_seconds"] == pytest.approx(200, abs=10), "but for what this machine took"
    assert found["productive_seconds"] == pytest.approx(100, abs=1)
    assert found["lost_seconds"] == pytest.approx(40, abs=1)
    assert found["restoring_seconds"] == 5.0
    assert found["goodput"] == pytest.approx(0.5, abs=0.05)
    assert 'holdfast_steps_lost{project="demo"} 40.0' in http.get("/metrics").text
    monkeypatch.setenv("HOLDFAST_URL", service.url)
    monkeypatch.setenv("HOLDFAST_TOKEN", service.token(Scope.READ))
    assert json.loads(CliRunner().invoke(app, ["runs", "goodput", "demo/gpt", "--json"]).stdout)["steps_lost"] == 40
    assert "Goodput: " in CliRunner().invoke(app, ["runs", "goodput", "demo/gpt"]).stdout
    # Of another project's run a token sees nothing.
    service.make_project("other")
    stranger = service.http(token=service.token(Scope.READ, project="other"))
    assert stranger.get("/v1/projects/demo/runs/gpt/goodput").status_code == 403
