"""A job with torchao's quantized weights, which stay, and an optimizer whose slots are quantized.

`python -m tests.support.quantized_rank RUN WEIGHTS MODULE OPTIMIZER STEPS KILL_AFTER`. It says the digest of all it has
after the last step, or kills itself when the save of that step is committed.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import signal
import sys
from typing import Any

import torch
from torch import nn
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_
from torchao.quantization.granularity import PerGroup

import holdfast
from holdfast.state.tensors import row_major_bytes
from holdfast.state.wrappers import leaves

WEIGHTS = {
    "int8": Int8WeightOnlyConfig(),
    "int4": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
    "float8": Float8WeightOnlyConfig(),
}


def digest_of(state: dict[str, Any]) -> str:
    found = hashlib.sha256()
    for name, parameter in state["model"].named_parameters():
        slots = state["optimizer"].state.get(parameter, {})
        for part, value in [("", parameter), *slots.items()]:
            for path, tensor in leaves(f"{name}/{part}", torch.as_tensor(value)):
                found.update(path.encode() + row_major_bytes(tensor).tobytes())
    return found.hexdigest()


def main() -> None:
    run, weights, library, optimizer = sys.argv[1:5]
    steps, kill_after = map(int, sys.argv[5:])
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")  # the compiler takes longer than the rest of the test
    torch.manual_seed(0)
    base = nn.Linear(64, 64)
    quantize_(base, WEIGHTS[weights])
    base.requires_grad_(False)
    model = nn.Sequential(base, nn.Linear(64, 64))  # 4096 items: fewer are not quantized by the optimizer
    made = getattr(importlib.import_module(library), optimizer)(model[1].parameters(), lr=1e-2)
    state = {"model": model, "optimizer": made}
    with holdfast.Checkpointer(run, create=True, save=holdfast.OnPreemption()) as ckpt:
        for step in range(ckpt.restore(state), steps):
            inputs = torch.randn(8, 64)
            (model(inputs) - inputs).square().mean().backward()
            made.step()
            made.zero_grad()
            ckpt.save(step, state).committed.result(timeout=60)
            if step == kill_after:
                os.kill(os.getpid(), signal.SIGKILL)
    slot = next(each for each in made.state[model[1].weight].values() if getattr(each, "ndim", 0))
    print(f"digest {digest_of(state)} {type(slot).__name__}:{slot.dtype}", flush=True)


if __name__ == "__main__":
    main()
