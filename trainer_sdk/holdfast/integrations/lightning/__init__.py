"""Lightning: its checkpoints in a run, under the names that ModelCheckpoint gives them. Written against lightning 2.6.

One process:  Trainer(plugins=[HoldfastCheckpointIO("demo/gpt")], callbacks=[HoldfastCallback(), ModelCheckpoint(…)])
Several:      Trainer(strategy=HoldfastDDPStrategy("demo/gpt"), callbacks=[HoldfastCallback(), ModelCheckpoint(…)])
FSDP2:        Trainer(strategy=HoldfastModelParallelStrategy("demo/gpt"), …)
Resume:       trainer.fit(model, ckpt_path="last"), or ckpt_path=io.last() if the node's disk may be another one
"""

from holdfast.integrations.lightning.callback import HoldfastCallback
from holdfast.integrations.lightning.checkpoint_io import HoldfastCheckpointIO
from holdfast.integrations.lightning.strategy import (
    HoldfastDDPStrategy,
    HoldfastModelParallelStrategy,
    HoldfastStrategyMixin,
)

__all__ = [
    "HoldfastCallback",
    "HoldfastCheckpointIO",
    "HoldfastDDPStrategy",
    "HoldfastModelParallelStrategy",
    "HoldfastStrategyMixin",
]
