"""What a rebuild cannot know: it says so by name, protects what may have been held, and confirms nothing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from sqlalchemy import select

from holdfast_protocol.states import Scope
from holdfast_protocol.stores import FindingKind
from holdfast_service.attached_stores.epoch import NotCheckedError
from holdfast_service.attached_stores.ownership import MARKER_NAME, Marker, read_marker, write_marker
from holdfast_service.audit.record import Actor
from holdfast_service.collect.orphans import sweep_store
from holdfast_service.db.engine import Database
from holdfast_service.db.tables.core import CatalogIdentity
from holdfast_service.db.tables.operations import AuditEvent
from holdfast_service.rebuild.report import RebuildReport
from holdfast_service.rebuild.run import rebuild
from holdfast_service.rebuild.sources import RebuildRefusedError
from holdfast_service.records.documents import (
    CheckpointRecord,
    ManifestRecord,
    ProjectRecord,
    RecordKind,
    decode,
    encode,
)
from holdfast_service.records.scanning import FoundRecord, scan_records
from holdfast_service.settings import ServiceSettings
from holdfast_service.stores.posix.posix_store import PosixStore
from holdfast_service.stores.registry import open_store
from tests.support.databases import SqliteCatalogs
from tests.support.garbage import age_it, listed
from tests.support.rank import Job, Refused, answer
from tests.support.rebuilt import SIGNING_KEY, check_all, claim_all, read_all, rebuild_into, rebuilt_service, record_all
from tests.support.replicated import put_policy, replicate
from tests.support.retention import prune
from tests.support.service import RunningService, running_service


def records_of(service: RunningService) -> dict[str, FoundRecord]:
    """By the subject's id."""
    return {each.subject.subject_id: each for each in scan_records(service.context.store)}


def root_of(service: RunningService) -> Path:
    assert isinstance(service.context.store, PosixStore)
    return service.context.store.root


def restore_point(service: RunningService, run: str) -> dict[str, object]:
    found: dict[str, object] = answer(service.http().get(f"/v1/projects/demo/runs/{run}/restore-point"))
    return found


def confirm(service: RunningService, **body: str) -> None:
    answer(service.http().post("/v1/catalog/confirmations", json=body))


@pytest.mark.rule("rebuild-doubts")
def test_a_run_whose_records_are_lost_is_not_begun_from_nothing_until_a_person_confirms_it(
    service: RunningService, settings: ServiceSettings, empty_url: str
) -> None:
    http = service.http()
    Job(http).save(20)
    record_all(service.context)
    Job(http, "demo/lost").save(30)  # acknowledged, and the database is gone before its record is written

    with rebuilt_service(settings, empty_url) as (again, report):
        assert report.doubts == {"demo": ["2 objects in its stores belong to no checkpoint."]}
        assert any("not known: demo: 2 objects" in line for line in report.lines())
        http = again.http()
        assert answer(http.get("/v1/catalog/doubts"))["items"][0]["project"] == "demo"
        for run in ("demo/lost", "demo/brand-new"):
            for create in (None, True):
                with pytest.raises(Refused) as refused:
                    Job(http, run, create=create)
                assert refused.value.code == "commits_unknown"
                assert f"`holdfast catalog confirm {run}`" in refused.value.detail
        decision = restore_point(again, "gpt")
        assert decision["restore_point"]["step"] == 20  # type: ignore[index]
        assert "newer checkpoints may be missing" in str(decision["note"])
        assert "may be missing" in Job(http, after=1).opened["note"], "a launch is told, and goes on from what there is"

        confirm(again, project="demo", run="brand-new", reason="it is new")
        assert Job(http, "demo/brand-new").opened["ever_committed"] is False
        assert restore_point(again, "brand-new")["note"] == ""
        with pytest.raises(Refused, match="commits_unknown"):
            Job(http, "demo/lost")
        token = again.token(Scope.ADMIN, project="demo")
        with pytest.raises(Refused, match="forbidden"):
            answer(again.http(token=token).post("/v1/catalog/confirmations", json={"project": "other"}))
        confirm(again, project="demo")
        assert Job(http, "demo/lost").opened["ever_committed"] is False
        assert restore_point(again, "gpt")["note"] == ""
        assert answer(http.get("/v1/catalog/doubts"))["items"] == []
        with again.context.database.read() as session:
            told = session.scalars(select(AuditEvent).where(AuditEvent.action == "catalog.confirm")).all()
        assert [event.reason for event in told] == ["it is new", None]


@pytest.mark.rule("rebuild-doubts")
def test_a_project_without_any_record_is_in_doubt_for_whoever_makes_it_anew(
    service: RunningService, settings: ServiceSettings, empty_url: str
) -> None:
    Job(service.http(), "other/gpt").save(1)
    record_all(service.context)
    Job(service.http()).save(20)
    # Whoever attaches a store may leave things in it, too.
    (root_of(service) / "lost+found").mkdir()

    with rebuilt_service(settings, empty_url) as (again, report):
        (reason,) = report.doubts[""]
        assert "2 objects in its stores belong to no checkpoint" in reason
        assert Job(again.http(), "other/new").opened["ever_committed"] is False, "of this project everything is known"
        with pytest.raises(Refused, match="commits_unknown"):
            Job(again.http(), "demo/gpt")
        confirm(again, project="demo")
        assert Job(again.http(), "demo/gpt").opened["ever_committed"] is False


@pytest.mark.rule("rebuild-doubts")
def test_a_record_that_was_begun_and_not_ended_is_doubted_and_never_promised_back(
    service: RunningService, settings: ServiceSettings, empty_url: str
) -> None:
    job = Job(service.http())
    job.save(20)
    lost = job.save(30)["id"]
    record_all(service.context)
    record = records_of(service)[lost]
    for name in (record.subject.manifest_name, str(record.newest_name)):
        service.context.store.delete_named(name)

    with rebuilt_service(settings, empty_url) as (again, report):
        assert lost in report.doubts["demo"][0]
        (store,) = check_all(again.context).stores
        assert [each.kind for each in store.findings if each.blocks] == [FindingKind.BEGUN_RECORDS]
        with pytest.raises(NotCheckedError, match="would lose"):
            claim_all(again.context)
        claim_all(again.context, accept_loss=True)


@pytest.mark.rule("rebuild-doubts")
def test_an_attempt_that_has_committed_says_so_where_no_record_of_its_checkpoint_is_left(
    service: RunningService, settings: ServiceSettings, empty_url: str
) -> None:
    job = Job(service.http())
    saved = job.save(20)
    job.end()
    record_all(service.context)
    subject = records_of(service)[saved["id"]].subject
    shutil.rmtree(root_of(service) / subject.folder)
    shutil.rmtree(root_of(service) / subject.project_id / "chunks")

    with rebuilt_service(settings, empty_url) as (again, report):
        assert report.doubts == {}
        opened = Job(again.http(), after=1).opened
        assert (opened["restore_point"], opened["ever_committed"]) == (None, True), "it must not begin from nothing"


@pytest.mark.rule("rebuild-doubts")
@pytest.mark.parametrize("damage", ["damaged", "missing"])
def test_what_nobody_knows_to_be_free_is_held_until_a_person_has_looked(
    service: RunningService, settings: ServiceSettings, empty_url: str, damage: str
) -> None:
    http = service.http()
    job = Job(http)
    saved = {step: job.save(step)["id"] for step in (1, 2, 3, 4)}
    answer(http.post(f"/v1/checkpoints/{saved[1]}/holds", json={"reason": "evidence"}))
    record_all(service.context)
    name = str(records_of(service)[saved[1]].newest_name)
    if damage == "damaged":
        service.context.store.write_named(name, b"{")
    else:
        service.context.store.delete_named(name)

    with rebuilt_service(settings, empty_url) as (again, report):
        assert not report.whole
        assert [each.partition(":")[0] for each in report.protected] == ["demo/gpt@1#1"]
        assert any("held until a person has looked: demo/gpt@1#1" in line for line in report.lines())
        http = again.http()
        (hold,) = answer(http.get("/v1/holds"))["items"]
        assert (hold["checkpoint_id"], hold["placed_by"]) == (saved[1], "catalog rebuild")
        with pytest.raises(Refused, match="checkpoint_held"):
            prune(again, checkpoint_ids=[saved[1]])
        check_all(again.context)
        claim_all(again.context, accept_loss=True)
        record_all(again.context)
        assert check_all(again.context).stores[0].findings == [], "its record has the hold from now on"
        released = answer(http.post(f"/v1/holds/{hold['id']}/release", json={"reason": "nobody needs it"}))
        assert released["released_at"] is not None, "any person who may release holds ends it"


def list_name(service: RunningService, checkpoint_id: str) -> str:
    folder = records_of(service)[checkpoint_id].subject.folder
    (name,) = (each for each in service.context.store.list_named(folder) if "/lists/" in each)
    return name


@pytest.mark.rule("rebuild-doubts")
@pytest.mark.parametrize("damaged", ["manifest", "list"])
def test_what_never_changes_is_taken_from_another_store_where_the_first_ones_is_damaged(
    settings: ServiceSettings, empty_url: str, tmp_path: Path, damaged: str
) -> None:
    second = f"posix://{tmp_path / 'second'}"
    two_stores = settings.model_copy(update={"second_store": second})
    with running_service(two_stores) as service:
        saved = Job(service.http()).save(20)
        put_policy(service)
        replicate(service)
        record_all(service.context)
        name = records_of(service)[saved["id"]].subject.manifest_name
        service.context.store.write_named(name if damaged == "manifest" else list_name(service, saved["id"]), b"{")

    with rebuilt_service(two_stores, empty_url, two_stores.store_url, second) as (again, report):
        assert report.whole, report.lines()
        assert any(f"it is taken from {second}" in note for note in report.notes)
        data = b"demo/gpt 1 20 0"
        assert read_all(again.http(), saved["id"], [data, b"index " + data])
        check_all(again.context)
        claim_all(again.context)
        record_all(again.context)
        assert check_all(again.context, deep=True).stores[0].findings == [], "the first store has it whole again"


@pytest.mark.rule("record-outbox")
def test_a_manifest_is_not_written_over_by_a_catalog_that_does_not_know_its_shards(
    settings: ServiceSettings, empty_url: str, tmp_path: Path
) -> None:
    second = f"posix://{tmp_path / 'second'}"
    with running_service(settings.model_copy(update={"second_store": second})) as service:
        saved = Job(service.http()).save(20)
        put_policy(service)
        replicate(service)
        record_all(service.context)
        name = records_of(service)[saved["id"]].subject.manifest_name
        service.context.store.write_named(name, b"{")
    whole = (tmp_path / "second" / name).read_bytes()
    rebuild_into(empty_url, settings.store_url)  # without the second store, which becomes the first one afterwards
    changes = {"store": second, "database_url": SecretStr(empty_url)}
    with running_service(settings.model_copy(update=changes)) as again:
        check_all(again.context)
        claim_all(again.context, accept_loss=True)
        assert record_all(again.context) > 0
        assert (tmp_path / "second" / name).read_bytes() == whole


@pytest.mark.rule("rebuild-doubts")
def test_what_may_be_the_chunks_of_a_checkpoint_without_its_lists_is_not_swept(
    service: RunningService, settings: ServiceSettings, empty_url: str
) -> None:
    saved = Job(service.http()).save(20)
    record_all(service.context)
    service.context.store.write_named(list_name(service, saved["id"]), b"{")
    project_id = records_of(service)[saved["id"]].subject.project_id

    with rebuilt_service(settings, empty_url) as (again, report):
        assert report.orphans == 2
        check_all(again.context)
        claim_all(again.context, accept_loss=True)
        objects = listed(again, project_id)
        for key in objects:
            age_it(again, key, 48 * 3600)
        how: dict[str, Any] = {"dry_run": False, "actor": Actor.controller("sweep")}
        swept = sweep_store(again.context, again.context.stores[0], force=False, **how)
        assert (swept.due_orphans, swept.deleted) == (2, 0)
        assert "without all of its chunk lists" in str(swept.stopped)
        assert listed(again, project_id) == objects
        assert sweep_store(again.context, again.context.stores[0], force=True, **how).deleted == 2


@pytest.fixture
def other_settings(settings: ServiceSettings, sqlite_catalogs: SqliteCatalogs, tmp_path: Path) -> ServiceSettings:
    """Of another catalog, with a store of its own."""
    folder = tmp_path / "other"
    folder.mkdir()
    return settings.model_copy(
        update={
            "database_url": SecretStr(sqlite_catalogs.new(folder)),
            "store": f"posix://{folder / 'store'}",
            "data_dir": folder / "data",
        }
    )


def records_copied(source: Path, target: Path) -> None:
    for name in ("records", *(each.name for each in source.iterdir() if (each / "chunks").is_dir())):
        shutil.copytree(source / name, target / name, dirs_exist_ok=True)


def rebuilt_as(url: str, store_url: str, catalog_id: str, *, may_mark: bool = True) -> RebuildReport:
    database = Database(url)
    try:
        opened = [(store_url, open_store(store_url, SIGNING_KEY))]
        return rebuild(database, opened, catalog_id=catalog_id, may_mark=may_mark)
    finally:
        database.dispose()


@pytest.mark.rule("rebuild-doubts")
def test_records_of_a_second_catalog_in_the_bucket_are_told_by_name_and_left_alone(
    service: RunningService, settings: ServiceSettings, other_settings: ServiceSettings, empty_url: str
) -> None:
    Job(service.http()).save(20)
    record_all(service.context)
    with running_service(other_settings) as other:
        Job(other.http()).save(40)
        record_all(other.context)
        records_copied(root_of(other), root_of(service))
        theirs = other.context.catalog_id

    with rebuilt_service(settings, empty_url) as (again, report):
        assert (report.catalog_id, report.checkpoints) == (service.context.catalog_id, {"committed": 1})
        (told,) = report.foreign
        assert f"the project demo of the catalog {theirs}" in told
        assert (report.orphans, report.doubts) == (0, {}), "its objects are not ours either"
        assert restore_point(again, "gpt")["restore_point"]["step"] == 20  # type: ignore[index]
        assert Job(again.http(), "demo/new").opened["ever_committed"] is False


@pytest.mark.rule("rebuild-doubts")
@pytest.mark.parametrize("marker", ["replaced", "lost", "unreadable"])
def test_a_marker_that_is_not_the_records_own_does_not_change_whose_catalog_it_is(
    service: RunningService, settings: ServiceSettings, empty_url: str, marker: str
) -> None:
    Job(service.http()).save(20)
    record_all(service.context)
    ours, store = service.context.catalog_id, service.context.store
    before = read_marker(store)
    with service.context.stores[0].watch.ownership.opened():
        if marker == "replaced":
            write_marker(store, Marker("ca_another", 1, 7))
        elif marker == "lost":
            store.delete_named(MARKER_NAME)
        else:
            store.write_named(MARKER_NAME, b"{")
    with pytest.raises(RebuildRefusedError) as refused:
        rebuild_into(empty_url, settings.store_url)
    assert f"--catalog {ours}" in str(refused.value)
    assert "demo" in str(refused.value)
    with pytest.raises(RebuildRefusedError, match="no record of the catalog ca_mistyped"):
        rebuilt_as(empty_url, settings.store_url, "ca_mistyped")

    report = rebuilt_as(empty_url, settings.store_url, ours)
    assert (report.catalog_id, report.whole) == (ours, True)
    assert report.epoch > before.epoch, "attempts of before are fenced, whatever epoch the marker tells"
    with running_service(settings.model_copy(update={"database_url": SecretStr(empty_url)})) as again:
        assert restore_point(again, "gpt")["restore_point"]["step"] == 20  # type: ignore[index]
        (view,) = answer(again.http().get("/v1/stores"))["items"]
        assert view["claimed"] is False, "the store is told whose it is, and still is to be claimed"
        check_all(again.context)
        claim_all(again.context)


@pytest.mark.rule("rebuild-doubts")
def test_records_that_contradict_each_other_are_told_and_raise_no_error_of_the_database(
    service: RunningService, settings: ServiceSettings, empty_url: str
) -> None:
    job = Job(service.http())
    saved = job.save(20)
    record_all(service.context)
    store = service.context.store
    found = records_of(service)[saved["id"]]
    # The same step of the same attempt, committed by two histories of one catalog.
    twin = f"ck_{'0' * 32}"
    for name in store.list_named(found.subject.folder):
        data = store.read_named(name)
        if name == found.subject.manifest_name:
            document = decode(data, ManifestRecord)
            data = encode(
                document.model_copy(update={"checkpoint": document.checkpoint.model_copy(update={"id": twin})})
            )
        elif name == found.newest_name:
            record = decode(data, CheckpointRecord)
            data = encode(record.model_copy(update={"checkpoint": record.checkpoint.model_copy(update={"id": twin})}))
        store.write_named(name.replace(saved["id"], twin), data)
    # Another project of the same name, another run of the same name, and another number of the same launch.
    (project,) = [each for each in scan_records(store) if each.subject.kind is RecordKind.PROJECT]
    facts = decode(store.read_named(str(project.newest_name)), ProjectRecord)
    renamed = facts.model_copy(update={"project": facts.project.model_copy(update={"id": "zzz"})})
    store.write_named(str(project.newest_name).replace(project.subject.project_id, "zzz"), encode(renamed))
    record = decode(store.read_named(str(found.newest_name)), CheckpointRecord)
    strangers = {
        f"ck_{'1' * 32}": {"run": record.run.model_copy(update={"id": "run_another"})},
        f"ck_{'2' * 32}": {"attempt": record.attempt.model_copy(update={"number": 7})},
    }
    for stranger, change in strangers.items():
        checkpoint = record.checkpoint.model_copy(update={"id": stranger, "step": 30})
        changed = record.model_copy(update={"checkpoint": checkpoint, **change})
        store.write_named(str(found.newest_name).replace(saved["id"], stranger), encode(changed))

    with rebuilt_service(settings, empty_url) as (again, report):
        assert not report.whole
        told = "\n".join(report.damaged)
        assert "another project is called demo already" in told
        assert f"ck_{'1' * 32}: another run of its project is called gpt already" in told
        assert f"ck_{'2' * 32}: the launch of attempt 7 has another number in its run" in told
        assert [each.partition(":")[0] for each in report.protected] == ["demo/gpt@20#1"]
        assert report.checkpoints == {"committed": 1, "trashed": 1}
        assert "demo" in report.doubts
        assert restore_point(again, "gpt")["restore_point"]["step"] == 20  # type: ignore[index]
        with again.context.database.read() as session:
            assert session.execute(select(CatalogIdentity)).scalar_one().rebuilding_from is None
