"""Connects the recorder to a Checkpointer. Only scripts under verification import it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.distributed.ranks import Ranks
from holdfast.state.components import Declarations

if TYPE_CHECKING:
    from holdfast.verify.recorder import Recorder


def follow(folder: Path | None, ranks: Ranks, declared: Declarations) -> Recorder | None:
    """The recorder, if `holdfast verify-resume` launched this process (`folder`). Raises ConfigurationError for a
    process's second Checkpointer."""
    if folder is None:
        return None
    from holdfast.verify.recorder import Recorder

    return Recorder(folder, ranks, declared)
