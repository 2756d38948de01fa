"""Rule late-save-adoption: adopting a spooled save at the same moment as a newer attempt opens, or saves a step of its
own."""

from __future__ import annotations

import pytest

import holdfast_service.training.attempts
import holdfast_service.training.begin
import holdfast_service.training.commit
from tests.support.interleave import hold_after, in_background, overlap, refused
from tests.support.rank import Job, Save, answer
from tests.support.service import RunningService

pytestmark = pytest.mark.rule("late-save-adoption")

CHUNKS = [b"state of 1 at 200", b"index of 1 at 200"]


@pytest.fixture
def first(service: RunningService) -> Job:
    job = Job(service.http())
    job.save(100)
    return job


@pytest.fixture
def second(first: Job) -> Job:
    """The relaunch; a client of its own, for it acts while others do."""
    return Job(first.http, after=1)


def begin_late(pusher: Job, **changes: bool) -> Save:
    return pusher.begin(200, origin_attempt=1, **changes)


def test_an_adoption_that_overlaps_a_newer_attempt_leaves_nothing_uploading(
    service: RunningService, second: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold_after(monkeypatch, holdfast_service.training.begin, "insert_absent")
    adopting, opening = overlap(service, gate, lambda: begin_late(second), lambda: Job(service.http(), after=2))
    save, third = adopting.result(), opening.result()
    assert save.now()["abort_reason"] == "fenced by attempt 3"
    assert third.opened["restore_point"]["step"] == 100
    assert begin_late(third).write(0, CHUNKS)["state"] == "committed"


def test_a_newer_attempt_is_told_of_an_adoption_that_commits_before_it(
    service: RunningService, second: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = begin_late(second)
    save.upload(0, CHUNKS)
    gate = hold_after(monkeypatch, holdfast_service.training.commit, "complete_if_whole")
    sealing, opening = overlap(service, gate, lambda: save.seal(0, CHUNKS), lambda: Job(service.http(), after=2))
    assert sealing.result()["state"] == "committed"
    assert opening.result().opened["restore_point"]["step"] == 200


@pytest.mark.parametrize("allow_detached", [False, True])
def test_no_adoption_begins_once_a_newer_attempt_has_its_restore_point(
    service: RunningService, second: Job, monkeypatch: pytest.MonkeyPatch, *, allow_detached: bool
) -> None:
    gate = hold_after(monkeypatch, holdfast_service.training.attempts, "choose_restore_point")
    opening, adopting = overlap(
        service, gate, lambda: Job(service.http(), after=2), lambda: begin_late(second, allow_detached=allow_detached)
    )
    third = opening.result()
    assert third.opened["restore_point"]["step"] == 100
    if not allow_detached:
        with refused("stale_attempt"):
            adopting.result()
        return
    view = adopting.result().write(0, CHUNKS)
    assert (view["state"], view["detached"]) == ("committed", True)
    assert Job(service.http(), after=3).opened["restore_point"]["step"] == 100


def test_the_newest_attempts_own_step_stands_over_a_save_adopted_at_the_same_moment(
    service: RunningService, second: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold_after(monkeypatch, holdfast_service.training.begin, "place_late_save")
    # It may be adopted, and its row is not there yet.
    adopting, beginning = overlap(service, gate, lambda: begin_late(second), lambda: second.begin(110))
    late, own = adopting.result(), beginning.result()
    second.resumed_from(latest(second)["checkpoint_id"])
    own.write(0, [b"w", b"i"])
    assert late.write(0, CHUNKS)["state"] == "committed"
    third = Job(service.http(), after=2)
    assert third.opened["restore_point"]["step"] == 110
    assert [(each["step"], each["reason"]) for each in third.opened["skipped"]] == [(200, "detached")]


def test_an_adoption_beside_the_newest_attempts_first_begin_comes_before_or_is_refused(
    service: RunningService, second: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold_after(monkeypatch, holdfast_service.training.begin, "insert_absent")
    # The row is there and nobody else can see it.
    beginning, adopting = overlap(service, gate, lambda: second.begin(110), lambda: begin_late(second))
    own = beginning.result()
    if service.context.database.is_postgres:  # both hold the run's row in share mode
        assert adopting.result().write(0, CHUNKS)["state"] == "committed"
        assert latest(second)["step"] == 200
    else:  # one writer at a time
        with refused("detached_branch"):
            adopting.result()
    with refused("detached_branch"):
        second.begin(300, origin_attempt=1)
    own.write(0, [b"w", b"i"])
    assert latest(second)["step"] == 110


def test_ranks_that_begin_the_same_late_save_at_once_find_one_checkpoint(second: Job) -> None:
    with in_background() as threads:
        saves = list(threads.map(lambda _: begin_late(second), range(8)))
    assert len({save.id for save in saves}) == 1


def latest(job: Job) -> dict[str, object]:
    return dict(answer(job.http.get(f"{job.base}/restore-point"))["restore_point"])
