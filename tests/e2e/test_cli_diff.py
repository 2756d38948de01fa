"""`holdfast checkpoints diff` on checkpoints that the SDK saved: which tensors are equal, told by digests alone."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from typer.testing import CliRunner

import holdfast
from holdfast_client import Client
from holdfast_client.cli.main import app
from holdfast_protocol.base import RunName
from holdfast_protocol.runs import EditProject
from holdfast_protocol.service import CreateToken
from holdfast_protocol.states import Scope
from tests.support.serve import ServedHoldfast, holdfast_serve
from tests.trainer.gloo import run_ranks

SIZES = holdfast.ChunkSizes(own_chunk_bytes=4096, pack_bytes=4096, cut_bytes=8192)
LARGE = 2048
"""Elements of a tensor with chunks of its own."""


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[tuple[ServedHoldfast, Path]]:
    folder = tmp_path_factory.mktemp("service")
    with holdfast_serve(folder) as running:
        yield running, folder / "data"


@pytest.fixture(autouse=True)
def client(served, monkeypatch) -> Iterator[Client]:
    for name, value in served[0].environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COLUMNS", "200")
    with Client() as connected:
        yield connected


@pytest.fixture
def run(client) -> RunName:
    name = f"p{secrets.token_hex(6)}"
    client.projects.edit(name, EditProject())
    return RunName(name, "gpt")


def weights(**changes: torch.Tensor) -> nn.ParameterDict:
    """Three large tensors, and two small ones, which share a chunk."""
    generator = torch.Generator().manual_seed(5)
    found = {name: torch.randn(LARGE, generator=generator) for name in ("changed", "cast", "kept")}
    found |= {name: torch.randn(8, generator=generator) for name in ("small", "little")}
    return nn.ParameterDict(found | changes)


def save(run: RunName, step: int, model: nn.Module, config: dict[str, Any], loss: float) -> None:
    with holdfast.Checkpointer(str(run), strict=True, create=True, chunk_sizes=SIZES, config=config) as ckpt:
        ckpt.restore({})
        ckpt.save(step, {"model": model}, metrics={"loss": loss}).committed.result(timeout=60)


def command(*arguments: str, exit_code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["checkpoints", "diff", *arguments])
    assert "Traceback" not in result.stderr + result.stdout
    assert result.exit_code == exit_code, result.stderr + result.stdout
    return result


def tensors(one: str, other: str) -> dict[str, Any]:
    """What is not empty."""
    found = json.loads(command(one, other, "--json").stdout)["tensors"]
    return {kind: names for kind, names in found.items() if names}


def test_one_tensor_changed_one_added_and_one_of_another_dtype(run):
    before = weights()
    save(run, 1, before, {"lr": 0.1, "warm_up": 5}, 2.0)
    changed = {
        "changed": before["changed"].detach() + 1,
        "cast": before["cast"].detach().to(torch.bfloat16),
        "added": torch.ones(LARGE),
    }
    save(run, 2, weights(**changed), {"lr": 0.2}, 1.5)
    assert tensors(f"{run}@1", f"{run}@2") == {
        "only_after": ["model/added"],
        "other_form": [
            {
                "name": "model/cast",
                "before": {"dtype": "float32", "shape": [LARGE]},
                "after": {"dtype": "bfloat16", "shape": [LARGE]},
            }
        ],
        "other_bytes": ["model/changed"],
        "equal": ["model/kept", "model/little", "model/small"],
    }
    assert tensors(f"{run}@2", f"{run}@1")["only_before"] == ["model/added"]
    assert list(tensors(f"{run}@2", f"{run}@2")) == ["equal"]
    lines = command(f"{run}@1", f"{run}@2").stdout.splitlines()
    words = [" ".join(line.split()) for line in lines]
    assert words[0] == "A B"
    assert f"checkpoint {run}@1#1 {run}@2#2" in words
    for line in ("metric loss 2 1.5", "config lr 0.1 0.2", "config warm_up 5 -", "1 other bytes", "3 equal"):
        assert line in words
    assert words[words.index("other bytes:") + 1] == "model/changed"
    assert words[words.index("other shape or dtype:") + 1] == f"model/cast: float32 [{LARGE}], bfloat16 [{LARGE}]"


def test_values_that_are_no_tensors_are_compared_too(run):
    for step, epoch in ((1, 3), (2, 3), (3, 4)):
        with holdfast.Checkpointer(str(run), strict=True, create=True, chunk_sizes=SIZES) as ckpt:
            ckpt.restore({})
            ckpt.save(step, {"model": weights(), "epoch": epoch, "sizes": [1, 2]}).committed.result(timeout=60)

    def others(one: int, other: int) -> set[str]:
        found = json.loads(command(f"{run}@{one}", f"{run}@{other}", "--json").stdout)["other_values"]
        return {name.partition("@")[0] for name in found} - {"rng"}  # who draws numbers between two saves is not told

    assert others(1, 2) == set()
    assert others(1, 3) == others(3, 2) == {"epoch"}
    shown = command(f"{run}@1", f"{run}@3").stdout
    assert "other values that are no tensors:\n  epoch" in shown
    assert "The values that are no tensors are the same." in command(f"{run}@1", f"{run}@1").stdout


def test_a_line_break_in_a_name_forges_no_line(run):
    forged = "kept\nequal:\n  model/all"
    save(run, 1, weights(**{forged: torch.ones(LARGE)}), {}, 1.0)
    save(run, 2, weights(**{forged: torch.zeros(LARGE)}), {}, 1.0)
    assert tensors(f"{run}@1", f"{run}@2")["other_bytes"] == [f"model/{forged}"]
    lines = command(f"{run}@1", f"{run}@2").stdout.splitlines()
    assert "  model/kept equal:   model/all" in lines
    assert "equal:" not in lines


def test_of_small_tensors_in_one_chunk_it_is_said_that_the_digest_does_not_tell(run):
    save(run, 1, weights(), {}, 1.0)
    save(run, 2, weights(small=torch.zeros(8)), {}, 1.0)
    found = tensors(f"{run}@1", f"{run}@2")
    assert found["undecided"] == ["model/little", "model/small"]
    assert "other_bytes" not in found
    shown = command(f"{run}@1", f"{run}@2", "--limit", "1").stdout
    assert "  model/little\n  and 1 more" in shown
    assert "model/small" not in shown
    assert "The configurations are the same." in shown


def layers() -> nn.Module:
    """Five matrices of two chunks each, and one that two ranks cut where one rank does not."""
    torch.manual_seed(7)
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(5)), nn.Linear(64, 72, bias=False))


def save_on_two_ranks(rank: int, run: str, sharded: bool) -> None:
    """Each layer whole on the rank that a hash of its name chooses, or each half on one rank."""
    model = layers()
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    else:
        model = nn.parallel.DistributedDataParallel(model)
    with holdfast.Checkpointer(run, strict=True, create=True, chunk_sizes=SIZES) as ckpt:
        ckpt.restore({})
        ckpt.save(1, {"model": model}).committed.result(timeout=60)


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp"])
def test_what_two_ranks_saved_and_one_rank_saved_again_is_compared(run, client, sharded):
    run_ranks(save_on_two_ranks, 2, str(run), sharded)
    model = layers()
    with holdfast.Checkpointer(str(run), strict=True, chunk_sizes=SIZES) as ckpt:
        ckpt.restore({"model": model})
        ckpt.save(2, {"model": model}).committed.result(timeout=60)
        with torch.no_grad():
            model[3].weight[5, 5] += 1
        ckpt.save(3, {"model": model}).committed.result(timeout=60)
    view = client.checkpoints.select(run.project, run.run, "1")
    assert all(len(client.checkpoints.shard_chunks(view.id, rank).chunks) > 2 for rank in range(2))
    odd = {"cut_differently": ["model/5.weight"]} if sharded else {}
    names = [f"model/{layer}.weight" for layer in range(5 if sharded else 6)]
    assert tensors(f"{run}@1", f"{run}@2") == {"equal": names} | odd
    assert (
        tensors(f"{run}@1", f"{run}@3")
        == {
            "other_bytes": ["model/3.weight"],
            "equal": [name for name in names if name != "model/3.weight"],
        }
        | odd
    )


def test_nothing_of_the_tensors_is_read(run, client, served):
    save(run, 1, weights(), {}, 1.0)
    save(run, 2, weights(kept=torch.zeros(LARGE)), {}, 1.0)
    for step in (1, 2):
        view = client.checkpoints.select(run.project, run.run, str(step))
        manifest = client.checkpoints.manifest(view.id)
        documents = {manifest.layout_digest, *(shard.index_digest for shard in manifest.shards)}
        for chunk in client.checkpoints.shard_chunks(view.id, 0).chunks:
            if chunk.digest not in documents:
                for path in served[1].rglob(f"{chunk.digest}/*"):
                    path.unlink()
    assert tensors(f"{run}@1", f"{run}@2")["other_bytes"] == ["model/kept"]


def test_values_are_measured_by_a_worker_and_what_digests_leave_undecided_is_decided(run):
    before = weights()
    save(run, 1, before, {}, 1.0)
    save(run, 2, weights(changed=before["changed"].detach() * 3, small=before["small"].detach() * 1.5), {}, 1.0)
    pair = (f"{run}@1", f"{run}@2")
    dry = command(*pair, "--values", "--dry-run")
    assert "3 tensors would be read: " in dry.stdout
    shown = command(*pair, "--values", "--limit", "1")
    lines = [line.split() for line in shown.stdout.splitlines()]
    assert ["model/changed", "2"] in [line[:2] for line in lines]
    assert "and 1 more: --limit shows more of them" in shown.stdout
    found = json.loads(command(*pair, "--values", "--json").stdout)["values"]
    measured = {each["name"]: each["relative_change"] for each in found["tensors"]}
    assert measured == pytest.approx({"model/changed": 2, "model/small": 0.5})
    assert (found["differing"], found["equal"]) == (2, 3), "little shares a chunk with small, and has not changed"
    assert found["bytes_to_read"] == found["read_bytes"] > 0
    assert "--dry-run is for --values" in command(*pair, "--dry-run", exit_code=2).stderr


def test_what_cannot_be_compared_is_said_in_a_sentence(run, client):
    save(run, 1, weights(), {}, 1.0)
    for one, other, missing in (
        (f"{run}@1", f"{run}@9", "no checkpoint 9"),
        (f"{run}@9", f"{run}@1", "no checkpoint 9"),
        (f"{run}@1", f"{run.project}/other", f"no run {run.project}/other"),
    ):
        assert missing in command(one, other, exit_code=3).stderr
    assert "write it as project/run" in command("gpt", f"{run}@1", exit_code=2).stderr
    other = RunName(f"{run.project}-other", "gpt")
    client.projects.edit(other.project, EditProject())
    save(other, 1, weights(), {}, 1.0)
    assert list(tensors(f"{run}@1", f"{other}@1")) == ["equal"], "two projects are compared like two runs"
    token = client.tokens.create(CreateToken(name="ours", project=run.project, scopes=[Scope.READ])).token
    result = CliRunner().invoke(app, ["checkpoints", "diff", f"{run}@1", f"{other}@1"], env={"HOLDFAST_TOKEN": token})
    assert result.exit_code == 4, result.stderr
