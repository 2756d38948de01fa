"""Whether the models hold neither NaN nor infinity, for `check_finite=`: captured -> **looked at** -> staged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from holdfast.staging.bits import boxes
from holdfast.state.capture import CapturedState

_LOOKED_AT = 4 * 1024 * 1024
"""Elements that are looked at at once: torch makes copies of them."""


@torch.no_grad()
def all_finite(captured: CapturedState, state: Mapping[str, Any]) -> bool:
    """Of this rank's parts of the models. One wait for the device in all. Raises what torch does, for one where the
    device has no memory left."""
    models = {key for key, value in state.items() if isinstance(value, torch.nn.Module)}
    verdicts = [
        _is_finite(box).all()
        for piece in captured.pieces
        if piece.spec.component in models and (piece.local.is_floating_point() or piece.local.is_complex())
        for start in range(0, piece.local.numel(), _LOOKED_AT)
        for box in boxes(piece.local, start, min(start + _LOOKED_AT, piece.local.numel()))
    ]
    if not verdicts:
        return True
    return bool(torch.stack([verdict.to(verdicts[0].device, non_blocking=True) for verdict in verdicts]).all())


def _is_finite(box: torch.Tensor) -> torch.Tensor:
    # torch cannot compare most floats of one byte; each of their values has its like in float32.
    return torch.isfinite(box.float() if box.element_size() == 1 else box)
