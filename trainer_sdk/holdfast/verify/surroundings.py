"""Objects that the training loop reaches, that change as it goes, and that are not in the state: forgotten state is
found here.

In the script: recorder -> **surroundings**. From the frames of Holdfast's caller, innermost first, through local
variables, attributes and closures, a few levels deep. Reads only; calls nothing but an object's own state_dict().
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from types import FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Sampler

from holdfast.verify.fingerprints import flat, tensor_digest
from holdfast.verify.records import Outside

_DEPTH = 4
_ITEMS = 100
"""The most that are searched of one container."""
_VISITS = 5000
_LOCAL_TENSORS = 64
_CLOSED = ("holdfast", "torch", "numpy", "builtins", "logging", "threading", "concurrent", "pathlib", "argparse")
"""Packages whose objects are not searched; their frames are skipped."""


class Surroundings:
    """One search. `outside` and `locals` are as in records.Snapshot."""

    def __init__(self, frame: FrameType | None, state: Mapping[str, Any]) -> None:
        self.outside: dict[str, Outside] = {}
        self.locals: dict[str, str] = {}
        self._kept = _storages(state.values())
        self._seen = {id(value) for value in state.values()} | {id(state)}
        self._of_data: set[int] = set()
        self._generators: dict[str, Any] = {}
        self._waiting: list[tuple[str, Any, int]] = []
        for each in _user_frames(frame):
            self._note_tensors(each)
            self._waiting += _variables(each)
        self._walk()

    def _note_tensors(self, frame: FrameType) -> None:
        """The batch is known by its bits, and is nowhere else."""
        if frame.f_locals is frame.f_globals and frame.f_globals.get("__name__") != "__main__":
            return
        for name, value in list(frame.f_locals.items()):
            for path, tensor in _tensors(name, value):
                if len(self.locals) < _LOCAL_TENSORS and self._is_fresh(tensor):
                    self.locals.setdefault(path, tensor_digest(tensor))

    def _is_fresh(self, tensor: torch.Tensor) -> bool:
        """Neither computed from parameters nor part of the state, and of plain bytes."""
        if tensor.grad_fn is not None or tensor.requires_grad or isinstance(tensor, DTensor):
            return False
        return tensor.layout is torch.strided and not tensor.is_meta and _storage(tensor) not in self._kept

    def _walk(self) -> None:
        visits = 0
        while self._waiting and visits < _VISITS:
            path, value, depth = self._waiting.pop(0)
            if id(value) in self._seen:
                continue
            self._seen.add(id(value))
            visits += 1
            # A foreign attribute or state_dict() may raise anything: a save never asks for it.
            with contextlib.suppress(Exception):
                if isinstance(value, DataLoader | Sampler):
                    self._of_data.add(id(getattr(value, "generator", None)))
                if kind := self._kind(value):
                    self._note(path, kind, value)
                if depth < _DEPTH:
                    self._waiting += [(name, item, depth + 1) for name, item in _inside(path, value)]
        for path, generator in self._generators.items():
            parts = {"state": "".join(text for _, text in flat(_generator_state(generator), ""))}
            kind = "data_generator" if id(generator) in self._of_data else "generator"
            self.outside[path] = Outside(kind, type(generator).__qualname__, parts)

    def _kind(self, value: Any) -> str | None:
        if isinstance(value, torch.optim.Optimizer):
            return "optimizer"
        if isinstance(value, LRScheduler):
            return "lr_scheduler"
        if isinstance(value, torch.amp.GradScaler):
            return "grad_scaler"
        if isinstance(value, torch.nn.Module):
            return "model"
        if isinstance(value, torch.Generator | random.Random | np.random.Generator | np.random.RandomState):
            return None if value is torch.default_generator else "generator"
        # Asked of the class, because a proxy answers for every name.
        if all(callable(getattr(type(value), name, None)) for name in ("state_dict", "load_state_dict")):
            return "stateful"
        return None

    def _note(self, path: str, kind: str, value: Any) -> None:
        if kind == "generator":
            self._generators.setdefault(path, value)  # its use is known when all is seen
        elif parts := dict(self._parts(kind, value)):
            self.outside.setdefault(path, Outside(kind, type(value).__qualname__, parts))

    def _parts(self, kind: str, value: Any) -> Iterator[tuple[str, str]]:
        if kind == "model":
            for name, tensor in value.state_dict().items():
                if isinstance(tensor, torch.Tensor) and _storage(tensor) not in self._kept:
                    yield name, tensor_digest(tensor)
        else:
            for name, text in flat(value.state_dict(), ""):
                yield name.lstrip("."), text


def _user_frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        if not _is_closed(frame.f_globals.get("__name__", "")):
            yield frame
        frame = frame.f_back


def _variables(frame: FrameType) -> Iterator[tuple[str, Any, int]]:
    found = list(frame.f_locals.items())
    if frame.f_globals is not frame.f_locals and "site-packages" not in frame.f_code.co_filename:
        found += frame.f_globals.items()
    for name, value in found:
        if not name.startswith("__") and not isinstance(value, ModuleType | type):
            yield name, value, 0


def _inside(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"{path}[{key!r:.40}]", item) for key, item in list(value.items())[:_ITEMS])
    elif isinstance(value, list | tuple):
        yield from ((f"{path}[{at}]", item) for at, item in enumerate(value[:_ITEMS]))
    elif isinstance(value, GeneratorType):
        if value.gi_frame is not None:
            yield from ((f"{path}.{name}", item) for name, item in list(value.gi_frame.f_locals.items()))
    elif isinstance(value, FunctionType):
        # A training step that was made by another function holds its model and optimizer in no variable of a frame.
        if not _is_closed(value.__module__ or ""):
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                with contextlib.suppress(ValueError):  # not assigned yet
                    yield f"{path}.{name}", cell.cell_contents
    elif isinstance(value, MethodType):
        yield f"{path}.__self__", value.__self__
        yield f"{path}.__func__", value.__func__
    elif isinstance(value, partial):
        yield from ((f"{path}.{name}", getattr(value, name)) for name in ("func", "args", "keywords"))
    elif isinstance(value, DataLoader):
        for name in ("generator", "sampler", "batch_sampler", "dataset"):
            yield f"{path}.{name}", getattr(value, name, None)
    elif _is_open(value):
        yield from ((f"{path}.{name}", item) for name, item in list(getattr(value, "__dict__", {}).items())[:_ITEMS])


def _tensors(path: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, list | tuple):
        yield from ((f"{path}[{at}]", item) for at, item in enumerate(value[:8]) if isinstance(item, torch.Tensor))
    elif isinstance(value, Mapping):
        items = list(value.items())[:8]
        yield from ((f"{path}[{key!r:.40}]", item) for key, item in items if isinstance(item, torch.Tensor))


def _generator_state(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return repr(value.getstate())
    return value.bit_generator.state if isinstance(value, np.random.Generator) else value.get_state(legacy=False)


def _storages(values: Any) -> set[int]:
    """The memory of the state's tensors: another object that holds one of them holds state."""
    found: set[int] = set()
    for value in values:
        if isinstance(value, torch.nn.Module):
            found.update(map(_storage, value.state_dict().values()))
        elif isinstance(value, torch.Tensor):
            found.add(_storage(value))
        elif isinstance(value, Mapping):
            found |= _storages(value.values())
        elif isinstance(value, list | tuple):
            found |= _storages(value)
    return found


def _storage(tensor: Any) -> int:
    if not isinstance(tensor, torch.Tensor):
        return 0
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr() if local.layout is torch.strided else 0


def _is_open(value: Any) -> bool:
    # A module's parts belong to it, and they are many.
    if isinstance(value, torch.nn.Module | ModuleType | type):
        return False
    return isinstance(value, Sampler) or not _is_closed(type(value).__module__)


def _is_closed(module: str) -> bool:
    return module.partition(".")[0] in _CLOSED or module in sys.builtin_module_names
