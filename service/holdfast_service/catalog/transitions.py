"""Which state may follow which. Pure; whoever changes a state asks here first."""

from __future__ import annotations

from holdfast_protocol.states import CheckpointState, CopyState

CHECKPOINT: dict[CheckpointState, frozenset[CheckpointState]] = {
    CheckpointState.UPLOADING: frozenset({CheckpointState.COMMITTED, CheckpointState.ABORTED}),
    CheckpointState.COMMITTED: frozenset({CheckpointState.TRASHED}),
    CheckpointState.ABORTED: frozenset(),
    CheckpointState.TRASHED: frozenset({CheckpointState.COMMITTED, CheckpointState.DELETING}),
    CheckpointState.DELETING: frozenset({CheckpointState.DELETED}),
    CheckpointState.DELETED: frozenset(),
}

COPY: dict[CopyState, frozenset[CopyState]] = {
    CopyState.PENDING: frozenset({CopyState.VERIFIED, CopyState.BAD, CopyState.DELETING}),
    CopyState.COPYING: frozenset({CopyState.VERIFIED, CopyState.COLD, CopyState.BAD, CopyState.DELETING}),
    CopyState.VERIFIED: frozenset({CopyState.SUSPECT, CopyState.BAD, CopyState.COLD, CopyState.DELETING}),
    CopyState.COLD: frozenset({CopyState.THAWING, CopyState.SUSPECT, CopyState.BAD, CopyState.DELETING}),
    CopyState.THAWING: frozenset({CopyState.VERIFIED, CopyState.COLD, CopyState.BAD, CopyState.DELETING}),
    CopyState.SUSPECT: frozenset({CopyState.VERIFIED, CopyState.COLD, CopyState.BAD, CopyState.DELETING}),
    CopyState.BAD: frozenset({CopyState.VERIFIED, CopyState.DELETING}),
    CopyState.DELETING: frozenset({CopyState.GONE}),
    CopyState.GONE: frozenset(),
}


def may_become(current: CheckpointState, new: CheckpointState) -> bool:
    return new in CHECKPOINT[current]


def copy_may_become(current: CopyState, new: CopyState) -> bool:
    return new in COPY[current]
