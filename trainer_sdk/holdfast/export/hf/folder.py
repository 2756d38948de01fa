"""The folder as a whole: what goes into it, and every refusal before the first weight is fetched.

Flow: pull -> **plan_folder** (names, model_files, fit) -> **write_folder** (weight_files) -> publish.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from holdfast.export.contents import Contents
from holdfast.export.hf.fit import Fit, NotKnown, fit_of
from holdfast.export.hf.model_files import CONFIG, given_files, read_config, read_kept, with_dtype
from holdfast.export.hf.names import ModelTensors, common_prefix, model_tensors
from holdfast.export.hf.weight_files import (
    INDEX,
    Weight,
    WeightFiles,
    bytes_to_fetch,
    plan_chunks,
    plan_files,
    write_files,
)
from holdfast.export.json_files import write_json
from holdfast.export.safetensors_files import check_dtypes
from holdfast.layout.reshard import ReadPlan
from holdfast.restore.checkpoint_reader import CheckpointSource
from holdfast.state.tensors import torch_dtype
from holdfast_client.errors import ConfigurationError
from holdfast_protocol.text import counted

DEFAULT_FILE_BYTES = 5 * 10**9
DTYPES: Mapping[str, str] = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "fp32": "float32",
    "float32": "float32",
}
_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
_OF_PEFT = frozenset({"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "base_layer", "modules_to_save"})
_NAMES_SHOWN = 3


@dataclass(frozen=True)
class HfChoices:
    config: Path | None = None
    """A config.json, or a folder with it and a tokenizer: in place of what the checkpoint keeps under these names."""
    dtype: str | None = None
    """A key of DTYPES: floating-point tensors are converted to it."""
    most_file_bytes: int = DEFAULT_FILE_BYTES
    prefix: str | None = None
    """Only the tensors whose names begin with it, without it."""
    check: bool = True
    """Refuse weights that the config does not fit."""


@dataclass(frozen=True)
class HfFolder:
    files: WeightFiles
    reads: ReadPlan
    beside: Mapping[str, bytes]
    """config.json, as it is written, and the other files."""
    ties: Mapping[str, str]
    """Name that is not written -> the tensor that has its bytes."""
    notes: tuple[str, ...]

    @property
    def bytes(self) -> int:
        return self.files.bytes + sum(map(len, self.beside.values()))

    def bytes_to_fetch(self, contents: Contents) -> int:
        return bytes_to_fetch(contents, self.reads)


def plan_folder(
    source: CheckpointSource,
    contents: Contents,
    *,
    only: Collection[str],
    choices: HfChoices,
    earlier: Callable[[], tuple[int, Mapping[str, bytes]] | None],
) -> HfFolder:
    """`earlier`: the files that an earlier checkpoint of the run keeps, and its step; asked if nothing else has a
    config.json. Raises ConfigurationError for anything that from_pretrained() could not load."""
    chosen = model_tensors(contents, only=only, prefix=choices.prefix)
    notes = list(chosen.notes)
    beside = _beside(source, contents, choices, earlier, notes)
    config = read_config(beside[CONFIG])
    weights = _weights(contents, chosen, choices)
    config = _with_the_weights_dtype(config, weights, notes)
    ties = _ties(chosen, contents, config, weights=weights, choices=choices, notes=notes)
    written = [weight for name, weight in weights.items() if name not in ties]
    files = plan_files(written, choices.most_file_bytes, ties)
    return HfFolder(
        files,
        plan_chunks(contents, files),
        {**beside, CONFIG: json.dumps(config, indent=2).encode() + b"\n"},
        ties,
        tuple(notes),
    )


def _beside(
    source: CheckpointSource,
    contents: Contents,
    choices: HfChoices,
    earlier: Callable[[], tuple[int, Mapping[str, bytes]] | None],
    notes: list[str],
) -> dict[str, bytes]:
    given = {} if choices.config is None else given_files(choices.config)
    found = read_kept(source, contents, without=given) | given
    if CONFIG not in found and (before := earlier()) is not None:
        step, kept = before
        notes.append(f"{', '.join(sorted(kept.keys() - found.keys()))}: from step {step}, the newest that keeps them.")
        found = {**kept, **found}
    if CONFIG not in found:
        raise ConfigurationError(
            "No config.json is known: this checkpoint keeps none, and neither does an earlier one of the run that can "
            "be read. Give one with --config, such as model.config.save_pretrained() writes, or a folder that has it, "
            "and a tokenizer."
        )
    return found


def _weights(contents: Contents, chosen: ModelTensors, choices: HfChoices) -> dict[str, Weight]:
    if choices.dtype is not None and choices.dtype not in DTYPES:
        raise ConfigurationError(f"--dtype {choices.dtype!r:.40} is not known. Give one of {', '.join(DTYPES)}.")
    into = DTYPES.get(choices.dtype or "")
    found = {}
    for name, tensor in chosen.tensors.items():
        entry = contents.layout.tensors[tensor]
        dtype = into if into is not None and entry.dtype in _FLOATS else entry.dtype
        found[name] = Weight(name, tensor, dtype, entry.shape)
    check_dtypes({weight.dtype: weight.name for weight in reversed(found.values())})
    return found


def _with_the_weights_dtype(
    config: Mapping[str, Any], weights: Mapping[str, Weight], notes: list[str]
) -> dict[str, Any]:
    """As save_pretrained() does it: from_pretrained() would convert the weights to the dtype that the model was made
    with, which is not what was trained."""
    elements = Counter[str]()
    for weight in weights.values():
        if weight.dtype in _FLOATS:
            elements[weight.dtype] += prod(weight.shape)
    if not elements:
        return dict(config)
    if len(elements) == 1:
        return with_dtype(config, next(iter(elements)))
    named = [str(config[key]) for key in ("dtype", "torch_dtype") if config.get(key) is not None]
    dtype = named[0] if named and named[0] in elements else max(elements, key=lambda each: (elements[each], each))
    others = ", ".join(sorted(elements.keys() - {dtype}))
    notes.append(
        f"The weights are of several dtypes. config.json says {dtype}, and from_pretrained() converts those in "
        f"{others} to it, but for what the model's class keeps."
    )
    return with_dtype(config, dtype)


def _ties(
    chosen: ModelTensors,
    contents: Contents,
    config: Mapping[str, Any],
    *,
    weights: Mapping[str, Weight],
    choices: HfChoices,
    notes: list[str],
) -> dict[str, str]:
    """The names that are not written: a written one has their bytes, and the model ties them when it is built."""
    ties = chosen.tied(contents.layout)

    def fit(without: Mapping[str, str]) -> Fit | NotKnown:
        return fit_of(
            config,
            {
                name: (torch_dtype(weight.dtype), weight.shape)
                for name, weight in weights.items()
                if name not in without
            },
        )

    if choices.check:
        _refuse_adapters(weights)
    found = fit(ties)
    # Weights that training tied and the config does not: each needs bytes of its own, or it would be drawn at random.
    # If nobody knows what the class ties, all of them: bytes that are there twice are tied again.
    own = set(found.missing) & ties.keys() if isinstance(found, Fit) else set(ties)
    if own:
        tied = "tied in training and not by the config" if isinstance(found, Fit) else "tied in training"
        notes.append(f"{_some(own)}: {tied}, so each is written with bytes of its own.")
        ties = {name: kept for name, kept in ties.items() if name not in own}
        found = fit(ties)
    for name, kept in list(ties.items())[:_NAMES_SHOWN]:
        notes.append(f"{name} is tied to {kept}, which is written once.")
    if len(ties) > _NAMES_SHOWN:
        notes.append(f"{len(ties) - _NAMES_SHOWN} more names are tied likewise; checkpoint.json lists them.")
    if isinstance(found, NotKnown):
        notes.append(f"Whether config.json fits the weights was not checked: {found.reason}.")
    elif found.missing or found.mismatched or _has_more_layers(found, weights):
        misfit = _misfit(found, weights, choices)
        if choices.check:
            raise ConfigurationError(f"{misfit} --no-check writes the files all the same.")
        notes.append(misfit)
    elif found.unexpected:
        notes.append(f"from_pretrained() will ignore {_some(found.unexpected)}: {found.model} has no such weights.")
    return ties


def _has_more_layers(found: Fit, weights: Collection[str]) -> bool:
    """Whether from_pretrained() would ignore a weight whose name is another's but for a number: the config is that of a
    smaller model, which would be loaded without a word."""
    ignored = frozenset(found.unexpected)
    known = {_without_numbers(name) for name in weights if name not in ignored}
    return any(_without_numbers(name) in known for name in ignored)


def _without_numbers(name: str) -> tuple[str, ...]:
    return tuple("" if part.isdigit() else part for part in name.split("."))


def _refuse_adapters(weights: Collection[str]) -> None:
    for name in weights:
        if _OF_PEFT.intersection(name.split(".")):
            raise ConfigurationError(
                f"{name!r:.200} is of a model with PEFT adapters, which from_pretrained() of the model does not know. "
                "load_weights() into such a model, then merge_and_unload() and save_pretrained()."
            )


def _misfit(found: Fit, weights: Collection[str], choices: HfChoices) -> str:
    told = []
    if found.missing:
        told.append(f"the checkpoint lacks {_some(found.missing)}")
    if found.unexpected:
        told.append(f"{found.model} has no {_some(found.unexpected)}")
    if found.mismatched:
        name, here, there = found.mismatched[0]
        more = f" (and {len(found.mismatched) - 1} more are unlike)" if len(found.mismatched) > 1 else ""
        told.append(f"{name} is {list(here)} in the checkpoint and {list(there)} by the config{more}")
    begins = common_prefix(weights) if found.missing and choices.prefix is None else None
    remedy = "Give the config that the model was built with: --config."
    if begins is not None:
        remedy += f" If {begins!r} is no part of its names: --prefix {begins}"
    return f"config.json does not fit the weights: {'; '.join(told)}. {remedy}"


def _some(names: Collection[str]) -> str:
    shown = sorted(names)[:_NAMES_SHOWN]
    more = f" and {counted(len(names) - len(shown), 'more tensor')}" if len(names) > len(shown) else ""
    return f"{', '.join(name[:200] for name in shown)}{more}"


def write_folder(
    source: CheckpointSource, contents: Contents, plan: HfFolder, folder: Path, on_bytes: Callable[[int], object]
) -> list[str]:
    """The files' names. All of them are on the disk when this returns. Raises ConfigurationError if a weight is too
    large for the dtype that it is converted to."""
    names, overflown = write_files(source, contents, plan.files, plan.reads, folder=folder, on_bytes=on_bytes)
    if overflown:
        raise ConfigurationError(
            f"Values are too large for --dtype, and would be infinite: {_some(overflown)}. Leave --dtype out, or give "
            "bf16, which holds what fp32 holds."
        )
    index = plan.files.index()
    if index is not None:
        names.append(write_json(folder, INDEX, index))
    for name, content in plan.beside.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        with path.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        names.append(name)
    return names
