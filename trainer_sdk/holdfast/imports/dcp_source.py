"""A folder of torch.distributed.checkpoint. Flow: sources -> **dcp_source** -> source_state.

torch reads the folder's `.metadata` with plain pickle, which can run any code. Here it is unpickled with the classes
that DCP's own writer puts there, and with no others: they hold data, and making one runs nothing. A pickle can also set
attributes, of a class too. Here it sets only those of the objects that it made itself. DCP's reader reads the tensors
in the other files with `weights_only=True`, and the values are read so here.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import sys
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.overrides import TorchFunctionMode

from holdfast.dcp.metadata import nested
from holdfast.errors import TreeFormatError
from holdfast.imports.source_state import SourceState, components_in, placeholder, read_description
from holdfast.imports.torch_file import load_without_pickle
from holdfast.layout.chunk_bytes import Bytes, Runs
from holdfast.state.tensors import row_major_bytes
from holdfast.state.tree import MAX_DEPTH
from holdfast_client.errors import ConfigurationError
from holdfast_protocol.index_documents import tiles


def _path(*parts: str) -> str:
    """In place of the path classes. Where the folder was is not used."""
    return "/".join(parts)


_MOST_PACKED = 100
"""A tensor may have this many bytes for each byte of the folder. DCP's writer can compress what it stores."""
_ORDER = "byteorder"
"""The end of the name of torch's record of the order of bytes."""
_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED: Mapping[tuple[str, str], Any] = {
    **{
        (_METADATA, name): getattr(metadata, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): OrderedDict,
    # From Python 3.13 on the module has another name.
    **{(module, name): _path for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")},
}


class _MetadataUnpickler(pickle._Unpickler):
    """Python's own, because that in C lets nobody in between when it sets attributes."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        found = _ALLOWED.get((module_name, global_name))
        if found is None and module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            found = getattr(torch, global_name)
        if found is None:
            raise _NotAllowedError(f"{module_name}.{global_name}")
        return found

    def _build(self: Any) -> None:
        made = self.stack[-2]
        if isinstance(made, type) or not dataclasses.is_dataclass(made):
            raise TypeError(f"it sets attributes of {made!r:.200}")
        pickle._Unpickler.dispatch[pickle.BUILD[0]](self)

    dispatch = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: _build}  # noqa: RUF012 - as the class above has it


class _NotAllowedError(Exception):
    """Its text: the name that pickle asked for."""


class _Window(io.RawIOBase):
    """A part of a mapped file as a file. torch's own has no right end for zipfile, which seeks from there."""

    def __init__(self, content: Bytes) -> None:
        self._content = content
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._at = offset + (0, self._at, self._content.size)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        part = self._content[self._at : self._at + len(buffer)]
        buffer[: part.size] = part.data
        self._at += part.size
        return part.size


class _Reader(FileSystemReader):
    """Of metadata that was read already."""

    def __init__(self, folder: Path, known: Metadata) -> None:
        super().__init__(folder)
        self._folder = folder
        self._known = known
        self._mapped: dict[str, Bytes] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._known

    def in_place(self, fqn: str, piece: ChunkStorageMetadata, dtype: torch.dtype) -> Bytes | None:
        """The row-major bytes of a piece in its mapped file. None if they do not lie there so: then torch reads it."""
        stored: filesystem._StorageInfo = self._known.storage_data[MetadataIndex(fqn, piece.offsets)]
        if stored.transform_descriptors:
            return None
        if stored.relative_path not in self._mapped:
            self._mapped[stored.relative_path] = np.memmap(self._folder / stored.relative_path, np.uint8, "r")
        content: Bytes = np.asarray(self._mapped[stored.relative_path])[stored.offset : stored.offset + stored.length]
        with zipfile.ZipFile(_Window(content)) as packed:
            orders = {packed.read(name) for name in packed.namelist() if name.endswith(_ORDER)}
            is_packed = any(each.compress_type != zipfile.ZIP_STORED for each in packed.infolist())
        if is_packed or orders - {sys.byteorder.encode()}:
            return None
        # On the device `meta` nothing is read, and torch 2.13 says where it would be.
        like = torch.load(cast("IO[bytes]", _Window(content)), map_location="meta", weights_only=True)
        offset = getattr(like.untyped_storage(), "_checkpoint_offset", None)
        is_as_said = like.dtype == dtype and like.shape == piece.sizes and like.is_contiguous()
        if offset is None or not is_as_said or like.is_conj() or like.is_neg():
            return None
        begin = offset + like.storage_offset() * dtype.itemsize
        found = content[begin : begin + like.nbytes]
        return found if found.size == like.nbytes else None


class _Planner(DefaultLoadPlanner):
    """Loads tensors in place, and values without pickle."""

    def __init__(self, folder: Path) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._folder = folder
        self.values: dict[str, Any] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        fqn = read_item.dest_index.fqn
        self.values[fqn] = load_without_pickle(value, f"{fqn!r:.200} in {self._folder}", mmap=False)


class _CheckedCopies(TorchFunctionMode):
    """DCP's reader copies each piece into the tensor. A copy would convert another dtype, or repeat what is stored
    once, without a word."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_ and args[1].nbytes > args[1].untyped_storage().nbytes():
            raise ValueError("a tensor repeats its elements, and DCP's own writer stores each")
        if func is torch.Tensor.copy_ and args[0].dtype != args[1].dtype:
            raise ValueError(f"a tensor is stored as {args[1].dtype}, and the metadata says {args[0].dtype}")
        return func(*args, **(kwargs or {}))


def open_dcp_folder(folder: Path, only: Collection[str]) -> SourceState:
    """`only`: the components whose values are read; without any, all. Raises ConfigurationError for what needs pickle,
    by its name, and for a folder that is damaged."""
    known = _read_metadata(folder / ".metadata")
    reader = _Reader(folder, known)
    paths = known.planner_data if isinstance(known.planner_data, dict) else {}
    reads: dict[int, Callable[[], Runs]] = {}
    flat: dict[str, Any] = {}
    values: list[str] = []
    for fqn, described in known.state_dict_metadata.items():
        if isinstance(described, TensorStorageMetadata):
            flat[fqn] = placeholder(tuple(described.size), described.properties.dtype)
            reads[id(flat[fqn])] = partial(_runs_of, reader, folder, fqn, described, flat[fqn])
        elif not only or str(next(iter(paths.get(fqn, ())), fqn)) in only:
            values.append(fqn)
    planner = _Planner(folder)
    if values:
        _load(folder, dict.fromkeys(values), reader, planner)
    try:
        found = nested({**flat, **planner.values}, known.planner_data)
    except TreeFormatError as error:
        raise ConfigurationError(f"{folder / '.metadata'} cannot be read: {error}.") from None
    return SourceState(components_in(found), reads)


def _read_metadata(path: Path) -> Metadata:
    pickled = read_description(path)
    try:
        known = _MetadataUnpickler(io.BytesIO(pickled)).load()
        if not isinstance(known, Metadata):
            raise TypeError(f"it holds a {type(known).__name__}")
        if any(not isinstance(fqn, str) for fqn in known.state_dict_metadata):
            raise TypeError("a name in it is no text")
        if isinstance(known.planner_data, dict):
            _check_places(known.planner_data)
        tensor_bytes = {
            fqn: _whole_bytes(fqn, described)
            for fqn, described in known.state_dict_metadata.items()
            if isinstance(described, TensorStorageMetadata)
        }
        files = {Path(stored.relative_path) for stored in known.storage_data.values()}
    except _NotAllowedError as error:
        raise ConfigurationError(
            f"{path} needs pickle, which can run any code, for {error}. DCP's own writer puts no such thing there. "
            "Load the checkpoint where you trust it, and save it again with torch.distributed.checkpoint.save()."
        ) from None
    except Exception as error:  # whatever a damaged pickle leads to
        raise ConfigurationError(f"{path} cannot be read: {error}.") from None
    for file in files:
        if file.is_absolute() or ".." in file.parts or "\0" in str(file):
            raise ConfigurationError(f"{path} names {str(file)!r:.200}, which is not in its folder.")
    most_bytes = _MOST_PACKED * sum((path.parent / file).stat().st_size for file in files)
    for fqn, wanted_bytes in tensor_bytes.items():
        if wanted_bytes > most_bytes:
            raise ConfigurationError(f"{path} cannot be read: {fqn!r:.200} is larger than what its files can hold.")
    return known


def _whole_bytes(fqn: str, described: TensorStorageMetadata) -> int:
    """Of a tensor that its pieces make whole: DCP's planner would leave what no piece has as the memory was. Raises
    ValueError."""
    size = tuple(described.size)
    if min(size, default=0) < 0:
        raise ValueError(f"the size of {fqn!r:.200} is {size}")
    boxes = [(tuple(piece.offsets), tuple(piece.sizes)) for piece in described.chunks]
    for box in boxes:
        for begin, length, whole in zip(*box, size, strict=True):
            if begin < 0 or length < 0 or begin + length > whole:
                raise ValueError(f"a piece of {fqn!r:.200} lies outside it")
    if not tiles(size, boxes):
        raise ValueError(f"the pieces of {fqn!r:.200} do not make it whole, each element once")
    return prod(size) * described.properties.dtype.itemsize


def _check_places(paths: dict[Any, Any]) -> None:
    """Raises TypeError."""
    for fqn, path in paths.items():
        is_path = isinstance(path, tuple) and 0 < len(path) <= MAX_DEPTH
        if not is_path or not all(isinstance(step, str | int) for step in path):
            raise TypeError(f"the place of {fqn!r:.200} in the state is malformed")


def _runs_of(reader: _Reader, folder: Path, fqn: str, described: TensorStorageMetadata, like: torch.Tensor) -> Runs:
    return _in_place(reader, fqn, described) or Runs((row_major_bytes(_read_tensor(reader, folder, fqn, like)),))


def _in_place(reader: _Reader, fqn: str, described: TensorStorageMetadata) -> Runs | None:
    """In the mapped files, if each piece is a run of the whole tensor, as it is for whole tensors and for shards by
    rows."""
    pieces = sorted(described.chunks, key=lambda piece: tuple(piece.offsets))
    runs = []
    for piece in pieces:
        if not _is_run(tuple(piece.sizes), tuple(described.size)):
            return None
        try:
            found = reader.in_place(fqn, piece, described.properties.dtype)
        except Exception:  # of a damaged file, which torch then names as it always does
            return None
        if found is None:
            return None
        runs.append(found)
    return Runs(tuple(runs))


def _is_run(piece: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether its elements follow each other in the whole, row-major."""
    cut = next((axis for axis, size in enumerate(piece) if size != 1), len(piece))
    return 0 not in piece and piece[cut + 1 :] == whole[cut + 1 :]


def _read_tensor(reader: _Reader, folder: Path, fqn: str, like: torch.Tensor) -> torch.Tensor:
    read = torch.empty(like.shape, dtype=like.dtype)
    with _CheckedCopies():
        _load(folder, {fqn: read}, reader, _Planner(folder))
    return read


def _load(folder: Path, state: dict[str, Any], reader: _Reader, planner: _Planner) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # there is no process group, on purpose
            load(state, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as error:  # a BaseException
        [failure, *_] = [each for each, _ in error.failures.values()]
        if isinstance(failure, ConfigurationError | OSError):
            raise failure from None
        raise ConfigurationError(f"{folder} cannot be read: {failure}.") from None
