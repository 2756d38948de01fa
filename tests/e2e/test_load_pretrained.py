"""`holdfast.load_pretrained("holdfast://…")`: the trained model of transformers, bit for bit, with no file in between
and in the memory of one model."""

from __future__ import annotations

import json
import logging
import logging.handlers
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    GPT2Model,
)

import holdfast
from holdfast.integrations.hf_files import ModelFiles
from tests.e2e.test_pull_hf import TOKENS, assert_same, config_of, gpt2, llama, pulled, save, train
from tests.trainer.gloo import run_ranks

pytestmark = pytest.mark.usefixtures("client")


def tied_llama(**options):
    return llama(tie_word_embeddings=True, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("build", [gpt2, llama, tied_llama])
def test_it_gives_the_trained_model_bit_for_bit_and_so_does_a_pull(run, client, tmp_path, build, dtype):
    model = build(dtype=dtype)
    model.generation_config.max_new_tokens = 7
    optimizer = train(model)
    save(run, {"model": model, "optimizer": optimizer, "hf_files": ModelFiles(model)})
    found = holdfast.load_pretrained(f"holdfast://{run}@latest")
    assert (type(found), found.dtype) == (type(model), dtype)
    assert_same(found.state_dict(), model.state_dict())
    assert torch.equal(found(input_ids=TOKENS).logits, model.eval()(input_ids=TOKENS).logits)
    is_tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert (found.get_input_embeddings().weight is found.get_output_embeddings().weight) == is_tied
    pulled(client, run, tmp_path / "out")
    of_a_pull = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_same(of_a_pull.state_dict(), found.state_dict())
    assert found.generation_config.max_new_tokens == of_a_pull.generation_config.max_new_tokens == 7


def save_sharded(rank: int, run: str) -> None:
    from torch.distributed.fsdp import fully_shard

    model = gpt2()
    for block in model.transformer.h:
        fully_shard(block)
    fully_shard(model)
    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore({})
        ckpt.save(1, {"model": model}).committed.result(timeout=180)


def test_shards_become_whole_and_options_are_those_of_from_pretrained(run, tmp_path):
    run_ranks(save_sharded, 2, str(run))
    config = config_of(gpt2(), tmp_path / "config")
    found = holdfast.load_pretrained(f"holdfast://{run}@1", config=config)
    assert_same(found.state_dict(), gpt2().state_dict())
    half = holdfast.load_pretrained(f"holdfast://{run}@1", config=config, dtype=torch.bfloat16)
    assert_same(half.state_dict(), gpt2(dtype=torch.bfloat16).state_dict())
    with pytest.raises(holdfast.errors.ConfigurationError, match=r"No config.json is known"):
        holdfast.load_pretrained(f"holdfast://{run}@1")


def test_weights_that_would_be_drawn_at_random_are_refused(run, tmp_path):
    save(run, {"model": gpt2()})
    config = config_of(
        GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=3, n_head=2)), tmp_path / "c"
    )
    with pytest.raises(holdfast.errors.ConfigurationError, match=r"the checkpoint lacks transformer\.h\.2"):
        holdfast.load_pretrained(f"holdfast://{run}@latest", config=config)
    config = config_of(gpt2(), tmp_path / "config")
    (config / "config.json").write_text((config / "config.json").read_text().replace("GPT2LMHeadModel", "OfOurOwn"))
    with pytest.raises(holdfast.errors.ConfigurationError, match=r"'OfOurOwn'.*Give the model's class"):
        holdfast.load_pretrained(f"holdfast://{run}@latest", config=config)
    found = holdfast.load_pretrained(f"holdfast://{run}@latest", GPT2Model, config=config)
    assert torch.equal(found.wte.weight, gpt2().transformer.wte.weight)
    with pytest.raises(holdfast.errors.ConfigurationError, match=r"lacks score\.weight of GPT2ForSequence.* at random"):
        holdfast.load_pretrained(f"holdfast://{run}@latest", GPT2ForSequenceClassification, config=config)
    with pytest.raises(holdfast.errors.ConfigurationError, match=r"AutoModelForCausalLM.* is no class of a model"):
        holdfast.load_pretrained(f"holdfast://{run}@latest", AutoModelForCausalLM, config=config)


def test_a_dtype_in_which_weights_would_be_infinite_is_refused(run, tmp_path, caplog):
    model, url = gpt2(), f"holdfast://{run}"
    with holdfast.Checkpointer(str(run), check_finite=False) as ckpt:
        ckpt.restore({})
        for step, value in enumerate((1e6, float("inf"), 3.4e38)):
            nn.init.constant_(model.transformer.ln_f.weight, value)
            if step == 1:
                nn.init.constant_(model.transformer.wte.weight, value)
            ckpt.save(step, {"model": model}).committed.result(timeout=180)
    config = config_of(model, tmp_path / "config")
    for step, dtype, wider in ((0, torch.float16, torch.bfloat16), (2, torch.bfloat16, torch.float32)):
        refused = rf"large for {dtype},.*: transformer.ln_f.weight\. Give dtype={wider}, "
        with pytest.raises(holdfast.errors.ConfigurationError, match=refused):
            holdfast.load_pretrained(f"{url}@{step}", config=config, dtype=dtype)
    assert "infinite" not in caplog.text
    found = holdfast.load_pretrained(f"{url}@0", config=config, dtype="bfloat16")
    assert found.transformer.ln_f.weight[0] == torch.tensor(1e6, dtype=torch.bfloat16)
    found = holdfast.load_pretrained(f"{url}@1", config=config, dtype=torch.float16)
    assert found.transformer.ln_f.weight.isinf().all(), "as they were trained"
    assert "lm_head.weight: infinite in torch.float16" in caplog.text, "it is tied to wte"


def load_on_each(rank: int, run: str, config: str) -> str:
    heard = logging.handlers.BufferingHandler(1000)
    logging.getLogger("holdfast").addHandler(heard)
    for which in ("latest", "1"):
        holdfast.load_pretrained(f"holdfast://{run}@{which}", config=config)
    return "\n".join(record.getMessage() for record in heard.buffer if record.levelno == logging.WARNING)


def test_ranks_that_may_load_different_checkpoints_are_warned(run, client, tmp_path):
    save(run, {"model": gpt2()})
    found = run_ranks(load_on_each, 2, str(run), str(config_of(gpt2(), tmp_path / "config")))
    [view] = client.checkpoints.all(run.project, run.run)
    assert found[0].startswith(f"holdfast://{run}@latest may name another checkpoint for the next rank.")
    assert found[0].endswith(f"write @{view.id}"), "of the step there is no warning"
    assert found[1] == ""


def test_a_config_names_no_code_wherever_in_it(run, tmp_path):
    save(run, {"model": gpt2()})
    config = config_of(gpt2(), tmp_path / "config") / "config.json"
    code = {"attn_implementation": "nobody/kernel", "_attn_implementation": "nobody/kernel"}
    config.write_text(json.dumps({**json.loads(config.read_text()), **code, "parts": [{**code, "kept": 1}]}))
    found = holdfast.load_pretrained(f"holdfast://{run}@latest", config=config)
    assert found.config.parts == [{"kept": 1}]


MIB = 1024**2
PEAK = """
import sys, torch, holdfast
from transformers import GPT2LMHeadModel

def peak_mib():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status["VmHWM"].split()[0]) // 1024

small, large, configs = sys.argv[1:]
holdfast.load_pretrained(small, config=f"{configs}/small")
floor = peak_mib()
model = holdfast.load_pretrained(large, config=f"{configs}/large")
print(peak_mib() - floor, sum(each.nbytes for each in model.parameters()) // 1024**2)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's peak of a process is read from /proc")
def test_it_takes_the_memory_of_one_model_and_of_some_chunks(run, tmp_path: Path) -> None:
    large = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=16, n_embd=2048, n_layer=6, n_head=2))
    config_of(gpt2(), tmp_path / "small")
    config_of(large, tmp_path / "large")
    save(run, {"model": gpt2()}, 1)
    other = f"{run}-large"
    with holdfast.Checkpointer(other, strict=True, create=True) as ckpt:
        ckpt.restore({})
        ckpt.save(1, {"model": large}).committed.result(timeout=180)
    del large
    done = subprocess.run(
        [sys.executable, "-c", PEAK, f"holdfast://{run}@1", f"holdfast://{other}@1", tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    taken, of_model = map(int, done.stdout.splitlines()[-1].split())
    assert of_model > 1000
    assert taken < 1.7 * of_model
