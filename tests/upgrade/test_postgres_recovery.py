"""What docs/operating/disaster.md says of Postgres: recovery to a point in time, and a failover to a synchronous
standby."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr
from sqlalchemy import select

from holdfast_service.attached_stores.epoch import NotCheckedError, raise_epoch
from holdfast_service.audit.record import Actor
from holdfast_service.collect.orphans import reconcile as sweep
from holdfast_service.db.engine import Database
from holdfast_service.db.tables.core import Checkpoint
from holdfast_service.service import open_database
from holdfast_service.settings import ServiceSettings
from tests.support.databases import migrate
from tests.support.posix_chunks import chunks
from tests.support.postgres import OwnPostgresServer, postgres_server
from tests.support.rank import Job, Refused
from tests.support.rebuilt import check_all, claim_all, rebuilt_service, record_all
from tests.support.service import running_service

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def server() -> Iterator[OwnPostgresServer]:
    with postgres_server(own=True) as started:
        assert isinstance(started, OwnPostgresServer)
        yield started


def known(database: Database) -> set[int]:
    with database.read() as session:
        return set(session.scalars(select(Checkpoint.step).where(Checkpoint.state == "committed")))


def one(server: OwnPostgresServer, statement: str) -> object:
    with server.connect() as connection:
        row = connection.execute(statement).fetchone()
        assert row is not None
        return row[0]


def wait_until(server: OwnPostgresServer, statement: str) -> None:
    ends_at = time.monotonic() + 120
    while one(server, statement) is not True:
        assert time.monotonic() < ends_at, statement
        time.sleep(0.1)


def test_a_database_recovered_to_a_point_in_time_is_noticed_and_gets_back_what_came_later(
    server: OwnPostgresServer, tmp_path: Path
) -> None:
    server.keep_log()
    settings = ServiceSettings(
        database_url=SecretStr(server.create_database("holdfast")),
        store=f"posix://{tmp_path / 'store'}",
        data_dir=tmp_path / "data",
        port=0,
    )
    with running_service(settings) as service:
        server.base_backup("base")
        job = Job(service.http())
        for step in (1, 2):
            job.save(step)
        moment = str(one(server, "SELECT clock_timestamp()"))
        job.save(3)
        record_all(service.context)
        before = chunks(service)
        segment = str(one(server, "SELECT pg_walfile_name(pg_switch_wal())"))
        wait_until(server, f"SELECT last_archived_wal >= '{segment}' FROM pg_stat_archiver")
    server.kill9()
    server.recover_to("base", moment)
    server.use_data("base")
    server.restart()
    wait_until(server, "SELECT NOT pg_is_in_recovery()")
    with running_service(settings) as service:
        assert known(service.context.database) == {1, 2}
        with pytest.raises(Refused, match="went back to an older state"):
            Job(service.http(), after=1)
        assert sweep(service.context).deleted == 0
    database = open_database(settings)
    raise_epoch(database, Actor.at_the_database())
    database.dispose()
    with running_service(settings) as service:
        check_all(service.context)
        with pytest.raises(NotCheckedError, match="has lost"):
            claim_all(service.context)
        assert chunks(service) >= before
        rebuilt = server.create_database("rebuilt")
        migrate(rebuilt)
        with rebuilt_service(settings, rebuilt, older=service.context.database) as (again, report):
            assert report.whole, report.lines()
            assert known(again.context.database) == {1, 2, 3}


@pytest.mark.timeout(600)
def test_the_rehearsed_failover_loses_nothing_that_a_job_was_told() -> None:
    command = [sys.executable, "-m", "scripts.rehearse_failover", "--jobs", "2", "--commits", "3"]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=580)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    told = dict(line.rsplit(maxsplit=1) for line in ran.stdout.splitlines() if line.startswith(("commits", "lost")))
    assert int(told["commits that jobs were told of"]) >= 12
    assert told["lost"] == "0"
    rates = r"saves a second +(\d+\.\d) before, (\d+\.\d) until that commit, (\d+\.\d) after"
    assert re.search(rates, ran.stdout), ran.stdout
