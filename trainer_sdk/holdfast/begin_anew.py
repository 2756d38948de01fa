"""Whether a save that did not commit is worth another begin. Pure; the pipeline asks.

The service gives a checkpoint up when no rank has called for long: it cannot tell a dead job from one that is cut off.
A job that is alive still holds the staged bytes. Every rank that hears of it begins the same step anew, and gets the
same new checkpoint (protocol rule 6); what had arrived is not sent again.
"""

from __future__ import annotations

from holdfast_client.errors import CheckpointAborted, ChunkGone, IncompleteCheckpoint
from holdfast_protocol.states import AbortCause

BEGINS = 3
"""So often in all: where a rank is dead for good, the others must not wait for it for ever."""

BEGIN_ANEW_AFTER = frozenset({AbortCause.SILENT, AbortCause.CHUNK_GONE})
"""What an outage does to a checkpoint. The other causes say that somebody does not want it or cannot complete it."""


def worth_another_begin(error: BaseException) -> bool:
    if isinstance(error, ChunkGone | IncompleteCheckpoint):
        # This rank's seal has found that a chunk was lost, another rank's or its own. It is sent anew.
        return True
    return isinstance(error, CheckpointAborted) and error.context.get("cause") in BEGIN_ANEW_AFTER
