"""A rank says that its share failed: the checkpoint is aborted at once and names the rank (protocol rule 8)."""

from __future__ import annotations

from holdfast_protocol.checkpoints import CheckpointView, FailShard
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.redaction import without_secrets
from holdfast_protocol.states import AbortCause, CheckpointState, ShardState
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.aborting import abort
from holdfast_service.catalog.shard_rows import locked_shard
from holdfast_service.catalog.views import current_checkpoint_view
from holdfast_service.catalog.writing import begin_writing, refuse_unless_uploading
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError


def fail_shard(
    context: ServiceContext, caller: Principal, checkpoint_id: str, rank: int, request: FailShard
) -> CheckpointView:
    """Raises `shard_sealed` once the rank has sealed: a lost seal reply must not abort a good checkpoint."""
    with context.database.transaction() as session:
        writing = begin_writing(session, caller, checkpoint_id, request, context.epoch, lock=True)
        checkpoint = writing.checkpoint
        if checkpoint.state != CheckpointState.ABORTED:
            refuse_unless_uploading(checkpoint)
            shard = locked_shard(session, checkpoint, rank)
            if shard.state == ShardState.SEALED:
                raise ProblemError(
                    ProblemCode.SHARD_SEALED,
                    f"Rank {rank} has sealed its shard of step {checkpoint.step} and cannot report failure any more. "
                    "Its share is safe; wait for the checkpoint to commit.",
                    rank=rank,
                )
            shard.state = ShardState.FAILED
            abort(
                checkpoint,
                f"rank {rank} failed: {without_secrets(request.reason)}",
                database_now(session),
                cause=AbortCause.RANK_FAILED,
                rank=rank,
            )
            session.flush()
        view = current_checkpoint_view(session, writing.project.name, writing.run.name, checkpoint)
    context.notifier.notify(checkpoint_id)
    return view
