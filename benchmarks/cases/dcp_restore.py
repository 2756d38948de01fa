"""torch DCP: `load` in place. What it leaves to do, set_state_dict, is not timed."""

from __future__ import annotations

from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from benchmarks.cases.dcp_storage import reader
from benchmarks.cases.restores import measure_restore
from benchmarks.spec import Spec
from benchmarks.state import build


def run(spec: Spec) -> dict[str, Any]:
    state = build(spec.size_bytes, seed=1, device=spec.device)
    model, optimizer = get_state_dict(state.model, state.optimizer)
    state_dict, storage = {"model": model, "optimizer": optimizer}, reader(spec, spec.options["number"])
    return measure_restore(spec, state, lambda: dcp.load(state_dict, storage_reader=storage))
