"""What gets cold and what stays hot: by the policy, by who needs it, by what holds it. On both databases, in folders
and in a bucket with archive classes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sqlalchemy import update

import holdfast_service.tiers.controller
from holdfast_service.context import ServiceContext
from holdfast_service.db.tables.core import Checkpoint, Copy
from holdfast_service.db.tables.operations import CheckpointCopy
from holdfast_service.tiers.rules import decide
from tests.support.rank import Job, answer
from tests.support.tiers import DAY, HOUR, IN_A_FOLDER, Cold, weights


def test_labels_kinds_pins_and_the_newest_stay_hot(cold: Cold) -> None:
    job = Job(cold.http)
    for step, changes in enumerate(
        [{}, {"labels": ["milestone"]}, {"kind": "final"}, {}, {}, {"kind": "emergency"}], start=1
    ):
        save = job.begin(step, **changes)
        save.write(0, [weights(step), b"index"])
    with cold.context.database.transaction() as session:
        session.execute(update(Checkpoint).where(Checkpoint.step == 4).values(pinned_at=Checkpoint.created_at))
    cold.policy(stay_hot={"labels": ["milestone"], "kinds": ["final"]})
    cold.advance(8 * DAY)
    cold.round()
    assert [cold.tier(step) for step in range(1, 7)] == ["cold", "hot", "hot", "hot", "hot", "hot"]
    plan = answer(cold.http.get(f"{job.base}/tiers/plan"))
    assert {row["step"]: row["stays"] for row in plan["rows"]} == {
        6: "one of the two newest healthy points",
        5: "one of the two newest healthy points",
        4: "pinned",
        3: "its kind is final",
        2: "labelled milestone",
        1: None,
    }


def test_what_an_active_attempt_resumed_from_stays_until_it_has_ended(cold: Cold) -> None:
    job = Job(cold.http)
    first = job.save(1)
    second = Job(cold.http, after=1)
    second.resumed_from(first["id"])
    for step in (2, 3):
        second.save(step)
    cold.policy()
    cold.advance(8 * DAY)
    cold.round()
    assert cold.tier(1) == "hot"
    second.end()
    cold.round()
    assert cold.tier(1) == "cold"


def set_health_of_the_newest(cold: Cold, health: str) -> None:
    with cold.context.database.transaction() as session:
        session.execute(update(Checkpoint).where(Checkpoint.step > 1).values(health=health, health_reason="a spike"))


def test_what_an_attempt_was_told_to_resume_from_after_the_decision_stays_until_it_has_ended(
    cold: Cold, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold.aged()
    told: list[Job] = []

    def decide_and_open(context: ServiceContext) -> int:
        decided = decide(context)
        set_health_of_the_newest(cold, "diverged")
        told.append(Job(cold.http, after=1))
        return decided

    with monkeypatch.context() as patch:
        patch.setattr(holdfast_service.tiers.controller, "decide", decide_and_open)
        cold.round()
    (job,) = told
    assert job.opened["restore_point"]["step"] == 1
    assert cold.tier(1) == "hot"
    set_health_of_the_newest(cold, "ok")
    job.end()
    cold.advance(HOUR)
    cold.round()
    assert cold.tier(1) == "cold"


@IN_A_FOLDER
def test_a_pass_whose_time_went_into_decisions_cools_something_nevertheless(
    cold: Cold, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold.aged()
    seconds = [0.0]

    def decide_slowly(context: ServiceContext) -> int:
        seconds[0] += DAY
        return decide(context)

    monkeypatch.setattr(holdfast_service.tiers.controller, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    monkeypatch.setattr(holdfast_service.tiers.controller, "decide", decide_slowly)
    cold.round()
    assert cold.tier(1) == "cold", "the time was over before the first chunk"


@pytest.mark.rule("present-is-referenced")
def test_a_chunk_is_as_hot_as_its_hottest_user(cold: Cold) -> None:
    """Two runs share their base. One gets cold, and only what nobody else needs moves."""
    base = b"frozen base"
    jobs = [Job(cold.http, "demo/gpt"), Job(cold.http, "demo/other")]
    for job in jobs:
        for step in (1, 2, 3):
            job.begin(step).write(0, [base, weights(step, job.run), b"index"])
    cold.policy(run="demo/gpt")
    cold.advance(8 * DAY)
    plan = answer(cold.http.get(f"{jobs[0].base}/tiers/plan"))
    assert plan["totals"][0]["due_bytes"] == len(weights(1))
    cold.round()
    assert cold.tier(1) == "cold"
    assert cold.copies(base) == [("verified", "primary")]
    assert cold.tier(1, "demo/other") == "hot"
    cold.policy(run="demo/other")
    cold.round()
    assert cold.copies(base) == [("verified", "primary")]  # the newest of both runs still need it
    assert cold.tier(1, "demo/other") == "cold"
    with cold.context.database.transaction() as session:
        session.execute(update(Checkpoint).where(Checkpoint.step > 1).values(state="trashed"))
    for job in jobs:  # newer points that do not need it
        for step in (4, 5):
            job.begin(step).write(0, [weights(step, job.run), b"other index"])
    cold.advance(2 * DAY)  # what was gone through is looked at again
    cold.round()
    assert [state for state, _ in cold.copies(base)] == ["deleting", "cold"]


@pytest.mark.rule("holds-outrank")
def test_what_a_store_holds_locked_is_not_taken_away_before_it_is_unlocked(cold: Cold) -> None:
    cold.aged()
    with cold.context.database.transaction() as session:
        session.execute(update(Copy).values(lock="locked"))
    cold.until_idle()
    assert [state for state, _ in cold.copies(weights(1))] == ["verified", "cold"]
    assert cold.tier(1) == "hot"
    with cold.context.database.transaction() as session:
        session.execute(update(Copy).values(lock=None))
    cold.advance(DAY)
    cold.until_idle()
    assert cold.tier(1) == "cold"


def test_a_policy_that_is_deleted_moves_nothing_more_and_brings_nothing_back(cold: Cold) -> None:
    job = cold.cooled()
    for step in (4, 5):
        job.save(step)
    answer(cold.http.request("DELETE", f"{job.base}/policies/tiers", headers={"If-Match": "*"}))
    cold.advance(8 * DAY)
    cold.until_idle()
    assert [cold.tier(step) for step in (1, 2, 3)] == ["cold", "hot", "hot"]


def test_the_next_save_sends_a_cold_chunk_again_and_the_chunk_gets_cold_anew(cold: Cold) -> None:
    job = cold.cooled()
    save = job.begin(4)
    (told,) = save.negotiate(0, [weights(1)])["chunks"]
    assert told["status"] == "upload"
    assert save.write(0, [weights(1), b"index"])["state"] == "committed"
    assert cold.content(4, weights(1)) == weights(1)
    for step in (5, 6):
        job.save(step)
    cold.advance(8 * DAY)
    cold.until_idle()
    assert cold.tier(4) == "cold"
    assert [state for state, _ in cold.copies(weights(1))][-1] == "deleting"
    assert ("cold", "cold" if cold.fake is None else "archive") in cold.copies(weights(1))


def test_what_another_store_has_not_got_yet_stays_hot_so_that_it_can(cold: Cold) -> None:
    cold.aged()
    with cold.context.database.transaction() as session:
        session.add(
            CheckpointCopy(
                checkpoint_id=cold.view(1)["id"],
                store_id=cold.context.store_id,
                wanted=True,
                checkpoint_version=1,
                missing_bytes=1,
            )
        )
    cold.until_idle()
    assert cold.tier(1) == "hot"
    with cold.context.database.transaction() as session:
        session.execute(
            update(CheckpointCopy)
            .values(complete_at=Checkpoint.created_at)
            .where(CheckpointCopy.checkpoint_id == Checkpoint.id)
        )
    cold.advance(HOUR)
    cold.until_idle()
    assert cold.tier(1) == "cold"
