"""Whether a chunk that a shard offers is there, must be sent, or is being sent already. Pure (protocol rules 14 to 17).

`present` needs a copy that the shard's attempt can rely on. A pending copy is no help to anybody but the shard that
was told to send it: another may never finish, so it gets a generation of its own. And what is stored at a key is one
sequence of bytes: a chunk that is offered in another codec than the pending copy's, or encoded to other bytes, gets a
copy of its own too.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from typing import NamedTuple

from holdfast_protocol.chunks import ChunkOffer
from holdfast_protocol.states import CopyState
from holdfast_service.catalog.copies import PROVEN, usable_by
from holdfast_service.catalog.tables import Copy


class Answer(StrEnum):
    PRESENT = "present"
    SEND_AGAIN = "send_again"  # into the same copy, with a fresh ticket
    SEND_ANEW = "send_anew"  # into a copy with a generation of its own
    ABSENT = "absent"  # it was only asked for, and nothing is reserved


class Decision(NamedTuple):
    answer: Answer
    copy: Copy | None


def decide(
    offer: ChunkOffer, copies: Sequence[Copy], *, attempt_id: int, own_copy_id: int | None, now: datetime
) -> Decision:
    """`copies`: the chunk's in the primary store. `own_copy_id`: the one that this shard relies on so far."""
    usable = [copy for copy in copies if usable_by(copy, attempt_id)]
    if usable:
        # What this shard has sent itself stays its own; else what is proven, for it is good for everybody.
        return Decision(
            Answer.PRESENT, min(usable, key=lambda copy: (copy.id != own_copy_id, copy.proof not in PROVEN, copy.id))
        )
    if offer.ask:
        return Decision(Answer.ABSENT, None)
    for copy in copies:
        own = copy.id == own_copy_id and copy.state == CopyState.PENDING
        if own and copy.ticket_expires_at > now and _holds(copy, offer):
            return Decision(Answer.SEND_AGAIN, copy)
    return Decision(Answer.SEND_ANEW, None)


def _holds(copy: Copy, offer: ChunkOffer) -> bool:
    return (copy.codec, copy.stored_digest, copy.stored_bytes) == (offer.codec, offer.wire_digest, offer.wire_bytes)
