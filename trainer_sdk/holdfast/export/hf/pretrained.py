"""`holdfast.load_pretrained(url)`: the model of a checkpoint by URL, as from_pretrained() gives it. No file is written.

    URL -> documents -> the names, config and checks of a pull for Hugging Face -> from_pretrained(state_dict=…)

transformers asks for each weight when its turn comes, and makes it a parameter. So the memory is that of the model, and
of the chunks that safe_open keeps.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from holdfast.dcp.url_reader import checkpoint_in
from holdfast.errors import ConfigurationError
from holdfast.export.contents import read_contents
from holdfast.export.hf.folder import HfChoices, plan_folder
from holdfast.export.hf.model_files import CONFIG, GENERATION_CONFIG
from holdfast.export.pull import files_of_an_earlier
from holdfast.progress import speak_up
from holdfast.restore.checkpoint_reader import CheckpointSource
from holdfast.restore.partial import resolve
from holdfast.restore.safe_open import StoredSlice, safe_open
from holdfast_client.chunks.workers import TransferWorkers
from holdfast_client.client import Client
from holdfast_client.filesystem.safetensors_layout import FORMAT_NAMES
from holdfast_protocol.runs import Best, Latest

log = logging.getLogger("holdfast")

_KERNELS = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
"""A config, and each that lies in it, may name code of the Hub by these, and a checkpoint brings no code."""
_NAMES_SHOWN = 3
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def load_pretrained(
    url: str,
    model_class: type | None = None,
    *,
    config: str | Path | None = None,
    prefix: str | None = None,
    **options: Any,
) -> Any:
    """The model of `holdfast://demo/gpt@best:loss`, or of any other selector, with its trained weights.

    `model_class`: a class of transformers, in place of the one that config.json names in `architectures`. `config`: a
    config.json, if neither the checkpoint nor an earlier one of the run keeps one. `prefix`: what stands before the
    weights' names and is no part of them. `options`: for from_pretrained(), such as `dtype` and `device_map`.

    Not collective: each process asks for itself what the selector names. Where several load one model, give a step.
    Ranks of one job that do not are warned, because a save between two of them may make them load different weights.

    Raises ConfigurationError for what from_pretrained() would draw at random, also for `model_class`, for weights that
    would be infinite in the dtype of the model, without transformers, and for a class that it does not have;
    NoRestorePoint, and ChunkLost if no copy has the right bytes.
    """
    speak_up()
    place = checkpoint_in(url)
    assert place.run is not None
    with Client() as client, TransferWorkers() as workers:
        point = resolve(client, place.run, str(place.point or "latest"))
        if isinstance(place.point or Latest(), Latest | Best) and _is_first_of_several():
            log.warning(
                "%s may name another checkpoint for the next rank. For one that is the same on all, write @%s",
                url,
                point.checkpoint_id,
            )
        with CheckpointSource(client, place.run, point, workers=workers) as source:
            contents = read_contents(source)
            plan = plan_folder(
                source,
                contents,
                only=(),
                choices=HfChoices(config=None if config is None else Path(config), prefix=prefix),
                earlier=partial(files_of_an_earlier, client, place.run, point, workers),
            )
    for note in plan.notes:
        log.info("%s", note)
    described = json.loads(plan.beside[CONFIG], object_hook=_without_kernels)
    kind: Any = _class_of(described, model_class)
    if GENERATION_CONFIG in plan.beside:
        options = {"generation_config": _generation_config(plan.beside[GENERATION_CONFIG]), **options}
    names = {tensor: (unit.name, unit.key_of(tensor)) for unit in contents.units for tensor in unit.tensors}
    with ExitStack() as stack:
        files: dict[str, tuple[safe_open, frozenset[str]]] = {}
        state = {}
        for weight in plan.files.weights.values():
            unit, key = names[weight.stored]
            if unit not in files:  # by the id: `latest` may be another one by now
                of_unit = f"holdfast://{place.run}@{point.checkpoint_id}/{unit}.safetensors"
                opened = stack.enter_context(safe_open(of_unit))
                files[unit] = opened, frozenset(opened.keys())
            file, held = files[unit]
            state[weight.name] = file.get_slice(key if key in held else file.metadata()[key])
        made = kind.config_class.from_dict(described)
        options = {"local_files_only": True, **options}
        model, told = kind.from_pretrained(
            None, config=made, state_dict=state, **{**options, "output_loading_info": True}
        )
        overflown, unknown = _infinite(model, state)
    if missing := sorted(told["missing_keys"]):
        raise ConfigurationError(
            f"The checkpoint lacks {_some(missing)} of {kind.__name__}, which would be drawn at random. Load the class "
            "that was trained, and take its parts."
        )
    if overflown:
        wide_enough = _wide_enough(model.dtype, {state[name].get_dtype() for name in overflown})
        raise ConfigurationError(
            f"Values are too large for {model.dtype}, and would be infinite: {_some(overflown)}. Give "
            f"dtype=torch.{wide_enough}."
        )
    if unknown:
        log.warning(
            "%s: infinite in %s. The checkpoint has no weight of that name: if the weights that it has in its place "
            "are finite, load them in a wider dtype",
            _some(unknown),
            model.dtype,
        )
    return (model, told) if options.get("output_loading_info") else model


def _infinite(model: Any, state: Mapping[str, StoredSlice]) -> tuple[list[str], list[str]]:
    """The weights that are infinite in the model and finite in the checkpoint, and those that are infinite in the model
    and have no counterpart in the checkpoint."""
    overflown, unknown = [], []
    of_checkpoint = {each.get_dtype() for each in state.values()}
    for name, value in model.state_dict().items():
        here = value.to_local() if isinstance(value, DTensor) else value
        stored = state.get(name)  # None: it is made of several, tied to another, or a buffer of the class's own
        if here.is_meta or here.dtype not in _FLOATS:
            continue
        before = {stored.get_dtype()} if stored else of_checkpoint
        if FORMAT_NAMES[str(here.dtype).removeprefix("torch.")] in before or not here.isinf().any():
            continue
        if stored is None:
            unknown.append(name)
        elif not stored[...].isinf().any():
            overflown.append(name)
    return sorted(overflown), sorted(unknown)


def _wide_enough(dtype: torch.dtype, stored: set[str]) -> str:
    if "F64" in stored:
        return "float64, as in the checkpoint"
    return "bfloat16, which holds what float32 holds" if dtype is torch.float16 else "float32, as in the checkpoint"


def _is_first_of_several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and dist.get_rank() == 0


def _some(names: list[str]) -> str:
    return ", ".join(names[:_NAMES_SHOWN]) + (" and more" if len(names) > _NAMES_SHOWN else "")


def _without_kernels(part: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in part.items() if key not in _KERNELS}


def _generation_config(content: bytes) -> Any:
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_dict(json.loads(content))
    except Exception as error:  # whatever a stranger's values lead to
        raise ConfigurationError(f"{GENERATION_CONFIG} cannot be used: {error!s:.300}.") from None


def _class_of(config: dict[str, Any], given: Any) -> type:
    try:
        import transformers
    except ImportError as error:
        raise ConfigurationError(f"{error}. Install it: pip install 'holdfast[hf]'.") from None
    named = config.get("architectures")
    found = given or (getattr(transformers, str(named[0]), None) if isinstance(named, list) and named else None)
    base = transformers.PreTrainedModel
    if isinstance(found, type) and issubclass(found, base) and getattr(found, "config_class", None):
        return found
    if given is not None:
        raise ConfigurationError(f"{given!r:.100} is no class of a model, such as LlamaForCausalLM.")
    raise ConfigurationError(
        f"config.json names {named!r:.100} in `architectures`, which transformers {transformers.__version__} does "
        "not have. Give the model's class: load_pretrained(url, LlamaForCausalLM)."
    )
