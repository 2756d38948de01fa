"""The start: what an unavailable store, another catalog's store and an unsafe filesystem do (rules fencing-token,
sqlite-immediate and store-outage-degrades)."""

from __future__ import annotations

import os
import stat
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import delete, select, text, update
from sqlalchemy.pool import QueuePool

import holdfast_service.collect.controller
import holdfast_service.scrub.verify
from holdfast_protocol.states import CopyState, StoreRole
from holdfast_service.attached_stores.epoch import NotCheckedError, confirm_move, raise_epoch
from holdfast_service.attached_stores.ownership import MARKER_NAME, read_marker, write_marker
from holdfast_service.audit.record import Actor
from holdfast_service.copies.copy_chunk import move_bytes
from holdfast_service.db.engine import Database, DatabaseConfigurationError, filesystem_kind
from holdfast_service.db.place import MOVED, settle_place
from holdfast_service.db.tables.core import CatalogIdentity, Copy
from holdfast_service.db.tables.core import Store as StoreRow
from holdfast_service.db.tables.operations import AuditEvent
from holdfast_service.db.tables.records import HistoryMark
from holdfast_service.records.history import FOLDER, HistoryKeeper
from holdfast_service.service import open_database
from holdfast_service.settings import ServiceSettings, SettingsError, refuse_unknown_settings, settings_table
from holdfast_service.stores.posix.posix_store import PosixStore
from tests.service.conftest import Clock
from tests.support.databases import SqliteCatalogs
from tests.support.rank import Job, Refused, answer, digest_of
from tests.support.rebuilt import check_all, claim_all, read_all
from tests.support.replicated import begin
from tests.support.rot import attached, key_of, states_of
from tests.support.seaweedfs import seaweedfs_server
from tests.support.service import RunningService, running_service

DAY = 86_400


def readiness(service: RunningService) -> tuple[int, dict[str, str]]:
    """Status, and the details of the checks that failed."""
    reply = service.http(token=None).get("/readyz")
    return reply.status_code, {check["name"]: check["detail"] for check in reply.json()["checks"] if not check["ok"]}


@pytest.mark.rule("store-outage-degrades")
def test_a_store_that_is_unavailable_at_the_start_degrades_the_service_until_it_is_back(
    settings: ServiceSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with seaweedfs_server() as weed:
        for name, value in weed.environment.items():
            monkeypatch.setenv(name, value)
        weed.stop()
        with running_service(settings.model_copy(update={"store": weed.store_url})) as service:
            assert service.http(token=None).get("/healthz").status_code == 200
            status, failed = readiness(service)
            assert (status, list(failed)) == (503, ["store"])
            answer(service.http().put("/v1/projects/demo", json={}))  # the catalog answers
            weed.start()
            assert readiness(service) == (200, {})
            saved = Job(service.http()).save(100)
            assert saved["state"] == "committed"
            probed = service.context.store.capabilities
        with running_service(settings.model_copy(update={"store": weed.store_url})) as service:
            assert service.context.store.capabilities == probed, "the probe's result is kept"


@pytest.mark.rule("store-outage-degrades")
def test_a_mount_that_is_absent_is_not_taken_for_a_new_store(settings: ServiceSettings, tmp_path: Path) -> None:
    with running_service(settings) as service:
        saved = Job(service.http()).save(100)
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    (tmp_path / "store").mkdir()  # the mount point without its mount
    with running_service(settings) as service:
        status, failed = readiness(service)
        assert (status, list(failed)) == (503, ["store"])
        assert not (tmp_path / "store" / MARKER_NAME).exists()
        (tmp_path / "store").rmdir()
        (tmp_path / "elsewhere").rename(tmp_path / "store")
        assert readiness(service) == (200, {})
        assert answer(service.http().get(f"/v1/checkpoints/{saved['id']}/manifest"))["checkpoint"] == saved


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_start_does_not_wait_until_what_gone_processes_have_left_is_deleted(
    settings: ServiceSettings, clock: Clock
) -> None:
    """A bucket with versions has one for each time that a process wrote its document."""
    with running_service(settings):
        pass
    clock.advance(2 * DAY)
    with running_service(settings) as service:
        store = service.context.store
        assert len(list(store.list_named(FOLDER))) == 2
        context = replace(service.context, stopping=threading.Event())
        HistoryKeeper(context).start()
        ends_at = time.monotonic() + 30
        while len(list(store.list_named(FOLDER))) > 1:
            assert time.monotonic() < ends_at
            time.sleep(0.01)
        context.stopping.set()


@pytest.mark.rule("database-went-back")
def test_a_store_that_is_attached_again_after_months_says_nothing_of_marks_that_the_database_has_forgotten(
    settings: ServiceSettings, tmp_path: Path, clock: Clock
) -> None:
    both = settings.model_copy(update={"second_store": f"posix://{tmp_path / 'second'}"})
    with running_service(both) as service:
        Job(service.http()).save(1)
    clock.advance(40 * DAY)
    for _ in range(2):
        with running_service(settings):
            pass  # the second forgets what is a month older than the mark of the first
    with running_service(both) as service:
        assert len(list(attached(service, StoreRole.SECOND).store.list_named(FOLDER))) == 2
        assert Job(service.http(), after=1).save(2)["state"] == "committed"


@pytest.mark.rule("database-went-back")
def test_a_clock_that_is_put_forward_by_months_does_not_make_the_database_look_older(
    settings: ServiceSettings, clock: Clock
) -> None:
    with running_service(settings) as service:
        job = Job(service.http())
        job.save(1)
        clock.advance(40 * DAY)
        for _ in range(2):
            with running_service(settings):
                pass  # the second has forgotten the marks of the other one, which lives
        for step in (2, 3):
            assert job.save(step)["state"] == "committed"


@pytest.mark.rule("database-went-back")
@pytest.mark.parametrize("starts", [1, 2])
def test_starts_while_the_clock_is_ahead_do_not_make_the_database_look_older_once_it_is_right(
    settings: ServiceSettings, clock: Clock, starts: int
) -> None:
    """The second start forgets the marks of the service that lives, because the first has left one that is a month
    newer."""
    with running_service(settings) as service:
        job = Job(service.http())
        job.save(1)
        clock.advance(40 * DAY)
        for _ in range(starts):
            with running_service(settings):
                pass
        clock.advance(-40 * DAY)
        with running_service(settings) as another:  # which compares what lies beside the data
            assert readiness(another) == (200, {})
        for step in (2, 3):
            assert job.save(step)["state"] == "committed"


@pytest.mark.rule("database-went-back")
def test_a_database_that_lacks_what_came_after_marks_were_forgotten_is_noticed(
    settings: ServiceSettings, clock: Clock
) -> None:
    """The note says of which marks that may be true, and of no later ones."""
    with running_service(settings):
        pass
    clock.advance(40 * DAY)
    with running_service(settings), running_service(settings) as service:
        Job(service.http()).save(1)
        with service.context.database.transaction() as session:
            assert session.scalar(select(CatalogIdentity.marks_forgotten_until)) is not None
            mine = HistoryMark.memory_id == service.context.database.memory.id
            session.execute(delete(HistoryMark).where(mine))  # as an older copy of the database has it
        with pytest.raises(Refused) as refused:
            Job(service.http(), after=1)
        assert refused.value.code == "catalog_went_back"


@pytest.mark.rule("no-symlinks")
def test_the_data_folder_and_the_catalog_are_closed_to_others(tmp_path: Path) -> None:
    settings = ServiceSettings(data_dir=tmp_path / "data")
    folder, catalog = settings.data_dir, settings.data_dir / "catalog.db"
    before = os.umask(0)
    try:
        open_database(settings).dispose()
        assert (_mode(folder), _mode(catalog)) == (0o700, 0o600)
        folder.chmod(0o755)
        catalog.chmod(0o644)
        database = open_database(settings)
        with database.transaction():
            assert {_mode(path) for path in folder.glob("catalog.db*")} == {0o600}
        database.dispose()
        assert _mode(folder) == 0o700
    finally:
        os.umask(before)


@pytest.mark.rule("no-symlinks")
def test_a_data_folder_that_holds_other_things_and_is_open_to_others_is_refused(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "other people's").mkdir()
    home.chmod(0o755)
    with pytest.raises(SettingsError, match=rf"HOLDFAST_DATA_DIR .*chmod o-rwx {home}"):
        open_database(ServiceSettings(data_dir=home))
    assert [path.name for path in home.iterdir()] == ["other people's"]


def test_a_group_that_is_not_there_is_named(settings: ServiceSettings) -> None:
    wrong = settings.model_copy(update={"store_group": "no-such-group"})
    with pytest.raises(SettingsError, match="HOLDFAST_STORE_GROUP: this machine has no group"), running_service(wrong):
        pass


@pytest.mark.rule("fencing-token")
def test_another_catalogs_store_is_refused_at_the_start(
    settings: ServiceSettings, sqlite_catalogs: SqliteCatalogs, tmp_path: Path
) -> None:
    with running_service(settings):
        pass
    other = settings.model_copy(
        update={"database_url": ServiceSettings(database_url=sqlite_catalogs.new(tmp_path)).database_url}
    )
    with pytest.raises(SettingsError, match="belongs to the catalog"), running_service(other):
        pass


@pytest.mark.rule("fencing-token")
def test_a_store_that_was_moved_keeps_its_row(settings: ServiceSettings, tmp_path: Path) -> None:
    with running_service(settings) as service:
        saved = Job(service.http()).save(100)
        store_id = service.context.store_id
    (tmp_path / "store").rename(tmp_path / "moved")
    with running_service(settings.model_copy(update={"store": f"posix://{tmp_path / 'moved'}"})) as service:
        assert service.context.store_id == store_id
        assert answer(service.http().get(f"/v1/checkpoints/{saved['id']}"))["health"] == "ok"
        with service.context.database.read() as session:
            assert [row.url for row in session.scalars(select(StoreRow))] == [f"posix://{tmp_path / 'moved'}"]


@pytest.mark.rule("fencing-token")
def test_two_stores_that_have_changed_places_are_not_taken_for_each_other(
    settings: ServiceSettings, tmp_path: Path
) -> None:
    first, second = tmp_path / "store", tmp_path / "second"
    two_stores = settings.model_copy(update={"second_store": f"posix://{second}"})
    with running_service(two_stores) as service:
        saved = Job(service.http()).save(100)
    changed_places(first, second)
    aside = [unmounted(folder) for folder in (first, second)]
    with running_service(two_stores) as service:
        assert readiness(service)[0] == 503
        for folder, away in zip((first, second), aside, strict=True):
            mounted(away, folder)
        status, failed = readiness(service)
        assert (status, list(failed)) == (503, ["store"])
        assert "start the service again" in failed["store"]
        with pytest.raises(Refused, match="store_unavailable"):
            Job(service.http(), after=1).save(200)
        assert len(holdfast_service.collect.controller.reconcile(service.context).skipped_stores) == 2
    with running_service(two_stores) as service:
        assert readiness(service) == (200, {}), "what a store says of itself counts, not where it is"
        data = b"demo/gpt 1 100 0"
        assert read_all(service.http(), saved["id"], [data, b"index " + data])
        job = Job(service.http(), after=2)
        assert job.save(300)["state"] == "committed"
        save = job.begin(400)
        save.upload(0, [b"weights", b"index"])
        changed_places(first, second)  # beneath a process that runs
        assert readiness(service)[0] == 503
        with pytest.raises(Refused, match="store_unavailable"):
            save.seal(0, [b"weights", b"index"])
        assert "changed places" in str(service.context.store_watch.ownership.problem())
        report = {"digest": digest_of(data), "problem": "missing"}
        with pytest.raises(Refused, match=r"store_unavailable.*changed places"):
            answer(service.http().post(f"/v1/checkpoints/{saved['id']}/chunk-reports", json=report))
        assert answer(service.http().get(f"/v1/checkpoints/{saved['id']}"))["health"] == "ok"
        changed_places(first, second)
        assert readiness(service) == (200, {})
        assert save.seal(0, [b"weights", b"index"])["state"] == "committed"


@pytest.mark.rule("store-outage-degrades")
def test_stores_that_have_changed_places_are_known_there_from_the_next_start_on(
    settings: ServiceSettings, tmp_path: Path
) -> None:
    first, second = tmp_path / "store", tmp_path / "second"
    two_stores = settings.model_copy(update={"second_store": f"posix://{second}"})
    with running_service(two_stores):
        pass
    changed_places(first, second)
    with running_service(two_stores) as service:
        assert readiness(service) == (200, {})
        row_ids = [each.store_id for each in service.context.stores]
    for away in ((first,), (second,), (first, second)):
        aside = [unmounted(folder) for folder in away]
        with running_service(two_stores) as service:
            assert [each.store_id for each in service.context.stores] == row_ids
            for folder, one in zip(away, aside, strict=True):
                mounted(one, folder)
            assert readiness(service) == (200, {}), "nobody has to start it again"


@pytest.mark.rule("fencing-token")
def test_a_store_in_anothers_place_is_neither_claimed_nor_forgotten_while_its_marker_cannot_be_read(
    settings: ServiceSettings, tmp_path: Path
) -> None:
    first, second = tmp_path / "store", tmp_path / "second"
    two_stores = settings.model_copy(update={"second_store": f"posix://{second}"})
    with running_service(two_stores) as service:
        check_all(service.context)
        changed_places(first, second)
        assert readiness(service)[0] == 503
        with pytest.raises(NotCheckedError, match="changed places"):
            claim_all(service.context, accept_loss=True)
        aside = (first / MARKER_NAME).rename(tmp_path / MARKER_NAME)
        assert readiness(service)[0] == 503
        with pytest.raises(Refused, match="store_unavailable"):
            Job(service.http()).save(100)
        aside.rename(first / MARKER_NAME)
        changed_places(first, second)
        assert readiness(service) == (200, {})


@pytest.mark.rule("fencing-token")
def test_a_store_whose_number_the_database_does_not_know_is_found_by_its_address_and_can_be_claimed(
    settings: ServiceSettings,
) -> None:
    """The database went back to before the store was attached, and has given its row another number since."""
    with running_service(settings) as service:
        watch, store = service.context.store_watch, service.context.store
        with watch.ownership.opened():
            write_marker(store, replace(read_marker(store), store_id=99))
    with running_service(settings) as service:
        ownership = service.context.store_watch.ownership
        assert readiness(service) == (200, {})
        assert "stores claim" in str(ownership.problem())
        check_all(service.context)
        claim_all(service.context, accept_loss=True)
        assert ownership.problem() is None


@pytest.mark.rule("fencing-token")
def test_a_store_that_a_rebuild_lacked_is_not_taken_for_the_one_that_was_given_its_number_since(
    settings: ServiceSettings, tmp_path: Path
) -> None:
    given = settings.model_copy(update={"second_store": f"posix://{tmp_path / 'given'}"})
    with running_service(given.model_copy(update={"cold_store": f"posix://{tmp_path / 'old'}"})) as service:
        numbers = [each.store_id for each in service.context.stores]
        watch, store = service.context.stores[2].watch, service.context.stores[2].store
        with watch.ownership.opened():
            write_marker(store, replace(read_marker(store), store_id=numbers[1], epoch=service.context.epoch - 1))
    (tmp_path / "old").rename(tmp_path / "late")
    late = given.model_copy(update={"cold_store": f"posix://{tmp_path / 'late'}"})
    for _ in range(2):
        with running_service(late) as service:
            *known, found = service.context.stores
            assert [each.store_id for each in known] == numbers[:2]
            assert found.store_id not in numbers
            assert "stores claim" in str(found.watch.ownership.problem())
    with running_service(late) as service:
        check_all(service.context)
        claim_all(service.context, accept_loss=True)
        assert service.context.stores[2].watch.ownership.problem() is None


def unmounted(folder: Path) -> Path:
    """What is left is the empty folder. Where the store is now."""
    away = folder.rename(folder.with_name(f"{folder.name} is not mounted"))
    folder.mkdir()
    return away


def mounted(away: Path, folder: Path) -> None:
    folder.rmdir()
    away.rename(folder)


def changed_places(first: Path, second: Path) -> None:
    between = first.rename(first.with_name("between"))
    second.rename(first)
    between.rename(second)


@pytest.mark.rule("fencing-token")
def test_after_a_restore_nothing_is_trusted_or_deleted_before_it_was_checked_and_adopted(
    settings: ServiceSettings,
) -> None:
    with running_service(settings) as service:
        job = Job(service.http())
        job.save(100, content=b"frozen")
        unfinished = job.begin(200)
        assert raise_epoch(service.context.database, Actor.at_the_database()) == 2
        assert "epoch" in readiness(service)[1]["database"], "the old process must not go on"
        key_before = service.context.signing_key
    with running_service(settings) as service:
        assert readiness(service) == (200, {})
        assert service.context.signing_key != key_before, "who has the backup must sign no URL"
        unfinished.job.http = service.http()
        with pytest.raises(Refused) as refused:
            unfinished.negotiate(0, [b"frozen"])
        assert refused.value.code == "stale_attempt"
        later = Job(service.http(), after=1)
        assert later.fence["epoch"] == 2
        assert later.begin(300).negotiate(0, [b"frozen"])["chunks"][0]["status"] == "upload"
        assert holdfast_service.collect.controller.reconcile(service.context).done == 0
        holdfast_service.scrub.verify.reconcile(service.context)
        with pytest.raises(NotCheckedError):
            claim_all(service.context)
        check_all(service.context)
        claim_all(service.context)
        with service.context.database.read() as session:
            assert CopyState.SUSPECT not in set(session.scalars(select(Copy.state)))


@pytest.mark.rule("fencing-token")
def test_a_database_that_was_moved_owns_its_stores_once_a_person_has_said_so_and_the_audit_log_says_who(
    service: RunningService,
) -> None:
    database, ownership = service.context.database, service.context.store_watch.ownership
    with database.transaction() as session:
        session.execute(update(CatalogIdentity).values(place="elsewhere"))
    assert (settle_place(database), ownership.problem()) == (False, MOVED)
    confirm_move(database, Actor.at_the_database())
    assert (settle_place(database), ownership.problem()) == (True, None)
    with database.read() as session:
        event = session.scalars(select(AuditEvent).where(AuditEvent.action == "catalog.confirm_move")).one()
    assert (event.actor, event.before) == ("holdfast admin", {"place": "elsewhere"})


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.rule("fencing-token")
def test_a_copy_that_was_under_way_at_the_backup_is_read_before_its_chunk_is_called_lost(
    settings: ServiceSettings, tmp_path: Path
) -> None:
    two_stores = settings.model_copy(update={"second_store": f"posix://{tmp_path / 'second'}"})
    with running_service(two_stores) as service:
        saved = Job(service.http()).save(100, content=b"weights")
        task = begin(service, b"weights")
        assert task is not None
        move_bytes(service.context, task)  # the backup is from before it was settled
        service.context.store.delete(key_of(service, b"weights"))  # and this came after the backup
        raise_epoch(service.context.database, Actor.at_the_database())
    with running_service(two_stores) as service:
        holdfast_service.scrub.verify.reconcile(service.context)
        assert states_of(service, b"weights", None) == [CopyState.BAD, CopyState.VERIFIED]
        assert answer(service.http().get(f"/v1/checkpoints/{saved['id']}"))["health"] == "ok"


@pytest.mark.rule("sqlite-immediate")
@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.s3fs", "lustre", "9p"])
def test_sqlite_is_refused_on_a_network_filesystem(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda1 / ext4 rw 0 0\nserver:/export {tmp_path} {kind} rw 0 0\n")
    assert filesystem_kind(tmp_path / "catalog.db", mounts) == kind
    assert filesystem_kind(Path("/somewhere/else"), mounts) == "ext4"
    monkeypatch.setattr("holdfast_service.db.engine.filesystem_kind", lambda path: filesystem_kind(path, mounts))
    with pytest.raises(DatabaseConfigurationError, match=f"HOLDFAST_DATABASE_URL.*{kind}"):
        Database(f"sqlite:///{tmp_path / 'catalog.db'}")


@pytest.mark.rule("sqlite-immediate")
def test_a_sqlite_write_transaction_takes_the_lock_before_it_reads(tmp_path: Path) -> None:
    """A deferred one that read first and writes later would fail with SQLITE_BUSY, whatever the time-out."""
    database = Database(f"sqlite:///{tmp_path / 'catalog.db'}")
    with database.transaction() as session:
        session.execute(text("CREATE TABLE counter (value INTEGER)"))
        session.execute(text("INSERT INTO counter VALUES (0)"))

    def increment() -> None:
        for _ in range(20):
            with database.transaction() as session:
                value = session.execute(text("SELECT value FROM counter")).scalar_one()
                time.sleep(0.001)
                session.execute(text("UPDATE counter SET value = :value"), {"value": value + 1})

    threads = [threading.Thread(target=increment) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with database.read() as session:
        assert session.execute(text("SELECT value FROM counter")).scalar_one() == 80
    database.dispose()


def test_a_reader_is_not_kept_waiting_by_a_writer_on_sqlite(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'catalog.db'}")
    with database.transaction() as session:
        session.execute(text("CREATE TABLE counter (value INTEGER)"))
    with database.transaction() as writing:
        writing.execute(text("INSERT INTO counter VALUES (1)"))
        with database.read() as reading:
            assert reading.execute(text("SELECT count(*) FROM counter")).scalar_one() == 0
    database.dispose()


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"HOLDFAST_STOR": "x"}, "There is no setting HOLDFAST_STOR. Did you mean HOLDFAST_STORE?"),
        ({"HOLDFAST_QQQ": "x"}, "There is no setting HOLDFAST_QQQ."),
    ],
)
def test_a_setting_that_nobody_knows_is_named(environment: dict[str, str], said: str) -> None:
    with pytest.raises(SettingsError) as refused:
        refuse_unknown_settings(environment)
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HOLDFAST_PORT", "http"),
        ("HOLDFAST_PORT", "70000"),
        ("HOLDFAST_DATABASE_URL", "mysql://user:secretpass@host/db"),
        ("HOLDFAST_DATABASE_URL", "secretpass"),
        ("HOLDFAST_LOG_FORMAT", "secretpass"),
        ("HOLDFAST_TICKET_SECONDS", "-1"),
    ],
)
def test_a_wrong_setting_is_named_and_its_value_is_not_repeated(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as refused:
        ServiceSettings()
    assert str(refused.value).startswith(f"{name} is not usable: ")
    assert "secretpass" not in str(refused.value)


@pytest.mark.parametrize("store", ["ftp://x/y", "posix://relative/path", "s3://", "nonsense"])
def test_a_store_url_that_cannot_be_used_stops_the_start(settings: ServiceSettings, store: str) -> None:
    with (
        pytest.raises(SettingsError, match=r"^HOLDFAST_STORE"),
        running_service(settings.model_copy(update={"store": store})),
    ):
        pass


def test_every_setting_is_in_the_table_with_what_it_is() -> None:
    rows = settings_table()
    assert len(rows) == len(ServiceSettings.model_fields)
    assert all(setting.startswith("HOLDFAST_") and description for setting, _, description in rows)


def test_the_store_is_the_one_of_the_data_folder_without_a_setting(tmp_path: Path) -> None:
    with running_service(ServiceSettings(data_dir=tmp_path / "data", port=0)) as service:
        store = service.context.store
        assert isinstance(store, PosixStore)
        assert store.root == tmp_path / "data" / "store"
        assert (tmp_path / "data" / "catalog.db").exists()


def test_a_service_whose_connections_are_all_in_use_says_busy(service: RunningService) -> None:
    engine = service.context.database.engine
    pool = engine.pool
    assert isinstance(pool, QueuePool)
    pool._timeout = 0.1
    held = [engine.connect() for _ in range(pool.size() + pool._max_overflow)]
    try:
        reply = service.http().get("/v1/service")
        assert (reply.status_code, reply.json()["code"], reply.json()["retryable"]) == (503, "busy", True)
    finally:
        for connection in held:
            connection.close()
    assert service.http().get("/v1/service").status_code == 200
