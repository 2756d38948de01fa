"""A rank's begin with its first offer: one call in place of two, and never less than either of them."""

from __future__ import annotations

import pytest

from tests.support.interleave import refused
from tests.support.rank import Job, Save, offer_of
from tests.support.service import RunningService

CHUNKS = [b"what it trains", b"where it stands"]


@pytest.fixture
def job(service: RunningService) -> Job:
    return Job(service.http())


@pytest.mark.rule("one-checkpoint-per-step")
def test_a_begin_negotiates_what_it_offers_and_the_seal_verifies_what_nobody_reported(job: Job) -> None:
    save = job.begin(1, offers=[offer_of(0, CHUNKS)])
    (negotiated,) = save.view["negotiated"]
    assert [each["status"] for each in negotiated["chunks"]] == ["upload", "upload"]
    save.send(CHUNKS, negotiated["chunks"])
    assert save.seal(0, CHUNKS)["state"] == "committed"


@pytest.mark.rule("one-checkpoint-per-step")
def test_the_same_begin_again_gives_the_same_checkpoint_and_copies(job: Job) -> None:
    first, again = job.begin(1, offers=[offer_of(0, CHUNKS)]), job.begin(1, offers=[offer_of(0, CHUNKS)])
    assert first.id == again.id
    assert again.view["negotiated"]
    again.send(CHUNKS, first.view["negotiated"][0]["chunks"])
    assert again.seal(0, CHUNKS)["state"] == "committed"


def test_a_begin_without_an_offer_negotiates_nothing(job: Job) -> None:
    assert job.begin(1).view["negotiated"] == []


def test_what_is_committed_takes_no_offer(job: Job) -> None:
    job.save(1)
    again = job.begin(1, offers=[offer_of(0, CHUNKS)])
    assert (again.view["state"], again.view["negotiated"]) == ("committed", [])


@pytest.mark.rule("quota-reserved")
def test_a_refused_offer_leaves_the_checkpoint_begun_and_the_next_call_says_why(service: RunningService) -> None:
    service.make_project("small", quota_bytes=1)
    save = Job(service.http(), "small/run").begin(1, offers=[offer_of(0, CHUNKS)])
    assert (save.view["state"], save.view["negotiated"]) == ("uploading", [])
    with refused("quota_exceeded"):
        save.negotiate(0, CHUNKS)


@pytest.mark.rule("present-is-referenced")
def test_what_is_there_is_said_to_be_and_held_for_the_shard(job: Job) -> None:
    job.save(1, content=CHUNKS[0])
    save: Save = job.begin(2, offers=[offer_of(0, [CHUNKS[0]])])
    assert [each["status"] for each in save.view["negotiated"][0]["chunks"]] == ["present"]


@pytest.mark.rule("fencing-token")
def test_a_fenced_attempt_begins_nothing_by_offering(service: RunningService, job: Job) -> None:
    Job(service.http(), after=1)
    with refused("stale_attempt"):
        job.begin(1, offers=[offer_of(0, CHUNKS)])


def test_a_rank_outside_of_the_world_is_refused_by_its_next_call(job: Job) -> None:
    save = job.begin(1, offers=[offer_of(7, CHUNKS)])
    assert save.view["negotiated"] == []
    with refused("invalid_request"):
        save.negotiate(7, CHUNKS)
