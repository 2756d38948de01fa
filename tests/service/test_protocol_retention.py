"""What expires is what was shown and what the run's state allows under its locks (rules lock-order, read-lease,
trash-first and apply-what-was-shown)."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import event, select

import holdfast_service.retention.prune
import holdfast_service.retention.trash
import holdfast_service.training.attempts
from holdfast_protocol.states import CheckpointState, Scope
from holdfast_service.db.tables.core import Checkpoint
from holdfast_service.db.tables.operations import AuditEvent, Policy, RetentionMark
from holdfast_service.retention.controller import RetentionReport, backlog, reconcile
from tests.service.conftest import Clock
from tests.support.interleave import hold_after, in_background, overlap, refused, until_blocked_or_done
from tests.support.rank import Job, Refused, answer, digest_of
from tests.support.retention import (
    HOUR,
    RUN,
    apply,
    events,
    expiring,
    pin,
    plan,
    put_policy,
    state,
    states,
    undelete,
)
from tests.support.service import RunningService

DAY = 24 * HOUR


def saved(job: Job, *steps: int) -> dict[int, str]:
    """Their ids."""
    return {step: job.save(step)["id"] for step in steps}


def read(service: RunningService, job: Job, checkpoint_id: str, step: int) -> Any:
    """As a reader of one of its chunks; the lease."""
    data = f"{job.run} {job.number} {step} 0".encode()
    reply = service.http().post(f"/v1/checkpoints/{checkpoint_id}/reads", json={"digests": [digest_of(data)]})
    return answer(reply)["lease_id"]


@pytest.mark.rule("apply-what-was-shown")
def test_what_was_shown_expires_with_its_reasons_and_twice_is_once(service: RunningService) -> None:
    ids = saved(Job(service.http()), 1, 2, 3, 4)
    put_policy(service, keep_last=2)
    shown = plan(service)
    assert expiring(shown) == [ids[2], ids[1]]
    done = apply(service, shown)
    assert [one["step"] for one in done["trashed"]] == [2, 1]
    assert done["freed"] == shown["freed"]
    assert shown["freed"]["bytes"] > 0
    assert states(service) == {1: "trashed", 2: "trashed", 3: "committed", 4: "committed"}
    ((who, what, why),) = events(service, ids[1])
    assert (what, why) == ("checkpoint.expire", "retention policy of the run, version 1: no rule keeps it")
    assert who.startswith("test")
    again = apply(service, shown)
    assert (again["trashed"], again["left"], again["freed"]["bytes"]) == ([], [], 0)
    view = answer(service.http().get(f"{RUN}/checkpoints/1"))
    assert (view["state"], view["trashed_by"]) == ("trashed", "policy")
    assert view["purge_at"] == done["purge_at"]


@pytest.mark.rule("apply-what-was-shown")
@pytest.mark.parametrize("how", ["another", "the project's own holds again"])
def test_a_policy_that_changed_refuses_the_whole_plan(service: RunningService, how: str) -> None:
    saved(Job(service.http()), 1, 2, 3)
    http = service.http()
    answer(http.put("/v1/projects/demo/policies/retention", json={"document": {"keep_last": 1}}))
    first = put_policy(service, keep_last=1)
    shown = plan(service)
    if how == "another":
        put_policy(service, first["etag"], keep_last=2)
    else:
        answer(http.delete(f"{RUN}/policies/retention", headers={"If-Match": first["etag"]}))
    with refused("policy_changed"):
        apply(service, shown)
    assert set(states(service).values()) == {"committed"}


def test_a_policy_that_was_deleted_and_put_anew_is_not_the_one_that_was_seen(service: RunningService) -> None:
    Job(service.http()).save(1)
    seen = put_policy(service, keep_last=3)
    answer(service.http().delete(f"{RUN}/policies/retention", headers={"If-Match": seen["etag"]}))
    anew = put_policy(service, keep_last=5)
    with refused("edit_conflict"):
        put_policy(service, seen["etag"], keep_last=1)
    assert put_policy(service, anew["etag"], keep_last=1)["document"] == {"keep_last": 1}


@pytest.mark.rule("apply-what-was-shown")
def test_what_came_in_between_stays_and_says_why(service: RunningService) -> None:
    job = Job(service.http())
    ids = saved(job, 1, 2, 3, 4, 5, 6)
    put_policy(service, keep_last=2)
    shown = plan(service)
    assert set(expiring(shown)) == {ids[1], ids[2], ids[3], ids[4]}
    pin(service, ids[1])
    read(service, job, ids[2], 2)
    answer(service.http().post(f"/v1/checkpoints/{ids[3]}/holds", json={"reason": "case 7"}))
    saved(job, 7)  # now step 5 would expire too, and nobody has seen that
    done = apply(service, shown)
    assert [one["step"] for one in done["trashed"]] == [4]
    left = {one["step"]: [reason["kind"] for reason in one["reasons"]] for one in done["left"]}
    assert left == {1: ["pinned"], 2: ["being_read"], 3: ["held"]}
    assert state(service, ids[5]) == "committed"


@pytest.mark.rule("apply-what-was-shown")
@pytest.mark.parametrize("what", ["reader", "label"])
def test_what_comes_between_the_plan_and_the_checkpoints_lock_is_seen(
    service: RunningService, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    job = Job(service.http())
    ids = saved(job, 1, 2, 3)
    put_policy(service, keep_last=2, keep_labels=["milestone"])
    shown = plan(service)
    gate = hold_after(monkeypatch, holdfast_service.retention.prune, "make_plan")

    def come() -> Any:
        if what == "reader":
            return read(service, job, ids[1], 1)
        edit = {"labels": ["milestone"]}
        return answer(service.http().patch(f"/v1/checkpoints/{ids[1]}", json=edit, headers={"If-Match": "*"}))

    with in_background(gate) as sides:
        applying = sides.submit(apply, service, shown)
        gate.wait_until_reached()
        coming = sides.submit(come)
        until_blocked_or_done(service, coming)
        in_time = coming.done()
        gate.open()
        done = applying.result()
        # On SQLite nobody writes meanwhile: there it came too late, and found the checkpoint in the trash.
        assert in_time is service.context.database.is_postgres
        assert bool(done["trashed"]) is not in_time
        assert state(service, ids[1]) == ("committed" if in_time else "trashed")
        if in_time:
            assert [reason["kind"] for reason in done["left"][0]["reasons"]] == ["changed"]
        coming.result()


@pytest.mark.rule("lock-order")
@pytest.mark.rule("apply-what-was-shown")
def test_what_an_attempt_just_says_that_it_resumed_from_is_waited_for_and_stays(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = saved(Job(service.http()), 1, 2, 3)
    put_policy(service, keep_last=2)
    shown = plan(service)
    second = Job(service.http(), after=1)
    gate = hold_after(monkeypatch, holdfast_service.training.attempts, "_is_own")
    saying, applying = overlap(
        service, gate, lambda: second.resumed_from(ids[1], rollback=True), lambda: apply(service, shown)
    )
    saying.result()
    done = applying.result()
    assert done["trashed"] == []
    assert {reason["kind"] for reason in done["left"][0]["reasons"]} >= {"resumed_from", "restore_point"}


@pytest.mark.rule("apply-what-was-shown")
def test_a_crash_in_the_middle_of_an_expire_leaves_nothing_of_it(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(Job(service.http()), 1, 2, 3, 4)
    put_policy(service, keep_last=2)
    shown = plan(service)
    real = holdfast_service.retention.trash.record_event
    told: list[str] = []

    def dies(*args: Any, **more: Any) -> None:
        if told:
            raise RuntimeError("killed")
        told.append(more["checkpoint_id"])
        real(*args, **more)

    with monkeypatch.context() as broken:
        broken.setattr(holdfast_service.retention.trash, "record_event", dies)
        assert service.http().post(f"{RUN}/retention/apply", json=_body(shown)).status_code == 500
    assert set(states(service).values()) == {"committed"}
    assert events(service, told[0]) == []
    assert len(apply(service, shown)["trashed"]) == 2


def _body(shown: dict[str, Any]) -> dict[str, Any]:
    return {"policy_digest": shown["policy_digest"], "checkpoint_ids": expiring(shown)}


@pytest.mark.rule("trash-first")
def test_the_controller_applies_policies_and_leaves_alone_runs_with_nothing_new(
    service: RunningService, clock: Clock
) -> None:
    job = Job(service.http())
    ids = saved(job, 1, 2, 3)
    assert reconcile(service.context) == RetentionReport()  # no policy: nothing is ever expired
    first = put_policy(service, keep_last=2)
    assert reconcile(service.context) == RetentionReport(done=1, expired=1)
    assert events(service, ids[1])[0][:2] == ("retention", "checkpoint.expire")
    assert reconcile(service.context) == RetentionReport()
    ids |= saved(job, 4)
    assert reconcile(service.context) == RetentionReport(done=1, expired=1)
    second = put_policy(service, first["etag"], keep_last=1)  # the two newest healthy points stay
    assert reconcile(service.context) == RetentionReport(done=1)
    clock.advance(2 * HOUR)  # pins and leases end without a word
    assert reconcile(service.context) == RetentionReport(done=1)
    # What is taken back is not expired again at once, nor what is as the policy now wants it.
    undelete(service, ids[2])
    put_policy(service, second["etag"], keep_last=3)
    assert reconcile(service.context) == RetentionReport(done=1)
    assert states(service) == {1: "trashed", 2: "committed", 3: "committed", 4: "committed"}


@pytest.mark.rule("database-clock")
def test_a_commit_by_a_clock_that_was_ahead_expires_nothing(service: RunningService, clock: Clock) -> None:
    job = Job(service.http())
    ids: dict[int, str] = {}
    for step in range(1, 7):
        ids |= saved(job, step)
        clock.advance(HOUR)
    policy = put_policy(service, keep_within="30d")
    assert reconcile(service.context) == RetentionReport(done=1)
    clock.advance(40 * DAY)
    ids |= saved(job, 7)
    clock.advance(-40 * DAY)
    for _ in range(2):
        assert expiring(plan(service)) == []
        assert reconcile(service.context) == RetentionReport(done=1)
        clock.advance(2 * HOUR)
    # The run goes on and ends, and that day comes.
    clock.advance(10 * DAY)
    ids |= saved(job, 8)
    clock.advance(40 * DAY)
    for _ in range(2):
        assert expiring(plan(service)) == []
        assert reconcile(service.context) == RetentionReport(done=1)
        clock.advance(2 * HOUR)
    put_policy(service, policy["etag"], keep_within="1h")
    assert set(expiring(plan(service))) == {ids[step] for step in range(1, 7)}


@pytest.mark.rule("database-clock")
def test_a_look_long_after_the_one_before_expires_nothing_and_the_next_one_does(
    service: RunningService, clock: Clock
) -> None:
    """The clock has jumped, or no service ran."""
    job = Job(service.http())
    saved(job, 1, 2, 3, 4)
    put_policy(service, keep_within="1d")
    assert reconcile(service.context) == RetentionReport(done=1)
    clock.advance(40 * DAY)
    saved(job, 5)
    assert reconcile(service.context) == RetentionReport(done=1)
    clock.advance(2 * HOUR)
    assert reconcile(service.context) == RetentionReport(done=1, expired=3)


def test_a_look_at_many_runs_takes_the_statements_of_a_look_at_one(service: RunningService) -> None:
    Job(service.http(), "demo/run0").save(1)
    answer(service.http().put("/v1/projects/demo/policies/retention", json={"document": {"keep_last": 1}}))

    def statements() -> int:
        said: list[str] = []
        engine = service.context.database.engine

        def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
            said.append(statement)

        with service.context.database.read() as session:
            event.listen(engine, "before_cursor_execute", note)
            backlog(session, service.context)
            event.remove(engine, "before_cursor_execute", note)
        return len(said)

    of_one = statements()
    for number in range(1, 6):
        Job(service.http(), f"demo/run{number}", create=True).save(1)
    assert statements() == of_one


def test_a_run_is_looked_at_by_one_process_and_taken_over_from_one_that_died(
    service: RunningService, clock: Clock
) -> None:
    saved(Job(service.http()), 1, 2, 3)
    put_policy(service, keep_last=2)
    with service.context.database.transaction() as session:
        run_id = session.scalars(select(Checkpoint.run_id)).first()
    assert holdfast_service.retention.controller._claim(service.context, str(run_id)) is not None
    assert holdfast_service.retention.controller._claim(service.context, str(run_id)) is None
    assert reconcile(service.context) == RetentionReport()
    clock.advance(service.context.settings.lease_seconds + 1)
    assert reconcile(service.context) == RetentionReport(done=1, expired=1)
    with service.context.database.read() as session:
        assert session.scalars(select(RetentionMark.lease_token)).all() == [None]


def test_a_policy_that_this_version_cannot_read_expires_nothing(service: RunningService) -> None:
    saved(Job(service.http()), 1, 2, 3)
    put_policy(service, keep_last=2)
    with service.context.database.transaction() as session:
        session.execute(select(Policy)).scalar_one().document = {"keep_last": 2, "keep_since_launch": True}
    report = reconcile(service.context)
    assert (report.done, report.failed, report.expired) == (0, 1, 0)
    assert "keep_since_launch" in str(report.error)
    with refused("invalid_request"):
        plan(service)
    assert set(states(service).values()) == {"committed"}


def test_policies_are_put_on_what_was_seen_shown_from_where_they_come_and_told(service: RunningService) -> None:
    http = service.http()
    Job(http).save(1)
    url, own = "/v1/projects/demo/policies/retention", f"{RUN}/policies/retention"
    with refused("policy_not_found"):
        answer(http.get(own))
    first = answer(http.put(url, json={"document": {"keep-last": 5}}))
    assert (first["level"], first["version"], first["document"]) == ("project", 1, {"keep_last": 5})
    assert answer(http.put(url, json={"document": {"keep_last": 5}})) == first, "the reply was lost"
    with refused("edit_needs_version"):
        answer(http.put(url, json={"document": {"keep_last": 6}}))
    with refused("edit_conflict"):
        answer(http.put(url, json={"document": {"keep_last": 6}}, headers={"If-Match": '"9"'}))
    assert answer(http.get(own))["level"] == "project"
    mine = answer(http.put(own, json={"document": {"keep_last": 7}}))
    assert answer(http.get(own)) == mine
    assert (mine["level"], mine["run"]) == ("run", "gpt")
    with pytest.raises(Refused, match="did you mean keep_daily") as wrong:
        answer(http.put(url, json={"document": {"keep_dayly": 6}}))
    assert wrong.value.code == "invalid_request"
    for scope in (Scope.READ, Scope.TRAIN, Scope.ADMIN):
        with refused("forbidden"):
            answer(service.http(token=service.token(scope)).put(own, json={"document": {"keep_last": 8}}))
    service.make_project("other")
    with refused("forbidden"):
        answer(service.http(token=service.token(project="other")).get(own))
    assert answer(http.delete(own, headers={"If-Match": mine["etag"]}))["document"] == {"keep_last": 7}
    assert answer(http.get(own))["level"] == "project"
    with refused("policy_not_found"):
        answer(http.delete(own, headers={"If-Match": mine["etag"]}))
    with service.context.database.read() as session:
        told = session.execute(
            select(AuditEvent.action, AuditEvent.run_id, AuditEvent.before)
            .where(AuditEvent.action.startswith("policy."))
            .order_by(AuditEvent.id)
        ).all()
    assert [row.action for row in told] == ["policy.put", "policy.put", "policy.delete"]
    assert told[1].run_id
    assert told[2].before == {"kind": "retention", "document": {"keep_last": 7}, "version": 1}


def test_a_refused_policy_names_its_fields_and_its_kind(service: RunningService) -> None:
    Job(service.http()).save(1)
    url = "/v1/projects/demo/policies"
    rules = [{"after": "soon", "storage_class": "rare"}]
    with pytest.raises(Refused) as wrong:
        answer(
            service.http().put(
                f"{url}/tiers", json={"document": {"rules": rules, "stay_hot": {"labels": [7]}, "old": 1}}
            )
        )
    told = {".".join(each["where"]): each["message"] for each in wrong.value.context["errors"]}
    assert set(told) == {f"body.document.{each}" for each in ("rules.0.after", "stay_hot.labels.0", "old")}
    assert "not a span" in told["body.document.rules.0.after"]
    for kind, document in (("objectives", {}), ("copies", {})):
        with pytest.raises(Refused) as unfit:
            answer(service.http().put(f"{url}/{kind}", json={"document": document}))
        assert (unfit.value.code, unfit.value.context["kind"]) == ("invalid_request", kind)


def test_an_uploading_checkpoint_is_shown_and_never_expires(service: RunningService) -> None:
    job = Job(service.http())
    saved(job, 1, 2, 3)
    save = job.begin(4)
    put_policy(service, keep_last=1)
    shown = plan(service)
    (one,) = [each for each in shown["checkpoints"] if each["state"] == CheckpointState.UPLOADING]
    assert (one["checkpoint_id"], one["keep"]) == (save.id, True)
    assert apply(service, {**shown, "checkpoints": [{**one, "keep": False}]})["trashed"] == []


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_plan_says_that_nothing_expires_by_itself_while_the_controller_is_paused(service: RunningService) -> None:
    saved(Job(service.http()), 1, 2, 3)
    controller = "/v1/controllers/retention"
    answer(service.http().post(f"{controller}/pause", json={"reason": "a move of the bucket"}))
    assert len(plan(service)["notes"]) == 1, "there is no policy"
    put_policy(service, keep_last=2)
    (note,) = plan(service)["notes"]
    assert "has paused the controller retention (a move of the bucket): nothing expires by itself" in note
    answer(service.http().post(f"{controller}/resume"))
    assert plan(service)["notes"] == []
