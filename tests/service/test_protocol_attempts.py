"""Attempts, the lineage and what opening tells: rules attempt-compare-and-swap, latest-follows-lineage, fencing-token
and no-silent-fresh-start."""

from __future__ import annotations

import pytest
from sqlalchemy import update

from holdfast_protocol.states import Scope
from holdfast_service.db.tables.core import Checkpoint
from holdfast_service.training import fencing as writing
from tests.support.interleave import hold_before, in_background, refused, until_blocked_or_done
from tests.support.rank import Job, Refused, answer
from tests.support.service import RunningService


@pytest.mark.rule("attempt-compare-and-swap")
def test_the_same_launch_gets_its_number_back(service: RunningService) -> None:
    first = Job(service.http(), launch_id="one")
    assert Job(service.http(), launch_id="one").number == first.number == 1
    assert first.begin(1).view["state"] == "uploading"


@pytest.mark.rule("attempt-compare-and-swap")
def test_a_late_retry_cannot_fence_its_successor(service: RunningService) -> None:
    Job(service.http(), launch_id="one")
    second = Job(service.http(), launch_id="two", after=1)
    with refused("stale_attempt"):
        Job(service.http(), launch_id="one")
    with refused("attempt_conflict") as caught:
        Job(service.http(), launch_id="three", after=1)
    assert caught.value.context["latest_attempt"] == 2
    assert second.save(100)["state"] == "committed"


@pytest.mark.rule("lock-order")
@pytest.mark.rule("attempt-compare-and-swap")
def test_of_two_launches_at_once_one_opens_and_the_other_is_told(service: RunningService) -> None:
    Job(service.http())

    def launch(_: int) -> str:
        try:
            return str(Job(service.http(), after=1).number)
        except Refused as problem:
            return problem.code

    with in_background() as threads:
        assert sorted(threads.map(launch, range(6))) == ["2"] + ["attempt_conflict"] * 5


def test_every_write_of_a_fenced_attempt_is_refused(service: RunningService) -> None:
    first = Job(service.http())
    save = first.begin(100)
    save.upload(0, [b"w", b"i"])
    second = Job(service.http(), after=1)
    for write in (
        lambda: first.begin(200),
        lambda: save.negotiate(0, [b"more"]),
        lambda: save.negotiate(0, finished=[b"w"]),
        lambda: save.seal(0, [b"w", b"i"]),
        lambda: save.fail(0),
        lambda: save.abort(),
        lambda: first.heartbeat(100),
        lambda: first.resumed_from(None),
        lambda: first.end(),
    ):
        with refused("stale_attempt") as caught:
            write()
        assert "Attempt 1 was fenced: attempt 2 has taken over" in caught.value.detail
    view = answer(second.http.get(f"{second.base}/attempts/1"))
    assert (view["outcome"], view["outcome_detail"]) == ("fenced", "attempt 2 has taken over while it was still alive")


def test_an_attempt_cannot_write_into_another_ones_checkpoint(service: RunningService) -> None:
    committed = Job(service.http()).save(100)
    second = Job(service.http(), after=1)
    with refused("checkpoint_conflict"):
        second.call("POST", f"/v1/checkpoints/{committed['id']}/shards/0/chunks")


@pytest.mark.rule("latest-follows-lineage")
def test_after_a_rollback_a_poisoned_later_step_never_outranks_the_new_line(service: RunningService) -> None:
    first = Job(service.http())
    good, poisoned = first.save(500), first.save(1000)
    second = Job(service.http(), after=1)
    assert second.opened["restore_point"]["step"] == 1000
    second.resumed_from(good["id"], rollback=True)
    third = Job(service.http(), after=2)
    assert third.opened["restore_point"]["step"] == 500
    assert [(each["step"], each["reason"]) for each in third.opened["skipped"]] == [(1000, "detached")]
    assert third.opened["skipped"][0]["checkpoint_id"] == poisoned["id"]
    third.resumed_from(good["id"])
    third.save(550)
    assert Job(service.http(), after=3).opened["restore_point"]["step"] == 550


@pytest.mark.rule("latest-follows-lineage")
def test_an_attempt_that_has_committed_nothing_leaves_the_line_as_it_was(service: RunningService) -> None:
    first = Job(service.http())
    older = first.save(500)
    first.save(1000)
    second = Job(service.http(), after=1)
    second.resumed_from(older["id"])  # a fall-back, and then it dies
    third = Job(service.http(), after=2)
    assert third.opened["restore_point"]["step"] == 1000
    third.resumed_from(older["id"])
    third.save(600)
    fourth = Job(service.http(), after=3)
    assert fourth.opened["restore_point"]["step"] == 600
    assert [each["reason"] for each in fourth.opened["skipped"]] == ["detached"]


@pytest.mark.rule("latest-follows-lineage")
def test_the_line_cannot_be_moved_once_the_attempt_has_committed(service: RunningService) -> None:
    first = Job(service.http())
    one, two = first.save(100), first.save(200)
    second = Job(service.http(), after=1)
    second.resumed_from(two["id"])
    own = second.save(300)
    second.resumed_from(two["id"])
    second.resumed_from(own["id"])  # its own: it lies on its line already
    with refused("invalid_request"):
        second.resumed_from(one["id"])
    with refused("invalid_request"):
        second.resumed_from(own["id"], rollback=True)
    assert Job(service.http(), after=2).opened["restore_point"]["step"] == 300


@pytest.mark.rule("latest-follows-lineage")
def test_only_a_committed_checkpoint_of_this_run_can_have_been_resumed_from(service: RunningService) -> None:
    foreign = Job(service.http(), "demo/another-one").save(100)
    job = Job(service.http())
    with refused("checkpoint_not_found"):
        job.resumed_from(foreign["id"])
    with refused("checkpoint_not_found"):
        job.resumed_from("ck_" + "0" * 32)
    uploading = job.begin(5)
    with refused("invalid_request"):
        job.resumed_from(uploading.id)


def test_opening_says_why_newer_checkpoints_were_skipped(service: RunningService) -> None:
    first = Job(service.http())
    first.save(100)
    first.save(200, metrics={"loss": {"nonfinite": "inf"}})
    corrupt, cold = first.save(300), first.save(400)
    with service.context.database.transaction() as session:
        session.execute(
            update(Checkpoint).where(Checkpoint.id == corrupt["id"]).values(health="corrupt", health_reason="a hole")
        )
        session.execute(update(Checkpoint).where(Checkpoint.id == cold["id"]).values(tier="cold"))
    first.begin(500).abort("disk full")
    first.begin(600)
    second = Job(service.http(), after=1)
    assert second.opened["restore_point"]["step"] == 100
    assert [(each["step"], each["reason"]) for each in second.opened["skipped"]] == [
        (600, "aborted"),
        (500, "aborted"),
        (400, "cold"),
        (300, "corrupt"),
        (200, "diverged"),
    ]
    assert [each["detail"] for each in second.opened["skipped"]] == [
        "Step 600 of attempt 1 was never complete: fenced by attempt 2.",
        "Step 500 of attempt 1 was never complete: disk full.",
        "Step 400 of attempt 1 is cold. `holdfast checkpoints thaw demo/gpt@400#1` makes it readable; with --status it "
        "tells first what that takes.",
        "Step 300 of attempt 1 cannot be read whole: a hole.",
        "Step 200 of attempt 1 diverged: the metric loss is inf.",
    ]
    # The catalog keeps it, for who asks later; the job's own answer is gone by then.
    assert second.view()["skipped"] == second.opened["skipped"]
    newest, oldest = answer(service.http().get(f"{second.base}/attempts"))["items"]
    assert (newest["skipped"], oldest["skipped"]) == (second.opened["skipped"], [])
    (started,) = answer(service.http().get("/v1/events", params={"type": "restore.started"}))["items"]
    assert started["data"]["reason"] == (
        "skipped 600 (aborted: fenced by attempt 2), 500 (aborted: disk full), 400 (cold), 300 (corrupt: a hole), "
        "200 (diverged: the metric loss is inf)"
    )


def test_what_was_skipped_is_told_of_the_checkpoint_that_was_loaded(service: RunningService) -> None:
    """Which is another than the offered one if a late save is adopted, or if a rank could not read what was offered."""
    first = Job(service.http())
    for step in (100, 200):
        first.save(step)
    late = [b"state at 300", b"index at 300"]
    first.begin(300)
    second = Job(service.http(), after=1)
    assert [each["step"] for each in second.view()["skipped"]] == [300]
    adopted = second.begin(300, origin_attempt=1).write(0, late)
    second.resumed_from(adopted["id"])
    assert second.view()["skipped"] == [], "nothing was newer"
    third = Job(service.http(), after=2)
    assert (third.opened["restore_point"]["step"], third.view()["skipped"]) == (300, [])
    older = next(
        each for each in answer(service.http().get(f"{third.base}/checkpoints"))["items"] if each["step"] == 200
    )
    third.resumed_from(older["id"])
    assert third.view()["skipped"] is None, "nobody has said yet what is wrong with step 300"
    with service.context.database.transaction() as session:
        session.execute(
            update(Checkpoint).where(Checkpoint.id == adopted["id"]).values(health="corrupt", health_reason="a hole")
        )
    fourth = Job(service.http(), after=3)
    told = fourth.view()["skipped"]
    # Both are of one step and one attempt: which comes first is not said.
    assert sorted((each["step"], each["reason"]) for each in told) == [(300, "aborted"), (300, "corrupt")]
    fourth.resumed_from(older["id"])
    assert fourth.view()["skipped"] == told


def test_what_an_attempt_keeps_of_what_was_skipped_is_bounded(service: RunningService) -> None:
    first = Job(service.http())
    first.save(1)
    for step in range(2, 25):
        first.begin(step).abort("disk full " * 90)
    second = Job(service.http(), after=1)
    kept = second.view()["skipped"]
    assert [each["step"] for each in kept] == list(range(24, 4, -1))
    assert {len(each["detail"]) for each in kept} == {200}
    (started,) = answer(service.http().get("/v1/events", params={"type": "restore.started"}))["items"]
    assert len(started["data"]["reason"]) == 500


def test_a_job_that_goes_back_by_itself_skips_nothing(service: RunningService) -> None:
    job = Job(service.http())
    job.save(1)
    job.begin(2).abort("disk full")
    body = {"launch_id": "back", "after": 1, "world_size": 1, "rolls_back": 1}
    answer(service.http().post(f"{job.base}/attempts", json=body))
    assert answer(service.http().get(f"{job.base}/attempts/2"))["skipped"] is None


@pytest.mark.rule("fencing-token")
def test_a_fence_of_another_epoch_is_refused(service: RunningService) -> None:
    job = Job(service.http())
    job.fence = job.fence | {"epoch": service.context.epoch + 1}
    with refused("stale_attempt") as caught:
        job.begin(100)
    assert "restored or cloned" in caught.value.detail


@pytest.mark.rule("no-silent-fresh-start")
def test_only_a_run_in_which_nothing_was_ever_committed_says_so(service: RunningService) -> None:
    first = Job(service.http())
    assert (first.opened["restore_point"], first.opened["ever_committed"]) == (None, False)
    first.begin(100).abort()
    second = Job(service.http(), after=1)
    assert (second.opened["restore_point"], second.opened["ever_committed"]) == (None, False)
    second.save(100, finite=False)
    third = Job(service.http(), after=2)
    assert (third.opened["restore_point"], third.opened["ever_committed"]) == (None, True)


@pytest.mark.rule("no-silent-fresh-start")
def test_a_mistyped_run_is_refused_and_says_which_was_meant(service: RunningService) -> None:
    Job(service.http(), "demo/llama-small").save(100)
    for mistyped in ("demo/lama-small", "demo/llama_small", "demo/lalma-small", "dmeo/llama-small"):
        with refused("run_not_found") as caught:
            Job(service.http(), mistyped)
        assert caught.value.context["did_you_mean"] == ["demo/llama-small"]
        assert "Did you mean demo/llama-small" in caught.value.detail
    assert Job(service.http(), "demo/llama-large").number == 1
    assert Job(service.http(), "demo/lama-small", create=True).number == 1


@pytest.mark.rule("no-silent-fresh-start")
def test_a_run_that_must_exist_is_not_made(service: RunningService) -> None:
    with refused("project_not_found"):
        Job(service.http(), "demo/gpt", create=False)
    service.make_project("demo")
    with refused("run_not_found"):
        Job(service.http(), "demo/gpt", create=False)
    assert Job(service.http(), "demo/gpt").number == 1


@pytest.mark.rule("no-silent-fresh-start")
def test_a_token_that_may_not_make_projects_is_told_that_there_is_none(service: RunningService) -> None:
    trainer = service.http(token=service.token(Scope.TRAIN, Scope.READ))
    with refused("project_not_found"):
        Job(trainer, "demo/gpt")
    service.make_project("demo")
    service.make_project("other")
    assert Job(trainer, "demo/gpt").number == 1
    bound = service.http(token=service.token(project="demo"))
    with refused("forbidden"):
        Job(bound, "other/gpt")


def test_a_mistyped_run_of_a_project_that_the_token_may_not_see_stays_unknown(service: RunningService) -> None:
    Job(service.http(), "secret/llama").save(100)
    service.make_project("secret2")
    with refused("run_not_found"):
        Job(service.http(), "secret/lama")
    assert Job(service.http(token=service.token(project="secret2")), "secret2/lama").number == 1


def test_attempts_are_listed_with_what_they_said_of_themselves(service: RunningService) -> None:
    first = Job(service.http(), world_size=4)
    first.heartbeat(17)
    assert first.heartbeat()["save_interval_seconds"] == 600.0
    first.end("preempted")
    first.end("failed")  # the first word counts
    with refused("stale_attempt"):
        first.begin(100)
    Job(service.http(), after=1)
    page = answer(first.http.get(f"{first.base}/attempts", params={"limit": 1}))
    assert [each["number"] for each in page["items"]] == [2]
    rest = answer(first.http.get(f"{first.base}/attempts", params={"cursor": page["next_cursor"]}))
    assert rest["next_cursor"] is None
    (view,) = rest["items"]
    assert (view["number"], view["world_size"], view["last_step"], view["outcome"]) == (1, 4, 17, "preempted")
    with refused("attempt_not_found"):
        answer(first.http.get(f"{first.base}/attempts/3"))
    with refused("invalid_request"):
        first.call("POST", f"{first.base}/attempts/2/heartbeat")


def test_a_heartbeat_and_a_begin_at_once_do_not_wait_for_each_other(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(service.http())
    with in_background(begins := hold_before(monkeypatch, writing, "beat")) as threads:
        saving = threads.submit(job.begin, 100)
        begins.wait_until_reached()  # its checkpoint refers to the attempt, whose row it will write
        beating = threads.submit(Job.heartbeat, job, 101)
        until_blocked_or_done(service, beating)
        assert beating.done() or not service.context.database.is_postgres  # each would wait for the other
        begins.open()
        assert saving.result().view["state"] == "uploading"
        assert beating.result()["save_interval_seconds"] > 0
    assert job.view()["last_step"] == 101


def test_an_opening_tells_what_the_attempt_ran_with_that_saved_the_restore_point(service: RunningService) -> None:
    http = service.http()
    assert Job(http).opened["saved_with"] is None
    second = Job(http, after=1, environment={"torch": "2.13.0"})
    saved = second.save(7)
    third = Job(http, after=2, environment={"torch": "9.9.9"})
    assert (third.opened["restore_point"]["step"], third.opened["saved_with"]) == (7, {"torch": "2.13.0"})
    third.resumed_from(saved["id"])
    third.save(8)
    point = answer(http.get(f"{third.base}/restore-point", params={"before_step": 8}))
    assert (point["restore_point"]["step"], point["saved_with"]) == (7, {"torch": "2.13.0"})
    assert answer(http.get(f"{third.base}/restore-point"))["saved_with"] == {"torch": "9.9.9"}
