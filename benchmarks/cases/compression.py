"""Compression of really trained states: the demo's GPT on the demo's text, saved with compress="zstd" and raw.

Random numbers would be the worst case, and zeros the best; what a run saves is neither. Each state goes into a project
of its own, or the second save would send nothing. Every restore is compared with what was saved.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.measure import used
from benchmarks.spec import Spec
from benchmarks.state import TrainingState
from holdfast import Checkpointer

_DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"
_GB = 1e9
_LENGTH = 64


def run(spec: Spec) -> dict[str, Any]:
    """Figures of each state, by its name: `…_ratio`, stored over raw bytes; `…_save_cpu` and `…_restore_cpu`, what
    compression adds, in CPU-seconds per GB of state; `…_raw_save_cpu` and `…_raw_restore_cpu`, those without it."""
    states, steps, loss = _trained(spec)
    figures: dict[str, Any] = {"steps": steps, "loss": loss, "bytes": states["adamw"].bytes}
    for name, state in states.items():
        plain, packed = (_saves(name, state, compress, spec) for compress in ("none", "zstd"))
        figures |= {
            f"{name}_bytes": state.bytes,
            f"{name}_ratio": packed["ratio"],
            f"{name}_raw_save_cpu": plain["save_cpu"],
            f"{name}_save_cpu": packed["save_cpu"] - plain["save_cpu"],
            f"{name}_raw_restore_cpu": plain["restore_cpu"],
            f"{name}_restore_cpu": packed["restore_cpu"] - plain["restore_cpu"],
        }
    return figures


def _trained(spec: Spec) -> tuple[dict[str, TrainingState], int, float]:
    """`adamw`: the whole training state; `fp32`: its weights alone; `bf16`: these, as they are kept for inference."""
    sys.path.insert(0, str(_DEMO))
    from gpt import GPT  # type: ignore[import-not-found]
    from text import TextLoader, standard_library_text  # type: ignore[import-not-found]

    torch.manual_seed(20_240)
    width, layers, steps = (256, 6, 200) if spec.size_bytes >= 64 * 1024**2 else (64, 2, 10)
    model = GPT(width=width, layers=layers, heads=width // 64, length=_LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = TextLoader(standard_library_text(), batch=4, length=_LENGTH)
    loss = torch.zeros(())
    for _ in range(steps):
        tokens, targets = loader.next_batch()
        loss = model(tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    without = torch.optim.AdamW(model.parameters())
    half = copy.deepcopy(model).bfloat16()
    states = {
        "fp32": TrainingState(model, without),
        "bf16": TrainingState(half, torch.optim.AdamW(half.parameters())),
        "adamw": TrainingState(model, optimizer),
    }
    return states, steps, loss.item()


def _saves(name: str, state: TrainingState, compress: str, spec: Spec) -> Mapping[str, float]:
    rounds: list[dict[str, float]] = []
    objects: dict[str, Any] = {"model": state.model} | ({"optimizer": state.optimizer} if name == "adamw" else {})
    gigabytes = state.bytes / _GB
    for number in range(1 + spec.rounds):
        run_name = f"bench-{name}-{compress}-{number}/state"
        with Checkpointer(run_name, compress=compress, create=True, strict=True) as checkpointer:  # type: ignore[arg-type]
            with used({}) as saving:
                checkpointer.save(0, objects).committed.result()
            stats = checkpointer.stats
        restored = copy.deepcopy(objects)
        for tensor in _tensors(restored):
            tensor.zero_()
        with Checkpointer(run_name) as checkpointer, used({}) as restoring:
            checkpointer.restore(restored)
        if not all(map(torch.equal, _tensors(objects), _tensors(restored))):
            raise RuntimeError("what was restored is not what was saved")
        if number:  # the first starts threads and opens connections
            rounds.append(
                {
                    "ratio": stats.sent_bytes / stats.sent_chunk_bytes,
                    "save_cpu": saving.cpu_seconds / gigabytes,
                    "restore_cpu": restoring.cpu_seconds / gigabytes,
                }
            )
    return {figure: median(one[figure] for one in rounds) for figure in rounds[0]}


def _tensors(objects: Mapping[str, Any]) -> list[torch.Tensor]:
    found = [parameter.detach() for parameter in objects["model"].parameters()]
    if "optimizer" in objects:
        for slots in objects["optimizer"].state.values():
            found += [slots["exp_avg"], slots["exp_avg_sq"]]
    return found
