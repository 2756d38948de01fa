"""The catalog that `make scale` fills could be one that the service has written: it answers, and its sums are right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from benchmarks.scale.catalog import NotEmptyError, fill
from sqlalchemy import event, make_url

from holdfast_protocol.checkpoints import CheckpointView, ShardChunks
from holdfast_protocol.digests import checkpoint_digest, shard_digest
from holdfast_protocol.usage import UsageView
from holdfast_service.db.tables.core import Checkpoint
from holdfast_service.settings import ServiceSettings
from tests.support.service import running_service
from tests.support.tallies import check_sums, take_up

_READ_AT_ONCE = 10


@contextmanager
def _loaded() -> Iterator[list[Checkpoint]]:
    """The rows of checkpoints that are read meanwhile."""
    rows: list[Checkpoint] = []

    def keep(row: Checkpoint, _: object) -> None:
        rows.append(row)

    event.listen(Checkpoint, "load", keep)
    try:
        yield rows
    finally:
        event.remove(Checkpoint, "load", keep)


@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
def test_the_service_works_on_a_filled_catalog(database_url: str, settings: ServiceSettings, tmp_path: Path) -> None:
    dsn = make_url(database_url).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(dsn, autocommit=True) as connection:
        fill(connection, checkpoints=1000, runs=10, projects=2, store_url=f"posix://{tmp_path / 'store'}")
        with pytest.raises(NotEmptyError):
            fill(connection)
    with running_service(settings) as service, service.http() as http:
        assert take_up(service).moved == 0, "it is settled from the start"
        check_sums(service)
        with _loaded() as loaded:
            decision = http.get("/v1/projects/scale-1/runs/run-1/restore-point").raise_for_status().json()
        assert len(loaded) <= _READ_AT_ONCE, "of a hundred"
        point = decision["restore_point"]
        found = http.get(f"/v1/checkpoints/{point['checkpoint_id']}/shards/0").raise_for_status()
        usage = UsageView.model_validate(http.get("/v1/projects/scale-1/usage").raise_for_status().json())
        saved: list[CheckpointView] = []
        for run in (1, 3, 5, 7, 9):
            asked = {"limit": 100, "state": "committed"}
            page = http.get(f"/v1/projects/scale-1/runs/run-{run}/checkpoints", params=asked).raise_for_status()
            saved += [CheckpointView.model_validate(each) for each in page.json()["items"]]
    shard = ShardChunks.model_validate(found.json())
    assert shard.digest == shard_digest([chunk.digest for chunk in shard.chunks])
    assert (point["step"], point["digest"]) == (10_000, checkpoint_digest([shard.digest]))
    assert usage.logical_bytes == sum(each.logical_bytes for each in saved)
    assert usage.stored_bytes == usage.committed_bytes + usage.trashed_bytes > usage.logical_bytes
