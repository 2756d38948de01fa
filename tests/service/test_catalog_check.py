"""The catalog against its stores, and what a clone of it may do to them: nothing (rule fencing-token)."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from pydantic import SecretStr
from sqlalchemy import make_url, select, text, update

import holdfast_service.operations.controller
from holdfast_protocol.stores import FindingKind
from holdfast_service.attached_stores.epoch import NotCheckedError, claim_store, raise_epoch
from holdfast_service.attached_stores.ownership import MARKER_NAME
from holdfast_service.audit.record import Actor
from holdfast_service.background.registry import OPERATION_KINDS, loops_of
from holdfast_service.catalog_check.check import check_catalog
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Checkpoint, Copy
from holdfast_service.db.tables.operations import AuditEvent, Controller
from holdfast_service.errors import ProblemError
from holdfast_service.records.outbox import record_in_store
from holdfast_service.records.scanning import scan_records
from holdfast_service.service import open_database
from holdfast_service.settings import ServiceSettings, SettingsError
from holdfast_service.stores.base import ObjectFacts, ObjectKey, StoreError, StoreNotOurs
from holdfast_service.stores.posix.posix_store import PosixStore
from tests.service.conftest import Clock
from tests.support.postgres import PostgresServer
from tests.support.rank import Job, answer
from tests.support.rebuilt import check_all, claim_all, record_all
from tests.support.retention import pin
from tests.support.service import RunningService, running_service

DAY = 24 * 3600.0


def root_of(service: RunningService) -> Path:
    store = service.context.store
    assert isinstance(store, PosixStore)
    return store.root


def tree(*roots: Path) -> dict[str, bytes]:
    """Every file of a store but what is on its way."""
    return {
        str(path): path.read_bytes()
        for root in roots
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.relative_to(root).parts[0] not in {"incoming", "proofs"}
    }


def chunk_files(service: RunningService) -> list[Path]:
    """The objects themselves, not the proofs beside them."""
    return sorted(path for path in root_of(service).glob("*/chunks/*/*/*") if path.suffix != ".sha256")


def kinds(service: RunningService, *, deep: bool = False) -> dict[FindingKind, int]:
    (store,) = check_all(service.context, deep=deep).stores
    return {each.kind: each.count for each in store.findings}


@pytest.mark.rule("record-outbox")
def test_nothing_is_found_on_a_healthy_catalog_and_each_damage_is(service: RunningService) -> None:
    job = Job(service.http())
    saved = {step: job.save(step)["id"] for step in range(1, 8)}
    assert kinds(service) == {}, "a record that is only due is no difference"
    record_all(service.context)
    (healthy,) = check_all(service.context, deep=True).stores
    assert (healthy.findings, healthy.objects, healthy.copies, healthy.read_copies) == ([], 14, 14, 14)
    files = chunk_files(service)
    files[0].unlink()
    files[1].write_bytes(b"cut")
    size = files[2].stat().st_size
    files[2].write_bytes(b"?" * size)
    stray = files[3].with_name("f" * 32)
    stray.write_bytes(b"nobody's")
    (attached,) = service.context.stores
    records = {each.subject.subject_id: each for each in scan_records(attached.store)}
    names = [str(records[saved[step]].newest_name) for step in range(1, 4)]
    attached.store.delete_named(names[0])
    attached.store.write_named(names[1], b"{}")
    attached.store.write_named(names[2].replace(saved[3], "ck_" + "0" * 32), attached.store.read_named(names[2]))
    assert kinds(service) == {
        FindingKind.MISSING_OBJECTS: 1,
        FindingKind.WRONG_SIZES: 1,
        FindingKind.UNKNOWN_OBJECTS: 1,
        FindingKind.MISSING_RECORDS: 1,
        FindingKind.DAMAGED_RECORDS: 1,
        FindingKind.UNKNOWN_RECORDS: 1,
    }
    record_all(service.context)
    with service.context.database.read() as session:
        states = session.scalars(select(Copy.state).order_by(Copy.state)).all()
        health = session.scalars(select(Checkpoint.health).where(Checkpoint.health == "corrupt")).all()
    assert states.count("bad") == 2
    assert health, "who needs what is gone is marked, by name"
    assert kinds(service, deep=True) == {
        FindingKind.DAMAGED_COPIES: 1,
        FindingKind.UNKNOWN_OBJECTS: 1,
        FindingKind.UNKNOWN_RECORDS: 1,
    }


def test_the_check_shows_that_it_lives_before_each_question_to_the_store(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    Job(service.http(), world_size=2).save(1)
    (attached,) = service.context.stores
    gone = chunk_files(service)[:3]
    for file in gone:
        file.unlink()
    events: list[str] = []
    head = attached.store.head

    def heard(key: ObjectKey) -> ObjectFacts:
        events.append(key.path)
        return head(key)

    monkeypatch.setattr(attached.store, "head", heard)
    actor = Actor.at_the_database()
    check_catalog(service.context, None, actor, lambda *_: events.append("progress"), deep=False, confirm_missing=True)
    for file in gone:
        asked_at = events.index(str(file.relative_to(root_of(service))))
        assert events[asked_at - 1] == "progress"


def test_a_person_starts_the_check_and_sees_what_to_do(service: RunningService) -> None:
    http = service.http()
    Job(http).save(1)
    record_all(service.context)
    chunk_files(service)[0].unlink()
    started = answer(http.post("/v1/catalog/checks", json={}))
    holdfast_service.operations.controller.reconcile(service.context, kinds=OPERATION_KINDS)
    (store,) = answer(http.get(f"/v1/operations/{started['id']}"))["result"]["stores"]
    (finding,) = store["findings"]
    assert (finding["kind"], finding["count"], finding["blocks"]) == ("missing_objects", 1, False)
    assert finding["remedy"]
    assert finding["examples"]
    (view,) = answer(http.get("/v1/stores"))["items"]
    assert (view["role"], view["claimed"], view["checked_whole"]) == ("primary", True, True)
    service.make_project("other")
    theirs = service.http(token=service.token(project="other"))
    assert theirs.get("/v1/stores").status_code == 403
    for path in ("/v1/catalog/checks", "/v1/stores/primary/claim"):
        assert theirs.post(path, json={}).status_code == 403


def run_every_controller(service: RunningService) -> None:
    """A pass of each, as the service runs them; a store that refuses fails a pass and no more."""
    for each in loops_of(service.context.settings):
        with suppress(StoreError, ProblemError):
            each.reconcile(service.context)


@contextmanager
def cloned(
    service_settings: ServiceSettings, request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[ServiceSettings]:
    """The settings of a service on a byte-for-byte copy of the catalog, with the very same stores."""
    url = service_settings.database_url_text
    if url.startswith("sqlite"):
        path = tmp_path / "clone.db"
        with sqlite3.connect(str(make_url(url).database)) as source, sqlite3.connect(path) as target:
            source.backup(target)
        yield service_settings.model_copy(update={"database_url": SecretStr(f"sqlite:///{path}")})
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    name = f"clone_{tmp_path.name[-20:].lower().replace('-', '_')}"
    url = server.create_database(name, template=str(make_url(url).database))
    yield service_settings.model_copy(update={"database_url": SecretStr(url)})
    server.drop_database(name)


@pytest.mark.rule("fencing-token")
@pytest.mark.parametrize("said", ["nothing was said", "raise-epoch"])
def test_a_clone_changes_nothing_in_productions_stores_whatever_controller_runs(
    settings: ServiceSettings, request: pytest.FixtureRequest, tmp_path: Path, clock: Clock, said: str
) -> None:
    settings = settings.model_copy(update={"second_store": f"posix://{tmp_path / 'second'}"})
    with running_service(settings) as production:
        http = production.http()
        job = Job(http)
        ids = [job.save(step)["id"] for step in range(1, 6)]
        answer(http.put("/v1/projects/demo/policies/copies", json={"document": {}}))
        record_all(production.context)
        with production.context.database.transaction() as session:
            record_in_store(session, ids[0], production.context.stores[1].store_id)
        # Left for every controller to do: garbage, a bad copy, a purge, records that are due, copies that lack.
        job.begin(99).upload(0, [b"garbage", b"more of it"])
        answer(http.post("/v1/projects/demo/runs/gpt/retention/prune", json={"checkpoint_ids": ids[:2]}))
        with production.context.database.transaction() as session:
            bad = session.scalars(select(Copy).order_by(Copy.id)).first()
            assert bad is not None
            bad.state, bad.bad_at = "bad", database_now(session)
    roots = (tmp_path / "store", tmp_path / "second")
    before = tree(*roots)
    with cloned(settings, request, tmp_path) as theirs:
        if said == "raise-epoch":
            declare(theirs)
        with running_service(theirs) as clone:
            http = clone.http()
            answer(http.post("/v1/sweeps", json={"dry_run": False, "force": True}))
            for attached in clone.context.stores:
                with pytest.raises(StoreNotOurs):
                    attached.store.write_named("records/demo/project/1.json", b"{}")
                with pytest.raises(StoreNotOurs):
                    attached.store.delete_named("holdfast-store.json")
                if said == "raise-epoch":
                    with pytest.raises(NotCheckedError):
                        claim_store(clone.context, attached, Actor.at_the_database())
            for _ in range(4):
                clock.advance(4 * DAY)
                with clone.context.database.transaction() as session:
                    session.execute(update(Controller).values(reconciled_at=database_now(session)))
                run_every_controller(clone)
            assert tree(*roots) == before
    with running_service(settings) as production:
        # The same work is really there: production itself does it.
        for _ in range(2):
            run_every_controller(production)
        assert tree(*roots) != before


def declare(settings: ServiceSettings) -> None:
    """What an operator does to the database itself after a restore or a clone."""
    database = open_database(settings)
    raise_epoch(database, Actor.at_the_database())
    database.dispose()


@pytest.mark.rule("fencing-token")
def test_a_clone_that_holds_the_epoch_which_production_is_raised_to_changes_nothing(
    settings: ServiceSettings, request: pytest.FixtureRequest, tmp_path: Path, clock: Clock
) -> None:
    """The clone was there first. What people deleted in it waits for a store that lets itself be changed."""
    with running_service(settings) as production:
        job = Job(production.http())
        for step in range(1, 4):
            job.save(step)
        job.end()
        record_all(production.context)
    with cloned(settings, request, tmp_path) as theirs:
        declare(theirs)
        with running_service(theirs.model_copy(update={"trash_person_seconds": 0.0})) as clone:
            answer(clone.http().request("DELETE", "/v1/projects/demo/runs/gpt", json={}, headers={"If-Match": "*"}))
            run_every_controller(clone)
            declare(settings)
            with running_service(settings) as production:
                assert production.context.epoch == clone.context.epoch
                check_all(production.context)
                claim_all(production.context)
                record_all(production.context)
            before = tree(tmp_path / "store")
            (attached,) = clone.context.stores
            with pytest.raises(StoreNotOurs, match="another database"):
                attached.store.write_named("records/demo/project/1.json", b"{}")
            check_all(clone.context)
            with pytest.raises(NotCheckedError, match="raise-epoch"):
                claim_store(clone.context, attached, Actor.at_the_database(), accept_loss=True)
            for _ in range(4):
                clock.advance(4 * DAY)
                with clone.context.database.transaction() as session:
                    session.execute(update(Controller).values(reconciled_at=database_now(session)))
                run_every_controller(clone)
        assert tree(tmp_path / "store") == before
        with pytest.raises(SettingsError, match="another database"), running_service(theirs):
            pass
    with running_service(settings) as production:
        assert production.http().get("/readyz").status_code == 200
        assert kinds(production) == {}


@pytest.mark.rule("fencing-token")
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_marker_from_before_claims_is_the_catalogs_until_its_epoch_is_raised(settings: ServiceSettings) -> None:
    with running_service(settings) as service:
        marker = root_of(service) / MARKER_NAME
        fields = json.loads(marker.read_text())
        del fields["claim"]
        marker.write_text(json.dumps(fields))
    with running_service(settings) as service:
        (attached,) = service.context.stores
        assert attached.watch.ownership.problem() is None
        Job(service.http()).save(1)
        assert record_all(service.context)
    declare(settings)
    with running_service(settings) as service:
        (attached,) = service.context.stores
        assert not attached.watch.ownership.holds()
        check_all(service.context)
        claim_all(service.context)
        assert attached.watch.ownership.holds()
        assert json.loads(marker.read_text())["claim"] == service.context.claim != ""


@pytest.mark.rule("fencing-token")
def test_a_restored_catalog_is_not_adopted_over_what_it_does_not_know(
    settings: ServiceSettings, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    with running_service(settings) as service:
        job = Job(service.http())
        job.save(1)
        record_all(service.context)
    with cloned(settings, request, tmp_path) as backup:
        with running_service(settings) as service:
            job.http = service.http()
            lost = job.save(2)["id"]
            record_all(service.context)
        declare(backup)
        with running_service(backup) as restored:
            context = restored.context
            (store,) = check_all(context).stores
            assert not store.whole
            assert any(lost in name for each in store.findings for name in each.examples)
            with pytest.raises(NotCheckedError, match="would lose"):
                claim_all(context)
            reply = restored.http().post("/v1/stores/primary/claim", json={})
            assert (reply.status_code, reply.json()["code"]) == (409, "store_foreign")
            claimed = answer(restored.http().post("/v1/stores/primary/claim", json={"accept_loss": True}))
            assert (claimed["claimed"], claimed["problem"]) == (True, None)
            record_all(context)
            with context.database.read() as session:
                actions = session.scalars(select(AuditEvent.action)).all()
            assert {"catalog.new_epoch", "catalog.check", "store.claim"} <= set(actions)


@pytest.mark.rule("index-names-its-save")
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("step = 28", "step is 28 in the catalog and 20 in its record"),
        ("world_size = 2", "world_size is 2 in the catalog and 1 in its record"),
        ("digest = :zeros", f"digest is {'0' * 64} in the catalog and"),
        ("attempt_number = 7", "attempt is 7 in the catalog and 1 in its record"),
        ("health = 'diverged'", "health is diverged in the catalog and ok in its record"),
        ("state = 'trashed'", "state is trashed in the catalog and committed in its record"),
        ("pinned_at = NULL", "pinned_at is nothing in the catalog and"),
    ],
)
def test_a_row_that_the_records_contradict_is_told_field_by_field(
    s3_service: RunningService, change: str, told: str
) -> None:
    service = s3_service
    http = service.http()
    saved = Job(http).save(20)
    pin(service, saved["id"])
    record_all(service.context)
    assert kinds(service, deep=True) == {}
    with service.context.database.transaction() as session:
        session.execute(text(f"UPDATE checkpoints SET {change}"), {"zeros": bytes(32)} if ":zeros" in change else {})
    (store,) = check_all(service.context).stores
    (finding,) = store.findings
    assert (finding.kind, finding.count, finding.blocks) == (FindingKind.DIFFERENT_RECORDS, 1, True)
    assert f"{saved['id']}: {told}" in finding.examples[0]
    assert kinds(service) == {FindingKind.DIFFERENT_RECORDS: 1}, "it is told, and nobody writes over the records"


@pytest.mark.rule("index-names-its-save")
def test_what_never_changes_is_compared_also_where_a_newer_record_is_due(
    s3_service: RunningService,
) -> None:
    service = s3_service
    http = service.http()
    saved = Job(http).save(20)
    held = answer(http.post(f"/v1/checkpoints/{saved['id']}/holds", json={"reason": "evidence"}))
    record_all(service.context)
    with service.context.database.transaction() as session:
        session.execute(text("DELETE FROM holds"))
        session.execute(text("UPDATE runs SET name = 'other'"))
    (store,) = check_all(service.context).stores
    told = "\n".join(example for finding in store.findings for example in finding.examples)
    assert f"holds is nothing in the catalog and {{'{held['id']}'" in told
    assert "name='other'" in told
    with service.context.database.transaction() as session:
        session.execute(text("UPDATE checkpoints SET step = 28, version = version + 1"))
    record_all(service.context)
    (store,) = check_all(service.context).stores
    told = "\n".join(example for finding in store.findings for example in finding.examples)
    assert "step is 28 in the catalog and 20 in its record" in told, "its manifest still knows"
