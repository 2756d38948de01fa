"""Postgres fails over to an older copy of itself under a service that runs: what was acknowledged since is lost, and
neither the catalog's epoch nor its place tells (rule database-went-back)."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast_protocol.states import CheckpointState
from holdfast_protocol.stores import FindingKind
from holdfast_service.attached_stores.epoch import NotCheckedError, raise_epoch
from holdfast_service.audit.record import Actor
from holdfast_service.collect.controller import reconcile as collect
from holdfast_service.collect.orphans import sweep_store
from holdfast_service.db.engine import lossy_settings
from holdfast_service.db.tables.core import Checkpoint
from holdfast_service.errors import ProblemError, WentBackError
from holdfast_service.records.documents import Subject, checkpoint_subject
from holdfast_service.records.history import keep_history
from holdfast_service.records.scanning import scan_records
from holdfast_service.records.writing import claim_records, remove_record, settle_record, write_record
from holdfast_service.retention.purge import reconcile as purge
from holdfast_service.service import open_database
from holdfast_service.settings import ServiceSettings
from holdfast_service.stores.base import StoreNotOurs
from tests.jepsen.database import Copy, FailoverPostgres, failover_postgres
from tests.service.conftest import Clock
from tests.support.databases import migrate
from tests.support.posix_chunks import age_everything, chunks
from tests.support.rank import Job, Refused, answer
from tests.support.rebuilt import check_all, claim_all, rebuilt_service, record_all
from tests.support.retention import states
from tests.support.service import RunningService, running_service

pytestmark = pytest.mark.rule("database-went-back")


@pytest.fixture(scope="module")
def server() -> Iterator[FailoverPostgres]:
    with failover_postgres() as server:
        yield server


@pytest.fixture
def database_url(server: FailoverPostgres) -> str:
    url = server.server.create_database(f"holdfast_{secrets.token_hex(4)}")
    migrate(url)
    return url


def refused(call: Callable[[], Any]) -> bool:
    with pytest.raises(Refused) as error:
        call()
    return (error.value.code, error.value.status) == ("catalog_went_back", 503)


def readyz(service: RunningService) -> tuple[int, str]:
    reply = service.http().get("/readyz")
    checks = {each["name"]: each["detail"] for each in reply.json()["checks"]}
    return reply.status_code, checks["database"]


@pytest.mark.parametrize("take", [FailoverPostgres.older_copy, FailoverPostgres.standby])
def test_a_failover_that_loses_a_commit_stops_jobs_until_an_operator_has_accepted_it(
    server: FailoverPostgres, settings: ServiceSettings, take: Callable[[FailoverPostgres], Copy]
) -> None:
    with running_service(settings) as service, running_service(settings) as idle:
        first = Job(service.http())
        first.save(1)
        copy = take(server)
        server.cut_off(copy)
        living = Job(service.http(), after=1, world_size=2)
        save = living.begin(20)
        for rank in (0, 1):
            save.write(rank, [b"acknowledged", b"index"])
        assert save.now()["state"] == "committed"
        record_all(service.context)
        keep_history(service.context)
        server.fail_over(copy)
        for each in (idle, service):
            assert refused(lambda each=each: Job(each.http(), after=1, world_size=2))
            assert refused(lambda each=each: answer(each.http().get(f"{first.base}/restore-point")))
            status, detail = readyz(each)
            assert (status, "holdfast catalog check" in detail) == (503, True)
            assert "gpt" not in detail, "/readyz is open to everybody"
        for call in (lambda: living.begin(21), lambda: living.heartbeat(21), lambda: first.begin(2)):
            assert refused(call)
        named = answer(service.http().get(f"{first.base}/restore-point", params={"selector": "1"}))
        assert named["restore_point"]["step"] == 1, "what is named can be read"
        assert answer(service.http().get(f"{first.base}/checkpoints"))["items"]
    with running_service(settings) as service:
        assert readyz(service)[0] == 503, "it stands in the catalog, and outlives the process"
        check_all(service.context)
        with pytest.raises(NotCheckedError, match="raise-epoch"):
            claim_all(service.context, accept_loss=True)
    database = open_database(settings)
    raise_epoch(database, Actor.at_the_database())
    database.dispose()
    with running_service(settings) as service:
        assert refused(lambda: Job(service.http(), after=1))
        (primary,) = check_all(service.context).stores
        assert any(save.id in example for each in primary.findings for example in each.examples)
        with pytest.raises(NotCheckedError, match="step 20 of demo/gpt was committed"):
            claim_all(service.context)
        claim_all(service.context, accept_loss=True)
        assert readyz(service)[0] == 200
        assert Job(service.http(), after=1).save(3)["state"] == "committed"


@pytest.mark.rule("rebuild-doubts")
def test_a_rebuild_after_a_failover_keeps_what_only_the_older_copy_and_what_only_the_records_know(
    server: FailoverPostgres, settings: ServiceSettings
) -> None:
    """Two acknowledged commits: the copy knows the first, which has no record yet; the second is recorded, and was
    committed behind the copy's back."""
    with running_service(settings) as service:
        job = Job(service.http())
        job.save(1)
        record_all(service.context)
        without_record = job.save(2)["id"]
        copy = server.older_copy()
        with_record = job.save(3)["id"]
        _record_alone(service, with_record)
        keep_history(service.context)
        server.fail_over(copy)
        assert readyz(service)[0] == 503
    older = open_database(settings)
    raise_epoch(older, Actor.at_the_database())
    with running_service(settings) as service:
        (primary,) = check_all(service.context).stores
        named = {each.kind: each for each in primary.findings}
        assert with_record in named[FindingKind.UNKNOWN_RECORDS].examples[0]
        told = named[FindingKind.UNRECORDED]
        assert any(without_record in example for example in told.examples), "the service says so first"
        assert "--with-database" in told.remedy
    empty = server.server.create_database(f"holdfast_{secrets.token_hex(4)}")
    migrate(empty)
    with rebuilt_service(settings, empty, older=older) as (service, report):
        assert [each.rpartition("/")[2] for each in report.remembered if "/checkpoints/" in each] == [without_record]
        assert states(service) == {1: "committed", 2: "committed", 3: "committed"}
        check_all(service.context)
        claim_all(service.context, accept_loss=True)
        record_all(service.context)
        assert Job(service.http(), after=1).opened["restore_point"]["step"] == 3
        assert scan_records(service.context.store).by_subject[_subject(service, without_record)].newest
    older.dispose()


def _subject(service: RunningService, checkpoint_id: str) -> Subject:
    project_id = next(service.context.store.list_named("records")).split("/")[1]
    return checkpoint_subject(project_id, checkpoint_id)


def _record_alone(service: RunningService, checkpoint_id: str) -> None:
    """The others stay due, as they do where there are more than the outbox can write."""
    (attached,) = service.context.stores
    with service.context.database.transaction() as session:
        (task,) = claim_records(session, service.context, _subject(service, checkpoint_id), [attached])
    write_record(service.context, task)
    assert settle_record(service.context, task)


@pytest.mark.parametrize("restarted", [False, True], ids=["runs on", "was restarted"])
def test_nothing_that_an_acknowledged_commit_needs_is_deleted_after_a_failover(
    server: FailoverPostgres, settings: ServiceSettings, clock: Clock, *, restarted: bool
) -> None:
    """A chunk that nobody needed when the copy was made was taken over by step 2. The service has asked the store for
    newer records before, and was told that there are none."""
    with running_service(settings) as service:
        job = Job(service.http())
        first = job.save(1)
        given_up = job.begin(999)
        given_up.upload(0, [b"frozen base"])
        given_up.abort()
        with service.context.database.transaction() as session:
            trashed = session.get_one(Checkpoint, first["id"])
            trashed.state = CheckpointState.TRASHED
            trashed.purge_at = trashed.committed_at
        record_all(service.context)
        assert collect(service.context).skipped_stores == ()
        copy = server.older_copy()
        job.save(2, content=b"frozen base")
        record_all(service.context)
        before = chunks(service)
        if not restarted:
            server.fail_over(copy)
            _nothing_is_deleted(service, clock, first["id"])
            assert chunks(service) == before
    if restarted:
        server.fail_over(copy)
        with running_service(settings) as service:
            _nothing_is_deleted(service, clock, first["id"])
            assert chunks(service) == before


def _nothing_is_deleted(service: RunningService, clock: Clock, trashed_id: str) -> None:
    context = service.context
    clock.advance(3 * 24 * 3600.0)
    age_everything(service)
    collected = collect(context)
    assert (collected.done, len(collected.skipped_stores)) == (0, 1)
    project_id = next(context.store.list_named("records")).split("/")[1]
    with pytest.raises(StoreNotOurs, match="went back"):
        remove_record(context, project_id, trashed_id)
    with pytest.raises(ProblemError, match="went back"):
        sweep_store(context, context.stores[0], dry_run=False, force=True, actor=Actor.at_the_database())
    for _ in range(2):  # the first one leaves out the time in which nobody looked
        with pytest.raises(WentBackError):
            purge(context)
    # The lost changes may have purged it: "taken back" would be a promise that nobody can keep.
    for taken_back in (f"checkpoints/{trashed_id}", "projects/demo/runs/gpt"):
        refused = service.http().post(f"/v1/{taken_back}/undelete", json={})
        assert refused.json()["code"] == "catalog_went_back", taken_back
    assert answer(service.http().get(f"/v1/checkpoints/{trashed_id}"))["state"] == "trashed"


def test_a_killed_process_has_left_beside_the_data_what_it_had_acknowledged(
    server: FailoverPostgres, settings: ServiceSettings, tmp_path: Path
) -> None:
    """The memory of the process is gone with it, and no record was written yet."""
    with running_service(settings) as service:
        job = Job(service.http())
        copy = server.older_copy()
        job.save(1)
        keep_history(service.context)
        server.fail_over(copy)
        with running_service(settings) as other:
            assert readyz(other)[0] == 503
            assert refused(lambda: job.begin(2))


def test_a_failover_that_loses_nothing_goes_unnoticed(server: FailoverPostgres, settings: ServiceSettings) -> None:
    with running_service(settings) as service:
        job = Job(service.http())
        job.save(1)
        copy = server.older_copy()
        server.fail_over(copy)
        assert readyz(service)[0] == 200
        assert job.save(2)["state"] == "committed"
        assert Job(service.http(), after=1).opened["restore_point"]["step"] == 2


def test_settings_that_can_lose_an_acknowledged_commit_are_named(settings: ServiceSettings) -> None:
    with running_service(settings) as service:
        status, detail = readyz(service)
    assert status == 200
    for name in ("fsync", "full_page_writes"):  # as these tests run Postgres
        assert f"{name} is off" in detail
    safe = {"fsync": "on", "full_page_writes": "on", "synchronous_commit": "on", "synchronous_standby_names": ""}
    assert lossy_settings(safe, 0) == []
    assert "data_sync_retry is on" in lossy_settings(safe | {"data_sync_retry": "on"}, 0)[0]
    assert "synchronous_commit is off" in lossy_settings(safe | {"synchronous_commit": "off"}, 0)[0]
    assert "replica that no commit waits for" in lossy_settings(safe, 1)[0]
    assert lossy_settings(safe | {"synchronous_standby_names": "ANY 1 (*)"}, 1) == []
    assert lossy_settings(safe | {"synchronous_standby_names": "ANY 1 (*)", "synchronous_commit": "local"}, 1)


def test_a_clone_for_tests_can_give_up_what_it_lacks(server: FailoverPostgres, settings: ServiceSettings) -> None:
    with running_service(settings) as service:
        Job(service.http()).save(1)
        service.context.database.note_went_back(["step 2 of demo/gpt was committed"])
        assert readyz(service)[0] == 503
    database = open_database(settings)
    raise_epoch(database, Actor.at_the_database(), accept_loss=True)
    database.dispose()
    with running_service(settings) as service:
        assert readyz(service)[0] == 200
        assert Job(service.http(), after=1).save(2)["state"] == "committed"
