"""MLflow and W&B: a job that is killed goes on in the same tracked run, which has its restore points by reference."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import logging
import os
import pickle
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import launched
from tests.trainer.conftest import Service

import holdfast
from holdfast.integrations import restore_points
from holdfast.integrations.restore_points import RestorePointLog
from holdfast.save.job import SaveHandle
from holdfast_protocol.checkpoints import CheckpointView
from holdfast_protocol.states import Health

JOB = "tests.support.tracked_job"


def needs(library: str) -> Any:
    return pytest.mark.skipif(importlib.util.find_spec(library) is None, reason=f"{library} is not installed")


def killed_and_resumed(run: str, tool: str, folder: Path) -> None:
    with launched(JOB, run, tool, folder, 2) as [rank]:
        assert rank.wait(timeout=120) == -signal.SIGKILL
    with launched(JOB, run, tool, folder, -1) as [rank]:
        assert rank.wait(timeout=120) == 0


@needs("mlflow")
def test_an_mlflow_run_goes_on_with_the_job_and_has_its_restore_points(
    run: str, service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # its databases take longer to make than the rest of the test
    killed_and_resumed(run, "mlflow", tmp_path)
    client = MlflowClient(tmp_path.as_uri())
    [experiment] = [each for each in client.search_experiments() if each.name == "holdfast"]
    [tracked] = client.search_runs([experiment.experiment_id])
    run_id = tracked.info.run_id
    points = {point.step for point in client.get_metric_history(run_id, "restore_point")}
    saved = {view.step: view for view in service.client.checkpoints.all(*run.split("/"))}
    assert {3, 4, 5} <= points <= saved.keys() == set(range(6))  # of earlier ones MLflow heard if it was in time
    assert tracked.data.tags["holdfast.run"] == run
    assert tracked.data.tags["holdfast.latest"] == f"{run}@5"
    assert tracked.data.tags["holdfast.latest_id"] == saved[5].id
    artifact = Path(client.download_artifacts(run_id, "restore_points/step-5.json", str(tmp_path)))
    told = json.loads(artifact.read_text())
    assert (told["url"], told["digest"]) == (f"holdfast://{run}@{saved[5].id}", saved[5].digest)
    assert told["metrics"] == {"loss": pytest.approx(1 / 6)}
    with holdfast.safe_open(f"{told['url']}/model.safetensors") as file:
        assert file.get_tensor("weight").shape == (4, 4)


@needs("wandb")
def test_wandb_gets_each_restore_point_as_a_reference_of_the_same_run(
    run: str, service: Service, tmp_path: Path
) -> None:
    from holdfast.integrations.wandb import wandb_id

    killed_and_resumed(run, "wandb", tmp_path)
    launches = sorted((tmp_path / "wandb").glob(f"offline-run-*-{wandb_id(run)}"))
    assert launches, "both launches are of one W&B run"
    written = b"".join(path.read_bytes() for path in (tmp_path / "wandb").rglob("*.wandb"))
    [last] = [view for view in service.client.checkpoints.all(*run.split("/")) if view.step == 5]
    assert f"holdfast://{run}@{last.id}".encode() in written
    assert last.digest is not None
    assert last.digest.encode() in written


class Told(RestorePointLog):
    tool = "the tool"

    def __init__(self, run: str) -> None:
        self.steps: list[int] = []
        super().__init__(run)

    def tell(self, view: CheckpointView) -> None:
        if view.step == 0:
            raise OSError("https://me:secret@tool:5000/api is away")
        self.steps.append(view.step)


def test_a_tool_that_is_away_costs_a_warning_and_a_diverged_save_is_no_restore_point(
    run: str, caplog: pytest.LogCaptureFixture
) -> None:
    points = Told(run)
    with caplog.at_level(logging.WARNING, "holdfast"), holdfast.Checkpointer(run) as ckpt:
        ckpt.restore({})
        for step, loss in enumerate([1.0, 2.0, float("nan"), 3.0]):
            assert points.log(ckpt.save(step, {}, metrics={"loss": loss})) is not None
            ckpt.wait()
        assert points.log(None) is None
    points.close()
    assert points.steps == [1, 3]
    assert "the tool was not told of step 0" in caplog.text
    assert "https://tool:5000/api is away" in caplog.text
    assert "secret" not in caplog.text


def test_the_tool_hears_of_what_a_job_that_must_leave_has_saved(run: str) -> None:
    points = Told(run)

    def train() -> None:
        with points, holdfast.Checkpointer(run, save=holdfast.OnPreemption()) as ckpt:
            ckpt.restore(state := {"model": torch.nn.Linear(2, 2)})
            os.kill(os.getpid(), signal.SIGTERM)
            for step in itertools.count(1):
                points.log(ckpt.step(step, state))

    with pytest.raises(holdfast.Preempted) as told:
        train()
    assert points.steps == [told.value.saved_step]
    again = pickle.loads(pickle.dumps(told.value))
    assert again.checkpoint.step == told.value.saved_step, "launchers carry the exception to another process"


def test_a_save_that_is_over_before_its_handle_hears_of_it_is_told_all_the_same() -> None:
    points, handle = Told("demo/gpt"), SaveHandle(7)
    points.log(handle)
    points.close(timeout_seconds=0)
    handle.committed.set_result(CheckpointView.model_construct(step=7, health=Health.OK))
    points.close()
    assert points.steps == [7]


class Timed(Told):
    def __init__(self) -> None:
        self.bound = 0.0
        super().__init__("demo/gpt")

    def close(self, timeout_seconds: float = 0.0) -> None:
        self.bound = timeout_seconds
        super().close()


@pytest.mark.parametrize(
    ("error", "bound"),
    [(None, 60), (SystemExit(0), 60), (SystemExit(1), 5), (OSError(), 5), (holdfast.Preempted("spot"), 5)],
)
def test_a_tool_that_does_not_answer_does_not_hold_a_job_that_must_leave(
    error: BaseException | None, bound: float
) -> None:
    with contextlib.suppress(BaseException), Timed() as points:
        if error is not None:
            raise error
    assert points.bound == bound


class Hanging(Told):
    def __init__(self, answers: threading.Event) -> None:
        self.answers, self.asked = answers, 0
        super().__init__("demo/gpt")

    def open(self) -> None:
        self.asked += 1
        self.answers.wait()
        if self.asked == 1:
            raise OSError("the tool is away")


def test_a_job_begins_without_a_tool_that_hangs_and_the_tool_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore_points, "_BEGIN_SECONDS", 0.01)
    answers = threading.Event()
    points, handles = Hanging(answers), [SaveHandle(step) for step in (1, 2)]
    for handle in handles:
        points.log(handle)
        handle.committed.set_result(CheckpointView.model_construct(step=handle.step, health=Health.OK))
    answers.set()
    points.close()
    assert (points.steps, points.asked) == ([1, 2], 2)
