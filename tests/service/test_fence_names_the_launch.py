"""An attempt's number that a database gives twice: it went back to a state from before it gave it the first time."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import delete, update

from holdfast_protocol.attempts import Heartbeat
from holdfast_protocol.base import body_for
from holdfast_service.db.tables.core import Attempt, Run
from tests.support.rank import Job, Refused, answer
from tests.support.service import RunningService

pytestmark = pytest.mark.rule("database-went-back")


def lose_newest_attempt(service: RunningService) -> None:
    """As a failover does whose copy of the database ends before it was opened."""
    with service.context.database.transaction() as session:
        run_id, newest = session.execute(
            update(Run).values(latest_attempt=Run.latest_attempt - 1).returning(Run.id, Run.latest_attempt)
        ).one()
        session.execute(delete(Attempt).where(Attempt.run_id == run_id, Attempt.number > newest))


def test_two_launches_that_were_given_one_number_do_not_share_a_fence(service: RunningService) -> None:
    living = Job(service.http(), world_size=2, launch_id="living")
    lose_newest_attempt(service)
    with pytest.raises(Refused, match="went back to an older state") as refused:
        living.heartbeat(7)
    assert refused.value.code == "stale_attempt"
    assert "latest_attempt" not in refused.value.context, "nobody else has the run: the job may be launched again"
    other = Job(service.http(), world_size=2, launch_id="other")
    assert (other.number, other.opened["epoch"]) == (living.number, living.opened["epoch"])
    save = other.begin(10)
    save.write(0, [b"rank 0 of the other launch", b"index"])
    living_save = type(save)(living, save.view)
    for call in (
        lambda: living.begin(10),
        lambda: living_save.negotiate(1, [b"rank 1 of the living one"]),
        lambda: living_save.seal(1, [b"rank 0 of the other launch", b"index"]),
        lambda: living_save.fail(1),
        lambda: living_save.abort(),
        lambda: living.resumed_from(None),
        lambda: living.heartbeat(11),
        lambda: living.end(),
    ):
        with pytest.raises(Refused, match="another launch's") as refused:
            call()
        assert (refused.value.code, refused.value.context["latest_attempt"]) == ("stale_attempt", 1)
    assert save.now()["sealed_ranks"] == 1
    assert save.write(1, [b"rank 1 of the other launch", b"index"])["state"] == "committed"


def test_what_a_stranger_says_is_not_noted_for_the_attempt_of_its_number(service: RunningService) -> None:
    living = Job(service.http(), launch_id="living")
    lose_newest_attempt(service)
    Job(service.http(), launch_id="other")
    Job(service.http(), launch_id="third", after=1)
    with pytest.raises(Refused):
        living.heartbeat(7)
    other: dict[str, Any] = answer(service.http().get("/v1/projects/demo/runs/gpt/attempts/1"))
    assert (other["launch_id"], other["refused_at"]) == ("other", None)


def test_an_older_client_is_fenced_by_its_number_and_an_older_service_is_not_told_the_launch(
    service: RunningService,
) -> None:
    job = Job(service.http())
    del job.fence["launch_id"]
    assert job.save(1)["state"] == "committed"
    beat = Heartbeat(epoch=1, attempt=1, launch_id="l")
    assert b"launch_id" not in body_for(3, beat)
    assert b"launch_id" in body_for(4, beat)
