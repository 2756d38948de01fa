"""Weights in safetensors files: one file, or several with Hugging Face's index. Their tensors lie in the mapped files.

Flow: sources -> **safetensors_weights** -> source_state. The format has no ties. What save_model() of safetensors and
`holdfast checkpoints pull` note of them in a file's metadata (`{dropped: kept}`) ties the names again. A file of
Hugging Face's has one name of a tied pair, and the model ties the other when it is built.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from holdfast.imports.source_state import MODEL, SourceState
from holdfast_client.errors import ConfigurationError


def open_safetensors(path: Path) -> SourceState:
    """`path`: the file, or the index. Raises ConfigurationError for a file that is damaged, or lacks what the index
    names."""
    if path.suffix != ".json":
        return SourceState({MODEL: _tensors_of(path)})
    found: dict[str, torch.Tensor] = {}
    for file, names in _files_of(path).items():
        tensors = _tensors_of(path.parent / file)
        for name in names:
            if name not in tensors:
                raise ConfigurationError(f"{path} says that {file} has {name!r:.200}, and it does not. Copy it again.")
        found |= tensors
    return SourceState({MODEL: found})


def _files_of(index: Path) -> dict[str, list[str]]:
    try:
        weights = json.loads(index.read_bytes())["weight_map"]
        files: dict[str, list[str]] = {}
        for name, file in weights.items():
            if Path(file).name != file:
                raise ValueError(f"{file!r:.200} is no name of a file beside it")
            files.setdefault(file, []).append(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{index} is no index of safetensors files: {error}.") from None
    return files


def _tensors_of(path: Path) -> dict[str, torch.Tensor]:
    path.stat()  # a missing file is told by its name
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
            noted = file.metadata() or {}
    except SafetensorError as error:
        raise ConfigurationError(f"{path} cannot be read: {error}.") from None
    ties = {name: tensors[kept] for name, kept in noted.items() if name not in tensors and kept in tensors}
    return tensors | ties
