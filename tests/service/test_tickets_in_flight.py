"""A project's tickets in flight are bounded, on both databases and in all processes together."""

from __future__ import annotations

import pytest

from holdfast_service import context
from holdfast_service.settings import ServiceSettings
from tests.support.rank import Job, Refused
from tests.support.service import RunningService, running_service

MOST = 4


@pytest.fixture
def settings(settings: ServiceSettings) -> ServiceSettings:
    return settings.model_copy(update={"project_tickets": MOST})


@pytest.fixture(autouse=True)
def _counted_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_AGAIN_AFTER_SECONDS", -1.0)


def chunks(first: int, count: int) -> list[bytes]:
    return [f"chunk {number}".encode() for number in range(first, first + count)]


def test_what_is_beyond_the_limit_comes_when_something_has_arrived(service: RunningService) -> None:
    save = Job(service.http()).begin(1)
    sent = chunks(0, MOST)
    answers = save.negotiate(0, sent)["chunks"]
    with pytest.raises(Refused) as caught:
        save.negotiate(0, chunks(10, 1))
    assert (caught.value.status, caught.value.code) == (429, "rate_limited")
    assert "HOLDFAST_PROJECT_TICKETS" in caught.value.detail
    assert {each["status"] for each in save.negotiate(0, sent)["chunks"]} == {"upload"}, "the same tickets again"
    save.send(sent, answers)
    assert len(save.negotiate(0, chunks(10, 1), finished=sent)["chunks"]) == 1


def test_tickets_that_another_process_has_handed_out_count_too(service: RunningService) -> None:
    job = Job(service.http())
    save = job.begin(1)
    save.negotiate(0, chunks(0, MOST))
    with running_service(service.context.settings) as other:
        job.http = other.http()
        with pytest.raises(Refused):
            save.negotiate(0, chunks(10, 1))


def test_another_project_has_a_limit_of_its_own(service: RunningService) -> None:
    Job(service.http()).begin(1).negotiate(0, chunks(0, MOST))
    assert len(Job(service.http(), "other/run").begin(1).negotiate(0, chunks(0, MOST))["chunks"]) == MOST


def test_one_call_may_ask_for_more_than_the_limit_if_nothing_is_in_flight(service: RunningService) -> None:
    save = Job(service.http()).begin(1)
    save.upload(0, chunks(0, 3 * MOST))
    assert save.seal(0, chunks(0, 3 * MOST))["state"] == "committed"


def test_a_begin_goes_through_without_its_offer(service: RunningService) -> None:
    """The rank hears why when it offers again."""
    job = Job(service.http())
    job.begin(1).negotiate(0, chunks(0, MOST))
    offer = {"rank": 0, "chunks": [{"digest": "0" * 64, "bytes": 3, "md5": "0" * 32}]}
    begun = job.begin(2, offers=[offer])
    assert begun.view["state"] == "uploading"
    assert begun.view["negotiated"] == []
