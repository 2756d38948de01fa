"""Where the recorder hangs itself into a Checkpointer. Scripts that nobody verifies never import it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.distributed.ranks import Ranks
from holdfast.state.components import Declarations

if TYPE_CHECKING:
    from holdfast.verify.recorder import Recorder


def follow(folder: Path | None, ranks: Ranks, declared: Declarations) -> Recorder | None:
    """The recorder, where `holdfast verify-resume` launched this process (`folder`). Raises ConfigurationError for a
    second Checkpointer of one process."""
    if folder is None:
        return None
    from holdfast.verify.recorder import Recorder

    return Recorder(folder, ranks, declared)
