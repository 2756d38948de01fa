"""Holdfast in a training script: saves sharded state while training goes on, and resumes from whole checkpoints only.

    with holdfast.Checkpointer("demo/gpt", save=holdfast.Every(minutes=10)) as ckpt:
        start = ckpt.restore(state)
        for step in range(start, total_steps):
            loss = train_step()
            ckpt.step(step, state, metrics={"loss": loss})

Walk a save from checkpointer.py by save/saver.py to save/pipeline.py, and a restore from checkpointer.py by
restore/restorer.py to restore/checkpoint_reader.py.
"""

from __future__ import annotations

import importlib
import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast import data, errors
    from holdfast.checkpointer import Checkpointer
    from holdfast.dcp.url_reader import dcp_reader
    from holdfast.errors import Preempted
    from holdfast.export.hf.pretrained import load_pretrained
    from holdfast.health.loss_spike import LossSpike
    from holdfast.layout.plan import ChunkSizes
    from holdfast.progress import Progress
    from holdfast.restore.partial import load_weights
    from holdfast.restore.safe_open import safe_open
    from holdfast.save.job import SaveHandle, SaveState, SaveStats
    from holdfast.schedule.save_policy import Auto, Best, Every, OnPreemption
    from holdfast.state.load import LoadReport

__all__ = [
    "Auto",
    "Best",
    "Checkpointer",
    "ChunkSizes",
    "Every",
    "LoadReport",
    "LossSpike",
    "OnPreemption",
    "Preempted",
    "Progress",
    "SaveHandle",
    "SaveState",
    "SaveStats",
    "data",
    "dcp_reader",
    "errors",
    "load_pretrained",
    "load_weights",
    "safe_open",
]

_HOMES = {
    "Auto": "holdfast.schedule.save_policy",
    "Best": "holdfast.schedule.save_policy",
    "Checkpointer": "holdfast.checkpointer",
    "ChunkSizes": "holdfast.layout.plan",
    "Every": "holdfast.schedule.save_policy",
    "LossSpike": "holdfast.health.loss_spike",
    "LoadReport": "holdfast.state.load",
    "OnPreemption": "holdfast.schedule.save_policy",
    "Preempted": "holdfast.errors",
    "Progress": "holdfast.progress",
    "SaveHandle": "holdfast.save.job",
    "SaveState": "holdfast.save.job",
    "SaveStats": "holdfast.save.job",
    "data": "holdfast.data",
    "dcp_reader": "holdfast.dcp.url_reader",
    "errors": "holdfast.errors",
    "load_pretrained": "holdfast.export.hf.pretrained",
    "load_weights": "holdfast.restore.partial",
    "safe_open": "holdfast.restore.safe_open",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: the command line finds `pull` in this package, and must list runs without importing torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    # A library that we import draws random numbers on import, and a script has often seeded by then.
    drawn = random.getstate()
    try:
        home = importlib.import_module(_HOMES[name])
    finally:
        random.setstate(drawn)
    return home if name in ("data", "errors") else getattr(home, name)
