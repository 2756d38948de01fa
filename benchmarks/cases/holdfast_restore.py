"""Holdfast: `ckpt.restore()`, every byte verified, the opening of the attempt included. With `stream`: until all of it
is there, and beside that the time until restore() returned.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.cases.holdfast_save import RUN
from benchmarks.cases.restores import measure_restore
from benchmarks.spec import Spec
from benchmarks.state import build
from holdfast import Checkpointer


def run(spec: Spec) -> dict[str, Any]:
    state = build(spec.size_bytes, seed=1, device=spec.device)
    streams = spec.options.get("stream", False)
    returned: list[float] = []
    with Checkpointer(RUN) as checkpointer:

        def restore() -> None:
            began = time.perf_counter()
            if checkpointer.restore(state.objects(), stream=streams) == 0:
                raise RuntimeError("there was nothing to restore")
            returned.append(time.perf_counter() - began)
            checkpointer.wait_for_rest()

        figures = measure_restore(spec, state, restore)
    return figures | ({"returned_seconds": returned[0]} if streams else {})
