"""What every measured restore has in common: a fresh process with another state, one restore, the bytes compared."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from benchmarks.measure import used, warm_pages
from benchmarks.spec import Spec
from benchmarks.state import TrainingState


def measure_restore(spec: Spec, state: TrainingState, restore: Callable[[], None]) -> dict[str, Any]:
    """Once, as a relaunched job does it. Raises where the state is not what was saved: a wrong byte has no speed.

    Python collects its garbage before. In a fresh process that is due at some allocation or other, by chance, and looks
    at all that torch holds, for 0.2 s."""
    warm_pages(state.bytes)
    gc.collect()
    with used(spec.server_pids) as usage:
        restore()
        state.wait()
    if state.fingerprint() != spec.options["fingerprint"]:
        raise RuntimeError("what was restored is not what was saved")
    return {
        "seconds": usage.wall_seconds,
        "cpu_seconds": usage.cpu_seconds,
        "server_cpu_seconds": usage.server_cpu_seconds,
        "bytes": state.bytes,
    }
