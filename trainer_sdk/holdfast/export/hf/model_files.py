"""The files that describe a model of Hugging Face beside its weights: config.json, generation_config.json, a tokenizer.

A checkpoint keeps them as bytes, in any component that is a dict: {"hf_files": {name: uint8 tensor}}. Tensors, because
a tokenizer may have many megabytes: they are chunks of their own, which later saves do not send again.

    integrations/hf.py, imports/ -> as_component() -> the checkpoint -> kept_in() -> folder
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from holdfast.export.contents import Contents
from holdfast.export.tensors import read_tensors
from holdfast.restore.checkpoint_reader import CheckpointSource
from holdfast.state.components import HF_FILES, Kind
from holdfast.state.tensors import row_major_bytes
from holdfast.state.tree import TensorRef, decode_tree
from holdfast_client.errors import ConfigurationError

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
MOST_BYTES = 256 * 1024**2
"""Of all of them together. The largest tokenizers have some 40 MB."""

_NAMES = frozenset(
    {
        CONFIG, GENERATION_CONFIG,
        "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
        "vocab.json", "vocab.txt", "merges.txt", "normalizer.json", "tekken.json",
        "tokenizer.model", "spiece.model", "spm.model", "sentencepiece.bpe.model", "source.spm", "target.spm",
        "chat_template.json", "chat_template.jinja",
        "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
    }
)  # fmt: skip
"""What is taken out of a folder. Python files of a model are left: a checkpoint brings no code."""
_TEMPLATES = "additional_chat_templates"
_NAME = re.compile(
    r"([A-Za-z0-9_][A-Za-z0-9_\-]{0,199}/)?[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}(?<!\.index)"
    r"\.(json|txt|model|jinja|spm|tiktoken|vocab|bpe)"
)
"""A folder's name has no dot, and a file's has one, so none is in the other's way."""
_NEVER = frozenset({"checkpoint.json", "adapter_config.json"})
"""The first is ours. By the second from_pretrained() would take the weights from the place that it names."""


def as_component(files: Mapping[str, bytes]) -> dict[str, dict[str, torch.Tensor]]:
    """For a checkpoint. `files`: by their path in the folder, such as `config.json`."""
    return {
        HF_FILES: {
            name: torch.frombuffer(bytearray(content), dtype=torch.uint8)
            if content
            else torch.empty(0, dtype=torch.uint8)
            for name, content in sorted(files.items())
        }
    }


def names_in(folder: Path) -> list[str]:
    """The files of a folder of Hugging Face that are kept: none if it has no config.json."""
    if not (folder / CONFIG).is_file():
        return []
    return _names_in(folder)


def _names_in(folder: Path) -> list[str]:
    templates = (f"{_TEMPLATES}/{path.name}" for path in folder.glob(f"{_TEMPLATES}/*.jinja"))
    return sorted(name for name in (*_NAMES, *templates) if may_be_kept(name) and (folder / name).is_file())


def may_be_kept(name: str) -> bool:
    """Whether a file of this name, a path in its folder, can be written beside weights: it is none of these, no code,
    names no other weights, and no way out of the folder."""
    return name not in _NEVER and _NAME.fullmatch(name) is not None


def read_names(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Raises ConfigurationError if they are too large to be what they are called."""
    names = list(names)
    total = sum((folder / name).stat().st_size for name in names)
    if total > MOST_BYTES:
        raise ConfigurationError(
            f"{folder} has {total} bytes of configuration and tokenizer, and {MOST_BYTES} are the most. Move what does "
            "not belong to the model away."
        )
    return {name: (folder / name).read_bytes() for name in names}


def given_files(path: Path) -> dict[str, bytes]:
    """What the user has named: a config.json under any name, or a folder with it. Raises ConfigurationError."""
    try:
        if path.is_dir():
            if not (found := _names_in(path)):
                raise ConfigurationError(f"{path} has no {CONFIG} and no tokenizer.")
            return read_names(path, found)
        return {CONFIG: path.read_bytes()}
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}. Name a config.json, or a folder.") from None


def kept_in(contents: Contents) -> dict[str, str]:
    """Name of each file that the checkpoint keeps -> its tensor's in the layout. If several components keep one, the
    component `hf_files` counts."""
    found: dict[str, str] = {}
    for unit in sorted(contents.units, key=lambda unit: unit.name.partition("@")[0] == HF_FILES):
        if unit.kind in (Kind.STATEFUL, Kind.VALUE):
            found |= _refs(decode_tree(unit.tree))
    entries = contents.layout.tensors
    return {name: tensor for name, tensor in found.items() if entries[tensor].dtype == "uint8"}


def _refs(tree: Any) -> dict[str, str]:
    files = tree.get(HF_FILES) if isinstance(tree, dict) else None
    if not isinstance(files, dict):
        return {}
    # The names become paths of this machine.
    return {
        name: ref.name
        for name, ref in files.items()
        if isinstance(name, str) and may_be_kept(name) and isinstance(ref, TensorRef)
    }


def read_kept(source: CheckpointSource, contents: Contents, without: Collection[str] = ()) -> dict[str, bytes]:
    """The kept files but those `without`, verified. Raises ConfigurationError if they are too large for this, and
    ChunkLost if no copy has the right bytes."""
    kept = {name: tensor for name, tensor in kept_in(contents).items() if name not in without}
    if not kept:
        return {}
    total = sum(contents.layout.tensors[tensor].total_bytes for tensor in kept.values())
    if total > MOST_BYTES:
        raise ConfigurationError(
            f"The checkpoint keeps {total} bytes of configuration and tokenizer, and {MOST_BYTES} are the most."
        )
    read = read_tensors(source, contents, kept.values(), lambda count: None)
    return {name: row_major_bytes(read[tensor]).tobytes() for name, tensor in kept.items()}


def read_config(content: bytes) -> dict[str, Any]:
    """Without the name of a file of weights, which is that of the folder it came from. Raises ConfigurationError."""
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{CONFIG} is no JSON: {error}. Give the right one with --config.") from None
    if not isinstance(config, dict):
        raise ConfigurationError(f"{CONFIG} is no JSON object. Give the right one with --config.")
    config.pop("transformers_weights", None)
    return config


def with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """from_pretrained() makes the model in the dtype that the config names, whatever the files have."""
    named = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
    return {**config, **dict.fromkeys(named, dtype)}
