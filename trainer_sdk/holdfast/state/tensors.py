"""A tensor of the state -> the piece of it that this rank holds, or a refusal that names its key.

Flow: capture walks the state and calls describe() for each tensor; the planner takes the specs, staging the tensors.
What is described is the *logical* tensor: strides, conj and neg bits, expansion and the storage behind a view are how
this process happens to hold it, and are not saved.
"""

from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from holdfast.layout.pieces import PackGroup, PieceSpec
from holdfast.state.errors import UnsupportedStateError
from holdfast.state.sharding import local_box
from holdfast_protocol.index_documents import ITEM_BYTES


class TensorPiece(NamedTuple):
    """One rank's box of a tensor. `local` is the live tensor, detached: stage it before training goes on."""

    spec: PieceSpec
    local: torch.Tensor


class Held(NamedTuple):
    """How the component holds its plain tensors. DTensors say so themselves."""

    replicated: bool
    pack: PackGroup = "trainable"
    owner: int | None = None
    replicas: tuple[tuple[int, int], ...] = ()


class TieBook:
    """Remembers what one component has described, so that tied tensors are staged once. One per component."""

    def __init__(self) -> None:
        self._names: dict[tuple[object, ...], str] = {}

    def tied_to(self, name: str, spec: PieceSpec, local: torch.Tensor) -> str | None:
        """The earlier name of exactly this view of this storage, or None (and the view is remembered)."""
        if local.numel() == 0:
            return None
        view = (
            local.device,
            local.data_ptr(),
            local.stride(),
            local.is_conj(),
            local.is_neg(),
            spec._replace(name="", pack="trainable", owner=None),
        )
        first = self._names.setdefault(view, name)
        return None if first == name else first


def describe(name: str, component: str, tensor: torch.Tensor, held: Held, ties: TieBook) -> TensorPiece | None:
    """The piece of `tensor` that this rank holds; None where a DTensor's mesh leaves this rank out.

    Never copies and never changes the tensor. Raises UnsupportedStateError for what has no logical bytes here.
    """
    refuse_unsupported(name, tensor)
    shape = tuple(tensor.shape)
    if isinstance(tensor, DTensor):
        box = local_box(name, tensor)
        if box is None:
            return None
        refuse_unsupported(name, box.local)
        local = box.local.detach()
        spec = PieceSpec(
            name, component, dtype_name(tensor.dtype), shape, box.offsets, tuple(local.shape), box.replicated,
            pack=held.pack, replicas=box.replicas,
        )  # fmt: skip
    else:
        local = tensor.detach()
        spec = PieceSpec(
            name, component, dtype_name(tensor.dtype), shape, (0,) * len(shape), shape, held.replicated,
            pack=held.pack, owner=held.owner, replicas=held.replicas,
        )  # fmt: skip
    return TensorPiece(spec._replace(alias_of=ties.tied_to(name, spec, local)), local)


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name without `torch.`, as the layout has it."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """The inverse of dtype_name, for the names of ITEM_BYTES."""
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is not a dtype of this torch {torch.__version__}")
    return dtype


def refuse_unsupported(name: str, tensor: torch.Tensor) -> None:
    """Raises UnsupportedStateError for a tensor whose bytes cannot be saved and given back exactly."""
    if type(tensor).__name__ == "ShardedTensor":  # first: it answers no question as a tensor does
        raise UnsupportedStateError(
            name,
            "it is a ShardedTensor, which torch has given up for DTensor",
            "shard with fully_shard(), or save it by your own dcp.save with ckpt.writer(), which keeps it",
        )
    if isinstance(tensor, UninitializedTensorMixin):
        raise UnsupportedStateError(name, "it is a lazy parameter without a shape", "run one forward pass first")
    if tensor.is_nested:
        raise UnsupportedStateError(name, "it is a nested tensor", "keep its values and lengths as plain tensors")
    if tensor.is_quantized:
        raise UnsupportedStateError(name, "it is a quantized tensor", "keep its int_repr(), scale and zero point")
    if tensor.layout != torch.strided:
        raise UnsupportedStateError(name, f"it is a sparse tensor ({tensor.layout})", "keep its indices and values")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and not isinstance(tensor, DTensor):
        raise UnsupportedStateError(
            name,
            f"it is a {type(tensor).__qualname__}, whose bytes holdfast does not know",
            "convert it to a plain tensor",
        )
    if tensor.device.type == "meta":
        raise UnsupportedStateError(name, "it is on the meta device and has no bytes", "materialise it with to_empty()")
    if dtype_name(tensor.dtype) not in ITEM_BYTES:
        raise UnsupportedStateError(name, f"holdfast cannot store the dtype {tensor.dtype}", "view it as uint8")
