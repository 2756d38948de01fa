"""`holdfast admin backup` and `restore`: one moment of a catalog in use, and what a service may do afterwards."""

from __future__ import annotations

import base64
import json
import os
import secrets
import shutil
import sqlite3
import stat
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from alembic import command
from pydantic import SecretStr
from sqlalchemy import func, inspect, select, text

import holdfast_service.attached_stores.epoch
import holdfast_service.backup.write
import holdfast_service.db.dialect
from holdfast_service.attached_stores.epoch import NotCheckedError
from holdfast_service.backup.document import MANIFEST, Backup, BackupRefusedError
from holdfast_service.backup.restore import restore_backup
from holdfast_service.backup.write import write_backup
from holdfast_service.collect.controller import reconcile as collect
from holdfast_service.collect.orphans import reconcile as sweep
from holdfast_service.db.engine import Database
from holdfast_service.db.migrate import alembic_config, exclusive_connection
from holdfast_service.db.tables import Table
from holdfast_service.db.tables.core import CatalogIdentity, Checkpoint
from holdfast_service.service import open_database
from holdfast_service.settings import ServiceSettings
from tests.support.databases import PostgresCatalogs, SqliteCatalogs
from tests.support.posix_chunks import age_everything, chunks
from tests.support.postgres import PostgresServer
from tests.support.rank import Job, answer
from tests.support.rebuilt import check_all, claim_all, read_all, rebuilt_service, record_all
from tests.support.service import running_service
from tests.support.trial_revision import COLUMN, later_revisions
from tests.support.webhooks import make_hook


@pytest.fixture
def nowhere(database_url: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database of the same kind without any table."""
    if database_url.startswith("sqlite"):
        yield f"sqlite:///{tmp_path / 'restored.db'}"
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    name = f"restored_{secrets.token_hex(6)}"
    yield server.create_database(name)
    server.drop_database(name)


def at(settings: ServiceSettings, url: str) -> ServiceSettings:
    return settings.model_copy(update={"database_url": SecretStr(url)})


@contextmanager
def opened(url: str) -> Iterator[Database]:
    database = Database(url)
    try:
        yield database
    finally:
        database.dispose()


def rows_of(url: str) -> dict[str, int]:
    with opened(url) as database, database.read() as session:
        return {
            name: session.scalar(select(func.count()).select_from(table)) or 0
            for name, table in Table.metadata.tables.items()
        }


def test_a_backup_is_one_moment_of_a_catalog_that_saves_go_into(
    settings: ServiceSettings, nowhere: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each checkpoint in it has all of its rows, and a job commits two more before it is over."""
    file = tmp_path / "catalog.backup"
    stop = threading.Event()
    with running_service(settings) as service:
        job = Job(service.http(), world_size=1)
        job.save(1)

        committed: SimpleQueue[int] = SimpleQueue()

        def save() -> None:
            step = 1
            while not stop.is_set():
                step += 1
                assert job.save(step)["state"] == "committed"
                committed.put(step)

        real = holdfast_service.backup.write._described

        def described(*arguments: Any) -> Backup:
            while not committed.empty():
                committed.get()
            for _ in range(3):  # the first one may have been under way
                committed.get(timeout=60)
            return real(*arguments)

        monkeypatch.setattr(holdfast_service.backup.write, "_described", described)
        with ThreadPoolExecutor(1) as jobs:
            saving = jobs.submit(save)
            try:
                made = write_backup(service.context.database, file)
            finally:
                stop.set()
            saving.result()
        context = service.context
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith(".")} == set()
    assert (made.catalog_id, made.epoch) == (context.catalog_id, 1)
    assert restore_backup(at(settings, nowhere), file) == 2
    with opened(nowhere) as database, database.read() as session:
        identity = session.execute(select(CatalogIdentity)).scalar_one()
        assert (identity.catalog_id, identity.epoch) == (context.catalog_id, 2)
        assert identity.signing_key not in {b"", context.signing_key}
        assert (session.scalar(select(func.count()).select_from(Checkpoint)) or 0) >= 1
        # Sums that triggers keep agree with the rows of the same moment.
        counted = "SELECT sum(committed) FROM (SELECT committed FROM checkpoint_tallies WHERE run_id = '' UNION ALL "
        kept = session.scalar(text(f"{counted} SELECT committed FROM checkpoint_deltas) AS each"))
        assert kept == session.scalar(text("SELECT count(*) FROM checkpoints WHERE state = 'committed'"))
        whole = "SELECT count(*) FROM checkpoints c WHERE state = 'committed' AND NOT EXISTS (SELECT 1 FROM shards s "
        assert session.scalar(text(f"{whole} WHERE s.checkpoint_id = c.id AND s.state = 'sealed')")) == 0


def test_a_restored_catalog_deletes_nothing_and_finds_what_came_after_the_backup(
    settings: ServiceSettings, nowhere: str, empty_url: str, tmp_path: Path, clock: Callable[[float], None]
) -> None:
    file = tmp_path / "catalog.backup"
    with running_service(settings) as service:
        job = Job(service.http())
        first = job.save(1)["id"]
        record_all(service.context)
        write_backup(service.context.database, file)
        later = job.save(2, content=b"after the backup")["id"]
        record_all(service.context)
        before = chunks(service)
        last = job.save(3, content=b"and no record of it")["id"]
    restored = at(settings, nowhere)
    assert restore_backup(restored, file) == 2
    clock(10 * 24 * 3600.0)
    with running_service(restored) as service:
        age_everything(service)
        assert collect(service.context).done == 0
        assert sweep(service.context).deleted == 0
        assert chunks(service) >= before
        checked = check_all(service.context)
        assert later in str(checked), "the check names it"
        with pytest.raises(NotCheckedError, match="would lose"):
            claim_all(service.context)
        assert read_all(service.http(), first, [b"demo/gpt 1 1 0", b"index demo/gpt 1 1 0"])
        older = service.context.database
        with rebuilt_service(restored, empty_url, older=older) as (again, report):
            assert report.whole, report.lines()
            with again.context.database.read() as session:
                known = set(session.scalars(select(Checkpoint.id).where(Checkpoint.state == "committed")))
            assert known == {first, later}
            assert last not in known, "its process had not recorded it yet"
            check_all(again.context)
            claim_all(again.context)
            assert answer(again.http().get(f"/v1/checkpoints/{later}"))["step"] == 2


def test_every_row_comes_back_and_numbers_go_on(settings: ServiceSettings, nowhere: str, tmp_path: Path) -> None:
    file = tmp_path / "catalog.backup"
    with running_service(settings) as service:
        job = Job(service.http(), world_size=2)
        for step in (1, 2):
            job.save(step)
        answer(service.http().put("/v1/projects/other", json={}))
        write_backup(service.context.database, file)
    before = rows_of(settings.database_url_text)
    restored = at(settings, nowhere)
    restore_backup(restored, file)
    after = rows_of(nowhere)
    for grown in ("audit_events", "history_marks"):
        assert after.pop(grown) == before.pop(grown) + 1, "the new epoch is told"
    assert {name: after[name] for name in before} == before
    with running_service(restored) as service:
        assert answer(service.http().get("/v1/projects"))["items"]
        assert Job(service.http(), after=1, world_size=2).save(3)["state"] == "committed"


def test_a_backup_holds_no_secret_in_clear(settings: ServiceSettings, tmp_path: Path) -> None:
    key = base64.b64encode(secrets.token_bytes(32)).decode()
    with running_service(settings) as service:
        service.make_project("demo")
        hook = make_hook(service, "https://hooks.example.org/in?key=s3cret-of-the-query", "attempt.failed")
        with pytest.raises(BackupRefusedError, match="secrets of 1 webhooks unencrypted"):
            write_backup(service.context.database, tmp_path / "plain.backup")
        assert not list(tmp_path.glob("*plain.backup*"))
        write_backup(service.context.database, tmp_path / "plain.backup", plain_secrets=True)
    with_key = settings.model_copy(update={"secrets_key": SecretStr(key)})
    with running_service(with_key) as service:
        write_backup(service.context.database, tmp_path / "catalog.backup")
        told = [
            service.context.signing_key,
            base64.b64decode(hook["secret"].removeprefix("whsec_")),
            b"s3cret-of-the-query",
            service.token().rpartition("_")[2].encode(),
        ]
    with zipfile.ZipFile(tmp_path / "catalog.backup") as archive:
        held = b"".join(archive.read(name) for name in archive.namelist())
    for secret in told:
        assert secret not in held
        assert secret.hex().encode() not in held.lower()
    with zipfile.ZipFile(tmp_path / "plain.backup") as archive:
        assert b"s3cret-of-the-query" in b"".join(archive.read(name) for name in archive.namelist())


def test_what_is_no_whole_backup_or_has_no_empty_place_is_refused_and_leaves_nothing(
    settings: ServiceSettings, nowhere: str, tmp_path: Path
) -> None:
    file, spoilt = tmp_path / "catalog.backup", tmp_path / "spoilt.backup"
    restored = at(settings, nowhere)
    with running_service(settings) as service:
        Job(service.http()).save(1)
        write_backup(service.context.database, file)
        with pytest.raises(BackupRefusedError, match="is there already"):
            write_backup(service.context.database, file)
    with pytest.raises(BackupRefusedError, match=r"there already|has tables"):
        restore_backup(settings, file)
    whole = file.read_bytes()
    with zipfile.ZipFile(file) as archive:
        largest = max(archive.infolist(), key=lambda each: each.compress_size)
        begin = {each: each.header_offset + 30 + len(each.filename) for each in (largest, archive.getinfo(MANIFEST))}

    def spoil(offset: int) -> bytes:
        return whole[:offset] + bytes([whole[offset] ^ 0xFF]) + whole[offset + 1 :]

    method = whole.index(b"PK\1\2") + 10  # of the first member, as the archive's index has it
    for bad in (
        whole[: len(whole) // 2],
        spoil(begin[largest] + largest.compress_size // 2),
        *(whole[:start] + b"\x07" + whole[start + 1 :] for start in begin.values()),  # no block of deflate
        spoil(method),
        b"something else",
    ):
        spoilt.write_bytes(bad)
        with pytest.raises(BackupRefusedError):
            restore_backup(restored, spoilt)
    with zipfile.ZipFile(spoilt, "w") as archive:
        archive.writestr(MANIFEST, json.dumps({"format": 99}))
    with pytest.raises(BackupRefusedError, match="format 99"):
        restore_backup(restored, spoilt)
    assert restore_backup(restored, file) == 2, "nothing was left"


def test_a_catalog_is_backed_up_before_its_upgrade(settings: ServiceSettings, nowhere: str, tmp_path: Path) -> None:
    with running_service(settings) as service:
        Job(service.http()).save(1)
    with opened(settings.database_url_text) as database, exclusive_connection(database) as connection:
        command.downgrade(alembic_config(connection), "0029")
    with opened(settings.database_url_text) as database:
        assert write_backup(database, tmp_path / "catalog.backup").revision == "0029"
    restored = at(settings, nowhere)
    assert restore_backup(restored, tmp_path / "catalog.backup") == 2
    with running_service(restored) as service:
        assert answer(service.http().get("/v1/projects/demo/runs/gpt/checkpoints/1"))["state"] == "committed"


def test_a_restore_that_is_cut_off_owns_no_store_and_goes_on_the_next_time(
    settings: ServiceSettings, nowhere: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "catalog.backup"
    with running_service(settings) as service:
        Job(service.http()).save(1)
        write_backup(service.context.database, file)
    restored = at(settings, nowhere)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(holdfast_service.attached_stores.epoch, "record_event", killed)
        with pytest.raises(KeyboardInterrupt):
            restore_backup(restored, file)
    if nowhere.startswith("postgres"):
        with opened(nowhere) as database, database.read() as session:
            identity = session.execute(select(CatalogIdentity)).scalar_one()
            assert (identity.epoch, identity.place) == (1, "a backup"), (
                "at home in the old epoch it would own the store"
            )
            assert identity.signing_key not in {b"", service.context.signing_key}
    assert restore_backup(restored, file) == 2
    with running_service(restored) as service:
        assert answer(service.http().get("/v1/projects/demo/runs/gpt/checkpoints/1"))["state"] == "committed"


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_the_name_of_a_restored_catalog_is_durable(
    settings: ServiceSettings, nowhere: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a service that starts after a power failure finds no catalog, and makes a new one."""
    with running_service(settings) as service:
        write_backup(service.context.database, tmp_path / "catalog.backup")
    real, synced = os.fsync, []

    def fsync(descriptor: int) -> None:
        if os.path.samestat(os.fstat(descriptor), tmp_path.stat()):
            synced.append((tmp_path / "restored.db").exists())
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    restore_backup(at(settings, nowhere), tmp_path / "catalog.backup")
    assert synced == [True]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("left", ["-wal", "-shm", "-journal"])
def test_what_is_left_of_another_catalog_is_not_mixed_into_the_restored_one(
    settings: ServiceSettings, nowhere: str, tmp_path: Path, left: str
) -> None:
    with running_service(settings) as service:
        write_backup(service.context.database, tmp_path / "catalog.backup")
    (tmp_path / f"restored.db{left}").write_bytes(b"pages of another catalog")
    with pytest.raises(BackupRefusedError, match=f"restored.db{left} is there already"):
        restore_backup(at(settings, nowhere), tmp_path / "catalog.backup")
    assert not (tmp_path / "restored.db").exists()


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_backup_that_the_catalogs_disk_has_no_room_for_is_refused_and_leaves_nothing(
    settings: ServiceSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, catalog = tmp_path / "catalog.backup", settings.database_url_text.removeprefix("sqlite:///")
    open_database(settings).dispose()
    size = Path(catalog).stat().st_size
    room = {"free": 2 * size}
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(**room))

    def becomes_full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with opened(settings.database_url_text) as database:
        with pytest.raises(BackupRefusedError, match=rf"needs {round(2.2 * size)} bytes there, and {2 * size} are"):
            write_backup(database, file)
        room["free"] = 3 * size
        monkeypatch.setattr(holdfast_service.backup.write, "_described", becomes_full)
        with pytest.raises(BackupRefusedError, match="has become full"):
            write_backup(database, file)
    assert list(tmp_path.glob("*.backup")) == list(tmp_path.glob(".*")) == []


@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
def test_a_table_of_somebody_else_makes_no_backup_useless(
    settings: ServiceSettings, nowhere: str, tmp_path: Path
) -> None:
    with running_service(settings) as service:
        Job(service.http()).save(1)
        with service.context.database.transaction() as session:
            session.execute(text("CREATE TABLE somebody_elses (id serial)"))
            session.execute(text("INSERT INTO somebody_elses DEFAULT VALUES"))
        write_backup(service.context.database, tmp_path / "catalog.backup")
    url = nowhere.replace("postgresql+psycopg://", "postgres://").replace("postgresql://", "postgres://")
    assert restore_backup(at(settings, url), tmp_path / "catalog.backup") == 2


@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
@pytest.mark.parametrize("column", ["id\" FROM PROGRAM 'true' --", "of_no_revision"])
def test_a_column_that_the_revision_has_not_is_no_part_of_a_statement(
    settings: ServiceSettings, nowhere: str, tmp_path: Path, column: str
) -> None:
    with running_service(settings) as service:
        Job(service.http()).save(1)
        write_backup(service.context.database, tmp_path / "whole.backup")
    hostile_backup = tmp_path / "hostile.backup"
    with zipfile.ZipFile(tmp_path / "whole.backup") as whole, zipfile.ZipFile(hostile_backup, "w") as hostile:
        for each in whole.namelist():
            content = whole.read(each)
            if each == MANIFEST:
                told = json.loads(content)
                told["tables"]["projects"] = [column]
                content = json.dumps(told).encode()
            hostile.writestr(each, content)
    with pytest.raises(BackupRefusedError, match="columns of projects"):
        restore_backup(at(settings, nowhere), hostile_backup)
    with opened(nowhere) as database, database.engine.connect() as connection:
        assert inspect(connection).get_table_names() == []


@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
def test_an_older_backup_is_brought_up_to_date_and_a_newer_one_is_refused(
    settings: ServiceSettings, nowhere: str, tmp_path: Path
) -> None:
    file, newer = tmp_path / "catalog.backup", tmp_path / "newer.backup"
    with running_service(settings) as service:
        Job(service.http()).save(1)
        database = service.context.database
        older = write_backup(database, file).revision
        with later_revisions(tmp_path, COLUMN) as names:
            assert restore_backup(at(settings, nowhere), file) == 2
            with opened(nowhere) as restored, restored.read() as session:
                assert session.scalar(text("SELECT version_num FROM alembic_version")) == names[-1] != older
            with opened(settings.database_url_text) as same:
                holdfast_service.db.migrate.upgrade(same)
            write_backup(database, newer)
    with opened(nowhere) as restored, restored.engine.begin() as connection:
        connection.exec_driver_sql("DROP SCHEMA public CASCADE")
        connection.exec_driver_sql("CREATE SCHEMA public")
    with pytest.raises(BackupRefusedError, match=f"revision {names[-1]}, which this version"):
        restore_backup(at(settings, nowhere), newer)


@pytest.fixture
def empty_url(database_url: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Another migrated, empty catalog of the same kind."""
    if database_url.startswith("sqlite"):
        sqlite: SqliteCatalogs = request.getfixturevalue("sqlite_catalogs")
        return sqlite.new(tmp_path)
    postgres: PostgresCatalogs = request.getfixturevalue("postgres_catalogs")
    return postgres.new()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    from tests.service.conftest import Clock

    real = holdfast_service.db.dialect._read_clock
    moved = Clock()
    monkeypatch.setattr(holdfast_service.db.dialect, "_read_clock", lambda *read: real(*read) + moved.ahead)
    return moved.advance
