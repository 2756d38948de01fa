"""What is to be done with a spooled save that did not get through. Pure."""

from __future__ import annotations

from enum import Enum, auto

from holdfast.begin_anew import worth_another_begin
from holdfast.heart import ENDS_THE_JOB
from holdfast_client.errors import (
    CheckpointAborted,
    CheckpointConflict,
    ChunkCorrupt,
    HoldfastError,
    InvalidRequest,
    ManifestConflict,
    TransferStopped,
)
from holdfast_protocol.states import AbortCause

NOBODY_WANTS_IT = frozenset({AbortCause.JOB, AbortCause.RANK_FAILED})
"""After these the save cannot be completed by anybody. After any other, its bytes are worth their place."""


class Verdict(Enum):
    AGAIN = auto()
    """Service, store or network are at fault, or an operator can mend it: the bytes are safe here, time may help."""
    DROP = auto()
    """It can never be committed, and its handle has said so."""
    LEAVE = auto()
    """Not by this job; maybe by the next attempt, or by a person."""


def verdict_of(error: BaseException) -> Verdict:
    if isinstance(error, CheckpointAborted):
        if worth_another_begin(error):
            return Verdict.AGAIN
        # Fenced, or its attempt is over: the next attempt may adopt it (protocol rule 4).
        return Verdict.DROP if error.context.get("cause") in NOBODY_WANTS_IT else Verdict.LEAVE
    if isinstance(error, CheckpointConflict | ManifestConflict | InvalidRequest | ChunkCorrupt):
        return Verdict.DROP
    if isinstance(error, HoldfastError) and not isinstance(error, (TransferStopped, *ENDS_THE_JOB)):
        return Verdict.AGAIN
    return Verdict.LEAVE
