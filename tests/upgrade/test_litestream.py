"""A SQLite catalog that Litestream copies as it changes, as docs/operating/disaster.md says: the real program."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr
from sqlalchemy import select

from holdfast_service.attached_stores.epoch import raise_epoch
from holdfast_service.audit.record import Actor
from holdfast_service.db.engine import Database
from holdfast_service.db.tables.core import Checkpoint
from holdfast_service.service import open_database
from holdfast_service.settings import ServiceSettings
from tests.support.databases import SqliteCatalogs
from tests.support.prepare import NotHereError, prepare
from tests.support.processes import ServerProcess
from tests.support.rank import Job
from tests.support.rebuilt import check_all, claim_all, record_all
from tests.support.service import running_service


@pytest.fixture(scope="module")
def litestream() -> str:
    try:
        prepare("litestream", "litestream", sys.prefix)
    except NotHereError as reason:
        pytest.skip(str(reason))  # pip cannot install it, and no other part of Holdfast needs it
    return str(Path(sys.prefix, "litestream", "node_modules", "@flydotio", "litestream-linux-x64", "litestream"))


@pytest.fixture
def catalog(sqlite_catalogs: SqliteCatalogs, tmp_path: Path) -> Path:
    return Path(sqlite_catalogs.new(tmp_path).removeprefix("sqlite:///"))


@pytest.fixture
def replicating(litestream: str, catalog: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    copies = tmp_path / "copies"
    process = ServerProcess(
        [litestream, "replicate", str(catalog), f"file://{copies}"],
        log=tmp_path / "litestream.log",
        ready=lambda: (copies / "generations").is_dir(),
        env={"PATH": os.environ["PATH"]},
    )
    yield process
    process.stop()


def restored(litestream: str, tmp_path: Path) -> set[int]:
    """The steps that the copy has now; what it is restored into stays as restored.db."""
    path = tmp_path / "restored.db"
    for each in tmp_path.glob("restored.db*"):
        each.unlink()
    subprocess.run(
        [litestream, "restore", "-o", str(path), f"file://{tmp_path / 'copies'}"], capture_output=True, timeout=120
    )
    if not path.exists():
        return set()
    database = Database(f"sqlite:///{path}")
    try:
        with database.read() as session:
            return set(session.scalars(select(Checkpoint.step).where(Checkpoint.state == "committed")))
    finally:
        database.dispose()


def test_a_catalog_that_litestream_copies_is_restored_and_checked(
    litestream: str, catalog: Path, replicating: ServerProcess, tmp_path: Path
) -> None:
    settings = ServiceSettings(
        database_url=SecretStr(f"sqlite:///{catalog}"),
        store=f"posix://{tmp_path / 'store'}",
        data_dir=tmp_path / "data",
        port=0,
    )
    with running_service(settings) as service:
        job = Job(service.http())
        for step in range(1, 6):
            job.save(step)
        record_all(service.context)
        ends_at = time.monotonic() + 120
        while restored(litestream, tmp_path) != {1, 2, 3, 4, 5}:
            assert time.monotonic() < ends_at, replicating.log_text
            time.sleep(0.2)
        replicating.kill9()
    for each in catalog.parent.glob(f"{catalog.name}*"):
        if each.is_file():
            each.unlink()
    assert restored(litestream, tmp_path) == {1, 2, 3, 4, 5}
    again = settings.model_copy(update={"database_url": SecretStr(f"sqlite:///{tmp_path / 'restored.db'}")})
    database = open_database(again)
    assert raise_epoch(database, Actor.at_the_database()) == 2
    database.dispose()
    with running_service(again) as service:
        check_all(service.context)
        claim_all(service.context)
        assert Job(service.http(), after=1).save(6)["state"] == "committed"
