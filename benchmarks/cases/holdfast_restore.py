"""Holdfast: `ckpt.restore()`, every byte verified, the opening of the attempt included."""

from __future__ import annotations

from typing import Any

from benchmarks.cases.holdfast_save import RUN
from benchmarks.cases.restores import measure_restore
from benchmarks.spec import Spec
from benchmarks.state import build
from holdfast import Checkpointer


def run(spec: Spec) -> dict[str, Any]:
    state = build(spec.size_bytes, seed=1, device=spec.device)
    with Checkpointer(RUN) as checkpointer:
        return measure_restore(spec, state, lambda: _restore(checkpointer, state.objects()))


def _restore(checkpointer: Checkpointer, objects: dict[str, Any]) -> None:
    if checkpointer.restore(objects) == 0:
        raise RuntimeError("there was nothing to restore")
