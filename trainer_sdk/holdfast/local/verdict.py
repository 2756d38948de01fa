"""What is to be done with a spooled save that did not get through. Pure."""

from __future__ import annotations

from enum import Enum, auto

from holdfast.begin_anew import worth_another_begin
from holdfast.session import ENDS_THE_JOB
from holdfast_client.errors import (
    CheckpointAborted,
    CheckpointConflict,
    ChunkCorrupt,
    HoldfastError,
    InvalidRequest,
    ManifestConflict,
    TransferStopped,
)


class Verdict(Enum):
    AGAIN = auto()
    """Service, store or network are at fault, or an operator can mend it: the bytes are safe here, time may help."""
    DROP = auto()
    """It can never be committed, and its handle has said so."""
    LEAVE = auto()
    """Not by this job; maybe by the next attempt, or by a person."""


def verdict_of(error: BaseException) -> Verdict:
    if isinstance(error, CheckpointAborted):
        return Verdict.AGAIN if worth_another_begin(error) else Verdict.DROP
    if isinstance(error, CheckpointConflict | ManifestConflict | InvalidRequest | ChunkCorrupt):
        return Verdict.DROP
    if isinstance(error, HoldfastError) and not isinstance(error, (TransferStopped, *ENDS_THE_JOB)):
        return Verdict.AGAIN
    return Verdict.LEAVE
