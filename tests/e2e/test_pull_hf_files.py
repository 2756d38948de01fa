"""The config and the tokenizer that `holdfast checkpoints pull --format hf` writes beside the weights: where they come
from, what is kept of them, and what is refused."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, PreTrainedTokenizerFast, TrainingArguments

import holdfast
from holdfast.export.contents import read_contents
from holdfast.export.hf.model_files import kept_in
from holdfast.integrations.hf import HoldfastTrainer
from holdfast.integrations.hf_files import ModelFiles
from holdfast.restore.checkpoint_reader import CheckpointSource
from holdfast_client import errors
from holdfast_client.chunks.workers import TransferWorkers
from holdfast_protocol.base import RunName
from tests.support.damage import chunks_of, files_of, flip
from tests.support.hf_models import (
    TOKENS,
    assert_same,
    bring,
    config_of,
    gpt2,
    llama,
    loaded,
    pulled,
    save,
    tokenizer,
    train,
)


def test_a_folder_is_whole_again_after_import_training_and_pull(run, client, tmp_path):
    model = gpt2()
    model.save_pretrained(tmp_path / "in", max_shard_size="20KB")
    tokenizer().save_pretrained(tmp_path / "in")
    (tmp_path / "in" / "modeling_own.py").write_text("raise SystemExit")
    told = bring(client, run, tmp_path / "in", 0)
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} == set(
        told["model_files"]
    )
    assert told["left_out"] == ["modeling_own.py"]
    fresh = gpt2()
    with holdfast.Checkpointer(str(run), strict=True) as ckpt:
        start = ckpt.restore({"model": fresh})
        optimizer = train(fresh)
        ckpt.save(start, {"model": fresh, "optimizer": optimizer}).committed.result(timeout=60)
    newest = client.checkpoints.select(run.project, run.run, "latest")
    assert (newest.step, newest.missing_components) == (1, [])
    _, notes = pulled(client, run, tmp_path / "out")
    assert any("from step 0, the newest that keeps them" in note for note in notes)
    assert_same(loaded(tmp_path / "out").state_dict(), fresh.state_dict())
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("fast hold").input_ids == [2, 1]
    kept = [name for name in os.listdir(tmp_path / "in") if name.startswith(("tokenizer", "generation"))]
    for name in kept:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "in" / name).read_bytes()
    # What was pulled is a folder like any other, to be imported again.
    again = RunName("tests", f"r{uuid.uuid4().hex}")
    assert bring(client, again, tmp_path / "out", 0)["tied"] == 1
    pulled(client, again, tmp_path / "again")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_the_newest_config_of_those_before_is_taken(run, client, tmp_path):
    model = llama()
    save(run, {"model": model, "hf_files": ModelFiles(model)})
    save(run, {"model": model, "hf_files": {}}, step=2)
    save(run, {"model": model}, step=3)
    _, notes = pulled(client, run, tmp_path / "out")
    assert any("from step 1, the newest that keeps them" in note for note in notes)


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {"input_ids": TOKENS[at % 2], "labels": TOKENS[at % 2]}


def test_no_save_waits_for_the_files(run, client, tmp_path, monkeypatch):
    model, words = gpt2(), tokenizer()
    files = ModelFiles(model, words)

    def written_late(*_: object, **__: object) -> None:
        raise AssertionError("a save waits for it")

    for each in (model.config, model.generation_config, words):
        monkeypatch.setattr(type(each), "save_pretrained", written_late)
    save(run, {"model": model, "hf_files": files})
    monkeypatch.undo()
    pulled(client, run, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("fast hold").input_ids == [2, 1]


def test_the_files_follow_what_the_script_changes(run, client, tmp_path):
    model, words = gpt2(), tokenizer()
    files = ModelFiles(model, words)
    assert files.state_dict() is files.state_dict()
    words.add_tokens(["keep"])
    words.chat_template = "{{ messages }}"
    model.generation_config.max_new_tokens = 7
    save(run, {"model": model, "hf_files": files})
    pulled(client, run, tmp_path / "out")
    found = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (found("fast keep").input_ids, found.chat_template) == ([2, 3], words.chat_template)
    assert loaded(tmp_path / "out").generation_config.max_new_tokens == 7
    for change in (
        lambda: words.add_tokens(["more"]),
        lambda: setattr(words, "chat_template", "{{ bos_token }}"),
        lambda: setattr(model.generation_config, "max_new_tokens", 8),
    ):
        before = files.state_dict()
        change()
        assert files.state_dict() is not before


def test_what_a_trainer_of_transformers_saves_needs_no_config(run, client, tmp_path, monkeypatch):
    written_at = []
    write = PreTrainedTokenizerFast.save_pretrained

    def trainer(checkpointer: holdfast.Checkpointer, steps: int) -> HoldfastTrainer:
        arguments = TrainingArguments(
            output_dir=str(tmp_path / "trainer"),
            max_steps=steps,
            save_steps=2,
            per_device_train_batch_size=2,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        made = HoldfastTrainer(
            gpt2(), arguments, train_dataset=Texts(), processing_class=tokenizer(), checkpointer=checkpointer
        )

        def note(*given: Any, **options: Any) -> Any:
            written_at.append(made.state.global_step)
            return write(*given, **options)

        monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", note)
        return made

    with holdfast.Checkpointer(str(run), save=holdfast.OnPreemption(), strict=True) as checkpointer:
        trainer(checkpointer, 2).train(resume_from_checkpoint=True)
    with holdfast.Checkpointer(str(run), save=holdfast.OnPreemption(), strict=True) as checkpointer:
        second = trainer(checkpointer, 4)
        second.train(resume_from_checkpoint=True)
    assert (second.state.global_step, written_at) == (4, [0, 2]), "it is written before the first step of each job"
    summary, notes = pulled(client, run, tmp_path / "out")
    assert (summary["step"], [note for note in notes if "config" in note]) == (4, [])
    assert_same(loaded(tmp_path / "out").state_dict(), second.model.state_dict())
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("fast").input_ids == [2]
    first, last = (client.checkpoints.select(run.project, run.run, str(step)) for step in (2, 4))
    digests = [{chunk.digest for chunk in client.checkpoints.shard_chunks(view.id, 0).chunks} for view in (first, last)]
    assert digests[0] & digests[1], "the files are a chunk that is sent once"


def test_a_damaged_tokenizer_is_in_nobodys_way_who_gives_another(run, client, tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_DIRECT_FILES", "false")
    model, words = gpt2(), tokenizer()
    save(run, {"model": model, "hf_files": ModelFiles(model, words)})
    model.generation_config.save_pretrained(tmp_path / "config")
    words.save_pretrained(config_of(model, tmp_path / "config"))
    point = client.restores.restore_point(run.project, run.run).restore_point
    with TransferWorkers(1) as workers, CheckpointSource(client, run, point, workers=workers) as source:
        kept = kept_in(read_contents(source))
    for _, digest in chunks_of(client, point.checkpoint_id, kept["tokenizer.json"]):
        for path in files_of(Path(os.environ["HOLDFAST_DATA_DIR"]), digest):
            flip(path)
    pulled(client, run, tmp_path / "out", config=tmp_path / "config")
    assert_same(loaded(tmp_path / "out").state_dict(), model.state_dict())
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("fast hold").input_ids == [2, 1]


def test_a_config_that_does_not_fit_is_refused_by_name_unless_the_user_insists(run, client, tmp_path):
    model = llama()
    save(run, {"model": model})
    wrong = tmp_path / "wrong.json"
    config = json.loads((config_of(model, tmp_path / "config") / "config.json").read_text())
    wrong.write_text(json.dumps(config | {"vocab_size": 51, "num_hidden_layers": 3, "dtype": "float16"}))
    with pytest.raises(
        errors.ConfigurationError,
        match=r"lacks model\.layers\.2\..*more tensors; lm_head\.weight is \[50, 16\] in the checkpoint and \[51, 16\]",
    ):
        pulled(client, run, tmp_path / "out", config=wrong)
    _, notes = pulled(client, run, tmp_path / "out", config=wrong, check=False)
    assert any("does not fit" in note for note in notes)
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), model.state_dict())
    wrong.write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(errors.ConfigurationError, match=r"LlamaForCausalLM has no model\.layers\.1\."):
        pulled(client, run, tmp_path / "other", config=wrong)
    for content, told in (("{", "is no JSON"), ("[]", "no JSON object")):
        wrong.write_text(content)
        with pytest.raises(errors.ConfigurationError, match=told):
            pulled(client, run, tmp_path / "other", config=wrong)
    with pytest.raises(errors.ConfigurationError, match="cannot be read: No such file"):
        pulled(client, run, tmp_path / "other", config=tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(errors.ConfigurationError, match=r"has no config\.json and no tokenizer"):
        pulled(client, run, tmp_path / "other", config=tmp_path / "empty")


def test_files_of_a_checkpoint_lead_nowhere_else(run, client, tmp_path):
    """A component is what a job has written, perhaps a hostile one."""
    model = llama()
    config = (config_of(model, tmp_path / "config") / "config.json").read_bytes()
    names = [
        "../../out.json",
        "/tmp/x.json",
        "model.safetensors",
        "evil.py",
        "checkpoint.json",
        "a/b/c.json",
        ".x.json",
        "model.safetensors.index.json",
        "model.safetensors/x.json",
        "config.json/x.json",
        "adapter_config.json",
    ]
    files = {name: torch.tensor([1], dtype=torch.uint8) for name in names}
    files["config.json"] = torch.frombuffer(bytearray(config), dtype=torch.uint8)
    save(run, {"model": model, "own": {"hf_files": files}})
    pulled(client, run, tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == ["checkpoint.json", "config.json", "model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config", "out"]
    assert_same(loaded(tmp_path / "out").state_dict(), model.state_dict())
