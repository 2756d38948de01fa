"""Which state of a checkpoint may follow which. Pure; whoever changes one asks here first."""

from __future__ import annotations

from holdfast_protocol.states import CheckpointState

CHECKPOINT: dict[CheckpointState, frozenset[CheckpointState]] = {
    CheckpointState.UPLOADING: frozenset({CheckpointState.COMMITTED, CheckpointState.ABORTED}),
    CheckpointState.COMMITTED: frozenset({CheckpointState.TRASHED}),
    CheckpointState.ABORTED: frozenset(),
    CheckpointState.TRASHED: frozenset({CheckpointState.COMMITTED, CheckpointState.DELETING}),
    CheckpointState.DELETING: frozenset({CheckpointState.DELETED}),
    CheckpointState.DELETED: frozenset(),
}


def may_become(current: CheckpointState, new: CheckpointState) -> bool:
    return new in CHECKPOINT[current]
