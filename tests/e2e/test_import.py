"""`holdfast import`: what torch, safetensors, transformers and DCP wrote, bit for bit, for jobs to restore."""

from __future__ import annotations

import argparse
import functools
import json
import os
import pickle
import subprocess
import time
import uuid
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file, save_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast
from holdfast.errors import StateMismatchError
from holdfast.export.pull import Format, pull
from holdfast.imports import dcp_source, steps
from holdfast.imports.checkpoint_plan import Choices, plan_import
from holdfast.imports.sources import find_sources
from holdfast_client import errors
from holdfast_client.cli.main import main
from holdfast_protocol import index_documents
from holdfast_protocol.base import RunName
from holdfast_protocol.pruning import PruneCheckpoints
from holdfast_protocol.runs import Latest, parse_point
from holdfast_protocol.states import AttemptOutcome, CheckpointState
from tests.support.forked import ForkedProgram, run_forked
from tests.support.serve import ENTRY_POINT
from tests.support.training import Job
from tests.trainer.gloo import run_ranks

pytestmark = pytest.mark.usefixtures("client")


@pytest.fixture
def run() -> RunName:
    return RunName("tests", f"r{uuid.uuid4().hex}")


def bring(client, run, source, step=None, *, only=(), on_note=lambda note: None, **choices) -> dict:
    progress = []
    report = steps.import_sources(
        client,
        run,
        find_sources(source, step),
        choices=Choices(only=frozenset(only), **choices),
        on_total=lambda count: progress.append(-count),
        on_bytes=progress.append,
        on_note=on_note,
    )
    assert sum(progress) == 0
    return report


def holdfast_command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_forked(ENTRY_POINT, [str(argument) for argument in arguments], environment=os.environ)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit."""
    one, other = one.detach().contiguous().reshape(-1), other.detach().contiguous().reshape(-1)
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def assert_same(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    assert not [name for name, tensor in expected.items() if not same(found[name], tensor)]


def other_byte_order(path: Path, out: Path) -> Path:
    """As a machine writes it whose numbers have their bytes the other way round. Each element has 8 bytes."""
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(out, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if name.endswith("/byteorder"):
                content = {b"little": b"big", b"big": b"little"}[content]
            elif "/data/" in name:
                content = np.frombuffer(content, np.uint64).byteswap().tobytes()
            target.writestr(name, content)
    return out


class Net(nn.Module):
    """Tied weights, a buffer, a NaN with a payload, and a tensor that is larger than a chunk that others share."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(30, 8)
        self.head = nn.Linear(8, 30, bias=False)
        self.head.weight = self.embed.weight
        self.narrow = nn.Parameter(torch.randn(5, 3).to(torch.bfloat16))
        self.wide = nn.Parameter(torch.randn(1500, 1500))
        self.register_buffer("seen", torch.tensor(seed))
        with torch.no_grad():
            self.narrow.view(torch.int16)[0, 0] = 0x7FC1


def restored(run: RunName) -> tuple[Net, int]:
    model = Net(99)
    with holdfast.Checkpointer(str(run)) as ckpt:
        return model, ckpt.restore({"model": model})


def test_a_state_dict_of_torch_is_restored_bit_for_bit_and_pulled_under_its_name(run, client, tmp_path):
    model = Net(1)
    torch.save(model.state_dict(), tmp_path / "gpt.pt")
    done = holdfast_command("import", tmp_path / "gpt.pt", f"{run}@1200", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["tensors"], report["steps"][0]["tied"], report["steps"][0]["skipped"]) == (5, 1, False)
    assert report["bytes"] == sum(each.nbytes for name, each in model.state_dict().items() if name != "head.weight")
    assert report["sent_bytes"] + report["present_bytes"] == report["bytes"]
    found, start = restored(run)
    assert start == 1201
    assert_same(found.state_dict(), model.state_dict())
    fresh = Net(99)
    holdfast.load_weights(f"{run}@1200", fresh)
    assert_same(fresh.state_dict(), model.state_dict())
    pull(client, run, Latest(), tmp_path / "out", Format.TORCH)
    pulled = torch.load(tmp_path / "out" / "model.pt", weights_only=True)
    assert_same(pulled, model.state_dict())
    assert pulled["head.weight"].data_ptr() == pulled["embed.weight"].data_ptr()


def test_a_dict_of_a_training_script_becomes_components_that_a_job_goes_on_with(run, client, tmp_path):
    job = Job(loader=False)
    for step in range(3):
        job.step(step)
    model, optimizer = job.state["model"], job.state["optimizer"]
    torch.save(
        {"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict(), "epoch": 3},
        tmp_path / "step_3.pt",
    )
    bring(client, run, tmp_path / "step_3.pt", renamed={"model_state_dict": "model"})
    other = Job(loader=False)
    state = {"model": other.state["model"], "optimizer_state_dict": {}, "epoch": 0}
    with holdfast.Checkpointer(str(run)) as ckpt:
        assert ckpt.restore(state) == 4
        other.state["optimizer"].load_state_dict(state["optimizer_state_dict"])
        assert state["epoch"] == 3
        assert_same(other.state["model"].state_dict(), model.state_dict())
        slots = other.state["optimizer"].state_dict()["state"]
        for number, of_parameter in optimizer.state_dict()["state"].items():
            assert_same(slots[number], of_parameter)
        other.step(4)
        ckpt.save(4, state).committed.result(timeout=60)
    found = client.checkpoints.select(run.project, run.run, "3").components
    kinds = {name: component.kind for name, component in found.items()}
    assert kinds == {"model": "model", "optimizer_state_dict": "optimizer", "epoch": "extra"}


def test_what_needs_pickle_is_refused_by_its_name_and_the_rest_can_be_taken(run, client, tmp_path):
    torch.save({"model": {"w": torch.ones(2)}, "args": argparse.Namespace(lr=1)}, tmp_path / "full.pt")
    refused = holdfast_command("import", tmp_path / "full.pt", f"{run}@1")
    assert (refused.returncode, "argparse.Namespace" in refused.stderr) == (2, True)
    assert "Traceback" not in refused.stderr
    state = {"model": {"w": torch.ones(2)}, "args": {"when": argparse.Namespace(lr=1)}}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(errors.ConfigurationError, match=r"args\.when.*argparse\.Namespace"):
        bring(client, run, tmp_path / "dcp", 1)
    with pytest.raises(errors.NotFound):  # nothing was made, and no attempt was opened
        client.runs.get(run.project, run.run)
    bring(client, run, tmp_path / "dcp", 1, only=["model"])
    pull(client, run, Latest(), tmp_path / "out", Format.TORCH)
    assert_same(torch.load(tmp_path / "out" / "model.pt", weights_only=True), {"w": torch.ones(2)})


@pytest.mark.parametrize("world", ["one file", "several files and an index"])
def test_a_model_of_transformers_is_imported_with_its_tied_weights(run, client, tmp_path, world):
    from transformers import GPT2Config, GPT2LMHeadModel

    def config() -> GPT2Config:
        return GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2)

    model = GPT2LMHeadModel(config())
    folder = tmp_path / "checkpoint-500"
    model.save_pretrained(folder, max_shard_size="20KB" if world != "one file" else "1GB")
    assert (folder / "model.safetensors").exists() is (world == "one file")
    torch.save({"state": {}}, folder / "optimizer.pt")
    notes = []
    report = bring(client, run, folder, on_note=notes.append)
    assert report["steps"][0]["step"] == 500
    assert "It has the weights alone: begin a new run from them" in notes[0]
    assert report["steps"][0]["left_out"] == ["optimizer.pt"]
    assert report["steps"][0]["model_files"] == ["config.json", "generation_config.json"]
    assert report["steps"][0]["components"] == ["hf_files", "model"]
    fresh = GPT2LMHeadModel(config())
    holdfast.load_weights(str(run), fresh)
    assert fresh.lm_head.weight is fresh.transformer.wte.weight
    assert_same(fresh.state_dict(), model.state_dict())
    state = {"model": GPT2LMHeadModel(config())}
    with holdfast.Checkpointer(str(run)) as ckpt:
        assert ckpt.restore(state) == 501
    assert_same(state["model"].state_dict(), model.state_dict())


def test_a_step_that_was_imported_without_its_config_is_the_same_content(run, client, tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    bring(client, run, tmp_path, 3)
    (tmp_path / "config.json").write_text("{}")  # an import of before took no notice of it
    [again] = bring(client, run, tmp_path, 3)["steps"]
    assert (again["skipped"], again["components"], again["model_files"]) == (True, ["model"], [])
    assert again["left_out"] == ["config.json"]
    [later] = bring(client, run, tmp_path, 4)["steps"]
    assert (later["skipped"], later["model_files"]) == (False, ["config.json"])


def test_a_safetensors_file_keeps_its_ties_from_a_pull_to_a_pull(run, client, tmp_path):
    model = Net(2)
    save_model(model, tmp_path / "model.safetensors")
    bring(client, run, tmp_path, 7)
    assert_same(restored(run)[0].state_dict(), model.state_dict())
    pull(client, run, Latest(), tmp_path / "out", Format.SAFETENSORS)
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), load_file(tmp_path / "model.safetensors"))
    again = RunName("tests", f"r{uuid.uuid4().hex}")
    report = bring(client, again, tmp_path / "out" / "model.safetensors", 7)
    assert (report["steps"][0]["tied"], report["sent_bytes"]) == (1, 0)


def test_a_dcp_folder_is_imported_with_its_nested_names(run, client, tmp_path):
    job = Job(loader=False)
    job.step(0)
    model, optimizer = job.state["model"], job.state["optimizer"]
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "epoch": 3}
    dcp.save(state, checkpoint_id=tmp_path / "step-40", no_dist=True)
    report = bring(client, run, tmp_path / "step-40")
    assert (report["steps"][0]["format"], report["steps"][0]["components"]) == ("dcp", ["epoch", "model", "optim"])
    other = Job(loader=False)
    fresh, into = other.state["model"], {"model": other.state["model"], "optim": {}, "epoch": 0}
    with holdfast.Checkpointer(str(run)) as ckpt:
        assert ckpt.restore(into) == 41
    assert_same(fresh.state_dict(), model.state_dict())
    other.state["optimizer"].load_state_dict(into["optim"])
    slots = other.state["optimizer"].state_dict()["state"]
    assert slots.keys() == optimizer.state_dict()["state"].keys()
    for parameter, expected in optimizer.state_dict()["state"].items():
        assert_same(slots[parameter], expected)
    pull(client, run, Latest(), tmp_path / "out", Format.DCP)
    wanted = {"model": {name: torch.zeros_like(each) for name, each in model.state_dict().items()}}
    slot = optimizer.state_dict()["state"]
    number = next(key for key, each in slot.items() if each["exp_avg"].shape == model.up.weight.shape)
    wanted["optim"] = {"state": {str(number): {"exp_avg": torch.zeros_like(model.up.weight)}}}
    dcp.load(wanted, checkpoint_id=tmp_path / "out", no_dist=True)
    assert_same(wanted["model"], model.state_dict())
    assert same(wanted["optim"]["state"][str(number)]["exp_avg"], slot[number]["exp_avg"])


def save_sharded(rank: int, folder: Path) -> dict[str, torch.Tensor]:
    job = Job(rank, kind="fsdp", loader=False)
    job.step(0)
    state = job.state["model"].state_dict()
    dcp.save({"model": state}, checkpoint_id=folder)
    return {name: each.full_tensor() for name, each in state.items()}


def test_a_dcp_folder_of_several_ranks_is_imported_whole(run, client, tmp_path):
    [whole, _] = run_ranks(save_sharded, 2, tmp_path / "global_step8")
    assert len(list((tmp_path / "global_step8").glob("*.distcp"))) == 2
    bring(client, run, tmp_path / "global_step8")
    fresh = Job(seed=5, loader=False).state["model"]
    with holdfast.Checkpointer(str(run)) as ckpt:
        assert ckpt.restore({"model": fresh}) == 9
    assert_same(fresh.state_dict(), whole)


def save_columns(rank: int, folder: Path) -> torch.Tensor:
    whole = torch.arange(60.0).view(6, 10)
    mesh = init_device_mesh("cpu", (2,))
    state = {"columns": distribute_tensor(whole, mesh, [Shard(1)]), "rows": distribute_tensor(whole, mesh, [Shard(0)])}
    dcp.save({"model": state}, checkpoint_id=folder)
    return whole


def test_a_dcp_tensor_is_read_whole_only_if_it_does_not_lie_in_its_files_row_by_row(run, client, tmp_path, monkeypatch):
    read_whole = []
    read = dcp_source._read_tensor
    monkeypatch.setattr(dcp_source, "_read_tensor", lambda *given: read_whole.append(given[2]) or read(*given))
    [whole, _] = run_ranks(save_columns, 2, tmp_path / "step-1")
    bring(client, run, tmp_path / "step-1")
    assert set(read_whole) == {"model.columns"}
    read_whole.clear()
    other = {"turned": torch.randn(4, 6).t(), "cut": torch.randn(9, 5)[2:7], "zero_d": torch.tensor(2.5)}
    dcp.save({"model": other}, checkpoint_id=tmp_path / "step-2", no_dist=True)
    bring(client, run, tmp_path / "step-2")
    assert set(read_whole) == {"model.turned"}
    for step, expected in ((1, {"columns": whole, "rows": whole}), (2, other)):
        pull(client, run, parse_point(str(step)), tmp_path / f"out{step}", Format.TORCH)
        assert_same(torch.load(tmp_path / f"out{step}" / "model.pt", weights_only=True), expected)


def test_a_file_of_a_machine_of_the_other_byte_order_is_imported(run, client, tmp_path):
    whole = {f"t{n}": torch.arange(n * 1000, n * 1000 + 700) for n in range(3)}
    torch.save(whole, tmp_path / "here.pt")
    bring(client, run, other_byte_order(tmp_path / "here.pt", tmp_path / "there.pt"), 1)
    pull(client, run, Latest(), tmp_path / "out", Format.TORCH)
    assert_same(torch.load(tmp_path / "out" / "model.pt", weights_only=True), whole)


def test_a_tied_pair_that_lies_twice_in_the_source_is_tied_if_the_user_says_it(run, client, tmp_path):
    model = Net(3)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "step-1", no_dist=True)
    bring(client, run, tmp_path / "step-1")
    with pytest.raises(StateMismatchError, match="two values"):
        restored(run)
    other = f"tests/r{uuid.uuid4().hex}"
    done = holdfast_command("import", tmp_path / "step-1", other, "--tie", "model/head.weight=model/embed.weight")
    assert done.returncode == 0, done.stderr
    assert_same(restored(other)[0].state_dict(), model.state_dict())


class Marks:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_dcp_folder_whose_metadata_would_run_code_is_refused_and_runs_nothing(run, client, tmp_path):
    dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "step-1", no_dist=True)
    with (tmp_path / "step-1" / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    metadata.planner_data = Marks(tmp_path / "ran")
    (tmp_path / "step-1" / ".metadata").write_bytes(pickle.dumps(metadata))
    refused = holdfast_command("import", tmp_path / "step-1", run)
    assert (refused.returncode, f"{os.mkdir.__module__}.mkdir" in refused.stderr) == (2, True), refused.stderr
    assert not (tmp_path / "ran").exists()


def series(folder: Path, numbers: list[int], rows: int = 100) -> dict[int, dict[str, torch.Tensor]]:
    """Steps that share a frozen tensor."""
    folder.mkdir(exist_ok=True)
    base = torch.randn(rows, 1000)
    found = {}
    for number in numbers:
        found[number] = {"base": base, "w": torch.full((rows, 1000), float(number))}
        save_file(found[number], folder / f"checkpoint-{number}.safetensors")
    return found


def test_a_series_is_imported_in_order_and_what_is_there_is_skipped_and_fences_nobody(run, client, tmp_path):
    expected = series(tmp_path / "runs", [1000, 500, 90], rows=3000)  # 500 < 90 as text
    report = bring(client, run, tmp_path / "runs")
    assert [step["step"] for step in report["steps"]] == [90, 500, 1000]
    assert report["steps"][1]["present_bytes"] >= expected[90]["base"].nbytes  # sent once for all
    [attempt] = client.attempts.list(run.project, run.run).items
    assert (attempt.outcome, attempt.number) == (AttemptOutcome.FINISHED, 1)
    for step, tensors in expected.items():
        pull(client, run, parse_point(str(step)), tmp_path / f"out{step}", Format.SAFETENSORS)
        assert_same(load_file(tmp_path / f"out{step}" / "model.safetensors"), tensors)
    again = holdfast_command("import", tmp_path / "runs", run)
    assert again.returncode == 0, again.stderr
    assert "0 steps imported, 3 there already" in again.stdout
    assert "checkpoint-500.safetensors: step 500 is there already" in again.stderr
    assert len(client.attempts.list(run.project, run.run).items) == 1
    series(tmp_path / "runs", [2000])
    later = bring(client, run, tmp_path / "runs")
    assert [step["skipped"] for step in later["steps"]] == [True, True, True, False]
    assert client.restores.restore_point(run.project, run.run).restore_point.step == 2000
    assert client.restores.restore_point(run.project, run.run, "500").restore_point.step == 500


def test_a_source_whose_index_could_not_be_read_back_is_refused_before_a_byte_of_any_is_sent(
    run, client, tmp_path, monkeypatch
):
    series(tmp_path / "runs", [5])
    torch.save({"model": {"w": torch.ones(3)}, "seen": list(range(5000))}, tmp_path / "runs" / "checkpoint-9.pt")
    monkeypatch.setattr(index_documents, "compress", functools.partial(index_documents.compress, max_bytes=4000))
    with pytest.raises(
        errors.ConfigurationError, match=r"checkpoint-9\.pt: the index would be .* most 4000 can .*--only"
    ):
        bring(client, run, tmp_path / "runs")
    with pytest.raises(errors.NotFound):
        client.attempts.list(run.project, run.run)
    assert [step["step"] for step in bring(client, run, tmp_path / "runs", only=["model"])["steps"]] == [5, 9]


def test_other_content_earlier_steps_and_runs_of_training_jobs_are_left_alone(run, client, tmp_path):
    series(tmp_path / "runs", [5])
    bring(client, run, tmp_path / "runs")
    series(tmp_path / "runs", [5])
    with pytest.raises(errors.ConfigurationError, match="another content at step 5"):
        bring(client, run, tmp_path / "runs")
    with pytest.raises(errors.ConfigurationError, match="Step 3 cannot be imported after step 5"):
        bring(client, run, tmp_path / "runs" / "checkpoint-5.safetensors", 3)
    trained = RunName("tests", f"r{uuid.uuid4().hex}")
    with holdfast.Checkpointer(str(trained)) as ckpt:
        ckpt.restore({})
        ckpt.save(1, {"epoch": 1}).committed.result(timeout=60)
        with pytest.raises(errors.ConfigurationError, match=r"training job.*would fence it"):
            bring(client, trained, tmp_path / "runs")
        ckpt.save(2, {"epoch": 2}).committed.result(timeout=60)


def test_a_step_that_cannot_be_imported_is_told_before_the_first_is_sent(run, client, tmp_path):
    series(tmp_path / "runs", [1, 2])
    torch.save({"w": torch.ones(2), "args": argparse.Namespace(lr=1)}, tmp_path / "runs" / "checkpoint-3.pt")
    with pytest.raises(errors.ConfigurationError, match=r"checkpoint-3\.pt.*argparse\.Namespace"):
        bring(client, run, tmp_path / "runs")
    with pytest.raises(errors.NotFound):
        client.runs.get(run.project, run.run)


def delete(client, run, step: int) -> None:
    found = client.checkpoints.select(run.project, run.run, str(step))
    done = client.retention.prune(run.project, run.run, PruneCheckpoints(checkpoint_ids=[found.id], all_of_run=True))
    assert [each.step for each in done.trashed] == [step]


def test_a_step_that_was_deleted_since_is_not_imported_again_and_later_ones_are(run, client, tmp_path):
    series(tmp_path / "runs", [1, 2, 3])
    bring(client, run, tmp_path / "runs")
    delete(client, run, 1)
    series(tmp_path / "runs", [4])
    done = holdfast_command("import", tmp_path / "runs", run, "--json")
    assert done.returncode == 0, done.stderr
    assert "step 1 was committed before, and has been deleted since" in done.stderr
    kinds = [(step["skipped"], step["deleted"]) for step in json.loads(done.stdout)["steps"]]
    assert kinds == [(True, True), (True, False), (True, False), (False, False)]
    again = holdfast_command("import", tmp_path / "runs", run)
    assert "0 steps imported, 3 there already, 1 deleted since" in again.stdout
    assert client.checkpoints.select(run.project, run.run, "1").state is CheckpointState.TRASHED


def test_what_another_build_of_zlib_compresses_otherwise_is_the_same_content(run, client, tmp_path, monkeypatch):
    tensors = series(tmp_path / "runs", [5])[5]
    bring(client, run, tmp_path / "runs")
    monkeypatch.setattr(index_documents, "compress", lambda canonical: zlib.compress(canonical, 1))
    assert bring(client, run, tmp_path / "runs")["steps"][0]["skipped"]
    for other in ({"w": tensors["base"], "base": tensors["w"]}, {"v": tensors["w"], "base": tensors["base"]}):
        save_file(other, tmp_path / "runs" / "checkpoint-5.safetensors")
        with pytest.raises(errors.ConfigurationError, match="another content at step 5"):
            bring(client, run, tmp_path / "runs")


def test_a_job_that_is_launched_while_a_source_is_read_is_not_fenced(run, client, tmp_path, monkeypatch):
    series(tmp_path / "runs", [5])
    bring(client, run, tmp_path / "runs")
    series(tmp_path / "runs", [6])
    jobs = []

    def launched(*arguments):
        if not jobs:
            job = holdfast.Checkpointer(str(run), config={"imported_from": "hf", "lr": 0.1})
            job.restore({})
            jobs.append(job)
        return plan_import(*arguments)

    monkeypatch.setattr(steps, "plan_import", launched)
    for why in ("was opened since this import began", "training job"):  # the second import sees the job at once
        with pytest.raises(errors.ConfigurationError, match=why):
            bring(client, run, tmp_path / "runs")
    with jobs[0] as job:
        job.save(7, {"epoch": 1}).committed.result(timeout=60)


def test_the_names_of_foreign_files_are_no_commands_to_the_terminal(run, client, tmp_path):
    folder = tmp_path / "odd\x1b"
    folder.mkdir()
    save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    (folder / "a\x1b[2J\nholdfast: step 7 is committed").touch()
    done = holdfast_command("import", folder, f"{run}@3")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stderr
    assert "Not imported: a" in done.stderr
    assert not [line for line in done.stderr.splitlines() if line.startswith("holdfast: step 7")]
    told = client.attempts.config(run.project, run.run, 1).config["imported_from"]
    assert told == f"{tmp_path}/odd\N{REPLACEMENT CHARACTER}/model.safetensors"


def test_a_run_whose_name_is_like_another_is_made_only_if_that_is_meant(client, tmp_path):
    series(tmp_path / "runs", [5])
    run = RunName("tests", "finetune")
    bring(client, run, tmp_path / "runs")
    mistyped = "tests/finetunes"
    refused = holdfast_command("import", tmp_path / "runs", mistyped)
    assert (refused.returncode, f"Did you mean {run}" in refused.stderr) == (3, True), refused.stderr
    meant = holdfast_command("import", tmp_path / "runs", mistyped, "--create")
    assert meant.returncode == 0, meant.stderr


def test_what_was_stored_otherwise_than_the_source_has_it_is_told(run, client, tmp_path, monkeypatch):
    series(tmp_path / "runs", [1, 2])
    take = steps._InSource.take

    def flipped(place, read, chunk):
        if read.name == "model/w":
            chunk[read.chunk_offset + 7] ^= 1
        take(place, read, chunk)

    monkeypatch.setattr(steps._InSource, "take", flipped)
    with pytest.raises(errors.IntegrityError, match=r"'model/w' in ck_.* is not what the source has"):
        bring(client, run, tmp_path / "runs")
    [attempt] = client.attempts.list(run.project, run.run).items
    assert attempt.outcome is AttemptOutcome.FAILED
    # The next import compares the newest step again, although it is committed.
    with pytest.raises(errors.IntegrityError):
        bring(client, run, tmp_path / "runs")
    monkeypatch.setattr(steps._InSource, "take", take)
    # What the page says to do.
    quarantined = holdfast_command(
        "checkpoints", "edit", f"{run}@1", "--health", "quarantined", "--reason", "differs from its source"
    )
    assert quarantined.returncode == 0, quarantined.stderr
    with pytest.raises(errors.ConfigurationError, match=r"Step 1 .* is quarantined\. Delete it"):
        bring(client, run, tmp_path / "runs")
    deleted = holdfast_command("checkpoints", "prune", f"{run}@1", "--yes")
    assert deleted.returncode == 0, deleted.stderr
    report = bring(client, run, tmp_path / "runs")
    assert [(step["step"], step["skipped"]) for step in report["steps"]] == [(1, False), (2, False)]
    assert client.restores.restore_point(run.project, run.run).restore_point.step == 2


def test_a_step_that_may_lack_its_comparison_is_named_if_only_a_later_one_is_imported(
    run, client, tmp_path, monkeypatch
):
    series(tmp_path / "runs", [1, 2, 3])
    name = "checkpoint-{}.safetensors".format
    with monkeypatch.context() as killed:
        killed.setattr(steps._Import, "_compare", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            bring(client, run, tmp_path / "runs" / name(1))
    notes = []
    bring(client, run, tmp_path / "runs" / name(2), on_note=notes.append)
    assert [note.startswith("step 1 is of an import that did not end well") for note in notes] == [True, False]
    bring(client, run, tmp_path / "runs" / name(3), on_note=notes.append)
    assert len(notes) == 3, notes


def import_that_never_takes_its_third_step() -> None:
    """The command, in a process of its own."""
    take = steps._Import.take

    def stops(importing, source, plan):
        while source.step == 3:
            time.sleep(60)
        return take(importing, source, plan)

    steps._Import.take = stops
    main()


def test_an_import_that_is_killed_goes_on_where_it_was(run, client, served, tmp_path):
    expected = series(tmp_path / "runs", [1, 2, 3], rows=5000)
    killed = ForkedProgram(
        f"{__name__}:{import_that_never_takes_its_third_step.__name__}",
        ["import", str(tmp_path / "runs"), str(run)],
        environment={**os.environ, **served.environment},
        log=tmp_path / "log",
    )

    def is_in_the_middle() -> bool:
        assert killed.poll() is None, (tmp_path / "log").read_text()
        try:
            found = client.checkpoints.list(run.project, run.run).items
        except errors.NotFound:
            return False
        return any(view.step == 2 for view in found)

    while not is_in_the_middle():
        time.sleep(0.01)
    killed.kill()
    killed.wait(timeout=60)
    report = bring(client, run, tmp_path / "runs")
    assert [step["step"] for step in report["steps"]] == [1, 2, 3]
    assert report["steps"][0]["skipped"]
    committed = list(client.checkpoints.all(run.project, run.run, state=CheckpointState.COMMITTED))
    assert sorted(view.step for view in committed) == [1, 2, 3]
    assert client.restores.restore_point(run.project, run.run).restore_point.step == 3
    for step, tensors in expected.items():
        pull(client, run, parse_point(str(step)), tmp_path / f"out{step}", Format.SAFETENSORS)
        assert_same(load_file(tmp_path / f"out{step}" / "model.safetensors"), tensors)
