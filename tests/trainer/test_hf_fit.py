"""What transformers says of weights and a config, on this machine and without code from elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from holdfast.export.hf.fit import Fit, NotKnown, Shape, fit_of
from holdfast.export.hf.model_files import read_config


def llama() -> tuple[dict[str, Any], dict[str, tuple[torch.dtype, Shape]]]:
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    with torch.device("meta"):
        state = LlamaForCausalLM(config).state_dict()
    weights = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}
    return {**config.to_dict(), "architectures": ["LlamaForCausalLM"], "dtype": "float32"}, weights


def test_a_kernel_that_the_config_names_is_not_asked_for() -> None:
    config, weights = llama()
    assert fit_of({**config, "attn_implementation": "somebody/kernel"}, weights) == Fit("LlamaForCausalLM")


def test_a_file_of_weights_that_the_config_names_is_not_looked_for_in_the_new_folder() -> None:
    assert read_config(b'{"transformers_weights": "other.safetensors", "n_layer": 2}') == {"n_layer": 2}


def test_a_class_whose_module_needs_more_than_is_here_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_package: object, name: str) -> object:
        raise ModuleNotFoundError(f"Could not import module {name!r}")

    config, weights = llama()
    monkeypatch.setattr(type(transformers), "__getattr__", missing)
    found = fit_of({**config, "architectures": ["Elsewhere"]}, weights)
    assert isinstance(found, NotKnown)
    assert "Could not import module 'Elsewhere'" in found.reason
