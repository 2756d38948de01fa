"""Megatron-core: a sharded state dict of dist_checkpointing as a checkpoint of the run, in the place of its folders.

    model.sharded_state_dict() … -> save(checkpointer, step, …), load(checkpointer, …) -> the state dict of this rank

These are dist_checkpointing.save() and load() with Holdfast's writer and reader in the place of a strategy's. The part
that all ranks have in common is in the checkpoint too. They use modules of Megatron that may change with any release.
Written against megatron-core 0.16.
"""

from __future__ import annotations

from argparse import Namespace
from contextlib import suppress
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import merge, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from holdfast.checkpointer import Checkpointer
from holdfast.errors import UnsupportedStateError
from holdfast.state.tensors import row_major_bytes
from holdfast.state.wrappers import fields_of, of_fields

_COMMON = "holdfast_common"


def save(checkpointer: Checkpointer, step: int, sharded_state_dict: dict[str, Any], *, validate: bool = True) -> None:
    """Saves `step`, on every rank. Training waits for the upload, as with every dcp.save(). As in
    dist_checkpointing.save(), `sharded_state_dict` is used up.

    `validate`: all ranks compare what they hold: each part of a tensor on exactly one main replica.

    Raises DCP's CheckpointException with UnsupportedStateError in it, by its key, for a value that could not be read
    without pickle. An argparse.Namespace, and tensors such as random state, can be read. So can enums whose class is on
    torch's list of classes that may be loaded, where Megatron enters its own.
    """
    sharded, common = save_preprocess(sharded_state_dict, validate)
    whole = {"sharded": sharded, "common": _common(common)}
    for each in nested_values(whole):
        if isinstance(each, ShardedObject):
            each.data = _packed(each.data)
    flat, _, _ = torch_dist._replace_state_dict_keys_with_sharded_keys(whole, keep_only_main_replica=True)
    planner = torch_dist.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    dcp_save(torch_dist.mcore_to_pyt_state_dict(flat, False), storage_writer=checkpointer.writer(step), planner=planner)


def load(
    checkpointer: Checkpointer, sharded_state_dict: dict[str, Any], at: str | None = None
) -> tuple[int, dict[str, Any]]:
    """The step to go on with, and the state dict of this rank, as dist_checkpointing.load() returns it. Call it on
    every rank; other parallel sizes than at the save are Megatron's own resharding.

    Raises NoRestorePoint if there is none, and Megatron's CheckpointingException if a tensor has another shape.
    """
    reader = checkpointer.reader(at)
    asked, own, factories = load_preprocess(sharded_state_dict)
    asked, _ = extract_sharded_base(asked)
    asked = {"sharded": asked, "common": _common(None)}
    tensors = [each for each in nested_values(asked) if isinstance(each, ShardedTensor)]
    flat, places, names = torch_dist._replace_state_dict_keys_with_sharded_keys(asked)
    wanted = torch_dist.mcore_to_pyt_state_dict(flat, True)
    planner = torch_dist.MCoreLoadPlanner(
        shapes_validation_sharded_tensors=[each for each in tensors if not each.allow_shape_mismatch],
        allow_shape_mismatch_sharded_tensors={each.key: each for each in tensors if each.allow_shape_mismatch},
    )
    dcp_load(wanted, storage_reader=reader, planner=planner)
    loaded = torch_dist._replace_sharded_keys_with_state_dict_keys(
        {name: torch_dist._unwrap_pyt_sharded_tensor(each) for name, each in wanted.items()}, places, names
    )
    torch_dist._restore_dict_types(loaded, asked)
    loaded = _unpacked(loaded)
    state: dict[str, Any] = loaded["common"]
    merge(state, own)
    merge(state, loaded.get("sharded", {}))
    return reader.step + 1, apply_factory_merges(state, factories)


def _common(value: Any) -> ShardedObject:
    """Rank 0's, for all."""
    return ShardedObject(_COMMON, value, (1,), (0,), replica_id=dist.get_rank())


_TENSOR, _NAMESPACE, _ENUM = "holdfast_tensor", "holdfast_namespace", "holdfast_enum"


def _packed(value: Any) -> Any:
    """With plain values in the place of tensors, which dcp.save does not look for inside a value, of namespaces and of
    enums. What cannot be told so stays as it is: the save refuses it by its key, on all ranks."""
    if isinstance(value, torch.Tensor):
        return (_TENSOR, value.dtype, tuple(value.shape), row_major_bytes(value).tobytes())
    if type(value) is Namespace:
        return (_NAMESPACE, _packed(vars(value)))
    if isinstance(value, Enum):
        with suppress(UnsupportedStateError):
            return (_ENUM, *(fields_of(value, "") or ()))
    if type(value) is dict:
        return {key: _packed(each) for key, each in value.items()}
    return type(value)(map(_packed, value)) if type(value) in (list, tuple) else value


def _unpacked(value: Any) -> Any:
    match value:
        case (str(mark), torch.dtype() as dtype, tuple(shape), bytes(data)) if mark == _TENSOR:
            return (
                torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
                if data
                else torch.empty(shape, dtype=dtype)
            )
        case (str(mark), dict(content)) if mark == _NAMESPACE:
            return Namespace(**_unpacked(content))
        case (str(mark), str(name), str(member)) if mark == _ENUM:
            return of_fields(name, member)
    if type(value) is dict:
        return {key: _unpacked(each) for key, each in value.items()}
    return type(value)(map(_unpacked, value)) if type(value) in (list, tuple) else value
