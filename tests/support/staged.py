"""Tensors of every dtype and form, staged as a save stages them. For the tests of staging."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from holdfast.layout.plan import ChunkSizes, build_local_plan
from holdfast.staging import StagedShard, StagingArea
from holdfast.state.tensors import Held, TensorPiece, TieBook, describe, torch_dtype
from holdfast_protocol.index_documents import ITEM_BYTES


def pieces_of(tensors: dict[str, torch.Tensor], declared: tuple[str, ...] = ()) -> list[TensorPiece]:
    """`declared`: the names of those that the user has declared frozen."""
    ties = TieBook()
    pieces = []
    for name, tensor in tensors.items():
        held = Held(replicated=True, pack="declared" if name in declared else "trainable")
        piece = describe(name, "m", tensor, held, ties)
        assert piece is not None
        pieces.append(piece)
    return pieces


def staged(
    tensors: dict[str, torch.Tensor],
    sizes: ChunkSizes | None = None,
    area: StagingArea | None = None,
    declared: tuple[str, ...] = (),
) -> StagedShard:
    """Without an area in one of its own, whole."""
    pieces = pieces_of(tensors, declared)
    plan = build_local_plan([piece.spec for piece in pieces], rank=0, world_size=1, sizes=sizes)
    return (area or StagingArea()).stage(plan, pieces)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = torch_dtype(draw(st.sampled_from(sorted(ITEM_BYTES))))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    count = 1
    for size in shape:
        count *= size
    seed = draw(st.integers(0, 9))
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count * dtype.itemsize,), dtype=torch.uint8,
                        generator=torch.Generator().manual_seed(seed))  # fmt: skip
    tensor = raw.view(dtype).reshape(shape)
    form = draw(st.sampled_from(["plain", "transposed", "expanded", "view", "strided", "conj", "neg", "parameter"]))
    if form == "transposed" and len(shape) > 1:
        tensor = tensor.transpose(0, -1)
    elif form == "expanded":
        tensor = tensor.unsqueeze(0).expand(3, *shape)
    elif form == "view" and shape:
        tensor = tensor[1:]
    elif form == "strided" and shape:
        tensor = tensor[::2]
    elif form == "conj" and dtype in (torch.complex64, torch.complex128):
        tensor = tensor.conj()
    elif form == "neg" and dtype in (torch.complex64, torch.complex128):
        tensor = tensor.conj().imag
    elif form == "parameter" and dtype.is_floating_point:
        tensor = torch.nn.Parameter(tensor)
    return tensor
