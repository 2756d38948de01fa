"""`holdfast checkpoints pull --format hf`: from_pretrained() of transformers itself gives the trained model, bit for
bit; or nothing is written, and the message says what to do."""

from __future__ import annotations

import json
import os
import resource
import signal
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

import holdfast
from holdfast.export import publish
from holdfast.export.hf.folder import HfChoices
from holdfast.export.pull import Format, pull
from holdfast.integrations.hf_files import ModelFiles
from holdfast.layout.plan import ChunkSizes
from holdfast_client import Client, errors
from holdfast_client.cli.main import app
from holdfast_protocol.base import RunName
from holdfast_protocol.runs import Latest
from tests.support.forked import fork_server
from tests.support.hf_models import TOKENS, assert_same, bring, config_of, gpt2, llama, loaded, pulled, save, train
from tests.trainer.gloo import run_ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("build", [gpt2, llama])
def test_from_pretrained_gives_the_trained_model_bit_for_bit(run, client, tmp_path, build, dtype):
    model = build(dtype=dtype)
    optimizer = train(model)
    save(run, {"model": model, "optimizer": optimizer})
    summary, _ = pulled(client, run, tmp_path / "out", config=config_of(model, tmp_path / "config"))
    assert {"config.json", "model.safetensors"} <= set(summary["files"])
    assert sorted([*summary["files"], "checkpoint.json"]) == sorted(os.listdir(tmp_path / "out"))
    found = loaded(tmp_path / "out")
    assert type(found) is type(model)
    assert found.dtype is dtype  # which the folder says, and no argument
    assert_same(found.state_dict(), model.state_dict())
    assert torch.equal(found(input_ids=TOKENS).logits, model.eval()(input_ids=TOKENS).logits)


def test_tied_weights_are_written_once_and_told(run, client, tmp_path):
    model = llama(tie_word_embeddings=True)
    train(model)
    save(run, {"model": model})
    summary, notes = pulled(client, run, tmp_path / "out", config=config_of(model, tmp_path / "config"))
    assert "lm_head.weight is tied to model.embed_tokens.weight, which is written once." in notes
    assert summary["tied"] == {"lm_head.weight": "model.embed_tokens.weight"}
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()
        assert file.metadata() == {"format": "pt", "lm_head.weight": "model.embed_tokens.weight"}
    found = loaded(tmp_path / "out")
    assert found.lm_head.weight is found.model.embed_tokens.weight
    assert_same(found.state_dict(), model.state_dict())


@pytest.mark.parametrize("transformers", ["is installed", "is not"])
def test_weights_that_training_tied_and_the_config_does_not_have_bytes_of_their_own(
    run, client, tmp_path, monkeypatch, transformers
):
    model = llama(tie_word_embeddings=False)
    model.lm_head.weight = model.model.embed_tokens.weight
    save(run, {"model": model})
    config = config_of(model, tmp_path / "config") / "config.json"
    if transformers == "is not":
        monkeypatch.setitem(__import__("sys").modules, "transformers", None)
        # Llama's own default, which a config need not say.
        config.write_text(config.read_text().replace('"tie_word_embeddings": false,', ""))
        assert "tie_word" not in config.read_text()
    summary, notes = pulled(client, run, tmp_path / "out", config=config)
    monkeypatch.undo()
    assert (summary["tied"], any("bytes of its own" in note for note in notes)) == ({}, True)
    assert any("transformers is not installed" in note for note in notes) == (transformers == "is not")
    assert_same(loaded(tmp_path / "out").state_dict(), model.state_dict())


def test_dtype_converts_what_is_floating_point_and_the_config_says_it(run, client, tmp_path):
    model = gpt2()
    model.register_buffer("seen", torch.tensor([7, 8]))
    train(model)
    save(run, {"model": model})
    config = config_of(model, tmp_path / "config")
    _, notes = pulled(client, run, tmp_path / "out", config=config, dtype="bf16")
    assert any("will ignore seen" in note for note in notes)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(weights.pop("seen"), torch.tensor([7, 8]))
    expected = {name: tensor.bfloat16() for name, tensor in model.state_dict().items() if name != "seen"}
    assert_same(weights, {name: tensor for name, tensor in expected.items() if name != "lm_head.weight"})
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_same(found.state_dict(), expected)


def test_a_value_that_the_dtype_cannot_hold_is_refused_by_its_name(run, client, tmp_path):
    model = llama()
    with torch.no_grad():
        model.model.norm.weight[3] = 70_000
        model.lm_head.weight[0, 0] = float("inf")  # as it was trained
    save(run, {"model": model})
    config = config_of(model, tmp_path / "config")
    with pytest.raises(errors.ConfigurationError, match=r"would be infinite: model\.norm\.weight\. Leave --dtype out"):
        pulled(client, run, tmp_path / "out", config=config, dtype="fp16")
    assert list(tmp_path.iterdir()) == [config]
    pulled(client, run, tmp_path / "out", config=config, dtype="bf16")
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), model.bfloat16().state_dict())


def test_several_dtypes_are_kept_and_told(run, client, tmp_path):
    model = llama(dtype=torch.bfloat16)
    model.model.norm.float()
    save(run, {"model": model})
    _, notes = pulled(client, run, tmp_path / "out", config=config_of(model, tmp_path / "config"))
    assert any("several dtypes. config.json says bfloat16" in note and "float32" in note for note in notes)
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), model.state_dict())


def save_sharded(rank: int, run: str) -> dict[str, torch.Tensor]:
    model = llama(tie_word_embeddings=True)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = train(model)
    with holdfast.Checkpointer(run, strict=True) as ckpt:
        ckpt.restore({})
        ckpt.save(1, {"model": model, "optimizer": optimizer, "hf_files": ModelFiles(model)}).committed.result(60)
    return {name: tensor.full_tensor().detach() for name, tensor in model.state_dict().items()}


def test_the_shards_of_two_ranks_become_files_of_a_bounded_size_with_an_index(run, client, tmp_path):
    whole = run_ranks(save_sharded, 2, str(run))[0]
    summary, _ = pulled(client, run, tmp_path / "out", most_file_bytes=4000)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert [path.name for path in files] == [
        f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)
    ]
    assert len(files) > 3
    parts = {path.name: load_file(path) for path in files}
    sizes = {name: sum(tensor.nbytes for tensor in part.values()) for name, part in parts.items()}
    assert max(sizes.values()) <= 4000
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {tensor: name for name, part in parts.items() for tensor in part}
    assert index["metadata"]["total_size"] == sum(sizes.values())
    found = loaded(tmp_path / "out")
    assert_same(found.state_dict(), whole)
    assert type(found).__name__ == "LlamaForCausalLM"  # and not the class that fully_shard has made of it
    # The same weights as one file, over the same folder.
    summary, _ = pulled(client, run, tmp_path / "out", force=True)
    assert "model.safetensors" in summary["files"]
    assert_same(loaded(tmp_path / "out").state_dict(), whole)


def test_names_that_wrappers_have_made_longer_are_those_of_the_model_again(run, client, tmp_path):
    model = llama()
    config = config_of(model, tmp_path / "config")
    longer = {
        "module._orig_mod." + name.replace("layers.0.", "layers.0._checkpoint_wrapped_module."): tensor.clone()
        for name, tensor in model.state_dict().items()
    }
    save_file(longer, tmp_path / "step_1.safetensors")
    bring(client, run, tmp_path / "step_1.safetensors", 1)
    _, notes = pulled(client, run, tmp_path / "out", config=config)
    assert notes[0].startswith("_checkpoint_wrapped_module, _orig_mod, module: of wrappers")
    assert_same(loaded(tmp_path / "out").state_dict(), model.state_dict())


class Task(nn.Module):
    """As a LightningModule has it: the model is an attribute, and there is more."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.net = model
        self.loss_weight = nn.Parameter(torch.ones(3))


def test_a_module_around_the_model_is_taken_away_where_the_user_says_it(run, client, tmp_path):
    model = llama()
    config = config_of(model, tmp_path / "config")
    save(run, {"model": Task(model)})
    with pytest.raises(errors.ConfigurationError, match=r"does not fit.*lacks.*LlamaForCausalLM has no"):
        pulled(client, run, tmp_path / "out", config=config)
    with pytest.raises(errors.ConfigurationError, match=r"begins with 'body\.'\. They begin with loss_weight\., net\."):
        pulled(client, run, tmp_path / "out", config=config, prefix="body")
    assert list(tmp_path.iterdir()) == [config]
    _, notes = pulled(client, run, tmp_path / "out", config=config, prefix="net.")
    assert notes == ["1 tensor without the prefix 'net.' is left out."]
    assert_same(loaded(tmp_path / "out").state_dict(), model.state_dict())


def test_the_weights_in_a_dict_of_more_are_found_where_the_user_says_it(run, client, tmp_path):
    """As Lightning's own dict has them."""
    model = llama()
    optimizer = train(model)
    dumped = {"state_dict": Task(model).state_dict(), "optimizer_states": [optimizer.state_dict()], "epoch": 1}
    save(run, {"checkpoint": dumped})
    choices = {"only": ["checkpoint"], "prefix": "state_dict.net."}
    pulled(client, run, tmp_path / "out", config=config_of(model, tmp_path / "config"), **choices)
    assert_same(loaded(tmp_path / "out").state_dict(), model.state_dict())


def test_the_model_of_a_dcp_save_is_found(run, client, tmp_path):
    model = gpt2()
    optimizer = train(model)
    state = {"model": model.state_dict(), "optim": {"exp_avg": optimizer.state_dict()["state"][0]["exp_avg"]}}
    with holdfast.Checkpointer(str(run)) as ckpt:
        dcp.save(state, storage_writer=ckpt.writer(0), no_dist=True)
    pulled(client, run, tmp_path / "out", config=config_of(model, tmp_path / "config"))
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict(), model.state_dict())
    other = RunName("tests", f"{run.run}-other")
    with holdfast.Checkpointer(str(other), create=True) as ckpt:
        dcp.save({"net": model.state_dict()}, storage_writer=ckpt.writer(0), no_dist=True)
    with pytest.raises(errors.ConfigurationError, match=r"with the parts net\. Say which.*--prefix net"):
        pulled(client, other, tmp_path / "net", config=tmp_path / "config")
    pulled(client, other, tmp_path / "net", config=tmp_path / "config", prefix="net")
    assert_same(load_file(tmp_path / "net" / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors"))


def test_what_does_not_make_one_model_is_refused_before_anything_is_written(run, client, tmp_path):
    model = llama()
    config = config_of(model, tmp_path / "config")

    def refused(name: str, state: dict[str, Any], **choices: Any) -> str:
        of = RunName("tests", f"{run.run}-{name}")
        save(of, state, create=True)
        with pytest.raises(errors.ConfigurationError) as caught:
            pulled(client, of, tmp_path / "out", **choices)
        assert list(tmp_path.iterdir()) == [config]
        return str(caught.value)

    assert "has no model. Its components are w." in refused("none", {"w": {"x": torch.ones(2)}}, config=config)
    two = refused("two", {"disc": nn.Linear(2, 2), "gen": nn.Linear(2, 2)}, config=config)
    assert "has 2 models: disc, gen. Choose one of them with --only" in two
    assert "No config.json is known" in refused("bare", {"model": model})
    assert "no component 'modle'" in refused("typo", {"model": model}, config=config, only=["modle"])
    optimizer = train(model)
    assert "is an optimizer" in refused(
        "opt", {"model": model, "optimizer": optimizer}, config=config, only=["optimizer"]
    )
    assert "PEFT" in refused("peft", {"model": nn.ModuleDict({"lora_A": nn.Linear(2, 2)})}, config=config)
    wave = nn.ParameterDict({"wave": nn.Parameter(torch.ones(2, dtype=torch.complex128))})
    assert "safetensors cannot hold 'wave', which is complex128" in refused("wave", {"model": wave}, config=config)
    reserved = nn.ParameterDict({"__metadata__": nn.Parameter(torch.ones(2))})
    assert "keeps the name '__metadata__'" in refused("name", {"model": reserved}, config=config, check=False)


def killed_pull(environment: dict[str, str], run: RunName, out: Path) -> None:
    os.environ.update(environment)
    with Client() as client:
        pull(client, run, Latest(), out, Format.HF, on_bytes=lambda count: os.kill(os.getpid(), signal.SIGKILL))


def test_a_killed_pull_leaves_nothing_that_looks_whole_and_the_next_one_clears_it_away(run, client, served, tmp_path):
    model = llama()
    save(run, {"model": model, "hf_files": ModelFiles(model)})
    out = tmp_path / "out"
    process = fork_server().Process(target=killed_pull, args=(served.environment, run, out), daemon=True)
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    [left] = tmp_path.iterdir()
    assert left.name.startswith(".out.holdfast-")
    assert (left / "model.safetensors").exists()
    with publish.published(out, force=False) as alive:  # of a pull that is under way
        publish.clear_leftovers(out)
        assert list(tmp_path.iterdir()) == [alive]
        (alive / "x").touch()
    pulled(client, run, out, force=True)
    assert list(tmp_path.iterdir()) == [out]
    assert_same(loaded(out).state_dict(), model.state_dict())


def measured_pull(environment: dict[str, str], runs: list[RunName], folder: Path, told: Any) -> None:
    os.environ.update(environment)
    peaks = []
    with Client() as client:
        for at, run in enumerate(runs):
            pull(
                client, run, Latest(), folder / str(at), Format.HF, hf=HfChoices(folder / "config", "bf16", check=False)
            )
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    told.send(peaks)


def test_memory_does_not_grow_with_the_model(client, served, tmp_path, monkeypatch):
    sizes = ChunkSizes(own_chunk_bytes=2**19, pack_bytes=2**20, cut_bytes=2**21)
    monkeypatch.setenv("HOLDFAST_DIRECT_FILES", "false")
    config_of(llama(), tmp_path / "config")
    runs, bytes_of = [], []
    for rows in (1500, 20000):
        name = RunName("tests", f"r{uuid.uuid4().hex}")
        model = nn.Linear(3000, rows, bias=False)
        save(name, {"model": model}, create=True, chunk_sizes=sizes)
        runs.append(name)
        bytes_of.append(model.weight.nbytes)
    ours, theirs = fork_server().Pipe(duplex=False)
    environment = served.environment | {"HOLDFAST_DIRECT_FILES": "false"}
    process = fork_server().Process(target=measured_pull, args=(environment, runs, tmp_path, theirs), daemon=True)
    process.start()
    assert ours.poll(120)
    small, large = ours.recv()
    process.join(60)
    assert large - small < bytes_of[1] / 3, (small, large)
    found = load_file(tmp_path / "1" / "model.safetensors")["weight"]
    assert torch.equal(found, model.weight.detach().bfloat16())


def holdfast_command(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_the_command_says_what_it_did_or_what_to_do(run, client, tmp_path):
    model = gpt2()
    save(run, {"model": model})
    config = config_of(model, tmp_path / "config")
    pulling = ("checkpoints", "pull", run, tmp_path / "out")
    of_another = holdfast_command(*pulling, "--dtype", "bf16")
    assert (of_another.exit_code, "are for --format hf" in of_another.stderr) == (2, True)
    none = holdfast_command(*pulling, "--format", "hf", "--max-file-size", "0")
    assert (none.exit_code, "more than 0" in none.stderr) == (2, True), none.stderr
    options = ("--format", "hf", "--config", config, "--dtype", "bf16", "--max-file-size", "2KB")
    done = holdfast_command(*pulling, *options)
    assert done.exit_code == 0, done.stderr
    assert f"is in {tmp_path / 'out'}, as hf." in done.stdout
    assert "holdfast: lm_head.weight is tied to transformer.wte.weight, which is written once." in done.stderr
    assert "Loading weights" not in done.stderr
    assert_same(loaded(tmp_path / "out").state_dict(), model.bfloat16().state_dict())
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    as_json = holdfast_command(*pulling, *options, "--force", "--json", "--max-file-size", "none")
    assert json.loads(as_json.stdout)["files"] == ["config.json", "model.safetensors"]
