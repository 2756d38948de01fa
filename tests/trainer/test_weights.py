"""Another run's weights: the model only, whatever the world sizes, strictly or in part."""

from __future__ import annotations

import pytest
import torch
from gloo import run_ranks
from tests.support.read_only import read_only
from tests.support.service import running_service
from tests.support.training import Job, random_numbers, train, values
from torch import nn

import holdfast
from holdfast import errors
from holdfast.export.pull import Format, pull
from holdfast_client.client import Client
from holdfast_protocol.base import RunName
from holdfast_protocol.runs import Latest
from holdfast_service.settings import ServiceSettings


def model_of(trained):
    return {name: value for name, value in trained.final.items() if "." in name or name in ("scale", "never")}


def test_the_model_alone_is_loaded_and_nothing_else_changes(run):
    trained = train(0, run, 3)
    job = Job(seed=5)
    job.step(0)
    before, drawn = values({**job.state}), random_numbers()
    report = holdfast.load_weights(run, job.state["model"])
    after = values(job.state)
    assert report == holdfast.LoadReport()
    assert random_numbers() == drawn
    for name, value in after.items():
        parameter = name in job.state["model"].state_dict()
        assert value == (trained.final[name] if parameter else before[name])


def test_no_attempt_is_opened_so_the_other_run_goes_on(run, service):
    train(0, run, 1)
    holdfast.load_weights(run, Job().state["model"])
    assert service.client.runs.get(*run.split("/")).latest_attempt == 1


def test_a_selector_names_which_weights(run):
    job = Job()
    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore(job.state)
        for step, loss in enumerate([3.0, 1.0, 2.0]):
            with torch.no_grad():
                job.state["model"].scale.fill_(step)
            ckpt.save(step, job.state, metrics={"loss": loss}).committed.result(timeout=60)
    for selector, scale in (("best:loss", 1.0), ("best:loss:max", 0.0), ("latest", 2.0), ("1", 1.0)):
        model = Job().state["model"]
        holdfast.load_weights(f"{run}@{selector}", model)
        assert model.scale.item() == scale


class Longer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.head = nn.Linear(7, 2)


def test_a_model_that_does_not_fit_is_refused_by_name_and_untouched(run):
    train(0, run, 1)
    model = Longer()
    before = model.up.weight.tolist()
    with pytest.raises(errors.StateMismatchError, match="head"):
        holdfast.load_weights(run, model)
    assert model.up.weight.tolist() == before


def test_in_part_what_fits_is_loaded_and_the_rest_reported(run):
    trained = train(0, run, 1)
    model = Longer()
    head = model.head.weight.tolist()
    report = holdfast.load_weights(run, model, strict=False)
    assert sorted(report.missing) == ["model/head.bias", "model/head.weight"]
    assert "model/down.weight" in report.unexpected
    assert model.head.weight.tolist() == head
    assert values_of(model.up.weight) == trained.final["up.weight"]


def test_excluded_parameters_stay_as_they_are(run):
    train(0, run, 2)
    model = Job(seed=3).state["model"]
    before = model.down.weight.tolist()
    report = holdfast.load_weights(run, model, exclude=["down.*"])
    assert model.down.weight.tolist() == before
    assert sorted(report.excluded) == ["model/down.bias", "model/down.weight"]


def test_values_are_cast_to_the_dtype_that_is_asked_for(run):
    train(0, run, 2)
    exact, cast = Job().state["model"], Job().state["model"]
    holdfast.load_weights(run, exact)
    holdfast.load_weights(run, cast, dtype=torch.bfloat16)
    assert cast.up.weight.dtype == torch.bfloat16
    assert torch.equal(cast.up.weight, exact.up.weight.to(torch.bfloat16))


def test_a_run_with_two_models_wants_a_name(run):
    state = {"teacher": nn.Linear(2, 2), "student": nn.Linear(2, 2)}
    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore(state)
        ckpt.save(0, state).committed.result(timeout=60)
    model = nn.Linear(2, 2)
    with pytest.raises(errors.ConfigurationError, match="student, teacher"):
        holdfast.load_weights(run, model)
    holdfast.load_weights(run, model, component="student")
    assert torch.equal(model.weight, state["student"].weight)


def test_a_run_that_has_nothing_raises(run):
    with pytest.raises(errors.NoRestorePoint):
        holdfast.load_weights(run, nn.Linear(2, 2))
    with pytest.raises(errors.ConfigurationError, match="project/run"):
        holdfast.load_weights("nonsense", nn.Linear(2, 2))


def save_sharded(rank, run):
    return train(rank, run, 2, kind="fsdp").final


def load_sharded(rank, run, kind):
    job = Job(rank, kind, seed=8)
    holdfast.load_weights(run, job.state["model"])
    return values(job.state)


@pytest.mark.parametrize(("kind", "world_size"), [("fsdp", 3), ("ddp", 2)])
def test_from_a_sharded_run_into_any_sharding(run, kind, world_size):
    saved = run_ranks(save_sharded, 2, run, timeout_seconds=180)[0]
    for loaded in run_ranks(load_sharded, world_size, run, kind, timeout_seconds=180):
        names = [name for name in loaded if name in ("scale", "never") or name.startswith(("up.", "down."))]
        assert len(names) == 6
        assert {name: loaded[name] for name in names} == {name: saved[name] for name in names}


def values_of(tensor):
    whole = tensor.detach()
    return str(whole.dtype), tuple(whole.shape), whole.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_weights_are_read_from_a_catalog_that_takes_no_writes_and_no_attempt_is_opened(tmp_path, monkeypatch, caplog):
    settings = ServiceSettings(data_dir=tmp_path / "data", port=0)
    with running_service(settings) as service:
        monkeypatch.setenv("HOLDFAST_URL", service.url)
        monkeypatch.setenv("HOLDFAST_TOKEN", service.token())
        monkeypatch.setenv("HOLDFAST_RETRY_SECONDS", "1")
        service.make_project("tests")
        trained = train(0, "tests/r", 2)
        job = Job(seed=5)
        with read_only(service.context.database):
            holdfast.load_weights("tests/r", job.state["model"])
            with Client() as client:
                pull(client, RunName("tests", "r"), Latest(), tmp_path / "out", Format.TORCH)
            with (
                pytest.raises(errors.ServiceUnavailable, match="can still be read"),
                holdfast.Checkpointer("tests/r") as c,
            ):
                c.restore(job.state)
        assert (
            model_of(trained).items()
            >= {
                name: value for name, value in values(job.state).items() if name in job.state["model"].state_dict()
            }.items()
        )
        assert "no lease keeps this checkpoint" in caplog.text
        with Client() as client:
            assert client.runs.get("tests", "r").latest_attempt == 1
