"""What step() costs a training loop where nothing is saved: microseconds a step, for each kind of policy.

    PYTHONPATH=.:tests/trainer .venv/bin/python scripts/measure_step.py [RANKS]

The ranks are gloo processes of this machine, against a service of their own. The bar is 50 (rule local-save-flag).
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from gloo import run_ranks
from tests.support.serve import holdfast_serve

import holdfast
from holdfast.schedule.save_policy import Policy

STEPS = 50_000
POLICIES: dict[str, Policy] = {
    "Every(steps=…)": holdfast.Every(steps=10**9),
    "Every(minutes=60)": holdfast.Every(minutes=60),
    "Auto()": holdfast.Auto(),
    'Auto() | Best("val_loss") | Every(steps=…) | OnPreemption()': holdfast.Auto()
    | holdfast.Best("val_loss")
    | holdfast.Every(steps=10**9)
    | holdfast.OnPreemption(),
}


def measure(rank: int, run: str, policy: Policy) -> float:
    with holdfast.Checkpointer(run, save=policy, create=True) as ckpt:
        ckpt.restore({})
        ckpt.step(0, {})
        metrics = {"loss": torch.tensor(1.0)}
        began = time.perf_counter()
        for step in range(1, STEPS + 1):
            ckpt.step(step, {}, metrics=metrics)
        return (time.perf_counter() - began) / STEPS * 1e6


def main(world_size: int) -> None:
    with tempfile.TemporaryDirectory() as folder, holdfast_serve(Path(folder)) as running:
        os.environ.update(running.environment)
        for number, (name, policy) in enumerate(POLICIES.items()):
            slowest = max(run_ranks(measure, world_size, f"steps/r{number}", policy))
            sys.stdout.write(f"{slowest:6.2f} us a step  {world_size} ranks  {name}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
