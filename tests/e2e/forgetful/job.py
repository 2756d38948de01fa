"""`job.py nothing|sampler|rng|scheduler|scaler|ema|optimizer|reseed|seed|end`: trains, and forgets that one thing."""

from __future__ import annotations

import copy
import os
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.data import ResumableLoader, ResumableSampler

TOTAL = 12


class Noise:
    """Augmentation that draws from a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * torch.randn(x.shape, generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


def main(forgets: str) -> None:
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)
    # Too large at the start: the first step overflows, is skipped, and brings the scale down.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**125, growth_interval=1000)
    ema = copy.deepcopy(model)
    noise = Noise()
    x, y = torch.randn(40, 4), torch.randn(40, 1)
    if forgets == "seed":
        y = y + int.from_bytes(os.urandom(2), "big") / 2**16  # never the same
    dataset = TensorDataset(x, y)
    loader: Any
    if forgets == "sampler":
        loader = DataLoader(dataset, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(7))
    else:
        loader = ResumableLoader(DataLoader(dataset, batch_size=2, sampler=ResumableSampler(dataset, seed=7)))
    state = {
        "model": model,
        "optimizer": optimizer,
        "lr_scheduler": scheduler,
        "grad_scaler": scaler,
        "ema": ema,
        "noise": noise,
        "dataloader": loader,
    }
    keys = {"sampler": "dataloader", "rng": "noise", "scheduler": "lr_scheduler", "scaler": "grad_scaler"}
    state.pop(keys.get(forgets, forgets), None)
    with holdfast.Checkpointer(f"tests/forgets-{forgets}") as ckpt:
        step = ckpt.restore(state)
        if forgets == "reseed":
            torch.manual_seed(1)
        while forgets == "end":
            time.sleep(1)
        while step < TOTAL:
            for x, y in loader:
                with torch.no_grad():
                    x = noise(x)
                loss = 4 * nn.functional.mse_loss(model(x), y)
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
                with torch.no_grad():
                    for slow, fast in zip(ema.parameters(), model.parameters(), strict=True):
                        slow.lerp_(fast, 0.1)
                ckpt.step(step, state, metrics={"loss": loss})
                step += 1


if __name__ == "__main__":
    main(sys.argv[1])
