"""Whatever else a training script puts into its state (LR schedulers, GradScaler, averages of the weights): resumed
equals straight, bit for bit, at each step. Optimizers are in test_state_capture.py."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from roundtrip import load, save
from torch import nn
from torch.optim import lr_scheduler as lr
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from holdfast.state.components import capture_rng, restore_rng
from holdfast.verify.fingerprints import flat

STEPS = 9
STARTS = (0, 3, 5, 7)
Make = Callable[[torch.optim.Optimizer], lr.LRScheduler]

SCHEDULERS: dict[str, Make] = {
    "OneCycleLR": lambda opt: lr.OneCycleLR(opt, max_lr=0.5, total_steps=STEPS + 1),
    "CosineAnnealingWarmRestarts": lambda opt: lr.CosineAnnealingWarmRestarts(opt, T_0=2, T_mult=2),
    "CosineAnnealingLR": lambda opt: lr.CosineAnnealingLR(opt, T_max=5),
    "ReduceLROnPlateau": lambda opt: lr.ReduceLROnPlateau(opt, patience=1, cooldown=1),
    "SequentialLR": lambda opt: lr.SequentialLR(
        opt, [lr.LinearLR(opt, total_iters=3), lr.ExponentialLR(opt, 0.7), lr.ConstantLR(opt, 0.5)], [3, 6]
    ),
    "LambdaLR": lambda opt: lr.LambdaLR(opt, lambda step: 1 / (1 + step) ** 0.5),
    "MultiplicativeLR": lambda opt: lr.MultiplicativeLR(opt, lambda step: 0.9 if step % 2 else 1.01),
    "ChainedScheduler": lambda opt: lr.ChainedScheduler([lr.ConstantLR(opt, 0.1, 4), lr.ExponentialLR(opt, 0.9)]),
    "MultiStepLR": lambda opt: lr.MultiStepLR(opt, [2, 4, 4, 7], gamma=0.3),
    "StepLR": lambda opt: lr.StepLR(opt, 3),
    "PolynomialLR": lambda opt: lr.PolynomialLR(opt, total_iters=6, power=2.0),
    "CyclicLR": lambda opt: lr.CyclicLR(opt, 0.01, 0.3, step_size_up=2, mode="exp_range", gamma=0.9),
}


class Job:
    """A model with what is under test around it."""

    def __init__(self, make_scheduler: Make, *, averages: bool = False, seed: int = 0) -> None:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Linear(5, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        self.state: dict[str, Any] = {
            "model": model,
            "optimizer": optimizer,
            "lr_scheduler": make_scheduler(optimizer),
            "grad_scaler": torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2),
        }
        if averages:
            self.state |= {
                "ema": AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True),
                "swa": AveragedModel(model),
                "teacher": copy.deepcopy(model).requires_grad_(False),
            }

    def step(self, at: int) -> dict[str, str]:
        """All that is in it afterwards, as texts that are equal when the bits are."""
        state = self.state
        batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(at))
        # Two steps overflow, one on each side of a resume, so that the scaler backs off and grows again.
        loss = state["model"](batch).square().mean() * (float("inf") if at in (2, 3) else 1.0)
        state["optimizer"].zero_grad()
        state["grad_scaler"].scale(loss).backward()
        state["grad_scaler"].step(state["optimizer"])
        state["grad_scaler"].update()
        if isinstance(state["lr_scheduler"], lr.ReduceLROnPlateau):
            state["lr_scheduler"].step(1.0 + at // 4)
        else:
            state["lr_scheduler"].step()
        if "ema" in state:
            self._average(at)
        found = {path: text for key, value in state.items() for path, text in flat({key: value.state_dict()}, "")}
        return found | dict(flat(loss.detach(), "loss"))

    def _average(self, at: int) -> None:
        state = self.state
        state["ema"].update_parameters(state["model"])
        if at >= 4:
            state["swa"].update_parameters(state["model"])
        with torch.no_grad():
            for slow, fast in zip(state["teacher"].parameters(), state["model"].parameters(), strict=True):
                slow.lerp_(fast, 0.05)


@pytest.mark.rule("bit-exact-resume")
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.filterwarnings("ignore:To get the last learning rate")
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
@pytest.mark.parametrize(("name", "averages"), [*((name, False) for name in SCHEDULERS), ("StepLR", True)])
def test_schedules_scalers_and_averages_go_on_bit_for_bit(name: str, averages: bool) -> None:
    make = SCHEDULERS[name]
    job = Job(make, averages=averages)
    torch.manual_seed(1)
    saves, expected = {}, []
    for at in range(STEPS):
        if at in STARTS:
            saves[at] = (save(job.state), capture_rng())
        expected.append(job.step(at))
    assert len({each[".optimizer.param_groups[0].lr"] for each in expected}) > 1, "the schedule did something"
    assert len({each[".grad_scaler.scale"] for each in expected}) > 2, "so did the scaler"
    for start, (saved, generators) in saves.items():
        fresh = Job(make, averages=averages, seed=5)
        fresh.step(0)
        load(fresh.state, [saved])
        restore_rng(generators)
        for at in range(start, min(start + 4, STEPS)):
            found = fresh.step(at)
            assert {path: text for path, text in found.items() if expected[at].get(path) != text} == {}, (start, at)
            assert found.keys() == expected[at].keys()
