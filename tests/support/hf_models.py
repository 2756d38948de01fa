"""Small models of transformers with a tokenizer: saved into a run, and pulled or loaded as a user does it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

import holdfast
from holdfast.export.hf.folder import HfChoices
from holdfast.export.pull import Format, pull
from holdfast.imports.checkpoint_plan import Choices
from holdfast.imports.sources import find_sources
from holdfast.imports.steps import import_sources
from holdfast_client import Client
from holdfast_protocol.base import RunName
from holdfast_protocol.runs import Latest

TOKENS = torch.arange(16).reshape(2, 8)


def gpt2(*, dtype: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, **options
    )
    return GPT2LMHeadModel(config).to(dtype)


def llama(*, dtype: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=0,
        **options,
    )
    return LlamaForCausalLM(config).to(dtype)


def train(model: nn.Module, steps: int = 2) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def save(run: RunName, state: dict[str, Any], step: int = 1, **options: Any) -> None:
    with holdfast.Checkpointer(str(run), strict=True, **options) as ckpt:
        ckpt.restore({})
        ckpt.save(step, state).committed.result(timeout=180)


def config_of(model: PreTrainedModel, folder: Path) -> Path:
    """As save_pretrained() of the model writes it, but for the weights and their dtype."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return folder


def pulled(client: Client, run: RunName, out: Path, **choices: Any) -> tuple[dict[str, Any], list[str]]:
    notes: list[str] = []
    totals: list[int] = []
    parts: list[int] = []
    summary = pull(
        client,
        run,
        Latest(),
        out,
        Format.HF,
        only=choices.pop("only", ()),
        force=choices.pop("force", False),
        hf=HfChoices(**choices),
        on_total=totals.append,
        on_bytes=parts.append,
        on_note=notes.append,
    )
    assert totals == [sum(parts)]
    return summary, notes


def loaded(folder: Path) -> PreTrainedModel:
    """What a user has who knows nothing of Holdfast. transformers must neither miss a weight nor ignore one."""
    model, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, local_files_only=True)
    assert not any(told.values()), told
    return model


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    unlike = [
        name
        for name, tensor in expected.items()
        if found[name].dtype != tensor.dtype
        or not torch.equal(found[name].contiguous().view(torch.uint8), tensor.detach().contiguous().view(torch.uint8))
    ]
    assert not unlike


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({"[UNK]": 0, "hold": 1, "fast": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", pad_token="[UNK]")


def bring(client: Client, run: RunName, folder: Path, step: int) -> dict[str, Any]:
    [told] = import_sources(client, run, find_sources(folder, step), choices=Choices())["steps"]
    return told
