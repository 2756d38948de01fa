"""A checkpoint's whole life: hot, cold, thawing, readable for a while, cold again, purged; what is asked of a thaw, and
who may. On both databases, in folders and in a bucket with archive classes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sqlalchemy import select, update

from holdfast_protocol.states import Scope
from holdfast_service.db.tables.core import Checkpoint, Project
from holdfast_service.db.tables.operations import AuditEvent
from holdfast_service.tiers.controller import reconcile
from tests.support.interleave import refused
from tests.support.rank import Job, answer
from tests.support.tiers import DAY, HOUR, IN_A_FOLDER, READ_LEASE_SECONDS, Cold, weights


def test_hot_cold_thawed_cold_again_and_purged(cold: Cold) -> None:
    job = cold.cooled()
    assert [cold.tier(step) for step in (1, 2, 3)] == ["cold", "hot", "hot"]
    place = "cold" if cold.fake is None else "archive"
    assert cold.copies(weights(1)) == [("deleting", "primary"), ("cold", place)]
    cold.collect()
    assert cold.copies(weights(1)) == [("cold", place)]
    with refused("checkpoint_cold") as found:
        cold.tickets(1, weights(1))
    assert "holdfast checkpoints thaw demo/gpt@1#1" in found.value.detail
    with refused("checkpoint_cold") as named:
        answer(cold.http.get(f"{job.base}/restore-point", params={"selector": "1"}))
    assert named.value.context["command"] == "holdfast checkpoints thaw demo/gpt@1#1"

    asked = cold.thaw(1, days=2)
    assert (asked["tier"], asked["state"]) == ("thawing", "thawing")
    with refused("checkpoint_cold"):
        cold.tickets(1, weights(1))
    done = cold.thawed(1, days=2)
    assert (done["state"], done["readable_chunks"]) == ("thawed", done["chunks"])
    assert cold.content(1, weights(1)) == weights(1)
    assert cold.content(1, b"index " + weights(1)) == b"index " + weights(1)

    cold.advance(2 * DAY + 2 * READ_LEASE_SECONDS)  # its days, and the lease of the reads above
    cold.round()
    assert cold.tier(1) == "cold"
    cold.round()
    cold.collect()
    assert cold.copies(weights(1)) == [("cold", place)]
    with cold.context.database.transaction() as session:
        session.execute(update(Checkpoint).where(Checkpoint.step == 1).values(state="deleted"))
        project_id = session.scalars(select(Project.id)).one()
    before = cold.stored(project_id)
    cold.collect()
    assert cold.copies(weights(1)) == []
    assert len(before) - len(cold.stored(project_id)) == 2
    assert cold.content(3, weights(3)) == weights(3)


def test_every_step_is_an_event_that_says_who_did_it(cold: Cold) -> None:
    cold.cooled()
    cold.thawed(1, days=1)
    cold.advance(DAY + 2 * HOUR)
    cold.round()
    with cold.context.database.read() as session:
        events = session.execute(
            select(AuditEvent.action, AuditEvent.actor_kind, AuditEvent.after)
            .where(AuditEvent.checkpoint_id == cold.view(1)["id"])
            .order_by(AuditEvent.id)
        ).all()
    # What was copied back from a folder can be read until its copies are taken away again.
    ends = [("thaw_end", "hot"), ("cool", "cold")] if cold.fake is None else [("thaw_end", "cold")]
    assert [(row.action, row.actor_kind, row.after["tier"]) for row in events] == [
        ("checkpoint.cool", "controller", "cold"),
        ("checkpoint.thaw", "person", "thawing"),
        ("checkpoint.thawed", "controller", "hot"),
        *((f"checkpoint.{action}", "controller", tier) for action, tier in ends),
    ]


def test_the_restore_point_is_what_can_be_read_now_and_a_thaw_is_told(cold: Cold) -> None:
    job = cold.cooled(4)
    with cold.context.database.transaction() as session:
        session.execute(
            update(Checkpoint).where(Checkpoint.step.in_((3, 4))).values(health="diverged", health_reason="NaN")
        )
    cold.thawed(1)
    decision = answer(cold.http.get(f"{job.base}/restore-point"))
    assert decision["restore_point"]["step"] == 1
    (two,) = [each for each in decision["skipped"] if each["reason"] == "cold"]
    assert two["step"] == 2
    assert "`holdfast checkpoints thaw demo/gpt@2#1`" in two["detail"]
    assert "--status" in two["detail"]


def test_a_thaw_is_prolonged_never_shortened_and_a_hot_one_can_be_kept(cold: Cold) -> None:
    cold.cooled()
    first = cold.thawed(1, days=5)
    assert cold.thaw(1, days=2)["readable_until"] >= first["readable_until"]
    longer = cold.thaw(1, days=9)
    assert longer["state"] == "thawed"
    cold.round()
    cold.advance(7 * DAY)
    cold.round()
    assert cold.tier(1) == "hot"
    assert cold.content(1, weights(1)) == weights(1)
    # A hot one is kept hot.
    cold.thaw(2, days=30)
    job = Job(cold.http, after=1)
    for step in (4, 5):
        job.save(step)
    cold.advance(8 * DAY)
    cold.until_idle()
    assert cold.tier(2) == "hot"


def test_what_is_being_read_stays_readable(cold: Cold) -> None:
    cold.cooled()
    cold.thawed(1, days=1)
    for hour in range(30):  # a slow reader, who takes tickets again and again
        if hour % 5 == 0:
            assert cold.content(1, weights(1)) == weights(1)
        # Passes are minutes apart, and a bucket ends a thaw at midnight: a jump over it ends what a pass prolongs.
        cold.advance(HOUR)
        cold.round()
    assert cold.tier(1) == "hot"
    cold.advance(2 * READ_LEASE_SECONDS)
    cold.round()
    assert cold.tier(1) == "cold"


@pytest.fixture
def service_token(cold: Cold) -> str:
    cold.service.make_project("elsewhere")
    return cold.service.token(project="elsewhere")


def test_a_thaw_of_what_is_in_the_trash_or_corrupt_is_refused_and_another_project_sees_nothing(
    cold: Cold, service_token: str
) -> None:
    cold.cooled()
    checkpoint_id = cold.view(1)["id"]
    stranger = cold.service.http(token=service_token)
    for reply in (
        stranger.post(f"/v1/checkpoints/{checkpoint_id}/thaw", json={}),
        stranger.get(f"/v1/checkpoints/{checkpoint_id}/thaw"),
    ):
        with refused("checkpoint_not_found"):
            answer(reply)
    reader = cold.service.http(token=cold.service.token(Scope.READ))
    with refused("forbidden"):
        answer(reader.post(f"/v1/checkpoints/{checkpoint_id}/thaw", json={}))
    assert answer(reader.get(f"/v1/checkpoints/{checkpoint_id}/thaw"))["state"] == "needed"
    for values in ({"state": "trashed"}, {"state": "committed", "health": "corrupt", "health_reason": "lost."}):
        with cold.context.database.transaction() as session:
            session.execute(update(Checkpoint).where(Checkpoint.id == checkpoint_id).values(**values))
        with refused("checkpoint_conflict"):
            answer(cold.http.post(f"/v1/checkpoints/{checkpoint_id}/thaw", json={}))


@IN_A_FOLDER
@pytest.mark.rule("read-lease")
def test_what_became_cold_stays_where_it_was_for_as_long_as_a_ticket_lives(cold: Cold) -> None:
    a_week = cold.context.settings.model_copy(update={"ticket_seconds": 7 * DAY})
    cold.aged()
    reconcile(replace(cold.context, settings=a_week))
    cold.collect()
    assert cold.copies(weights(1)) == [("deleting", "primary"), ("cold", "cold")]
    cold.advance(7 * DAY)
    cold.collect()
    assert cold.copies(weights(1)) == [("cold", "cold")]
