"""Every exception that a training script can see, importable from one place. The message ends with the remedy.

HoldfastError (holdfast_client.errors draws the whole tree)
├── SaveFailed        a save was not committed; with strict=True the next call raises it
│   └── SaveSpooled   this job did not commit it, but its bytes are safe on the node's disk; logged, never raised
│   └── SaveSuperseded given up for a newer state that could still be saved in time
├── Preempted         the job was told to leave, and has saved what it could: step() raises it on all ranks
├── SaveDeclined      all ranks skipped this save, because one of them was still busy with an earlier one
├── MissingComponent  with strict=True: the state lacks a component of the run's first checkpoint
├── NotRestored       a save was asked for before restore() in a run that has checkpoints
├── IntegrityError
│   └── TreeFormatError   a document of the checkpoint is malformed
├── RestoreFault      the rest of a streamed restore is damaged: restore() takes the checkpoint before, on all ranks
├── RankLost          a rank has ended, hangs, or cannot be reached
└── RanksDisagree     the ranks did not call the same thing in the same order
StateError            the user's state is at fault
├── UnsupportedStateError, StateMismatchError
LayoutError           the ranks' tensors do not make one checkpoint
"""

from __future__ import annotations

from typing import Any

from holdfast.layout.plan import LayoutError
from holdfast_client.errors import (
    CheckpointAborted,
    CheckpointNotFound,
    ChunkCorrupt,
    ChunkGone,
    ChunkLost,
    CommitsUnknown,
    ConfigurationError,
    Forbidden,
    HoldfastError,
    IntegrityError,
    NewerFormat,
    NoRestorePoint,
    NotFound,
    ReadsWrongHere,
    RunNotFound,
    ServiceUnavailable,
    StaleAttempt,
    StoreFull,
    StoreProblem,
    StoreRefused,
    TokenProblem,
    Unauthenticated,
    UnsupportedProtocol,
    rebuild_error,
)
from holdfast_protocol.checkpoints import CheckpointView

ENDS_THE_JOB = (StaleAttempt, TokenProblem, UnsupportedProtocol)
"""Errors that no retry can fix. Whichever background thread meets one, the training thread raises it at its next
call."""


class StateError(ValueError):
    """The given state is wrong, or does not fit the checkpoint."""

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_error, (type(self), self.args, vars(self))


class UnsupportedStateError(StateError):
    """The state holds a value that cannot be saved exactly. Names the key, says what to give instead."""

    def __init__(self, path: str, what: str, remedy: str) -> None:
        super().__init__(f"{path or 'the state'} cannot be saved: {what}; {remedy}")
        self.path = path


class StateMismatchError(StateError):
    """The checkpoint does not fit the state it is loaded into. Names the key, says what to change."""

    def __init__(self, path: str, what: str, remedy: str) -> None:
        super().__init__(f"{path} cannot be loaded: {what}; {remedy}")
        self.path = path


class TreeFormatError(IntegrityError):
    """An encoded typed tree is malformed: a damaged or hostile index. The checkpoint is at fault, not the given state,
    so a restore goes on to the point before."""

    code = "tree_format"


# ruff: noqa: N818  (the names are those of the client's errors)


__all__ = [
    "CheckpointAborted",
    "CheckpointNotFound",
    "ChunkCorrupt",
    "ChunkGone",
    "ChunkLost",
    "CommitsUnknown",
    "ConfigurationError",
    "Forbidden",
    "HoldfastError",
    "IntegrityError",
    "LayoutError",
    "MissingComponent",
    "NewerFormat",
    "NoRestorePoint",
    "NotFound",
    "NotRestored",
    "Preempted",
    "RankLost",
    "RanksDisagree",
    "ReadsWrongHere",
    "RestoreFault",
    "RunNotFound",
    "SaveDeclined",
    "SaveFailed",
    "SaveSpooled",
    "SaveSuperseded",
    "ServiceUnavailable",
    "StaleAttempt",
    "StateError",
    "StateMismatchError",
    "StoreFull",
    "StoreProblem",
    "StoreRefused",
    "TokenProblem",
    "TreeFormatError",
    "Unauthenticated",
    "UnsupportedStateError",
]


class SaveFailed(HoldfastError):
    code = "save_failed"


class SaveSpooled(SaveFailed):
    code = "save_spooled"
    remedy = "The next launch with this folder commits it first; `holdfast spool push` does it without one."


class SaveDeclined(HoldfastError):
    code = "save_declined"
    remedy = "Save less often, or give the store more bandwidth."


class NotRestored(HoldfastError):
    code = "not_restored"
    remedy = "Call restore(state) before the first step; to begin from nothing, choose the name of a new run."


class RestoreFault(HoldfastError):
    """`step`: of the checkpoint that was left. No step of an optimizer was taken with it, on any rank."""

    code = "restore_fault"
    remedy = (
        "Call restore(state) again on every rank, and begin the loop at the step that it returns: it takes the "
        "checkpoint before."
    )

    def __init__(self, message: str, *, step: int) -> None:
        super().__init__(message)
        self.step = step


class MissingComponent(HoldfastError):
    code = "missing_component"
    remedy = 'Pass it to step() and save() too, or say that it is left out on purpose: Checkpointer(…, drop=["ema"]).'


class RanksDisagree(HoldfastError):
    code = "ranks_disagree"
    remedy = "Call restore(), save() and step() on every rank, in the same order and with the same step."


class RankLost(HoldfastError):
    code = "rank_lost"
    remedy = "See which rank ended or hangs; its own error says why."


class SaveSuperseded(SaveFailed):
    code = "save_superseded"
    remedy = "Restore the newer checkpoint."


class Preempted(HoldfastError):
    """`saved_step`: the newest committed step of this job, or None. `notice`: why the job must leave. `checkpoint`:
    what was saved for that and is committed; None if nothing was left to save, or there was no time for it."""

    code = "preempted"
    remedy = "Launch the job again with the same command: it resumes from there."

    def __init__(
        self,
        message: str,
        *,
        saved_step: int | None = None,
        notice: str = "",
        checkpoint: CheckpointView | None = None,
    ) -> None:
        super().__init__(message)
        self.saved_step = saved_step
        self.notice = notice
        self.checkpoint = checkpoint
