"""Which checkpoints can be looked into: those that are wholly there."""

from __future__ import annotations

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import CheckpointState
from holdfast_service.catalog.tables import Checkpoint
from holdfast_service.errors import ProblemError

WHOLE = (CheckpointState.COMMITTED, CheckpointState.TRASHED)


def refuse_unless_whole(checkpoint: Checkpoint) -> None:
    """Raises `incomplete_checkpoint`, `checkpoint_aborted`, and `chunk_gone` for one whose bytes are being deleted."""
    if checkpoint.state in WHOLE:
        return
    if checkpoint.state == CheckpointState.UPLOADING:
        raise ProblemError(
            ProblemCode.INCOMPLETE_CHECKPOINT,
            f"Step {checkpoint.step} is still uploading. Wait with GET /v1/checkpoints/{checkpoint.id}?wait=30.",
        )
    if checkpoint.state == CheckpointState.ABORTED:
        raise ProblemError(
            ProblemCode.CHECKPOINT_ABORTED,
            f"Step {checkpoint.step} was never complete: {checkpoint.abort_reason}. Read another checkpoint.",
        )
    raise ProblemError(
        ProblemCode.CHUNK_GONE, f"Step {checkpoint.step} was deleted, and so are its bytes. Read another checkpoint."
    )
