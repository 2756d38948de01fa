"""A rebuild that is given the database that it replaces: what only that one knows comes along, and where the records
say more, they count (rules record-outbox and rebuild-doubts)."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from pydantic import SecretStr
from sqlalchemy import select, text, update
from sqlalchemy.exc import DBAPIError

from holdfast_protocol.states import CheckpointState
from holdfast_service.collect.controller import reconcile as collect
from holdfast_service.db.engine import Database
from holdfast_service.db.tables.core import CatalogIdentity, Checkpoint
from holdfast_service.db.tables.operations import Hold
from holdfast_service.rebuild.cli import rebuild_catalog
from holdfast_service.rebuild.report import RebuildReport
from holdfast_service.rebuild.sources import RebuildRefusedError
from holdfast_service.records.writing import forget_removed
from holdfast_service.settings import ServiceSettings, SettingsError
from tests.service.conftest import Clock
from tests.support.databases import SqliteCatalogs
from tests.support.rank import Job, answer
from tests.support.rebuilt import check_all, claim_all, read_all, rebuild_into, rebuilt_service, record_all
from tests.support.retention import HOUR, RUN, pin, prune, purge, put_policy, states, undelete
from tests.support.service import RunningService

pytestmark = [pytest.mark.rule("record-outbox"), pytest.mark.rule("rebuild-doubts")]


def label(service: RunningService, checkpoint_id: str, *labels: str) -> None:
    headers = {"If-Match": "*"}
    answer(service.http().patch(f"/v1/checkpoints/{checkpoint_id}", json={"labels": list(labels)}, headers=headers))


def hold(service: RunningService, checkpoint_id: str) -> str:
    reply = service.http().post(f"/v1/checkpoints/{checkpoint_id}/holds", json={"reason": "evidence"})
    return str(answer(reply)["id"])


def change(service: RunningService, checkpoint_id: str, **columns: object) -> None:
    """Behind the service's back: the row as it was when an older copy was made."""
    with service.context.database.transaction() as session:
        session.execute(update(Checkpoint).where(Checkpoint.id == checkpoint_id).values(**columns))


def row(service: RunningService, checkpoint_id: str) -> Checkpoint:
    with service.context.database.read() as session:
        return session.get_one(Checkpoint, checkpoint_id)


def states_in_the_bucket(url: str, store_url: str) -> dict[int, str]:
    report = rebuild_into(url, store_url)
    assert report.whole, report.lines()
    database = Database(url)
    with database.read() as session:
        found = {each.step: each.state for each in session.execute(select(Checkpoint.step, Checkpoint.state))}
    database.dispose()
    return found


def test_commits_without_a_record_come_along_with_their_attempts_and_every_byte(
    service: RunningService,
    settings: ServiceSettings,
    empty_url: str,
    sqlite_catalogs: SqliteCatalogs,
    tmp_path: Path,
) -> None:
    first = Job(service.http(), world_size=2)
    first.save(1)
    record_all(service.context)
    saved = Job(service.http(), after=1, world_size=2).save(2)["id"]
    Job(service.http(), "demo/other").save(7)

    with rebuilt_service(settings, empty_url, older=service.context.database) as (again, report):
        assert report.whole, report.lines()
        assert (report.runs, report.attempts, report.orphans, report.doubts) == (2, 3, 0, {})
        assert any(saved in line for line in report.lines())
        for rank in range(2):
            data = f"demo/gpt 2 2 {rank}".encode()
            assert read_all(again.http(), saved, [data, b"index " + data])
        assert check_all(again.context).stores[0].whole, "nothing of it is lost by claiming"
        claim_all(again.context)
        record_all(again.context)
        assert check_all(again.context, deep=True).stores[0].findings == []
    there = states_in_the_bucket(sqlite_catalogs.new(tmp_path), settings.store_url)
    assert there == {1: "committed", 2: "committed", 7: "committed"}, "now the store alone knows it"


def test_what_people_were_told_and_no_record_says_comes_along(
    service: RunningService, settings: ServiceSettings, empty_url: str
) -> None:
    job = Job(service.http())
    ids = {step: job.save(step)["id"] for step in range(1, 6)}
    prune(service, checkpoint_ids=[ids[1]])
    record_all(service.context)
    undelete(service, ids[1])
    pin(service, ids[2])
    held = hold(service, ids[3])
    label(service, ids[4], "milestone")
    put_policy(service, keep_last=2)

    with rebuilt_service(settings, empty_url, older=service.context.database) as (again, report):
        assert report.whole, report.lines()
        assert states(again) == dict.fromkeys(range(1, 6), "committed")
        assert row(again, ids[2]).pin_reason == "paper"
        assert [each["id"] for each in answer(again.http().get("/v1/holds"))["items"]] == [held]
        assert row(again, ids[4]).labels == ["milestone"]
        assert answer(again.http().get(f"{RUN}/policies/retention"))["document"] == {"keep_last": 2}


def test_where_record_and_database_have_both_gone_on_what_keeps_a_checkpoint_counts(
    service: RunningService, settings: ServiceSettings, empty_url: str
) -> None:
    job = Job(service.http())
    kept, taken_back = job.save(1)["id"], job.save(2)["id"]
    job.save(3)
    job.save(4)
    before = row(service, kept).version
    pin(service, kept)
    held = hold(service, kept)
    record_all(service.context)
    # The copy knows neither pin nor hold, and people go on with it.
    change(service, kept, version=before, pinned_at=None, pinned_by=None, pin_reason=None, pinned_until=None)
    with service.context.database.transaction() as session:
        session.execute(text("DELETE FROM holds"))
    for number in range(5):
        label(service, kept, f"label-{number}")
    prune(service, checkpoint_ids=[taken_back])
    newer_than_its_record = row(service, kept).version

    with rebuilt_service(settings, empty_url, older=service.context.database) as (again, report):
        assert report.whole, report.lines()
        found = row(again, kept)
        assert (found.labels, found.pin_reason, found.version) == (["label-4"], "paper", newer_than_its_record)
        with again.context.database.read() as session:
            assert session.scalars(select(Hold.id)).all() == [held]
        assert row(again, taken_back).state == CheckpointState.COMMITTED, "a person may say it once more"


def test_of_two_ends_of_a_hold_and_of_a_pin_the_later_counts(
    service: RunningService, settings: ServiceSettings, empty_url: str
) -> None:
    saved = Job(service.http()).save(1)["id"]
    before = row(service, saved).version
    pin(service, saved)
    held = hold(service, saved)
    record_all(service.context)
    # The copy is from before a person has made them longer.
    soon = row(service, saved).committed_at
    change(service, saved, version=before, pinned_until=soon)
    with service.context.database.transaction() as session:
        session.execute(update(Hold).values(kind="retain_until", retain_until=soon))
    for number in range(5):
        label(service, saved, f"label-{number}")

    with rebuilt_service(settings, empty_url, older=service.context.database) as (again, _):
        assert (row(again, saved).labels, row(again, saved).pinned_until) == (["label-4"], None)
        with again.context.database.read() as session:
            assert session.execute(select(Hold.id, Hold.retain_until)).all() == [(held, None)]


def test_a_hold_that_only_the_database_knows_comes_along_beside_a_newer_record(
    service: RunningService, settings: ServiceSettings, empty_url: str
) -> None:
    saved = Job(service.http()).save(1)["id"]
    before = row(service, saved).version
    first = hold(service, saved)
    for number in range(5):
        label(service, saved, f"label-{number}")
    record_all(service.context)
    change(service, saved, version=before, labels=[])
    reply = service.http().post(f"/v1/checkpoints/{saved}/holds", json={"reason": "after the failover"})
    second = str(answer(reply)["id"])

    with rebuilt_service(settings, empty_url, older=service.context.database) as (again, report):
        assert report.whole, report.lines()
        assert len(report.remembered) == 1
        assert row(again, saved).labels == ["label-4"]
        with again.context.database.read() as session:
            assert set(session.scalars(select(Hold.id))) == {first, second}
        check_all(again.context)
        claim_all(again.context)
        record_all(again.context)
        assert check_all(again.context).stores[0].findings == []


def test_a_record_that_is_newer_than_the_database_counts(
    service: RunningService, settings: ServiceSettings, empty_url: str
) -> None:
    saved = Job(service.http()).save(1)["id"]
    before = row(service, saved).version
    label(service, saved, "newer")
    record_all(service.context)
    change(service, saved, version=before, labels=[])
    with rebuilt_service(settings, empty_url, older=service.context.database) as (again, report):
        assert report.remembered == []
        assert row(again, saved).labels == ["newer"]


def test_what_was_purged_stays_so_though_the_database_knows_it_as_committed(
    service: RunningService,
    settings: ServiceSettings,
    clock: Clock,
    sqlite_catalogs: SqliteCatalogs,
    tmp_path: Path,
) -> None:
    """The first one was recorded, and the last one never."""
    job = Job(service.http())
    ids = {step: job.save(step)["id"] for step in range(1, 5)}
    record_all(service.context)
    ids[5] = job.save(5)["id"]
    for step in (6, 7):
        job.save(step)
    prune(service, checkpoint_ids=[ids[1], ids[5]])
    clock.advance(73 * HOUR)
    assert purge(service).done == 2
    collect(service.context)
    record_all(service.context)
    went_back = {"state": CheckpointState.COMMITTED, "deleted_at": None, "purge_at": None, "trashed_at": None}
    deleted = row(service, ids[1])
    for step in (1, 5):
        change(service, ids[step], **went_back)
    report = rebuild_into(sqlite_catalogs.new(tmp_path), settings.store_url, older=service.context.database)
    assert (report.checkpoints, report.removed, report.remembered) == ({"committed": 5}, 2, [])
    # A day later the word `removed` is gone as well.
    for step in (1, 5):
        change(service, ids[step], state=deleted.state, deleted_at=deleted.deleted_at)
    clock.advance(25 * HOUR)
    assert forget_removed(service.context, service.context.stores[0]) == 2
    change(service, ids[1], **went_back)
    with service.context.database.transaction() as session:
        session.execute(
            text(
                "INSERT INTO written_records (kind, subject_id, store_id, version, name) "
                "VALUES ('checkpoint', :id, :store_id, 0, 'what it was called')"
            ),
            {"id": ids[1], "store_id": service.context.store_id},
        )
    report = rebuild_into(sqlite_catalogs.new(tmp_path), settings.store_url, older=service.context.database)
    assert (report.checkpoints, report.remembered) == ({"committed": 5}, [])
    assert any(ids[1] in note and "purged" in note for note in report.notes)


def test_a_database_that_holds_no_whole_catalog_is_refused(
    service: RunningService, settings: ServiceSettings, empty_url: str
) -> None:
    Job(service.http()).save(1)
    record_all(service.context)
    with service.context.database.transaction() as session:
        session.execute(update(CatalogIdentity).values(rebuilding_from=settings.store_url))
    with pytest.raises(RebuildRefusedError, match="--with-database"):
        rebuild_into(empty_url, settings.store_url, older=service.context.database)


def test_the_database_that_is_replaced_is_never_written(
    service: RunningService, settings: ServiceSettings, empty_url: str, tmp_path: Path
) -> None:
    Job(service.http()).save(1)
    record_all(service.context)
    url = settings.database_url_text
    into = settings.model_copy(update={"database_url": SecretStr(empty_url)})

    def rebuild(older_url: str) -> RebuildReport:
        return rebuild_catalog(into, settings.store_url, catalog_id=None, older_url=older_url, dry_run=True, json=False)

    seen = _bytes_of(url)
    older = Database(url, reads_only=True)
    with pytest.raises(DBAPIError, match=r"read-?only"), older.engine.begin() as connection:
        connection.execute(text("UPDATE catalog_identity SET epoch = epoch + 1"))
    older.dispose()
    assert rebuild(url).checkpoints == {"committed": 1}
    assert _bytes_of(url) == seen

    with service.context.database.engine.begin() as connection:
        head = connection.scalar(text("SELECT version_num FROM alembic_version"))
        connection.execute(text("UPDATE alembic_version SET version_num = '0006'"))
    with pytest.raises(SettingsError, match=f"0006.*{head}.*Copy that database"):
        rebuild(url)
    with service.context.database.engine.begin() as connection:
        there = connection.scalar(text("SELECT version_num FROM alembic_version"))
        connection.execute(text("UPDATE alembic_version SET version_num = :head"), {"head": head})
    assert there == "0006", "it is left as it is"


def _bytes_of(url: str) -> bytes | None:
    """Of a SQLite file."""
    return Path(url.removeprefix("sqlite:///")).read_bytes() if url.startswith("sqlite") else None


def test_a_copy_of_the_database_in_another_journal_mode_is_read_and_stays_as_it_is(
    service: RunningService, settings: ServiceSettings, sqlite_catalogs: SqliteCatalogs, tmp_path: Path
) -> None:
    """As `VACUUM INTO` or a backup leaves it."""
    copied = tmp_path / "copied.db"
    source = sqlite3.connect(sqlite_catalogs.new(tmp_path).removeprefix("sqlite:///"))
    source.execute("VACUUM INTO ?", (str(copied),))
    source.close()
    before = copied.read_bytes()
    older = Database(f"sqlite:///{copied}", reads_only=True)
    with older.read() as session:
        assert session.scalar(text("SELECT count(*) FROM runs")) == 0
    older.dispose()
    assert copied.read_bytes() == before


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("sqlite:///{folder}/catlog.db", "there is no file"),
        ("sqlite:///{folder}/other.db", "without a catalog"),
        ("mysql://host/name", "use sqlite"),
        ("catalog.db", "sqlite:///path"),
        ("postgresql://u:p@host:port/name", "cannot be opened"),
    ],
)
def test_a_mistyped_database_is_refused_and_makes_no_file(
    settings: ServiceSettings, tmp_path: Path, url: str, said: str
) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    sqlite3.connect(folder / "other.db").executescript("CREATE TABLE things (id INTEGER)")
    with pytest.raises(SettingsError, match=f"--with-database.*{said}"):
        rebuild_catalog(
            settings,
            settings.store_url,
            catalog_id=None,
            older_url=url.format(folder=folder),
            dry_run=True,
            json=False,
        )
    assert [each.name for each in folder.iterdir() if not each.name.endswith(("-wal", "-shm"))] == ["other.db"]
