"""Two saves of one step, of one attempt: their ranks' parts never become one checkpoint, however late a part comes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import holdfast_service.training.begin
from tests.support.interleave import Gate, hold_after, hold_before, overlap, refused
from tests.support.rank import Job
from tests.support.service import RunningService

pytestmark = pytest.mark.rule("one-checkpoint-per-step")

WORLD = 2


@pytest.fixture
def job(service: RunningService) -> Job:
    return Job(service.http(), world_size=WORLD)


def part(number: int, rank: int) -> list[bytes]:
    return [f"save {number} of rank {rank}".encode(), f"its index {number} {rank}".encode()]


def test_a_later_save_takes_the_step_and_nothing_that_was_sealed_before_counts(job: Job) -> None:
    first = job.begin(100, save_number=1)
    first.write(0, part(1, 0))
    second = job.begin(100, save_number=2)
    assert second.id != first.id
    assert (first.now()["state"], first.now()["abort_cause"]) == ("aborted", "job")
    assert "save 2 of the attempt has begun this step anew" in first.now()["abort_reason"]
    assert second.write(1, part(2, 1))["state"] == "uploading"
    assert second.write(0, part(2, 0))["state"] == "committed"


def test_a_part_of_an_earlier_save_that_comes_late_is_refused(job: Job) -> None:
    job.begin(100, save_number=1).abort("a rank has failed")
    second = job.begin(100, save_number=2)
    second.write(0, part(2, 0))
    with refused("checkpoint_conflict") as caught:
        job.begin(100, save_number=1)
    assert "save 1 of that step cannot be completed any more" in caught.value.detail
    assert second.write(1, part(2, 1))["state"] == "committed"


def test_ranks_of_one_save_meet_and_so_does_an_older_client_that_gives_no_number(job: Job) -> None:
    begun = {job.begin(100, **said).id for said in ({"save_number": 3}, {"save_number": 3}, {})}
    assert len(begun) == 1


def test_a_committed_step_is_given_back_to_every_save_and_the_seal_compares_the_content(job: Job) -> None:
    first = job.begin(100, save_number=2)
    for rank in range(WORLD):
        first.write(rank, part(2, rank))
    for number in (1, 3):
        again = job.begin(100, save_number=number)
        assert (again.id, again.view["state"]) == (first.id, "committed")
        assert again.seal(0, part(2, 0))["state"] == "committed"
        with refused("manifest_conflict"):
            again.seal(0, part(number, 0))


@pytest.mark.parametrize("hold", [hold_before, hold_after], ids=["both have looked", "the other one waits"])
@pytest.mark.parametrize("held", [1, 2])
def test_two_saves_that_begin_at_once_end_with_the_later_one(
    job: Job, service: RunningService, monkeypatch: pytest.MonkeyPatch, held: int, hold: Callable[..., Gate]
) -> None:
    gate = hold(monkeypatch, holdfast_service.training.begin, "insert_absent")
    other = 3 - held
    futures = overlap(
        service, gate, lambda: job.begin(100, save_number=held), lambda: job.begin(100, save_number=other)
    )
    begun = dict(zip((held, other), futures, strict=True))
    later = begun[2].result()
    assert later.now()["state"] == "uploading"
    if begun[1].exception() is None:
        assert begun[1].result().now()["state"] == "aborted"
    else:
        with refused("checkpoint_conflict"):
            begun[1].result()
    for rank in range(WORLD):
        view = later.write(rank, part(2, rank))
    assert view["state"] == "committed"


def test_a_spooled_part_of_an_earlier_save_never_meets_a_later_save_of_its_step(job: Job) -> None:
    pusher = Job(job.http, after=job.number, world_size=WORLD)
    late = {"origin_attempt": job.number}
    first = pusher.begin(100, save_number=1, **late)
    first.write(0, part(1, 0))
    with refused("checkpoint_conflict") as caught:
        pusher.begin(100, save_number=2, **late)
    assert "Push it again once the other one is committed, or was given up" in caught.value.detail
    first.abort("its other part is lost")
    second = pusher.begin(100, save_number=2, **late)
    with refused("checkpoint_conflict"):
        pusher.begin(100, save_number=1, **late)
    for rank in range(WORLD):
        view = second.write(rank, part(2, rank))
    assert view["state"] == "committed"


def test_who_pushes_a_later_save_does_not_abort_what_living_ranks_still_write(job: Job) -> None:
    living = job.begin(100, save_number=1)
    living.write(0, part(1, 0))
    with refused("checkpoint_conflict"):
        job.begin(100, save_number=2, origin_attempt=job.number)
    assert living.write(1, part(1, 1))["state"] == "committed"
