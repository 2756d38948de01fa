"""`holdfast.safe_open(url)`: what safetensors.safe_open gives, of a checkpoint by URL. safetensors itself opens only
files that have a path.

URL -> holdfast_client.filesystem (lease, verified chunks) -> the header, then the tensors that are asked for
"""

from __future__ import annotations

import json
import threading
from math import prod
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch

from holdfast.errors import ConfigurationError
from holdfast.state.tensors import torch_dtype
from holdfast_client.filesystem.places import FACTS
from holdfast_client.filesystem.safetensors_layout import FORMAT_NAMES

_TORCH_NAMES = {name: dtype for dtype, name in FORMAT_NAMES.items()}


class _Stored(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def item_bytes(self) -> int:
        return self.dtype.itemsize


class StoredSlice:
    """A tensor that is read when it is indexed. Rows of the first dimension are read alone; any other index reads the
    tensor whole. Chunks are fetched whole in any case."""

    def __init__(self, opened: safe_open, stored: _Stored) -> None:
        self._opened = opened
        self._stored = stored

    def get_shape(self) -> list[int]:
        return list(self._stored.shape)

    def get_dtype(self) -> str:
        """As safetensors names it: `F32`."""
        return FORMAT_NAMES[str(self._stored.dtype).removeprefix("torch.")]

    def __getitem__(self, index: Any) -> torch.Tensor:
        """As torch indexes. Raises IndexError."""
        first, *others = (index if isinstance(index, tuple) else (index,)) or (...,)
        shape = self._stored.shape
        if not shape or not isinstance(first, slice) or first.step not in (None, 1):
            return self._opened.read(self._stored)[index]
        begin, end, _ = first.indices(shape[0])
        row_bytes = prod(shape[1:]) * self._stored.item_bytes
        rows = self._stored._replace(
            shape=(max(0, end - begin), *shape[1:]), begin=self._stored.begin + begin * row_bytes
        )
        return self._opened.read(rows)[(slice(None), *others)]


class safe_open:  # noqa: N801  (as safetensors calls its own)
    """A `.safetensors` file of a checkpoint, lazily: `holdfast://demo/gpt@best:loss/model.safetensors`.

    with holdfast.safe_open("holdfast://demo/gpt@latest/model.safetensors") as file:
        weight = file.get_tensor("embed.weight")

    It reads what is asked for, every byte verified, and holds a read lease until it is closed. Threads take turns.
    """

    def __init__(self, url: str, framework: str = "pt", device: str | torch.device = "cpu", **options: Any) -> None:
        """`device`: where tensors are given. `options`: as fsspec takes them, such as `token`. Raises
        ConfigurationError without fsspec or for another framework, FileNotFoundError for what is not there, and
        HoldfastError."""
        if framework not in ("pt", "torch", "pytorch"):
            raise ConfigurationError(f"framework={framework!r} is not supported; use 'pt'.")
        try:
            from holdfast_client.filesystem.fsspec_filesystem import HoldfastFileSystem
        except ModuleNotFoundError as error:
            raise ConfigurationError(f"{error}. Install it: pip install 'holdfast[url]'.") from None
        if not url.startswith("holdfast://"):
            raise ConfigurationError(f"{url!r} is no holdfast:// URL; safetensors.safe_open opens files.")
        if url.endswith(f"/{FACTS}"):
            raise ConfigurationError(f"{url!r} is no file of tensors; read it with fsspec.open.")
        self._device = torch.device(device)
        self._turn = threading.Lock()
        self._file = HoldfastFileSystem(**options).open(url)
        try:
            length = int.from_bytes(self._file.read(8), "little")
            header = json.loads(self._file.read(length))
        except BaseException:
            self.close()
            raise
        self._metadata: dict[str, str] = header.pop("__metadata__", {})
        self._tensors = {
            name: _Stored(
                torch_dtype(_TORCH_NAMES[form["dtype"]]), tuple(form["shape"]), 8 + length + form["data_offsets"][0]
            )
            for name, form in header.items()
        }

    def keys(self) -> list[str]:
        return sorted(self._tensors)

    def offset_keys(self) -> list[str]:
        """In the order of the file, in which they are read at least cost."""
        return list(self._tensors)

    def metadata(self) -> dict[str, str]:
        """`format`, and the tensor that each tied one is tied to."""
        return dict(self._metadata)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Raises KeyError for a tensor that is not in the file, ChunkLost if no copy has its right bytes."""
        return self.read(self._tensors[name])

    def get_tensors(self) -> dict[str, torch.Tensor]:
        return {name: self.get_tensor(name) for name in self._tensors}

    def get_slice(self, name: str) -> StoredSlice:
        """Reads when it is indexed. Raises KeyError."""
        return StoredSlice(self, self._tensors[name])

    def read(self, stored: _Stored) -> torch.Tensor:
        raw = torch.empty(prod(stored.shape) * stored.item_bytes, dtype=torch.uint8)
        if raw.numel():
            with self._turn:  # a file has one position
                self._file.seek(stored.begin)
                self._file.readinto(raw.numpy())
        return raw.view(stored.dtype).reshape(stored.shape).to(self._device)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
