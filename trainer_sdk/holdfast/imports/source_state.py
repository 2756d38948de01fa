"""The state of one source, as its reader found it. Its tensors are not read yet.

Flow: torch_file | safetensors_weights | dcp_source -> **source_state** -> checkpoint_plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from holdfast.layout.chunk_bytes import Runs
from holdfast.state.tensors import row_major_bytes
from holdfast_client.errors import ConfigurationError

MODEL = "model"
OPTIMIZER = "optimizer"
_MOST_DESCRIPTION_BYTES = 1024**3


@dataclass(frozen=True)
class SourceState:
    """By component. The tensors lie in mapped files, or `reads` has what gives their bytes, by id()."""

    components: Mapping[str, Any]
    reads: Mapping[int, Callable[[], Runs]] = field(default_factory=dict)

    def runs_of(self, tensor: torch.Tensor) -> Runs:
        return self.reads[id(tensor)]() if id(tensor) in self.reads else Runs((row_major_bytes(tensor),))


def placeholder(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of this shape on the host that takes no memory for it."""
    return torch.empty((), dtype=dtype).expand(shape)


def read_description(path: Path) -> bytes:
    """What says where the tensors of a source are. Raises ConfigurationError if it is too large for that."""
    if path.stat().st_size > _MOST_DESCRIPTION_BYTES:
        raise ConfigurationError(f"{path} cannot be read: it has more than {_MOST_DESCRIPTION_BYTES} bytes.")
    return path.read_bytes()


def components_in(loaded: dict[Any, Any]) -> dict[str, Any]:
    """The keys of a saved dict as components. A bare state_dict is the component `model`, that of an optimizer is
    `optimizer`. Raises ConfigurationError for keys that are no text."""
    if is_model(loaded):
        return {MODEL: loaded}
    if loaded.keys() == {"state", "param_groups"}:
        return {OPTIMIZER: loaded}
    for key in loaded:
        if not isinstance(key, str):
            raise ConfigurationError(f"Its key {key!r:.80} is no text, so it names no component. Save it under a name.")
    return loaded


def is_model(value: Any) -> bool:
    """Whether it looks like a module's state_dict: names and tensors, and what get_extra_state() gave."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        return False
    are_tensors = {key: isinstance(each, torch.Tensor) for key, each in value.items()}
    return any(are_tensors.values()) and all(is_tensor or is_extra(key) for key, is_tensor in are_tensors.items())


def is_extra(key: str) -> bool:
    return key == "_extra_state" or key.endswith("._extra_state")
