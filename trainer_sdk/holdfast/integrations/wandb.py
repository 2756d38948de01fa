"""Weights & Biases: a run that goes on with the run of Holdfast, and has its restore points as artifacts by reference.

    wandb.init(id=wandb_id("demo/gpt"), resume="allow") -> WandbRestorePoints -> log(checkpointer.step(…))

Written against wandb 0.31.
"""

from __future__ import annotations

import hashlib
from typing import Any

import wandb

from holdfast.integrations.restore_points import RestorePointLog, reference, url_of
from holdfast_protocol.checkpoints import CheckpointView


def wandb_id(run: str) -> str:
    """The id of the W&B run that belongs to `project/run`: the same at each launch, so that resume="allow" goes on."""
    return f"holdfast-{hashlib.sha256(run.encode()).hexdigest()[:16]}"


class WandbRestorePoints(RestorePointLog):
    """Each restore point as a version of one artifact, of type `checkpoint`. It refers to `holdfast://…` and has no
    byte of the state. The newest is also in the run's summary, as `holdfast.latest` and `holdfast.latest_id`.

        tracked = wandb.init(project="gpt", id=wandb_id("demo/gpt"), resume="allow")   # on rank 0
        with WandbRestorePoints("demo/gpt", tracked) as points:
            with holdfast.Checkpointer("demo/gpt", config={"wandb_run": tracked.path}) as checkpointer:
                ...
                points.log(checkpointer.step(step, state, metrics={"loss": loss}))
        tracked.finish()

    run: `project/run`, as for the Checkpointer. tracked: what wandb.init() returned; None on ranks other than 0.
    """

    tool = "Weights & Biases"

    def __init__(self, run: str, tracked: Any) -> None:
        super().__init__(run)
        self._tracked = tracked
        if self.is_first:
            tracked.config.update({"holdfast_run": run}, allow_val_change=True)

    def tell(self, view: CheckpointView) -> None:
        artifact = wandb.Artifact(
            self.run.replace("/", "-"), type="checkpoint", metadata=reference(self.run, view), incremental=False
        )
        # W&B knows no digest of such a reference: the URL names one checkpoint for good, and metadata has its digest.
        artifact.add_reference(url_of(self.run, view), name="checkpoint", checksum=False)
        self._tracked.log_artifact(artifact, aliases=[f"step-{view.step}"])
        self._tracked.summary.update({"holdfast.latest": f"{self.run}@{view.step}", "holdfast.latest_id": view.id})
