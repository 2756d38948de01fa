"""A whole run is deleted, taken back, and gone in the end; and a project (rule deleted-run-trash)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, update

import holdfast_service.retention.delete
import holdfast_service.retention.forget
import holdfast_service.retention.purge
from holdfast_protocol.states import AttemptOutcome, Scope
from holdfast_protocol.stores import CheckFinding
from holdfast_service.collect.controller import reconcile as collect
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables import Table
from holdfast_service.db.tables.core import Attempt, Checkpoint, Run
from holdfast_service.db.tables.operations import AuditEvent
from holdfast_service.db.tables.records import RecordSubject
from holdfast_service.operations.queue import start_operation
from holdfast_service.runs.metrics import _read as numbers
from holdfast_service.settings import ServiceSettings
from tests.service.conftest import Clock
from tests.support.death import Killed, kill
from tests.support.interleave import hold_after, overlap, refused
from tests.support.rank import Job, answer
from tests.support.rebuilt import check_all, claim_all, read_all, rebuilt_service, record_all
from tests.support.retention import HOUR, RUN, pin, prune, purge, states, undelete
from tests.support.service import RunningService, running_service
from tests.support.tallies import check_sums, take_up

pytestmark = pytest.mark.rule("deleted-run-trash")
PROJECT = "/v1/projects/demo"
ON_SQLITE = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
"""Where nothing waits for a lock: what is left to Postgres are the races, and the way of a run to its end."""


def saved(service: RunningService, run: str = "demo/gpt", steps: tuple[int, ...] = (1, 2, 3), **job: Any) -> Job:
    """A run whose only attempt has ended."""
    job_of = Job(service.http(), run, **job)
    list(map(job_of.save, steps))
    job_of.end()
    return job_of


def delete(service: RunningService, path: str = RUN, *, etag: str | None = "*", **body: Any) -> Any:
    headers = {} if etag is None else {"If-Match": etag}
    return answer(service.http().request("DELETE", path, json=body, headers=headers))


def take_back(service: RunningService, path: str = RUN) -> Any:
    return answer(service.http().post(f"{path}/undelete"))


def listed(service: RunningService, **params: Any) -> list[str]:
    return [one["name"] for one in answer(service.http().get(f"{PROJECT}/runs", params=params))["items"]]


def count(service: RunningService, table: str) -> int:
    with service.context.database.read() as session:
        return int(session.scalar(select(func.count()).select_from(Table.metadata.tables[table])) or 0)


def audited(service: RunningService, action: str) -> list[AuditEvent]:
    with service.context.database.read() as session:
        return list(session.scalars(select(AuditEvent).where(AuditEvent.action == action).order_by(AuditEvent.id)))


def purge_all(service: RunningService, clock: Clock) -> None:
    """The time in the trash is over, and everything of it goes: data, records, rows."""
    clock.advance(73 * HOUR)
    purge(service)
    clock.let_tickets_expire(service.context.settings)
    clock.advance(25 * HOUR)
    collect(service.context)
    for _ in range(2):
        record_all(service.context)
        purge(service)
    check_sums(service)


@ON_SQLITE
def test_a_deleted_run_is_in_no_list_and_begins_nothing_and_comes_back_as_it_was(service: RunningService) -> None:
    first = saved(service, steps=(1, 2))
    Job(service.http(), after=1).end()
    prune(service, filter={"before_step": 2}, all_of_run=True, reason="before")
    before = answer(service.http().get(RUN))
    seen = delete(service, dry_run=True, etag=None)
    assert (seen["checkpoints"], seen["dry_run"], seen["in_trash"]) == (1, True, None)
    assert seen["logical_bytes"] > 0 < seen["freed"]["bytes"]
    assert listed(service) == ["gpt"]
    done = delete(service, etag=seen["etag"], reason="a mistake of mine")
    assert (done["checkpoints"], done["in_trash"]["reason"]) == (1, "a mistake of mine")
    assert states(service) == {1: "trashed", 2: "trashed"}
    assert (listed(service), listed(service, deleted=True)) == ([], ["gpt"])
    with refused("run_not_found") as why:
        answer(service.http().get(RUN))
    assert "holdfast runs undelete demo/gpt" in str(why.value)
    for create in (None, True, False):
        with refused("run_not_found"):
            Job(service.http(), after=2, create=create)
    with refused("run_not_found"):
        answer(service.http().put(RUN))
    with refused("run_not_found"):
        undelete(service, done_id(service, 2))
    with refused("stale_attempt"):
        first.heartbeat()
    (event,) = audited(service, "run.delete")
    assert event.reason == "a mistake of mine"
    assert event.after is not None
    assert (event.after["checkpoints"], event.after["logical_bytes"]) == (1, seen["logical_bytes"])
    assert take_back(service) == {"project": "demo", "run": "gpt", "checkpoints": 1, "purged": 0}
    assert take_back(service)["checkpoints"] == 0
    assert answer(service.http().get(RUN)) == before
    assert states(service) == {1: "trashed", 2: "committed"}, "what was in the trash before stays there"
    assert Job(service.http(), after=2).opened["restore_point"]["step"] == 2
    assert [len(audited(service, name)) for name in ("run.undelete", "checkpoint.undelete")] == [1, 1]


def done_id(service: RunningService, step: int) -> str:
    with service.context.database.read() as session:
        return session.execute(select(Checkpoint.id).where(Checkpoint.step == step)).scalar_one()


@ON_SQLITE
def test_what_must_stay_refuses_it_by_name(service: RunningService) -> None:
    job = Job(service.http())
    ids = [job.save(step)["id"] for step in (1, 2)]
    with refused("checkpoint_protected") as why:
        delete(service)
    assert "End the job first" in str(why.value)
    save = job.begin(3)
    job.end()
    with refused("checkpoint_protected") as why:
        delete(service)
    assert "step 3" in str(why.value)
    save.abort()
    pin(service, ids[0])
    with refused("checkpoint_protected") as why:
        delete(service, dry_run=True)
    assert "step 1 of attempt 1 (pinned by" in str(why.value)
    service.http().delete(f"/v1/checkpoints/{ids[0]}/pin", headers={"If-Match": "*"}).raise_for_status()
    answer(service.http().post(f"/v1/checkpoints/{ids[1]}/holds", json={"reason": "evidence"}))
    with refused("checkpoint_held") as why:
        delete(service)
    assert "evidence" in str(why.value)
    assert states(service) == {1: "committed", 2: "committed", 3: "aborted"}


@ON_SQLITE
def test_only_what_was_seen_is_deleted_and_twice_is_once(service: RunningService) -> None:
    saved(service)
    etag = delete(service, dry_run=True)["etag"]
    with refused("edit_needs_version"):
        delete(service, etag=None)
    saved(service, steps=(4,), after=1)
    with refused("edit_conflict"):
        delete(service, etag=etag)
    etag = delete(service, dry_run=True)["etag"]
    first = delete(service, etag=etag)
    again = delete(service, etag=etag)
    assert first["in_trash"] == again["in_trash"]
    assert (again["checkpoints"], again["freed"]) == (first["checkpoints"], first["freed"])
    assert len(audited(service, "run.delete")) == 1
    etag = delete(service, dry_run=True)["etag"]  # seen deleted, and taken back since
    take_back(service)
    with refused("edit_conflict"):
        delete(service, etag=etag)


@ON_SQLITE
def test_scopes_and_other_projects_are_refused(service: RunningService) -> None:
    saved(service)
    service.make_project("other")
    for token in (service.token(Scope.READ, Scope.TRAIN), service.token(project="other")):
        reply = service.http(token=token).request("DELETE", RUN, json={}, headers={"If-Match": "*"})
        assert reply.json()["code"] == "forbidden"
        assert service.http(token=token).post(f"{RUN}/undelete").json()["code"] == "forbidden"
    own = service.http(token=service.token(project="demo"))
    reply = own.request("DELETE", PROJECT, json={}, headers={"If-Match": "*"})
    assert reply.json()["code"] == "forbidden", "a project's own token does not delete it"


@pytest.mark.races
def test_of_two_at_once_one_deletes(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(service)
    gate = hold_after(monkeypatch, holdfast_service.retention.delete, "mark_deleted")
    first, second = overlap(service, gate, lambda: delete(service), lambda: delete(service))
    assert first.result()["in_trash"] == second.result()["in_trash"]
    assert len(audited(service, "run.delete")) == 1


def test_an_attempt_that_comes_while_it_is_deleted_is_refused(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(service)
    gate = hold_after(monkeypatch, holdfast_service.retention.delete, "mark_deleted")
    first, second = overlap(service, gate, lambda: delete(service), lambda: Job(service.http(), after=1))
    assert first.result()["checkpoints"] == 3
    with refused("run_not_found"):
        second.result()


@ON_SQLITE
def test_a_job_that_was_only_thought_lost_saves_nothing_into_it(service: RunningService) -> None:
    job = Job(service.http())
    job.save(1)
    with service.context.database.transaction() as session:  # as the reaper does it
        session.execute(update(Attempt).values(outcome=AttemptOutcome.LOST, ended_at=database_now(session)))
    delete(service)
    for call in (lambda: job.begin(2), job.heartbeat, job.end, lambda: job.resumed_from(None)):
        with refused("stale_attempt"):
            call()
    with service.context.database.read() as session:
        assert session.scalar(select(Attempt.outcome)) == AttemptOutcome.LOST


@ON_SQLITE
def test_one_that_is_held_at_that_very_moment_leaves_all_as_it_was(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(service)
    real: Callable[..., Any] = holdfast_service.retention.delete.read_facts

    def read_and_then(*args: Any, **kwargs: Any) -> Any:
        facts = real(*args, **kwargs)
        kept = facts.facts[0]
        return type(facts)([type(kept)(**{**fields(kept), "version": kept.version - 1}), *facts.facts[1:]], None)

    monkeypatch.setattr(holdfast_service.retention.delete, "read_facts", read_and_then)
    with refused("edit_conflict"):
        delete(service)
    assert set(states(service).values()) == {"committed"}
    assert listed(service) == ["gpt"]


def fields(fact: Any) -> dict[str, Any]:
    return {name: getattr(fact, name) for name in fact.__slots__}


def test_what_others_share_stays_and_all_else_goes_and_the_name_is_free(service: RunningService, clock: Clock) -> None:
    old = saved(service, steps=(1,), launch_id="the-old-one")
    Job(service.http(), after=1, launch_id="the-second").end()
    data = b"demo/gpt 1 1 0"
    other = Job(service.http(), "demo/other")
    kept = other.save(7, content=data)
    counted = numbers_of(service)
    delete(service)
    purge_all(service, clock)
    assert read_all(service.http(), kept["id"], [data, b"index " + data])
    assert listed(service) == ["other"]
    assert listed(service, deleted=True) == []
    assert count(service, "checkpoints") == 1
    assert count(service, "shards") == 1
    assert count(service, "chunks") == 2
    with refused("run_not_found"):
        take_back(service)
    (event,) = audited(service, "run.purge")
    assert (event.after or {})["name"] == "gpt"
    assert numbers_of(service) == counted, "a counter never goes back"
    record_all(service.context)
    assert findings(service) == []
    new = Job(service.http())
    assert (new.number, new.opened["restore_point"], new.opened["ever_committed"]) == (1, None, False)
    with refused("stale_attempt"):
        old.begin(9)
    with refused("stale_attempt"):
        old.heartbeat()
    new.save(1)
    assert Job(service.http(), after=1).opened["restore_point"]["step"] == 1


def findings(service: RunningService) -> list[CheckFinding]:
    return [each for store in check_all(service.context).stores for each in store.findings]


def numbers_of(service: RunningService) -> tuple[int, ...]:
    with service.context.database.read() as session:
        (demo,) = numbers(session, service.context).projects
    return tuple(map(demo.ever, ("committed", "aborted", "chunk_bytes", "uploaded_bytes", "deduplicated_bytes")))


@ON_SQLITE
def test_the_name_is_not_free_before_the_purge_is_told_beside_the_data(service: RunningService, clock: Clock) -> None:
    saved(service)
    record_all(service.context)
    delete(service)
    clock.advance(73 * HOUR)
    purge(service)
    assert len(audited(service, "run.purge")) == 1
    with refused("run_not_found"):
        Job(service.http())
    purge(service)
    with refused("run_not_found"):
        Job(service.http())
    record_all(service.context)
    purge(service)
    Job(service.http())


@ON_SQLITE
def test_a_name_is_not_free_while_a_store_that_was_detached_has_the_living_record(
    settings: ServiceSettings, clock: Clock, empty_url: str, tmp_path: Path
) -> None:
    both = settings.model_copy(update={"second_store": f"posix://{tmp_path / 'second'}"})
    with running_service(both) as service:
        saved(service, steps=())
        record_all(service.context)
    with running_service(settings) as service:
        delete(service)
        purge_all(service, clock)
        assert len(audited(service, "run.purge")) == 1
        with refused("run_not_found") as why:
            Job(service.http())
        assert "taken out of the settings" in str(why.value)
    with running_service(both) as service:
        record_all(service.context)
        purge(service)
        saved(service, steps=())
        record_all(service.context)
    with rebuilt_service(settings, empty_url, str(both.second_store)) as (rebuilt, report):
        assert (report.damaged, listed(rebuilt)) == ([], ["gpt"])
        Job(rebuilt.http(), after=1)


@ON_SQLITE
def test_a_store_that_is_attached_later_is_told_what_the_others_have_been_told(
    settings: ServiceSettings, tmp_path: Path
) -> None:
    with running_service(settings) as service:
        saved(service, steps=())
        record_all(service.context)
    with running_service(settings.model_copy(update={"second_store": f"posix://{tmp_path / 'second'}"})) as service:
        assert record_all(service.context) == 2, "the project and the run"
    with running_service(settings) as service:
        assert record_all(service.context) == 0


@ON_SQLITE
def test_the_audit_is_asked_by_what_was_there_before_the_purge(service: RunningService, clock: Clock) -> None:
    saved(service, steps=(1,))
    saved(service, "other/gpt", steps=())
    gone = done_id(service, 1)
    delete(service, reason="the wrong data")
    delete(service, PROJECT)
    for _ in range(2):
        purge_all(service, clock)
    with service.context.database.read() as session:
        assert session.get(Checkpoint, gone) is None
    purged = [each for each in told(service, project="demo", run="gpt") if each["action"] == "run.purge"]
    own = service.http(token=service.token(project="other"))
    with refused("checkpoint_not_found"):
        answer(own.get("/v1/audit-events", params={"checkpoint": gone}))
    saved(service, steps=(2,))
    assert [each["action"] for each in told(service, checkpoint=gone)][-1] == "checkpoint.trash"
    (before,) = told(service, project="demo", run="gpt", action="run.delete")
    assert before["reason"] == "the wrong data"
    assert (before["project"], before["run"]) == (purged[0]["project"], purged[0]["run"])
    assert before["run"].startswith("gpt~")
    assert [each["action"] for each in told(service, project="demo", run="gpt")].count("run.create") == 2
    by_id = told(service, project=before["project"], run=before["run"])
    assert [each["action"] for each in by_id].count("run.create") == 1
    assert all(each["run"] == before["run"] for each in by_id)
    with refused("checkpoint_not_found"):
        told(service, checkpoint=f"ck_{'0' * 32}")
    with refused("run_not_found"):
        told(service, project="demo", run="gp")


def told(service: RunningService, **wanted: str) -> list[dict[str, Any]]:
    return answer(service.http().get("/v1/audit-events", params=wanted))["items"]  # type: ignore[no-any-return]


@ON_SQLITE
def test_an_operator_sees_what_is_left_of_a_deleted_project(service: RunningService, clock: Clock) -> None:
    saved(service, steps=(1,))
    http = service.http()
    with service.context.database.transaction() as session:
        run = session.scalars(select(Run)).one()
        started = start_operation(
            session, service.caller(), "drill", project_id=run.project_id, run_id=run.id, arguments={}
        )
    answer(http.post(f"/v1/operations/{started.id}/cancel"))
    delete(service)
    held = answer(http.post(f"/v1/checkpoints/{done_id(service, 1)}/holds", json={"reason": "evidence"}))
    delete(service, PROJECT)
    for names in ({"project": "demo"}, {"project": "demo", "run": "gpt"}):
        assert [each["id"] for each in answer(http.get("/v1/holds", params=names))["items"]] == [held["id"]]
        assert [each["id"] for each in answer(http.get("/v1/operations", params=names))["items"]] == [started.id]
    another = service.http(token=service.token())
    answer(another.post(f"/v1/holds/{held['id']}/release", json={"reason": "seen"}))
    clock.advance(73 * HOUR)
    for _ in range(3):
        purge(service)
        record_all(service.context)
    take_up(service)
    (operation,) = answer(http.get("/v1/operations"))["items"]
    assert operation["run"].startswith("gpt~")
    (used,) = answer(http.get("/v1/usage"))["items"]
    assert used["project"].startswith("demo~")
    assert used["pending_collection_bytes"] == used["stored_bytes"] > 0
    shown = http.get("/metrics").text
    assert 'holdfast_bytes{kind="pending_collection",project="(purged)",store="primary"}' in shown
    assert 'holdfast_attempts_ended{outcome="finished",project="(purged)"}' in shown
    assert "demo~" not in shown
    purge_all(service, clock)
    assert answer(http.get("/v1/usage"))["items"] == []


@ON_SQLITE
def test_a_check_sees_no_tampering_before_the_purge_is_told_beside_the_data_but_sees_another_name(
    service: RunningService, clock: Clock
) -> None:
    saved(service, steps=())
    record_all(service.context)
    delete(service)
    clock.advance(73 * HOUR)
    purge(service)
    assert len(audited(service, "run.purge")) == 1
    assert findings(service) == []
    for name in ("gqt", "gpt~of-another"):
        with service.context.database.transaction() as session:
            session.execute(update(Run).values(name=name))
        (found,) = findings(service)
        assert (found.kind, found.blocks) == ("different_records", True)


@ON_SQLITE
def test_what_is_held_in_the_trash_keeps_its_run(service: RunningService, clock: Clock) -> None:
    saved(service)
    delete(service)
    answer(service.http().post(f"/v1/checkpoints/{done_id(service, 2)}/holds", json={"reason": "evidence"}))
    clock.advance(73 * HOUR)
    purge(service)
    assert states(service) == {1: "deleted", 2: "trashed", 3: "deleted"}
    assert take_back(service) == {"project": "demo", "run": "gpt", "checkpoints": 1, "purged": 2}
    assert Job(service.http(), after=1).opened["restore_point"]["step"] == 2


@ON_SQLITE
def test_a_purge_that_dies_anywhere_is_gone_on_with(
    service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(service, steps=(1,))
    delete(service)
    for dies_in in ("record_event", "_purge_run", "forget_checkpoints", "_free_names"):
        with monkeypatch.context() as dying:
            died = kill(dying, holdfast_service.retention.forget, dies_in, after=True)
            with suppress(Killed):
                purge_all(service, clock)
            assert died(), dies_in
    purge_all(service, clock)
    assert len(audited(service, "run.purge")) == 1
    assert count(service, "checkpoints") == 0
    assert Job(service.http()).opened["ever_committed"] is False


@ON_SQLITE
def test_time_in_which_nobody_could_take_it_back_does_not_count(service: RunningService, clock: Clock) -> None:
    saved(service, steps=())
    delete(service)
    purge(service)
    clock.advance(100 * HOUR)
    assert holdfast_service.retention.purge.reconcile(service.context).moved_seconds > 99 * HOUR
    purge(service)
    assert take_back(service)["purged"] == 0
    assert listed(service) == ["gpt"]


@ON_SQLITE
@pytest.mark.parametrize("when", ["purged", "checkpoints_are_older", "run_is_older", "clock_stood_back"])
def test_a_rebuild_raises_nothing_deleted(service: RunningService, clock: Clock, empty_url: str, when: str) -> None:
    saved(service, steps=(1, 2))
    saved(service, "demo/other", steps=(5,))
    record_all(service.context)
    clock.advance(-HOUR if when == "clock_stood_back" else 0)
    delete(service, reason="done with it")
    if when == "purged":
        purge_all(service, clock)
        saved(service, steps=(9,))
    if when in ("purged", "clock_stood_back"):
        record_all(service.context)
    else:
        only(service, checkpoints=when == "run_is_older")
    with rebuilt_service(service.context.settings, empty_url) as (rebuilt, report):
        assert not report.damaged
        if when == "purged":
            assert sorted(listed(rebuilt)) == ["gpt", "other"]
            assert Job(rebuilt.http(), after=1).opened["restore_point"]["step"] == 9
            return
        assert states(rebuilt) == {1: "trashed", 2: "trashed", 5: "committed"}
        if when != "run_is_older":
            assert listed(rebuilt) == ["other"]
            with refused("run_not_found"):
                Job(rebuilt.http(), after=1)
        assert take_back(rebuilt)["checkpoints"] == 2
        assert Job(rebuilt.http(), after=1).opened["restore_point"]["step"] == 2


@ON_SQLITE
@pytest.mark.parametrize("since", ["nothing", "saved", "held", "told"])
def test_a_rebuild_from_records_that_do_not_know_that_it_was_taken_back_loses_nothing(
    service: RunningService, clock: Clock, empty_url: str, since: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(service, steps=(1, 2))
    delete(service)
    record_all(service.context)
    if since != "told":  # no store could be written at that moment
        monkeypatch.setattr(holdfast_service.retention.delete, "write_at_once", lambda *_: None)
    take_back(service)
    if since == "saved":
        saved(service, steps=(9,), after=1)
        only(service, checkpoints=True)
    if since == "held":
        answer(service.http().post(f"/v1/checkpoints/{done_id(service, 2)}/holds", json={"reason": "evidence"}))
        only(service, checkpoints=True)
    clock.advance(100 * HOUR)
    with rebuilt_service(service.context.settings, empty_url) as (rebuilt, report):
        check_all(rebuilt.context)
        claim_all(rebuilt.context, accept_loss=True)
        purge(rebuilt)
        if since == "nothing":
            assert any("can be taken back for 3 more days" in note for note in report.notes)
            assert take_back(rebuilt)["checkpoints"] == 2
        after, step = (2, 9) if since == "saved" else (1, 2)
        assert Job(rebuilt.http(), after=after).opened["restore_point"]["step"] == step


def only(service: RunningService, *, checkpoints: bool) -> None:
    """Of the records that are due only some are written before the database is lost."""
    table = RecordSubject if checkpoints else Checkpoint
    with service.context.database.transaction() as session:
        session.execute(update(table).values(recorded_version=table.version))
    record_all(service.context)


def test_a_project_goes_after_its_runs_and_comes_back(service: RunningService, clock: Clock) -> None:
    saved(service)
    own = service.http(token=service.token(project="demo"))
    with refused("checkpoint_protected") as why:
        delete(service, PROJECT)
    assert "demo has runs: gpt" in str(why.value)
    delete(service)
    with refused("edit_needs_version"):
        delete(service, PROJECT, etag=None)
    done = delete(service, PROJECT, reason="tidying up")
    assert delete(service, PROJECT)["in_trash"] == done["in_trash"]
    for name in ("demo/gpt", "demo/new"):
        with refused("project_not_found"):
            Job(service.http(), name)
    with refused("project_not_found"):
        answer(service.http().put(PROJECT, json={}))
    with refused("project_not_found"):
        take_back(service)
    assert answer(service.http().get("/v1/projects"))["items"] == []
    (shown,) = answer(service.http().get("/v1/projects", params={"deleted": True}))["items"]
    assert shown["in_trash"]["reason"] == "tidying up"
    take_back(service, PROJECT)
    assert take_back(service)["checkpoints"] == 3
    assert listed(service) == ["gpt"]
    delete(service)
    delete(service, PROJECT)
    purge_all(service, clock)
    purge_all(service, clock)
    assert len(audited(service, "project.purge")) == 1
    assert own.get(PROJECT).status_code == 401, "its tokens are revoked"
    with service.context.database.read() as session:
        assert session.scalar(select(Run.purged_at)) is not None
    assert Job(service.http()).opened["ever_committed"] is False
    record_all(service.context)
    assert findings(service) == [], "what was renamed by its purge was changed by nobody else"


@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
def test_a_run_that_is_taken_back_while_its_project_is_deleted_is_in_no_deleted_project(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(service)
    delete(service)
    gate = hold_after(monkeypatch, holdfast_service.retention.delete, "refuse_if_deleted")
    first, second = overlap(service, gate, lambda: take_back(service), lambda: delete(service, PROJECT))
    assert first.result()["checkpoints"] == 3
    with refused("checkpoint_protected"):
        second.result()


def test_a_run_that_is_made_while_its_project_is_deleted_is_in_no_deleted_project(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.make_project("demo")
    gate = hold_after(monkeypatch, holdfast_service.retention.delete, "mark_deleted")
    first, second = overlap(service, gate, lambda: delete(service, PROJECT), lambda: answer(service.http().put(RUN)))
    assert first.result()["in_trash"] is not None
    with refused("project_not_found"):
        second.result()
    assert count(service, "runs") == 0
