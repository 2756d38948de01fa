"""Present, send again or send anew: the decision on one offered chunk, as a table."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from holdfast_service.catalog.tables import Copy
from holdfast_service.uploads.decide import decide

NOW = datetime(2030, 1, 1, tzinfo=UTC)
ME, OTHER = 1, 2


def copy(number: int, state: str, proof: str | None = None, *, attempt: int = OTHER, expired: bool = False) -> Copy:
    expires_at = NOW + timedelta(seconds=-1 if expired else 1)
    return Copy(id=number, state=state, proof=proof, attempt_id=attempt, ticket_expires_at=expires_at)


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


@pytest.mark.rule("protocol-15")
@pytest.mark.rule("protocol-17")
@pytest.mark.parametrize("name", CASES)
def test_the_answer_to_an_offer(name: str) -> None:
    copies, own_copy_id, answer, chosen = CASES[name]
    decision = decide(copies, attempt_id=ME, own_copy_id=own_copy_id, now=NOW)
    assert (decision.answer, None if decision.copy is None else decision.copy.id) == (answer, chosen)
