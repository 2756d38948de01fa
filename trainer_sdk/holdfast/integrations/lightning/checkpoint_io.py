"""CheckpointIO for one process: Lightning's whole dict, as a typed tree. Nothing is pickled; a value that cannot be
kept is refused by its key.

With several ranks Lightning calls this on rank 0 alone, and with a sharding strategy never: see strategy.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.fabric.plugins.io import TorchCheckpointIO

from holdfast.integrations.lightning.named_run import NamedRun, RestOfCheckpoint
from holdfast.integrations.lightning.names import read_name, wanted_by


class HoldfastCheckpointIO(TorchCheckpointIO):
    """`Trainer(plugins=[HoldfastCheckpointIO("demo/gpt")], callbacks=[HoldfastCallback(), ModelCheckpoint(…)])`.

    checkpointer: arguments for holdfast.Checkpointer. Without `save=` in it, ModelCheckpoint alone says when to save.

    A path of ModelCheckpoint's becomes a small file that names the step, so `ckpt_path="last"` and `"best"` work as
    usual. Lightning's own files are read as before, and weights alone (save_weights_only) are written as such.
    """

    def __init__(self, run: str | None = None, *, checkpointer: Mapping[str, Any] | None = None) -> None:
        self.named_run = NamedRun(run, checkpointer or {})

    def last(self) -> str | None:
        """For `ckpt_path=`: the run's newest restore point, on any node; None if nothing was ever committed."""
        return self.named_run.last()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Returns when the state may change again. Raises UnsupportedStateError by the key that cannot be kept."""
        if "optimizer_states" not in checkpoint:
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            self.named_run.save(checkpoint["global_step"], path, {"checkpoint": RestOfCheckpoint(checkpoint)})

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Raises NoRestorePoint, IntegrityError, …; ConfigurationError for a name of another run; FileNotFoundError for
        an unknown one."""
        wanted = wanted_by(path)
        if wanted is None:
            loaded: dict[str, Any] = super().load_checkpoint(path, map_location, weights_only)
            return loaded
        whole = RestOfCheckpoint()
        self.named_run.load(wanted, {"checkpoint": whole})
        return whole.loaded

    def remove_checkpoint(self, path: Any) -> None:
        """The name goes at once; its checkpoint goes to the run's trash once no other name means it."""
        if read_name(path) is None and not self.named_run.knows(path):
            super().remove_checkpoint(path)
        else:
            self.named_run.remove(path)

    def teardown(self) -> None:
        """Waits for the save in flight and ends the attempt."""
        self.named_run.close()
        super().teardown()
