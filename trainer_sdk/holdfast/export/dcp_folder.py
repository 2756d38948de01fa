"""A torch.distributed.checkpoint folder, written by DCP's own save from whole tensors: dcp.load reads it on any mesh.

    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)

The content of a dcp.save keeps its names. Other keys are `<unit>.<name>`; optimizers are keyed by parameter names, as
in torch.distributed.checkpoint.state_dict, or by `<component>/<name>` if two modules of one optimizer share a name.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save


def write_dcp_folder(folder: Path, state: dict[str, Any]) -> list[str]:
    """Returns the files' names. Raises the disk's errors, not DCP's BaseException."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # there is no process group, on purpose
            # One thread: with more, a writer thread's ENOSPC is lost, and the metadata is written despite it.
            writer = FileSystemWriter(folder, thread_count=1, sync_files=True)
            save(state, storage_writer=writer, no_dist=True)
    except CheckpointException as error:
        failures = [failure for failure, _ in error.failures.values()]
        raise failures[0] from None
    return sorted(os.listdir(folder))
