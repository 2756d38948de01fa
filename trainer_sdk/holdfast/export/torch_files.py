"""`<unit>.pt` for torch.load(weights_only=True): the component's own state_dict. One file per unit."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from holdfast.export.contents import Unit
from holdfast.export.state_dicts import Tensors, flat, is_plain, state_dict_of


def write_torch_file(folder: Path, unit: Unit, tensors: Tensors) -> str:
    """The file's name."""
    content = state_dict_of(unit, tensors, parameters_by_name=False)
    path = folder / f"{unit.name}.pt"
    with path.open("xb") as file:
        torch.save(content if is_plain(content) else flat(unit, tensors), file)
        file.flush()
        os.fsync(file.fileno())
    return path.name
