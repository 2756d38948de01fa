"""A file of torch.save, mapped and read without pickle. Flow: sources -> **torch_file** -> source_state."""

from __future__ import annotations

import pickle
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from holdfast.imports.source_state import SourceState, components_in
from holdfast_client.errors import ConfigurationError

_REPEATED_BYTES = 1024**3
"""An expanded tensor says little of its size: a file of some bytes can have one of any."""


def open_torch_file(path: Path) -> SourceState:
    """Raises ConfigurationError for what needs pickle, by its name, and for a file that is damaged, compressed or no
    dict."""
    try:
        with zipfile.ZipFile(path) as file:  # a missing file is told by its name
            records = file.infolist()
            packed = [each.filename for each in records if each.compress_type != zipfile.ZIP_STORED]
            told = [] if packed else [each for each in records if each.filename.endswith("/byteorder")]
            orders = {_begin_of(file, each) for each in told}
    except (zipfile.BadZipFile, RuntimeError, ValueError, EOFError):
        raise ConfigurationError(
            f"{path} is damaged, or of a torch before 1.6. If torch.load() reads it, save it again with torch.save()."
        ) from None
    if packed:  # torch maps a record as it lies there: the tensors would be compressed bytes
        raise ConfigurationError(
            f"{path} was compressed after torch.save(): {packed[0]!r:.200} in it cannot be mapped. Load it with "
            "torch.load(), and save it again with torch.save()."
        )
    # torch turns bytes round in place: mapped, they would come back as the file has them when pages are given back.
    loaded = load_without_pickle(path, str(path), mmap=orders <= {sys.byteorder.encode()})
    if not isinstance(loaded, dict):
        raise ConfigurationError(f"{path} holds a {type(loaded).__name__}. Save a dict, such as a state_dict.")
    for tensor in _tensors_in(loaded):
        stored_bytes = tensor.untyped_storage().nbytes()
        if tensor.nbytes > max(stored_bytes, _REPEATED_BYTES):
            raise ConfigurationError(
                f"{path} has a tensor of the shape {tuple(tensor.shape)} that repeats {stored_bytes} bytes. If that is "
                "meant, save what its contiguous() gives."
            )
    return SourceState(components_in(loaded))


def _begin_of(file: zipfile.ZipFile, record: zipfile.ZipInfo) -> bytes:
    with file.open(record) as opened:
        return opened.read(len("little") + 1)


def _tensors_in(loaded: Any) -> Iterator[torch.Tensor]:
    """The dense ones, each once, however the containers lie in each other."""
    left, seen = [loaded], set[int]()
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            yield value
        elif isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list | tuple | set):
            left += value


def load_without_pickle(file: Path | IO[bytes], told: str, *, mmap: bool) -> Any:
    """`told`: what it is, for messages. Raises ConfigurationError."""
    try:
        return torch.load(file, weights_only=True, mmap=mmap, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise _refusal(file, told, error) from None


def _refusal(file: Path | IO[bytes], told: str, error: Exception) -> ConfigurationError:
    try:
        if not isinstance(file, Path):
            file.seek(0)
        needed = sorted(get_unsafe_globals_in_checkpoint(file))
    except Exception:  # of a damaged file
        needed = []
    if needed:
        return ConfigurationError(
            f"{told} needs pickle, which can run any code, for {', '.join(needed[:10])}. Load it where you trust it, "
            "and save it again without these: tensors, numbers, text, lists and dicts need no pickle."
        )
    return ConfigurationError(f"{told} cannot be read: {str(error).partition(chr(10))[0][:300]}.")
