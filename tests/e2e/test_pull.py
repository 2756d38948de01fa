"""`holdfast checkpoints pull`: stock torch, safetensors and DCP open what it writes, with equal tensors; or it writes
nothing."""

from __future__ import annotations

import datetime
import functools
import json
import os
import resource
import signal
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

import holdfast
from holdfast.export import publish
from holdfast.export.publish import DiskFull, NotWritten
from holdfast.export.pull import Format, pull
from holdfast.state.tree import decode_tree
from holdfast_client import Client, errors
from holdfast_client.settings import ClientSettings
from holdfast_protocol.base import RunName
from holdfast_protocol.checkpoints import EditCheckpoint
from holdfast_protocol.runs import EditProject, Latest, parse_selector
from holdfast_protocol.states import Health
from tests.support.forked import fork_server, run_forked
from tests.support.serve import ENTRY_POINT, ServedHoldfast, holdfast_serve
from tests.support.training import Job, Net, train, values
from tests.trainer.gloo import run_ranks


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[tuple[ServedHoldfast, Path]]:
    folder = tmp_path_factory.mktemp("service")
    with holdfast_serve(folder) as running:
        yield running, folder / "data"


@pytest.fixture(autouse=True)
def client(served, monkeypatch) -> Iterator[Client]:
    for name, value in served[0].environment.items():
        monkeypatch.setenv(name, value)
    with Client() as connected:
        connected.projects.edit("tests", EditProject())
        yield connected


@pytest.fixture
def run(client) -> RunName:
    name = f"r{uuid.uuid4().hex}"
    client.runs.create("tests", name)
    return RunName("tests", name)


def save(run: RunName, state: dict, step: int = 1) -> None:
    with holdfast.Checkpointer(str(run), strict=True) as ckpt:
        ckpt.restore({})
        ckpt.save(step, state, metrics={"loss": 0.5}).committed.result(timeout=60)


def holdfast_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_forked(ENTRY_POINT, arguments, environment=os.environ)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit."""
    one, other = one.detach().contiguous().reshape(-1), other.detach().contiguous().reshape(-1)
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.tensor(3))


class Scaled(nn.Linear):
    """A tensor as extra state, or one in a dict."""

    def __init__(self, scale: float, *, whole: bool) -> None:
        super().__init__(2, 2)
        self.whole = whole
        self.scale = torch.tensor([scale])

    def get_extra_state(self):
        return self.scale if self.whole else {"scale": self.scale, "power": 2}

    def set_extra_state(self, state):
        self.scale = state if self.whole else state["scale"]


ODD = {
    "bf16": torch.randn(7, 3).to(torch.bfloat16),
    "fp8": torch.randn(5, 3).to(torch.float8_e4m3fn),
    "mask": torch.tensor([True, False]),
    "zero_d": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "columns": torch.randn(4, 6).t(),
    "big": torch.randn(1500, 1500),
}


@pytest.mark.parametrize("world", ["one rank", "two sharded ranks"])
def test_stock_torch_opens_what_was_saved_and_trains_on_with_it(run, client, tmp_path, world):
    if world == "one rank":
        final = train(0, str(run), 4, loader=False).final
    else:
        fsdp = functools.partial(train, kind="fsdp", loader=False)
        final = run_ranks(fsdp, 2, str(run), 4)[0].final
    summary = pull(client, run, Latest(), tmp_path / "out", Format.TORCH)
    assert summary["step"] == 3
    job = Job(loader=False)
    job.state["model"].load_state_dict(torch.load(tmp_path / "out" / "model.pt", weights_only=True))
    job.state["optimizer"].load_state_dict(torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True))
    found = values(job.state)
    assert {name: value for name, value in found.items() if name != "lr_scheduler"} == {
        name: value for name, value in final.items() if name != "lr_scheduler"
    }
    scheduler = json.loads((tmp_path / "out" / "lr_scheduler.tree.json").read_text())
    assert decode_tree(scheduler["tree"]) == final["lr_scheduler"]
    job.step(4)


@pytest.mark.parametrize("world", ["one rank", "two sharded ranks"])
def test_stock_dcp_opens_what_was_saved(run, client, tmp_path, world):
    if world == "one rank":
        final = train(0, str(run), 3, loader=False).final
    else:
        fsdp = functools.partial(train, kind="fsdp", loader=False)
        final = run_ranks(fsdp, 2, str(run), 3)[0].final
    pull(client, run, Latest(), tmp_path / "out", Format.DCP)
    model = Net()
    state = {"model": model.state_dict(), "optimizer": {"state": {"up.weight": {"exp_avg": torch.zeros(7, 5)}}}}
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / "out"), no_dist=True)
    model.load_state_dict(state["model"])
    job = Job(loader=False)
    names = [name for name, _ in model.named_parameters()]
    assert {n: v for n, v in values({**job.state, "model": model}).items() if n in names} == {
        n: v for n, v in final.items() if n in names
    }
    slot = final[f"slot0.{names.index('up.weight')}.exp_avg"]
    assert state["optimizer"]["state"]["up.weight"]["exp_avg"].numpy().tobytes() == slot[2]


def test_one_optimizer_of_two_modules_with_the_same_names_keeps_the_state_of_both(run, client, tmp_path):
    gen, disc = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer = torch.optim.AdamW([*gen.parameters(), *disc.parameters()])
    (gen(torch.ones(3)).sum() - 2 * disc(torch.ones(3)).sum()).backward()
    optimizer.step()
    save(run, {"gen": gen, "disc": disc, "optimizer": optimizer})
    pull(client, run, Latest(), tmp_path / "out", Format.DCP)
    found = {f"{name}/weight": {"exp_avg": torch.zeros(2, 3)} for name in ("gen", "disc")}
    state = {"optimizer": {"state": found}}
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / "out"), no_dist=True)
    for name, module in (("gen", gen), ("disc", disc)):
        assert same(found[f"{name}/weight"]["exp_avg"], optimizer.state[module.weight]["exp_avg"])


@pytest.mark.parametrize("format_", [Format.TORCH, Format.DCP])
def test_tensors_in_a_modules_extra_state_are_loaded_with_it(run, client, tmp_path, format_):
    model, fresh = (nn.Sequential(Scaled(scale, whole=True), Scaled(2 * scale, whole=False)) for scale in (3.0, 0.0))
    save(run, {"model": model})
    pull(client, run, Latest(), tmp_path / "out", format_)
    if format_ is Format.TORCH:
        found = torch.load(tmp_path / "out" / "model.pt", weights_only=True)
    else:
        found = fresh.state_dict()
        dcp.load({"model": found}, storage_reader=dcp.FileSystemReader(tmp_path / "out"), no_dist=True)
    fresh.load_state_dict(found)
    assert [part.scale.item() for part in fresh] == [3, 6]
    assert same(fresh[1].weight, model[1].weight)


def test_stock_safetensors_opens_what_was_saved_and_ties_it_again(run, client, tmp_path):
    model = Tied()
    save(run, {"model": model, "odd": ODD})
    pull(client, run, Latest(), tmp_path / "out", Format.SAFETENSORS)
    path = tmp_path / "out" / "model.safetensors"
    found = load_file(path)
    assert set(found) == {"embed.weight", "seen"}
    assert same(found["embed.weight"], model.embed.weight)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    fresh = Tied()
    load_model(fresh, path)
    assert fresh.head.weight is fresh.embed.weight
    assert same(fresh.head.weight, model.head.weight)
    odd = load_file(tmp_path / "out" / "odd@0.safetensors")
    assert odd.keys() == ODD.keys()
    assert all(same(odd[name], tensor) and odd[name].shape == tensor.shape for name, tensor in ODD.items())


def test_every_dtype_and_shape_comes_back_from_torch_and_dcp(run, client, tmp_path):
    tensors = {**ODD, "complex": torch.randn(3, dtype=torch.complex128)}
    save(run, {"odd": tensors})
    pull(client, run, Latest(), tmp_path / "torch", Format.TORCH)
    found = torch.load(tmp_path / "torch" / "odd@0.pt", weights_only=True)
    assert found.keys() == tensors.keys()
    assert all(same(found[name], tensor) and found[name].shape == tensor.shape for name, tensor in tensors.items())
    pull(client, run, Latest(), tmp_path / "dcp", Format.DCP)
    state = {"odd@0": {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}}
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / "dcp"), no_dist=True)
    assert all(same(state["odd@0"][name], tensor) for name, tensor in tensors.items())


def test_a_dtype_that_safetensors_lacks_is_refused_by_name_before_anything_is_written(run, client, tmp_path):
    save(run, {"wave": {"function": torch.randn(3, dtype=torch.complex128)}})
    with pytest.raises(errors.ConfigurationError, match=r"'wave@0/function'.*complex128.*--format torch"):
        pull(client, run, Latest(), tmp_path / "out", Format.SAFETENSORS)
    assert list(tmp_path.iterdir()) == []


def test_values_that_need_pickle_are_left_to_the_json_and_the_tensors_still_open(run, client, tmp_path):
    state = {"mixed": {"when": datetime.date(2025, 1, 2), "w": torch.ones(2), "n": np.float32(0.5)}}
    save(run, state)
    pull(client, run, Latest(), tmp_path / "out", Format.TORCH)
    assert same(torch.load(tmp_path / "out" / "mixed@0.pt", weights_only=True)["w"], torch.ones(2))
    tree = decode_tree(json.loads((tmp_path / "out" / "mixed@0.tree.json").read_text())["tree"])
    assert tree["when"] == datetime.date(2025, 1, 2)


def test_each_ranks_own_state_has_its_own_files_and_rng(run, client, tmp_path):
    run_ranks(functools.partial(train, kind="ddp"), 2, str(run), 2)
    pull(client, run, Latest(), tmp_path / "out", Format.TORCH)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"dataloader@0.pt", "dataloader@1.pt", "dataloader@0.tree.json", "notes@1.tree.json", "rng.json"} <= names
    assert torch.load(tmp_path / "out" / "dataloader@1.pt", weights_only=True)["given"] == 2
    assert set(json.loads((tmp_path / "out" / "rng.json").read_text())) == {"0", "1"}


def test_the_summary_says_what_it_is(run, client, tmp_path):
    save(run, {"model": Tied()}, step=7)
    save(run, {"model": Tied()}, step=9)
    name, point = parse_selector(f"{run}@7")
    pull(client, name, point, tmp_path / "out", Format.TORCH)
    summary = json.loads((tmp_path / "out" / "checkpoint.json").read_text())
    chosen = client.restores.restore_point(run.project, run.run, "7").restore_point
    assert (summary["step"], summary["digest"], summary["format"]) == (7, chosen.digest, "torch")
    assert summary["metrics"]["loss"]["value"] == 0.5
    assert set(summary["components"]) == {"model"}
    assert summary["tied"] == {"model/head.weight": "model/embed.weight"}
    assert sorted([*summary["files"], "checkpoint.json"]) == sorted(os.listdir(tmp_path / "out"))


def test_only_the_named_component(run, client, tmp_path):
    train(0, str(run), 1)
    pull(client, run, Latest(), tmp_path / "out", Format.TORCH, only=["model"])
    assert [path.name for path in (tmp_path / "out").glob("*.pt")] == ["model.pt"]
    with pytest.raises(errors.ConfigurationError, match=r"no component 'modle'.*dataloader, lr_scheduler, model"):
        pull(client, run, Latest(), tmp_path / "other", Format.TORCH, only=["modle"])


def test_a_folder_with_something_in_it_is_replaced_only_by_force(run, client, tmp_path):
    save(run, {"model": Tied()})
    out = tmp_path / "out"
    out.mkdir()
    pull(client, run, Latest(), out, Format.TORCH)
    (out / "precious").write_text("x")
    with pytest.raises(errors.ConfigurationError, match=r"not empty.*--force"):
        pull(client, run, Latest(), out, Format.TORCH)
    assert (out / "precious").exists()
    pull(client, run, Latest(), out, Format.SAFETENSORS, force=True)
    assert not (out / "precious").exists()
    assert (out / "model.safetensors").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_link_to_a_folder_stays_one(run, client, tmp_path):
    """The disk that it leads to has the room, and perhaps this one has not."""
    save(run, {"w": {"x": torch.ones(2)}})
    disk, out = tmp_path / "disk", tmp_path / "out"
    disk.mkdir()
    out.symlink_to(disk / "pulled")
    pull(client, run, Latest(), out, Format.TORCH)
    pull(client, run, Latest(), out, Format.SAFETENSORS, force=True)
    assert out.is_symlink()
    assert (disk / "pulled" / "w@0.safetensors").exists()
    assert [path.name for path in disk.iterdir()] == ["pulled"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "out"]


def killed_while_it_takes_the_place(out: Path, renames: int) -> None:
    done = []

    def rename(self: Path, to: Path) -> None:
        os.rename(self, to)
        done.append(to)
        if len(done) == renames:
            os.kill(os.getpid(), signal.SIGKILL)

    with patch.object(Path, "rename", rename), publish.published(out, force=True) as folder:
        (folder / "new").touch()


@pytest.mark.parametrize(("renames", "found"), [(1, "old"), (2, "new")])
def test_a_kill_while_a_folder_is_replaced_leaves_one_of_the_two_to_the_next_pull(tmp_path, renames, found):
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").touch()
    process = fork_server().Process(target=killed_while_it_takes_the_place, args=(out, renames), daemon=True)
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2
    publish.clear_leftovers(out)
    assert [path.name for path in out.iterdir()] == [found]
    assert list(tmp_path.iterdir()) == [out]


def test_of_what_a_living_pull_replaces_nothing_is_touched(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").touch()
    with publish.published(out, force=True) as folder:
        old = folder.with_name(folder.name + ".old")
        out.rename(old)
        publish.clear_leftovers(out)
        assert sorted(tmp_path.iterdir()) == [folder, old]
        old.rename(out)


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_that_comes_at_the_last_moment_is_replaced_only_by_force(tmp_path, force):
    out = tmp_path / "out"

    def rename(self: Path, to: Path) -> None:
        if self.name.startswith(".") and not out.exists() and not list(tmp_path.glob("*.old")):
            out.mkdir()
            (out / "other").touch()
        os.rename(self, to)

    refused = nullcontext() if force else pytest.raises(errors.ConfigurationError, match="not empty")
    with refused, patch.object(Path, "rename", rename), publish.published(out, force=force) as folder:
        (folder / "new").touch()
    assert [path.name for path in out.iterdir()] == ["new" if force else "other"]
    assert list(tmp_path.iterdir()) == [out]


def test_every_folder_in_it_is_on_the_disk_before_it_takes_its_place(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    with publish.published(tmp_path / "out", force=False) as folder:
        (folder / "inner").mkdir()
    assert {(tmp_path / "out" / "inner").stat().st_ino, (tmp_path / "out").stat().st_ino} <= set(synced)


def test_what_came_into_the_folder_during_the_pull_is_not_replaced(run, client, tmp_path):
    """Two pulls into one folder, or a person's own file: both were told that they may begin."""
    save(run, {"w": {"x": torch.ones(2)}})
    out = tmp_path / "out"

    def another(_count):
        out.mkdir(exist_ok=True)
        (out / "precious").touch()

    with pytest.raises(errors.ConfigurationError, match=r"not empty.*--force"):
        pull(client, run, Latest(), out, Format.TORCH, on_bytes=another)
    assert [path.name for path in out.iterdir()] == ["precious"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_corrupt_checkpoint_leaves_nothing_behind_and_the_one_before_is_pulled_next(
    run, client, served, tmp_path, monkeypatch
):
    # Through the service, which hashes what it writes: nothing in the background has to read the chunk again.
    monkeypatch.setenv("HOLDFAST_DIRECT_FILES", "false")
    save(run, {"w": {"x": torch.randn(3_000_000)}}, step=1)
    save(run, {"w": {"x": torch.randn(3_000_000)}}, step=2)
    newest = client.restores.restore_point(run.project, run.run).restore_point
    digests = {chunk.digest: chunk.bytes for chunk in client.checkpoints.shard_chunks(newest.checkpoint_id, 0).chunks}
    largest = max(digests, key=lambda digest: digests[digest])
    (copy,) = (path for path in served[1].rglob(f"{largest}/*") if path.suffix != ".sha256")
    with copy.open("r+b") as file:
        file.seek(1000)
        byte = file.read(1)
        file.seek(1000)
        file.write(bytes([byte[0] ^ 1]))
    result = holdfast_command("checkpoints", "pull", str(run), str(tmp_path / "out"))
    assert result.returncode == 6, result.stderr
    assert largest[:12] in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []
    assert client.checkpoints.get(newest.checkpoint_id).health is Health.CORRUPT
    assert pull(client, run, Latest(), tmp_path / "out", Format.TORCH)["step"] == 1


@pytest.mark.parametrize("format_", list(Format))
def test_a_disk_that_becomes_full_is_said_clearly_and_leaves_nothing_behind(run, client, tmp_path, format_):
    config = torch.frombuffer(bytearray(b"{}"), dtype=torch.uint8)
    save(run, {"w": nn.Linear(1000, 1000), "files": {"hf_files": {"config.json": config}}})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024 * 1024, hard))
    try:
        with pytest.raises(DiskFull, match=r"disk became full.*Free some space"):
            pull(client, run, Latest(), tmp_path / "out", format_)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert list(tmp_path.iterdir()) == []


def test_what_stands_in_the_way_is_named(run, client, tmp_path):
    save(run, {"w": {"x": torch.randn(10)}})
    found = client.restores.restore_point(run.project, run.run).restore_point
    view = client.checkpoints.get(found.checkpoint_id)
    client.checkpoints.edit(view.id, EditCheckpoint(health=Health.QUARANTINED, health_reason="eats cats"), view.etag)
    with pytest.raises(
        errors.NoRestorePoint, match=r"nothing to pull at latest\. Step 1 .* is in quarantine: eats cats"
    ):
        pull(client, run, Latest(), tmp_path / "out", Format.TORCH)


@pytest.mark.parametrize(
    ("failure", "cause"),
    [(MemoryError(), "not enough memory"), (RuntimeError("PytorchStreamWriter failed: EIO"), "failed: EIO")],
)
def test_what_a_writer_says_is_told_and_is_no_bug_of_ours(run, client, tmp_path, monkeypatch, failure, cause):
    save(run, {"w": {"x": torch.randn(10)}})

    def write(*arguments):
        raise failure

    monkeypatch.setattr("torch.save", write)
    with pytest.raises(NotWritten, match=cause):
        pull(client, run, Latest(), tmp_path / "out", Format.TORCH)
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_is_seen_before_anything_is_fetched(run, client, tmp_path, monkeypatch):
    save(run, {"w": {"x": torch.randn(1_000_000)}})
    usage = type("usage", (), {"free": 10 * 1024**2})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    fetched = []
    with pytest.raises(DiskFull, match="are needed"):
        pull(client, run, Latest(), tmp_path / "out", Format.TORCH, on_total=fetched.append)
    assert fetched == []


def test_a_folder_that_is_a_mount_is_refused_before_the_service_is_asked(run, client):
    with pytest.raises(errors.ConfigurationError, match="/proc is where a file system is mounted"):
        pull(client, run, Latest(), Path("/proc"), Format.TORCH, force=True)


def test_a_bind_mount_of_the_same_file_system_is_refused_likewise(run, client, tmp_path, monkeypatch):
    target = tmp_path / "my out"
    target.mkdir()
    mounts = tmp_path / "mountinfo"
    place = str(target.resolve()).replace(" ", "\\040")
    mounts.write_text(f"36 35 98:0 /else {place} rw,noatime master:1 - ext4 /dev/root rw\n")
    monkeypatch.setattr("holdfast.export.publish._MOUNTS", mounts)
    with pytest.raises(errors.ConfigurationError, match="my out is where a file system is mounted"):
        pull(client, run, Latest(), target, Format.TORCH)


def test_progress_is_told_up_to_the_total(run, client, tmp_path):
    save(run, {"w": {"x": torch.randn(6_000_000)}, "v": {"y": torch.randn(10)}})
    totals, parts = [], []
    pull(client, run, Latest(), tmp_path / "out", Format.TORCH, on_total=totals.append, on_bytes=parts.append)
    assert totals == [sum(parts)]
    assert totals[0] >= 24_000_000


def test_the_command_says_what_it_did_or_what_to_do(run, client, tmp_path):
    nothing = holdfast_command("checkpoints", "pull", str(run), str(tmp_path / "out"))
    assert (nothing.returncode, nothing.stdout) == (3, "")
    assert "nothing was ever committed" in nothing.stderr
    save(run, {"model": Tied()})
    done = holdfast_command("checkpoints", "pull", f"{run}@latest", str(tmp_path / "out"), "--format", "safetensors")
    assert done.returncode == 0, done.stderr
    assert f"{run}@1#" in done.stdout
    again = holdfast_command("checkpoints", "pull", str(run), str(tmp_path / "out"))
    assert (again.returncode, "--force" in again.stderr) == (2, True)
    as_json = holdfast_command("checkpoints", "pull", str(run), str(tmp_path / "out"), "--force", "--json")
    assert json.loads(as_json.stdout)["step"] == 1


def test_without_the_mount_the_same_comes_over_http(run, served, tmp_path):
    save(run, {"odd": ODD})
    with Client(ClientSettings(direct_files=False)) as over_http:
        pull(over_http, run, Latest(), tmp_path / "out", Format.TORCH)
    found = torch.load(tmp_path / "out" / "odd@0.pt", weights_only=True)
    assert all(same(found[name], tensor) for name, tensor in ODD.items())
