"""`<unit>.safetensors` for safetensors.torch.load_file: names to tensors. One file per unit.

The format has no ties: as in safetensors' own save_model, one name of tied tensors is kept, and the metadata maps the
others to it (`{dropped: kept}`), so that load_model ties them again. Dtypes that it lacks are refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save, save_file

from holdfast.export.contents import Unit
from holdfast.export.state_dicts import Tensors
from holdfast.state.tensors import torch_dtype
from holdfast_client.errors import ConfigurationError
from holdfast_protocol.index_documents import Layout


def check_safetensors(layout: Layout, units: Iterable[Unit]) -> None:
    """Raises ConfigurationError naming the first tensor whose dtype the format cannot hold."""
    first: dict[str, str] = {}
    for unit in units:
        for name in unit.tensors:
            first.setdefault(layout.tensors[name].dtype, name)
    check_dtypes(first)


def check_dtypes(used: Mapping[str, str]) -> None:
    """`used`: dtype -> the first tensor that has it. Raises ConfigurationError for one that the format cannot hold."""
    for dtype, name in used.items():
        if not _can_hold(dtype):
            raise ConfigurationError(
                f"safetensors cannot hold {name!r:.200}, which is {dtype}. Choose --format torch or --format dcp."
            )


def _can_hold(dtype: str) -> bool:
    try:
        kept = load(save({"x": torch.zeros(1, dtype=torch_dtype(dtype))}))
    except (KeyError, ValueError, RuntimeError, SafetensorError):  # torch has no zeros of four bits
        return False
    return kept["x"].dtype == torch_dtype(dtype)


def write_safetensors_file(folder: Path, unit: Unit, tensors: Tensors, layout: Layout) -> str:
    """The file's name."""
    ties = {name: layout.tensors[name].alias_of for name in unit.tensors}
    kept = {unit.key_of(name): tensors[name].contiguous() for name, tied_to in ties.items() if tied_to is None}
    metadata = {unit.key_of(name): unit.key_of(tied_to) for name, tied_to in ties.items() if tied_to is not None}
    path = folder / f"{unit.name}.safetensors"
    save_file(kept, path, metadata={"format": "pt", **metadata})
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return path.name
