"""One rank of a launch. It writes down what it has done, line by line, before the next thing can happen."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.settings import TrainerSettings
from holdfast_client.settings import ClientSettings
from tests.preemption.plan import PARAMETERS, Plan

EXIT_TOLD = 10
"""The script has got its Preempted and ended by itself."""


class Journal:
    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def write(self, **facts: Any) -> None:
        self._file.write(json.dumps(facts | {"at": time.time()}) + "\n")


def train(rank: int, environment: dict[str, str], run: str, plan: Plan, folder: Path) -> None:
    """Until it is told to leave. Never returns."""
    os.environ.update(environment)
    journal = Journal(folder / f"{rank}.jsonl")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        _train(rank, run, plan, journal)
    except holdfast.Preempted as told:
        journal.write(preempted=str(told), saved=told.saved_step)
        os._exit(EXIT_TOLD)
    except BaseException as error:
        journal.write(failed=f"{type(error).__name__}: {error}")
        os._exit(1)


def _train(rank: int, run: str, plan: Plan, journal: Journal) -> None:
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(PARAMETERS // 100, 100, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "seen": {"steps": []}}
    settings = TrainerSettings(preemption_grace_seconds=plan.grace_seconds)
    with holdfast.Checkpointer(
        run,
        save=holdfast.Every(steps=plan.save_every),
        stage_every=plan.stage_every,
        settings=settings,
        client_settings=ClientSettings(max_bytes_per_second=plan.bytes_per_second),
    ) as ckpt:
        journal.write(ready=True)
        start = ckpt.restore(state)
        journal.write(start=start, state=_fingerprint(state) if start else None)
        for step in range(start, 1_000_000):
            batch = torch.randn(4, PARAMETERS // 100, generator=torch.Generator().manual_seed(100 * step + rank))
            time.sleep(plan.step_seconds(step))
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            state["seen"]["steps"] = [step]
            in_flight = [job.step for job in ckpt.parts.pipeline.in_flight]
            journal.write(step=step, state=_fingerprint(state), in_flight=in_flight)
            time.sleep(plan.evaluation_seconds(step))
            ckpt.step(step, state)


def _fingerprint(state: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(state["seen"]).encode())
    tensors = [*state["model"].parameters()]
    tensors += [slot for each in state["optimizer"].state.values() for slot in each.values()]
    for tensor in tensors:
        digest.update(tensor.detach().reshape(-1).numpy().data)
    return digest.hexdigest()
