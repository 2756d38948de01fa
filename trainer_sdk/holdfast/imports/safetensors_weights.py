"""Weights in safetensors files: one file, or several with Hugging Face's index. Their tensors lie in the mapped files.

Flow: sources -> **safetensors_weights** -> source_state. The format has no ties. What save_model() of safetensors and
`holdfast checkpoints pull` note of them in a file's metadata (`{dropped: kept}`) ties the names again. A file of
Hugging Face's has one name of a tied pair, and the model ties the other when it is built. With an index, a file
gives the tensors that the index says, whatever else it has.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from holdfast.imports.source_state import MODEL, SourceState, read_description
from holdfast_client.errors import ConfigurationError


def open_safetensors(path: Path) -> SourceState:
    """`path`: the file, or the index. Raises ConfigurationError for a file that is damaged, or lacks what the index
    names."""
    if path.suffix != ".json":
        tensors, ties = _tensors_of(path)
        return SourceState({MODEL: tensors | {name: tensors[kept] for name, kept in ties.items()}})
    files = files_of(path)
    indexed = {name for names in files.values() for name in names}
    found: dict[str, torch.Tensor] = {}
    for file, names in files.items():
        tensors, ties = _tensors_of(path.parent / file)
        for name in names:
            if name not in tensors and name not in ties:
                raise ConfigurationError(f"{path} says that {file} has {name!r:.200}, and it does not. Copy it again.")
        noted = [name for name, kept in ties.items() if kept in names and name not in indexed]
        found |= {name: tensors[ties.get(name, name)] for name in (*names, *noted)}
    return SourceState({MODEL: found})


def files_of(index: Path) -> dict[str, list[str]]:
    """The names of the tensors that are to be taken from each file beside it. Raises ConfigurationError."""
    try:
        weights = json.loads(read_description(index))["weight_map"]
        files: dict[str, list[str]] = {}
        for name, file in weights.items():
            if Path(file).name != file or "\0" in file:
                raise ValueError(f"{file!r:.200} is no name of a file beside it")
            os.fsencode(file)  # raises ValueError for what no file can be called
            files.setdefault(file, []).append(name)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigurationError(f"{index} is no index of safetensors files: {error}.") from None
    return files


def _tensors_of(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Its tensors, and by the name of each that is tied to one of them, that one's name."""
    path.stat()  # a missing file is told by its name
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
            noted = file.metadata() or {}
    except SafetensorError as error:
        raise ConfigurationError(f"{path} cannot be read: {error}.") from None
    noted.pop("format", None)  # {"format": "pt"} of Hugging Face ties nothing, whatever tensor is called so
    return tensors, {name: kept for name, kept in noted.items() if name not in tensors and kept in tensors}
