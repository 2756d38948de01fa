"""A run that begins with another run's checkpoint: no byte is copied, and the two runs go on without each other."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from pydantic import ConfigDict
from sqlalchemy import func, select, update

import holdfast_service.copies.corruption
import holdfast_service.retention.prune
import holdfast_service.runs.fork
from holdfast_protocol.base import PROTOCOL_HEADER, RunName
from holdfast_protocol.runs import ForkRun
from holdfast_protocol.states import CopyState, Proof, Scope
from holdfast_protocol.stores import FindingKind
from holdfast_service.audit.record import Actor
from holdfast_service.collect.controller import collect
from holdfast_service.copies.corruption import lock_users
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Attempt, Checkpoint, Chunk, Copy, Run, Shard
from holdfast_service.db.tables.events import EventRow
from holdfast_service.db.tables.operations import AuditEvent
from holdfast_service.db.tables.records import WrittenRecord
from holdfast_service.records.documents import Document, checkpoint_subject, encode
from holdfast_service.settings import ServiceSettings
from tests.service.conftest import Clock
from tests.support.death import Killed, kill
from tests.support.interleave import hold_after, in_background, overlap, refused, until_blocked_or_done
from tests.support.rank import Job, answer, digest_of
from tests.support.rebuilt import check_all, claim_all, read_all, rebuilt_service, record_all
from tests.support.retention import HOUR, pin, prune, purge
from tests.support.service import RunningService
from tests.support.tallies import check_sums

RUNS = "/v1/projects/demo/runs"
ON_SQLITE = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
"""Where nothing waits for a lock: what is left to Postgres are the races, and the way to the end."""


def fork(
    service: RunningService, name: str = "new", selector: str = "latest", *, of: str = "gpt", key: str = ""
) -> Any:
    headers = {"Idempotency-Key": key} if key else {}
    reply = service.http().post(f"{RUNS}/{of}/forks", json={"name": name, "selector": selector}, headers=headers)
    return answer(reply)


def shown(service: RunningService, name: str = "new") -> Any:
    return answer(service.http().get(f"{RUNS}/{name}"))


def checkpoint_of(service: RunningService, name: str = "new") -> Any:
    """Without what is added up of its copies: a rebuilt catalog has still to read those."""
    selected = answer(service.http().get(f"{RUNS}/{name}/checkpoints/latest"))
    return answer(service.http().get(f"/v1/checkpoints/{selected['id']}"))


def content(step: int, rank: int = 0, run: str = "demo/gpt") -> list[bytes]:
    """The chunks of a `Job.save` of attempt 1."""
    data = f"{run} 1 {step} {rank}".encode()
    return [data, b"index " + data]


def objects(service: RunningService) -> dict[str, int]:
    """Every object that holds a chunk, and its bytes, as the store itself lists them."""
    return {each.key.path: each.bytes for each in service.context.store.list_objects(None)}


def count(service: RunningService, table: type[Any]) -> int:
    with service.context.database.read() as session:
        return int(session.scalar(select(func.count()).select_from(table)) or 0)


@pytest.fixture
def saved(service: RunningService) -> Job:
    """demo/gpt with the steps 100 and 200, by an attempt that has ended."""
    job = Job(service.http(), world_size=2, environment={"torch": "2.13"}, config={"lr": 0.1})
    for step in (100, 200):
        job.save(step, metrics={"loss": {"value": 1 / step}})
    job.end()
    return job


@ON_SQLITE
def test_a_hundred_forks_add_no_byte_to_the_store(service: RunningService, saved: Job) -> None:
    before, usage = objects(service), answer(service.http().get("/v1/projects/demo"))
    assert len(before) == 8
    rows = count(service, Copy), count(service, Chunk)
    with service.context.database.transaction() as session:
        session.execute(update(Checkpoint).where(Checkpoint.step == 200).values(missing_components=["rng"]))
    source = checkpoint_of(service, "gpt")
    assert source["missing_components"] == ["rng"]
    for number in range(100):
        view = fork(service, f"fork-{number}", "200")
        assert view["restore_point"]["step"] == 200
    assert objects(service) == before
    assert (count(service, Copy), count(service, Chunk)) == rows
    made = checkpoint_of(service, "fork-99")
    assert (made["uploaded_bytes"], made["deduplicated_bytes"]) == (0, source["chunk_bytes"])
    said = ("metrics", "components", "missing_components", "world_size", "kind")
    for name in ("digest", "logical_bytes", "chunk_bytes", *said):
        assert made[name] == source[name]
    after = answer(service.http().get("/v1/projects/demo"))
    assert (after["stored_bytes"], after["quota_used_bytes"]) == (usage["stored_bytes"], usage["quota_used_bytes"])
    assert after["logical_bytes"] == usage["logical_bytes"] + 100 * source["logical_bytes"]
    check_sums(service)


@ON_SQLITE
def test_a_fork_says_where_it_comes_from_and_a_launch_goes_on_from_it(service: RunningService, saved: Job) -> None:
    source = checkpoint_of(service, "gpt")
    view = fork(service)
    told = {
        "project": "demo",
        "run": "gpt",
        "checkpoint_id": source["id"],
        "attempt": 1,
        "step": 200,
        "saved_in": "gpt",
    }
    assert view["forked_from"] == shown(service)["forked_from"] == told
    assert (view["status"], view["latest_attempt"], view["last_step"]) == ("finished", 1, None)
    made = checkpoint_of(service)
    assert (made["forked_from"], made["attempt"], made["step"], made["detached"]) == (told, 1, 200, False)
    assert source["forked_from"] is None
    (listed,) = answer(service.http().get(f"{RUNS}/new/attempts"))["items"]
    assert (listed["outcome"], listed["outcome_detail"]) == ("finished", "forked from demo/gpt@200#1")
    assert answer(service.http().get(f"{RUNS}/new/goodput"))["attempts"] == [], "no step of it ran in this run"
    job = Job(service.http(), "demo/new", after=1, world_size=2, config={"lr": 0.01})
    point = job.opened["restore_point"]
    assert (point["checkpoint_id"], point["step"], point["attempt"]) == (made["id"], 200, 1)
    assert job.opened["ever_committed"] is True
    assert job.opened["saved_with"] == {"torch": "2.13"}
    config = answer(service.http().get(f"{RUNS}/new/attempts/2/config"))
    assert [(each["path"], each["before"], each["after"]) for each in config["differences"]] == [("lr", 0.1, 0.01)]
    job.resumed_from(made["id"])
    job.save(210)
    assert shown(service)["restore_point"]["step"] == 210
    spent = answer(service.http().get(f"{RUNS}/new/goodput"))
    assert [each["attempt"] for each in spent["attempts"]] == [2], "and nobody waited for the launch"
    assert spent["since"] == answer(service.http().get(f"{RUNS}/new/attempts/2"))["opened_at"]
    assert shown(service, "gpt")["restore_point"]["step"] == 200
    for of, names in (("gpt", ["new"]), (source["id"], ["new"]), ("new", []), (made["id"], [])):
        listed = answer(service.http().get(RUNS, params={"forked_from": of}))["items"]
        assert [each["name"] for each in listed] == names
    with service.context.database.read() as session:
        (audited,) = session.scalars(select(AuditEvent).where(AuditEvent.action == "run.fork"))
        assert (audited.checkpoint_id, audited.actor_kind) == (made["id"], "person")
        assert audited.after == {
            "name": "new",
            "step": 200,
            "forked_from": "demo/gpt@200#1",
            "source_id": source["id"],
        }
        of_fork = select(EventRow.type, EventRow.reason).where(EventRow.checkpoint_id == made["id"])
        events = session.execute(of_fork.order_by(EventRow.id)).all()
        assert events[0] == ("checkpoint.committed", "forked from demo/gpt@200#1")


@ON_SQLITE
def test_the_same_fork_again_finds_it_and_another_of_its_name_is_refused(service: RunningService, saved: Job) -> None:
    http = service.http()

    def status(**body: str) -> int:
        return http.post(f"{RUNS}/gpt/forks", json={"name": "new", **body}).status_code

    assert [status(selector="200"), status(selector="200"), status(selector="200#1"), status()] == [201, 200, 200, 200]
    first = shown(service)
    assert fork(service, selector=first["forked_from"]["checkpoint_id"])["id"] == first["id"]
    for selector in ("100", "200#2", "best:loss:max"):
        with refused("run_exists") as why:
            fork(service, selector=selector)
    assert "demo/new already, forked from demo/gpt@200#1" in str(why.value)
    with refused("run_exists"):
        fork(service, "gpt", "200")
    answer(http.put(f"{RUNS}/empty"))
    with refused("run_exists"):
        fork(service, "empty")
    assert count(service, Run) == 3
    keyed = fork(service, "keyed", key="one")
    Job(http, after=1, world_size=2).save(300)
    assert fork(service, "keyed", key="one")["id"] == keyed["id"], "latest is another one by now"
    with refused("run_exists"):
        fork(service, "keyed")
    with refused("idempotency_key_reused"):
        fork(service, "another", key="one")


@ON_SQLITE
def test_a_step_that_was_saved_anew_after_a_rollback_is_another_fork(service: RunningService, saved: Job) -> None:
    first, source = fork(service, selector="200"), checkpoint_of(service, "gpt")
    again = Job(service.http(), after=1, world_size=2)
    again.resumed_from(answer(service.http().get(f"{RUNS}/gpt/checkpoints/100"))["id"], rollback=True)
    assert fork(service, selector="200")["id"] == first["id"], "no other checkpoint has this step yet"
    again.save(200)
    with refused("run_exists") as why:
        fork(service, selector="200")
    assert "forked from demo/gpt@200#1" in str(why.value)
    for selector in ("200#1", source["id"]):
        assert fork(service, selector=selector)["id"] == first["id"]
    assert fork(service, "newer", selector="200")["forked_from"]["attempt"] == 2


@ON_SQLITE
def test_what_no_job_could_resume_from_begins_no_run(service: RunningService, saved: Job) -> None:
    http = service.http()

    def set_health(step: int, **body: str) -> None:
        found = answer(http.get(f"{RUNS}/gpt/checkpoints/{step}"))
        answer(http.patch(f"/v1/checkpoints/{found['id']}", json=body, headers={"If-Match": "*"}))

    set_health(200, health="quarantined", health_reason="kills the loader")
    with refused("no_restore_point") as why:
        fork(service, selector="200")
    assert "kills the loader" in str(why.value)
    assert fork(service, "older")["forked_from"]["step"] == 100, "latest skips what a restore skips"
    set_health(100, health="diverged", health_reason="a spike")
    for selector in ("100", "latest"):
        with refused("no_restore_point") as why:
            fork(service, selector=selector)
        assert "a spike" in str(why.value)
    set_health(100, health="ok")
    set_health(200, health="ok")
    job = Job(http, after=1, world_size=2)
    job.begin(300)
    with refused("no_restore_point"):
        fork(service, selector="300")
    with service.context.database.transaction() as session:
        session.execute(update(Checkpoint).where(Checkpoint.step == 200).values(tier="cold"))
    with refused("checkpoint_cold") as why:
        fork(service, selector="200")
    assert "holdfast checkpoints thaw" in str(why.value)
    for selector, code in (("400", "checkpoint_not_found"), ("nonsense", "invalid_request")):
        with refused(code):
            fork(service, selector=selector)
    with refused("run_not_found"):
        fork(service, of="gpq")
    assert {run["name"] for run in answer(http.get(RUNS))["items"]} == {"gpt", "older"}, "a refusal makes no run"
    assert count(service, Attempt) == 3


@pytest.mark.rule("reuse-only-hashed")
@ON_SQLITE
def test_what_only_its_own_job_has_hashed_is_no_other_runs(service: RunningService, saved: Job) -> None:
    with service.context.database.transaction() as session:
        of_200 = select(Chunk.id).where(Chunk.bytes > 0).order_by(Chunk.id.desc()).limit(1)
        session.execute(update(Copy).where(Copy.chunk_id == of_200.scalar_subquery()).values(proof=Proof.UNPROVEN))
    with refused("checkpoint_unproven") as why:
        fork(service, selector="200")
    assert "holdfast scrubs start demo/gpt@200#1" in str(why.value)
    assert count(service, Run) == 1
    with service.context.database.transaction() as session:
        early = {"proof": Proof.READ_EARLY, "overwritable_until": database_now(session) + timedelta(hours=1)}
        session.execute(update(Copy).where(Copy.proof == Proof.UNPROVEN).values(early))
    with refused("checkpoint_unproven") as why:
        fork(service, selector="200")
    assert "once no upload can overwrite them any more, after 20" in str(why.value)
    with service.context.database.transaction() as session:
        session.execute(update(Copy).values(proof=Proof.READ))
    fork(service, selector="200")


@ON_SQLITE
def test_labels_pins_and_holds_of_the_source_do_not_come_along(service: RunningService, saved: Job) -> None:
    source = checkpoint_of(service, "gpt")
    http = service.http()
    answer(http.patch(f"/v1/checkpoints/{source['id']}", json={"labels": ["best"]}, headers={"If-Match": "*"}))
    pin(service, source["id"])
    answer(http.post(f"/v1/checkpoints/{source['id']}/holds", json={"reason": "evidence"}))
    fork(service)
    made = checkpoint_of(service)
    assert (made["labels"], made["pinned_at"]) == ([], None)
    assert answer(http.get(f"/v1/checkpoints/{made['id']}/holds"))["items"] == []
    gone = answer(http.request("DELETE", f"{RUNS}/new", json={}, headers={"If-Match": "*"}))
    assert gone["checkpoints"] == 1
    assert gone["freed"]["bytes"] == 0, "the source needs each of its bytes"


@ON_SQLITE
@pytest.mark.parametrize("kind", ["runs", "checkpoints"])
def test_a_fork_counts_as_a_run_and_a_checkpoint_and_takes_no_bytes(
    service: RunningService, saved: Job, kind: str
) -> None:
    used = {"runs": 1, "checkpoints": 2}[kind]
    full = answer(service.http().get("/v1/projects/demo"))["quota_used_bytes"]

    def limit(count: int) -> None:
        body = {f"quota_{kind}": count, "quota_bytes": full}
        answer(service.http().put("/v1/projects/demo", json=body, headers={"If-Match": "*"}))

    limit(used)
    with refused("quota_exceeded"):
        fork(service)
    assert count(service, Run) == 1
    limit(used + 1)
    fork(service)
    check_sums(service)


@ON_SQLITE
def test_who_may_fork(service: RunningService, saved: Job) -> None:
    service.make_project("other")
    body = {"name": "new"}
    for token in (service.token(Scope.READ), service.token(project="other")):
        reply = service.http(token=token).post(f"{RUNS}/gpt/forks", json=body)
        assert reply.json()["code"] == "forbidden"
    own = service.http(token=service.token(Scope.TRAIN, project="demo"))
    assert own.post(f"{RUNS}/gpt/forks", json=body).status_code == 201
    reply = own.post(f"{RUNS}/gpt/forks", json={"name": "other/new"})
    assert reply.json()["code"] == "invalid_request", "no name of a run leads into another project"


@pytest.mark.rule("protocol-version")
@ON_SQLITE
def test_an_older_client_is_told_that_it_cannot_read_a_fork(service: RunningService, saved: Job) -> None:
    fork(service)
    path = f"/v1/checkpoints/{checkpoint_of(service)['id']}/manifest"
    assert service.http().get(path).status_code == 200
    reply = service.http(headers=[(PROTOCOL_HEADER, "1.9")]).get(path)
    assert (reply.status_code, reply.json()["code"]) == (426, "unsupported_protocol")
    assert "1.9" in reply.json()["detail"]
    assert (
        service.http(headers=[(PROTOCOL_HEADER, "1.9")])
        .get(f"/v1/checkpoints/{checkpoint_of(service, 'gpt')['id']}/manifest")
        .is_success
    )


def delete_for_good(service: RunningService, clock: Clock, run: str) -> None:
    """The run is deleted, its time in the trash is over, and all that nothing else needs goes: data, records, rows."""
    clock.advance(24 * HOUR)  # until no lease of a reader is left
    answer(service.http().request("DELETE", f"{RUNS}/{run}", json={}, headers={"If-Match": "*"}))
    clock.advance(73 * HOUR)
    purge(service)
    clock.let_tickets_expire(service.context.settings)
    clock.advance(25 * HOUR)
    collect(service.context, whole=True)
    for _ in range(2):
        record_all(service.context)
        purge(service)


@pytest.mark.rule("mark-before-delete")
def test_a_parent_that_is_purged_breaks_no_fork_and_takes_what_only_it_needs(
    service: RunningService, saved: Job, settings: ServiceSettings, empty_url: str, clock: Clock
) -> None:
    fork(service, "child", "200")
    fork(service, "grandchild", of="child")
    listed = answer(service.http().get(RUNS, params={"forked_from": "gpt"}))["items"]
    assert [each["name"] for each in listed] == ["child"]
    record_all(service.context)
    before = objects(service)
    delete_for_good(service, clock, "gpt")
    assert len(objects(service)) == len(before) - 4, "step 100 is gone, and step 200 is there"
    assert count(service, Run) == 3, "a tombstone stays"
    views = {}
    for name in ("child", "grandchild"):
        views[name] = shown(service, name), checkpoint_of(service, name)
        assert views[name][0]["restore_point"]["step"] == 200
        for rank in (0, 1):
            assert read_all(service.http(), views[name][1]["id"], content(200, rank))
    assert str(views["child"][0]["forked_from"]["run"]) == "gpt", "words outlive what they name"
    grandchild = views["grandchild"][1]["forked_from"]
    assert (grandchild["run"], grandchild["saved_in"]) == ("child", "gpt")
    check_sums(service)
    # The name is free again, and means another run: the same fork is not repeated by it.
    Job(service.http(), create=True).save(200)
    assert shown(service, "gpt")["latest_attempt"] == 1
    for selector in ("200", "200#1"):
        with refused("run_exists"):
            fork(service, "child", selector)
    record_all(service.context)
    with rebuilt_service(settings, empty_url) as (again, report):
        assert report.whole, report.lines()
        for name, (run, checkpoint) in views.items():
            found = checkpoint_of(again, name)
            assert {**found, "etag": None} == {**checkpoint, "etag": None}
            told = shown(again, name)
            assert {field: told[field] for field in ("forked_from", "restore_point")} == {
                field: run[field] for field in ("forked_from", "restore_point")
            }
            assert read_all(again.http(), found["id"], [*content(200, 0), *content(200, 1)])
        assert not [each for store in check_all(again.context, deep=True).stores for each in store.findings]
        claim_all(again.context)
        job = Job(again.http(), "demo/child", after=1, world_size=2)
        assert job.opened["restore_point"]["step"] == 200
        delete_for_good(again, clock, "grandchild")
        assert read_all(again.http(), views["child"][1]["id"], [*content(200, 0), *content(200, 1)])


@pytest.mark.rule("record-outbox")
@ON_SQLITE
def test_a_rebuild_knows_a_fork_by_its_checkpoint_alone(
    service: RunningService, saved: Job, settings: ServiceSettings, empty_url: str
) -> None:
    told = fork(service)["forked_from"]
    record_all(service.context)
    with service.context.database.read() as session:
        of_run = select(WrittenRecord.name).join(Run, Run.id == WrittenRecord.subject_id).where(Run.name == "new")
        name = session.execute(of_run).scalar_one()
    assert name is not None
    service.context.store.delete_named(name)
    with rebuilt_service(settings, empty_url) as (again, _):
        assert shown(again)["forked_from"] == checkpoint_of(again)["forked_from"] == told


class AnyFields(Document):
    model_config = ConfigDict(extra="allow", frozen=True)


def written(service: RunningService, name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(service.context.store.read_named(name))["record"]
    return record


def write_as_before_forks(service: RunningService, name: str) -> None:
    """As a worker does that knows no forks, beside a newer service."""
    record = written(service, name)
    del record["checkpoint"]["forked_from"]
    service.context.store.write_named(name, encode(AnyFields.model_validate(record)))


@pytest.mark.rule("record-outbox")
@ON_SQLITE
def test_a_fork_survives_records_of_a_worker_that_knows_no_forks(
    service: RunningService, saved: Job, settings: ServiceSettings, empty_url: str
) -> None:
    told, context = fork(service)["forked_from"], service.context
    record_all(context)
    made = checkpoint_of(service)["id"]
    subject = checkpoint_subject(answer(service.http().get("/v1/projects/demo"))["id"], made)
    with context.database.read() as session:
        record = session.execute(select(WrittenRecord.name).where(WrittenRecord.subject_id == made)).scalar_one()
    assert record is not None
    for lacking in ([subject.manifest_name], [record, subject.manifest_name]):
        for name in lacking:
            write_as_before_forks(service, name)
        (store,) = check_all(context).stores
        (finding,) = store.findings
        assert (finding.kind, finding.blocks) == (FindingKind.OLD_RECORDS, False)
        assert made in finding.examples[0]
        record_all(context)
        for name in (record, subject.manifest_name):
            assert written(service, name)["checkpoint"]["forked_from"] == told
        assert [each.findings for each in check_all(context).stores] == [[]]
    write_as_before_forks(service, record)
    with rebuilt_service(settings, empty_url) as (again, report):
        assert report.whole, report.lines()
        assert shown(again)["forked_from"] == checkpoint_of(again)["forked_from"] == told


@pytest.mark.rule("index-names-its-save")
@ON_SQLITE
def test_the_check_sees_that_a_row_tells_another_source_than_its_record(service: RunningService, saved: Job) -> None:
    fork(service)
    record_all(service.context)
    (store,) = check_all(service.context).stores
    assert store.findings == []
    made = checkpoint_of(service)
    with service.context.database.transaction() as session:
        session.execute(
            update(Checkpoint)
            .where(Checkpoint.id == made["id"])
            .values(forked_from=made["forked_from"] | {"saved_in": "somebody"})
        )
    (store,) = check_all(service.context).stores
    (finding,) = store.findings
    assert (finding.blocks, f"{made['id']}: forked_from is" in finding.examples[0]) == (True, True), finding


@ON_SQLITE
@pytest.mark.parametrize(
    "place", ["_locked_source", "_attempt", "_checkpoint", "_take_shards", "_refuse_unreadable", "record_event"]
)
@pytest.mark.parametrize("after", [False, True])
def test_a_process_that_dies_at_any_step_has_made_nothing(
    service: RunningService, saved: Job, monkeypatch: pytest.MonkeyPatch, place: str, *, after: bool
) -> None:
    caller, source = service.caller(), RunName("demo", "gpt")
    rows = [count(service, table) for table in (Run, Attempt, Checkpoint, Shard, AuditEvent, EventRow)]
    with monkeypatch.context() as patch:
        died = kill(patch, holdfast_service.runs.fork, place, after=after)
        with pytest.raises(Killed):
            holdfast_service.runs.fork.fork_run(service.context, caller, source, ForkRun(name="new"), key="one")
    assert died()
    assert [count(service, table) for table in (Run, Attempt, Checkpoint, Shard, AuditEvent, EventRow)] == rows
    made, is_new = holdfast_service.runs.fork.fork_run(service.context, caller, source, ForkRun(name="new"), key="one")
    assert is_new
    assert made.restore_point is not None
    check_sums(service)


# Two at once. On Postgres the second waits for the first's lock; SQLite has one writer at a time.


@pytest.mark.races
def test_of_two_equal_forks_at_once_one_makes_the_run(
    service: RunningService, saved: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold_after(monkeypatch, holdfast_service.runs.fork, "_take_shards")

    def status() -> int:
        return service.http().post(f"{RUNS}/gpt/forks", json={"name": "new"}).status_code

    first, second = overlap(service, gate, status, status)
    assert (first.result(), second.result()) == (201, 200)
    assert (count(service, Run), count(service, Checkpoint)) == (2, 3)


@pytest.mark.races
def test_of_two_forks_at_once_under_one_name_one_is_refused(
    service: RunningService, saved: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold_after(monkeypatch, holdfast_service.runs.fork, "_take_shards")
    first, second = overlap(service, gate, lambda: fork(service, selector="100"), lambda: fork(service, selector="200"))
    assert first.result()["forked_from"]["step"] == 100
    with refused("run_exists"):
        second.result()


@pytest.mark.rule("quota-reserved")
@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
def test_no_job_waits_for_a_quota_while_a_fork_reads(
    service: RunningService, saved: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"quota_runs": 4, "quota_checkpoints": 4}
    answer(service.http().put("/v1/projects/demo", json=body, headers={"If-Match": "*"}))
    gate = hold_after(monkeypatch, holdfast_service.runs.fork, "_refuse_unreadable")
    with in_background(gate) as threads:
        forking = threads.submit(fork, service)
        gate.wait_until_reached()
        beginning = threads.submit(lambda: Job(service.http(), "demo/other", create=True).begin(1))
        until_blocked_or_done(service, beginning)
        assert beginning.done()
        gate.open()
    assert forking.result()["restore_point"]["step"] == 200
    with refused("quota_exceeded"):
        fork(service, "more")


@pytest.mark.races
@pytest.mark.rule("mark-before-delete")
def test_a_source_that_is_deleted_and_collected_beside_the_fork_leaves_it_whole(
    service: RunningService, saved: Job, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_all(service.context)
    gate = hold_after(monkeypatch, holdfast_service.runs.fork, "_locked_source")

    def delete() -> Any:
        return answer(service.http().request("DELETE", f"{RUNS}/gpt", json={}, headers={"If-Match": "*"}))

    forking, deleting = overlap(service, gate, lambda: fork(service, selector="200"), delete)
    assert forking.result()["restore_point"]["step"] == 200
    assert deleting.result()["checkpoints"] == 2
    delete_for_good(service, clock, "gpt")
    made = checkpoint_of(service)
    assert read_all(service.http(), made["id"], [*content(200, 0), *content(200, 1)])
    assert len(objects(service)) == 4
    check_sums(service)


@pytest.mark.races
@pytest.mark.parametrize("way", ["deleted", "corrupt"])
def test_a_source_that_goes_bad_first_refuses_the_fork(
    service: RunningService, saved: Job, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The fork has chosen it, and waits for its lock."""
    context = service.context
    if way == "deleted":
        gate = hold_after(monkeypatch, holdfast_service.retention.prune, "move_to_trash")

        def first() -> Any:
            return prune(service, filter={"from_step": 150}, all_of_run=True, reason="a mistake")
    else:
        gate = hold_after(monkeypatch, holdfast_service.copies.corruption, "mark_users")

        def first() -> Any:
            with context.database.transaction() as session:
                chunk_id = session.execute(
                    select(Chunk.id).where(Chunk.digest == digest_of(content(200)[0]))
                ).scalar_one()
                session.execute(update(Copy).where(Copy.chunk_id == chunk_id).values(state=CopyState.BAD))
                lock_users(session, chunk_id)
                return holdfast_service.copies.corruption.mark_users(
                    session, chunk_id, "lost", actor=Actor.controller("scrub")
                )

    going, forking = overlap(service, gate, first, lambda: fork(service, selector="200"))
    going.result()
    with refused("no_restore_point") as why:
        forking.result()
    assert "was deleted" in str(why.value) if way == "deleted" else "lost" in str(why.value)
    assert count(service, Run) == 1
