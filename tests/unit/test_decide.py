"""Present, send again or send anew: the decision on one offered chunk, as a table."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from holdfast_protocol.checkpoints import ChunkOffer
from holdfast_protocol.codecs import Codec
from holdfast_service.db.tables.core import Copy
from holdfast_service.training.negotiate import decide

NOW = datetime(2030, 1, 1, tzinfo=UTC)
ME, OTHER = 1, 2
RAW = ChunkOffer(digest="a" * 64, bytes=100)
ENCODED = ChunkOffer(digest="a" * 64, bytes=100, codec=Codec.ZSTD, stored_digest="b" * 64, stored_bytes=50)
ASKED = ChunkOffer(digest="a" * 64, bytes=100, ask=True)


def copy(
    number: int,
    state: str,
    proof: str | None = None,
    *,
    attempt: int = OTHER,
    expired: bool = False,
    holds: ChunkOffer = RAW,
) -> Copy:
    return Copy(
        id=number,
        state=state,
        proof=proof,
        attempt_id=attempt,
        ticket_expires_at=NOW + timedelta(seconds=-1 if expired else 1),
        codec=holds.codec,
        stored_digest=holds.wire_digest,
        stored_bytes=holds.wire_bytes,
    )


CASES = {
    "nothing is there": ([], None, "send_anew", None),
    "a proven copy of another attempt": ([copy(5, "verified", "read")], None, "present", 5),
    "an unproven copy of another attempt": ([copy(5, "verified", "unproven")], None, "send_anew", None),
    "an unproven copy of this attempt": ([copy(5, "verified", "unproven", attempt=ME)], None, "present", 5),
    "proven before unproven": (
        [copy(5, "verified", "unproven", attempt=ME), copy(6, "verified", "store_sha256")],
        None,
        "present",
        6,
    ),
    "what this shard relies on stays": (
        [copy(5, "verified", "read"), copy(6, "verified", "unproven", attempt=ME)],
        6,
        "present",
        6,
    ),
    "pending, and this shard was told to send it": ([copy(5, "pending", attempt=ME)], 5, "send_again", 5),
    "pending, and its ticket has expired": ([copy(5, "pending", attempt=ME, expired=True)], 5, "send_anew", None),
    "pending, and another rank was told to send it": ([copy(5, "pending", attempt=ME)], None, "send_anew", None),
    "bad": ([copy(5, "bad", attempt=ME)], 5, "send_anew", None),
    "suspect, though proven": ([copy(5, "suspect", "read")], 5, "send_anew", None),
    "sent by another meanwhile": (
        [copy(5, "pending", attempt=ME), copy(6, "verified", "store_sha256")],
        5,
        "present",
        6,
    ),
}


@pytest.mark.rule("present-is-referenced")
@pytest.mark.rule("random-generation")
@pytest.mark.parametrize("name", CASES)
def test_the_answer_to_an_offer(name: str) -> None:
    copies, own_copy_id, answer, chosen = CASES[name]
    decision = decide(RAW, copies, attempt_id=ME, own_copy_id=own_copy_id, now=NOW)
    assert (decision.answer, None if decision.copy is None else decision.copy.id) == (answer, chosen)


@pytest.mark.rule("reuse-only-hashed")
@pytest.mark.rule("random-generation")
@pytest.mark.parametrize(
    ("pending", "offer", "answer"),
    [
        (ENCODED, ENCODED, "send_again"),
        (RAW, ENCODED, "send_anew"),
        (ENCODED, RAW, "send_anew"),
        (ENCODED.model_copy(update={"codec": Codec.ZSTD_SHUFFLE4}), ENCODED, "send_anew"),
        (ENCODED.model_copy(update={"stored_digest": "c" * 64}), ENCODED, "send_anew"),
        (ENCODED.model_copy(update={"stored_bytes": 51}), ENCODED, "send_anew"),
    ],
)
def test_other_bytes_on_the_wire_never_go_into_a_copy_that_was_promised_for_these(
    pending: ChunkOffer, offer: ChunkOffer, answer: str
) -> None:
    copies = [copy(5, "pending", attempt=ME, holds=pending)]
    assert decide(offer, copies, attempt_id=ME, own_copy_id=5, now=NOW).answer == answer


@pytest.mark.rule("present-is-referenced")
@pytest.mark.parametrize("offer", [RAW, ENCODED, ASKED])
@pytest.mark.parametrize("stored", [RAW, ENCODED])
def test_a_chunk_is_present_in_whatever_codec_it_is_stored(offer: ChunkOffer, stored: ChunkOffer) -> None:
    copies = [copy(5, "verified", "read", holds=stored)]
    assert decide(offer, copies, attempt_id=ME, own_copy_id=None, now=NOW).answer == "present"


@pytest.mark.parametrize("state", ["pending", "bad", "suspect"])
def test_what_is_asked_for_and_not_there_is_absent(state: str) -> None:
    copies = [copy(5, state, attempt=ME)]
    assert decide(ASKED, copies, attempt_id=ME, own_copy_id=5, now=NOW) == ("absent", None)
    assert decide(ASKED, [], attempt_id=ME, own_copy_id=None, now=NOW) == ("absent", None)
