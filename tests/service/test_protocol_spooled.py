"""Rule late-save-adoption: a save that was kept in a spool is adopted while the run has not gone on without it, else a
branch.

`first` is the attempt that staged the save and died; `second` is the relaunch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import holdfast_service.training.begin
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Run
from holdfast_service.liveness.abandoned_uploads import ReapReport, reconcile
from holdfast_service.retention.read_facts import read_facts
from holdfast_service.settings import ServiceSettings
from holdfast_service.tiers.rules import subjects_of
from tests.service.conftest import Clock
from tests.support.interleave import refused
from tests.support.rank import Job, Save, answer, digest_of
from tests.support.service import RunningService

pytestmark = pytest.mark.rule("late-save-adoption")

IDLE_SECONDS = 40


@pytest.fixture
def settings(settings: ServiceSettings) -> ServiceSettings:
    return settings.model_copy(update={"upload_idle_seconds": IDLE_SECONDS, "lost_after_seconds": 200.0})


@pytest.fixture
def first(service: RunningService) -> Job:
    job = Job(service.http())
    job.save(100)
    return job


@pytest.fixture
def second(first: Job) -> Job:
    return Job(first.http, after=1)


def staged(origin: Job, step: int) -> list[bytes]:
    """What the spool holds of a rank."""
    return [f"state of {origin.number} at {step}".encode(), f"index of {origin.number} at {step}".encode()]


def begin_late(pusher: Job, origin: Job, step: int, **changes: Any) -> Save:
    return pusher.begin(step, origin_attempt=origin.number, **changes)


def push(pusher: Job, origin: Job, step: int, **changes: Any) -> Any:
    return begin_late(pusher, origin, step, **changes).write(0, staged(origin, step))


def restore_point(job: Job, selector: str = "latest") -> Any:
    return answer(job.http.get(f"{job.base}/restore-point", params={"selector": selector}))["restore_point"]


def latest_step(job: Job) -> int:
    return int(restore_point(job)["step"])


def test_the_next_attempt_adopts_what_the_one_before_had_spooled(first: Job, second: Job) -> None:
    assert second.opened["restore_point"]["step"] == 100
    view = push(second, first, 200)
    assert (view["state"], view["attempt"], view["pushed_by"], view["detached"]) == ("committed", 1, 2, False)
    assert restore_point(second)["checkpoint_id"] == view["id"]
    second.resumed_from(view["id"])
    assert Job(first.http, after=2).opened["restore_point"]["step"] == 200


def test_an_adopted_save_makes_its_attempts_line_the_runs(service: RunningService) -> None:
    first = Job(service.http())
    older = first.save(500)
    first.save(1000)
    second = Job(service.http(), after=1)
    second.resumed_from(older["id"])  # step 1000 did not load; what came after 500 is in the spool only
    third = Job(service.http(), after=2)
    assert latest_step(third) == 1000
    push(third, second, 700)
    assert latest_step(third) == 700
    fourth = Job(service.http(), after=3)
    assert [(each["step"], each["reason"]) for each in fourth.opened["skipped"]] == [(1000, "detached")]


def test_an_attempt_that_has_ended_is_pushed_for_until_another_takes_over(first: Job) -> None:
    first.end("preempted")
    view = push(first, first, 200)
    assert (view["state"], view["pushed_by"], view["detached"]) == ("committed", 1, False)
    assert latest_step(first) == 200
    with refused("stale_attempt"):
        first.begin(300)


def test_a_step_before_a_spoilt_one_is_adopted_too(first: Job) -> None:
    first.save(300, metrics={"loss": {"nonfinite": "nan"}})
    second = Job(first.http, after=1)
    assert latest_step(second) == 100
    push(second, first, 200)
    assert latest_step(second) == 200


def own_begin(first: Job, second: Job) -> Job:
    second.begin(110)
    return second


def own_begin_given_up(first: Job, second: Job) -> Job:
    second.begin(110).abort()
    return second


def rolled_back(first: Job, second: Job) -> Job:
    second.resumed_from(restore_point(second)["checkpoint_id"], rollback=True)
    return second


def one_in_between(first: Job, second: Job) -> Job:
    second.save(90)
    return Job(first.http, after=2)


GONE_ON = [own_begin, own_begin_given_up, rolled_back, one_in_between]


@pytest.mark.parametrize("go_on", GONE_ON)
def test_once_the_run_has_gone_on_a_late_save_is_a_branch_that_is_never_latest(
    first: Job, second: Job, go_on: Callable[[Job, Job], Job]
) -> None:
    pusher = go_on(first, second)
    before = restore_point(pusher)
    with refused("detached_branch") as caught:
        begin_late(pusher, first, 200)
    assert caught.value.status == 409
    better = {"loss": {"value": -1.0}}
    save = begin_late(pusher, first, 200, allow_detached=True)
    view = save.write(0, staged(first, 200), metrics=better)
    assert (view["state"], view["attempt"], view["detached"]) == ("committed", 1, True)
    assert restore_point(pusher) == before
    with refused("no_restore_point"):
        restore_point(pusher, "200")
    assert restore_point(pusher, "200#1")["checkpoint_id"] == restore_point(pusher, view["id"])["checkpoint_id"]
    newer = Job(first.http, after=pusher.number)
    assert newer.opened["restore_point"] == before
    late = next(each for each in newer.opened["skipped"] if each["checkpoint_id"] == view["id"])
    assert (late["reason"], "pushed late" in late["detail"]) == ("detached", True)


@pytest.mark.rule("latest-follows-lineage")
def test_a_branch_that_was_named_and_resumed_from_is_on_the_lineage(
    service: RunningService, first: Job, second: Job
) -> None:
    second.save(110)
    push(second, first, 150, allow_detached=True)
    named = push(second, first, 200, allow_detached=True)
    third = Job(first.http, after=2)
    assert latest_step(third) == 110
    third.resumed_from(named["id"], rollback=True)
    fourth = Job(first.http, after=3)  # the third has died before its first commit
    assert fourth.opened["restore_point"]["checkpoint_id"] == named["id"]
    fourth.resumed_from(named["id"])
    fourth.save(250)
    with service.context.database.read() as session:
        run = session.query(Run).one()
        facts = read_facts(session, run, None).facts
        subjects = subjects_of(session, run.id, database_now(session))
    for told in ([(each.step, each.on_line) for each in kept] for kept in (facts, subjects)):
        assert sorted(told) == [(100, True), (110, False), (150, False), (200, True), (250, True)]
    assert restore_point(fourth, "200")["checkpoint_id"] == named["id"]
    with refused("no_restore_point"):
        restore_point(fourth, "150")


def test_a_branch_is_never_the_best(first: Job, second: Job) -> None:
    second.save(110, metrics={"loss": {"value": 2.0}})
    save = begin_late(second, first, 200, allow_detached=True)
    save.write(0, staged(first, 200), metrics={"loss": {"value": 1.0}})
    assert restore_point(second, "best:loss")["step"] == 110


def test_a_branch_moves_nobodys_line(service: RunningService) -> None:
    first = Job(service.http())
    older = first.save(500)
    first.save(1000)
    second = Job(service.http(), after=1)
    second.resumed_from(older["id"])
    third = Job(service.http(), after=2)
    third.begin(1100)
    push(third, second, 700, allow_detached=True)
    assert latest_step(third) == 1000
    assert answer(third.http.get(f"{third.base}/attempts/2"))["last_step"] == 700


def test_a_branch_does_not_keep_a_later_attempt_from_adopting_the_step(
    first: Job, second: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = itertools.count()  # ids that rise: by them alone the branch would come first
    ids = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=f"{next(numbers):032x}"))
    monkeypatch.setattr(holdfast_service.training.begin, "uuid", ids)
    second.begin(110)
    done = push(second, first, 200, allow_detached=True)
    under_way = begin_late(second, first, 300, allow_detached=True)
    third = Job(first.http, after=2)
    for step in (200, 300):
        adopted = push(third, first, step)
        assert (adopted["state"], adopted["detached"]) == ("committed", False)
        assert latest_step(third) == step
        shown = answer(third.http.get(f"{third.base}/checkpoints/{step}%231"))
        assert shown["id"] == adopted["id"] == restore_point(third, f"{step}#1")["checkpoint_id"]
    assert done["id"] != restore_point(third, "200")["checkpoint_id"]
    assert under_way.write(0, staged(first, 300))["detached"]


def test_a_newer_attempt_ends_an_adoption_and_adopts_again(first: Job, second: Job) -> None:
    save = begin_late(second, first, 200)
    save.upload(0, staged(first, 200))
    third = Job(first.http, after=2)
    assert save.now()["abort_reason"] == "fenced by attempt 3"
    with refused("stale_attempt"):
        save.seal(0, staged(first, 200))
    view = push(third, first, 200)
    assert (view["state"], view["pushed_by"], latest_step(third)) == ("committed", 3, 200)


def test_a_newer_attempt_leaves_a_branch_alone(first: Job, second: Job) -> None:
    with refused("stale_attempt"):
        begin_late(first, first, 200)
    save = begin_late(first, first, 200, allow_detached=True)
    save.upload(0, staged(first, 200))
    third = Job(first.http, after=2)
    assert save.seal(0, staged(first, 200))["state"] == "committed"
    assert latest_step(third) == 100


def test_what_was_committed_in_time_is_found_and_compared(first: Job) -> None:
    saved = first.begin(200)
    saved.write(0, staged(first, 200))  # and the reply is lost
    second = Job(first.http, after=1)
    save = begin_late(second, first, 200)
    assert (save.id, save.view["state"], save.view["pushed_by"]) == (saved.id, "committed", None)
    assert save.seal(0, staged(first, 200))["etag"] == save.view["etag"]
    with refused("manifest_conflict"):
        save.seal(0, [b"other", b"content"])
    for write in (lambda: save.negotiate(0, [b"more"]), lambda: save.fail(0), save.abort):
        with refused("checkpoint_conflict"):
            write()
    with refused("checkpoint_conflict"):
        begin_late(second, first, 200, world_size=2)


def test_a_late_save_is_written_by_its_pusher_only(first: Job, second: Job) -> None:
    save = begin_late(first, first, 200, allow_detached=True)
    other = Save(second, save.view)
    for write in (
        lambda: other.negotiate(0, staged(first, 200)),
        lambda: other.seal(0, staged(first, 200)),
        lambda: other.fail(0),
        other.abort,
    ):
        with refused("checkpoint_conflict"):
            write()
    second.begin(110)
    with refused("checkpoint_conflict"):
        begin_late(second, first, 200, allow_detached=True)
    assert save.write(0, staged(first, 200))["state"] == "committed"
    assert begin_late(second, first, 200).view["detached"]


def test_all_ranks_find_what_one_began_in_time(first: Job, second: Job) -> None:
    save = begin_late(second, first, 200, world_size=2)
    second.begin(110)  # rank 0 is ahead of rank 1
    assert begin_late(second, first, 200, world_size=2).id == save.id
    for rank in (0, 1):
        view = save.write(rank, staged(first, 200))
    assert (view["state"], view["detached"], latest_step(second)) == ("committed", False, 200)


def test_what_makes_no_sense_is_refused(first: Job, second: Job) -> None:
    for wrong, code in (
        ({"origin_attempt": 3}, "attempt_not_found"),
        ({"origin_attempt": 2, "attempt": 1, "launch_id": first.launch_id, "allow_detached": True}, "invalid_request"),
        ({"origin_attempt": 1, "attempt": 7, "allow_detached": True}, "attempt_not_found"),
        ({"origin_attempt": 1, "epoch": 99, "allow_detached": True}, "stale_attempt"),
        ({"allow_detached": True}, "invalid_request"),
    ):
        with refused(code):
            second.begin(200, **wrong)


def test_an_unproven_copy_is_good_for_the_attempt_that_staged_it(
    service: RunningService, first: Job, second: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service.context.store, "capabilities", None)
    view = push(second, first, 200)
    assert view["state"] == "committed"
    read = answer(
        second.http.post(f"/v1/checkpoints/{view['id']}/reads", json={"digests": [digest_of(staged(first, 200)[0])]})
    )
    assert [each["kind"] for each in read["chunks"]] == ["http"]
    reply = second.begin(210).negotiate(0, staged(first, 200))
    assert [each["status"] for each in reply["chunks"]] == ["upload"] * 2


def test_only_its_own_silence_ends_a_late_save(first: Job, service: RunningService, clock: Clock) -> None:
    second = Job(first.http, after=1)
    save = begin_late(second, first, 200)
    second.end("failed")
    assert reconcile(service.context) == ReapReport()
    clock.advance(IDLE_SECONDS - 1)
    save.upload(0, staged(first, 200))
    assert reconcile(service.context) == ReapReport()
    older, newer = (answer(first.http.get(f"{first.base}/attempts/{number}")) for number in (1, 2))
    assert newer["heartbeat_at"] > newer["ended_at"] > older["heartbeat_at"]
    clock.advance(IDLE_SECONDS + 1)
    assert reconcile(service.context).aborted == (save.id,)
    assert save.now()["abort_cause"] == "silent"
