"""A database that was put back from an older state in the very same place, and nobody said so: same catalog, same
epoch, same file. What it calls nobody's belongs to checkpoints that it does not know (rule fencing-token)."""

from __future__ import annotations

import sqlite3

import pytest
from sqlalchemy import make_url

from holdfast_service.attached_stores.epoch import raise_epoch
from holdfast_service.audit.record import Actor
from holdfast_service.collect.controller import reconcile as collect
from holdfast_service.collect.orphans import reconcile as sweep
from holdfast_service.collect.orphans import sweep_store
from holdfast_service.errors import ProblemError
from holdfast_service.records.writing import remove_record
from holdfast_service.service import open_database
from holdfast_service.settings import ServiceSettings
from holdfast_service.stores.base import StoreNotOurs
from tests.service.conftest import Clock
from tests.support.posix_chunks import age_everything, chunks
from tests.support.rank import Job, Refused, answer
from tests.support.rebuilt import check_all, claim_all, record_all
from tests.support.service import running_service


@pytest.mark.rule("fencing-token")
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_database_put_back_in_place_deletes_nothing_of_what_it_does_not_know(
    settings: ServiceSettings, clock: Clock
) -> None:
    """Step 2 came after the backup. It took over a chunk that nobody needed then, and step 1 was held meanwhile."""
    backup = sqlite3.connect(":memory:")
    with running_service(settings) as service:
        job = Job(service.http())
        first = job.save(1)
        given_up = job.begin(999)
        given_up.upload(0, [b"frozen base"])
        given_up.abort()
        record_all(service.context)
        with sqlite3.connect(str(make_url(settings.database_url_text).database)) as catalog:
            catalog.backup(backup)
    with running_service(settings) as service:
        job.http = service.http()
        job.save(2, content=b"frozen base")
        answer(job.http.post(f"/v1/checkpoints/{first['id']}/holds", json={"reason": "the paper"}))
        record_all(service.context)
        assert sweep(service.context).error is None
        before = chunks(service)
        assert {b"frozen base", b"index frozen base"} <= before
    with sqlite3.connect(str(make_url(settings.database_url_text).database)) as catalog:
        backup.backup(catalog)
    clock.advance(3 * 24 * 3600.0)
    with running_service(settings) as service:
        context = service.context
        age_everything(service)
        collected = collect(context)
        assert collected.done == 0
        assert "holdfast admin raise-epoch" in collected.skipped_stores[0]
        assert "raise-epoch" in answer(service.http().get("/v1/collections/plan"))["stores"][0]["problem"]
        swept = sweep(context)
        assert swept.deleted == 0
        assert "holdfast admin raise-epoch" in str(swept.error)
        (primary,) = context.stores
        with pytest.raises(ProblemError, match="went back to an older state"):
            sweep_store(context, primary, dry_run=False, force=True, actor=Actor.at_the_database())
        with pytest.raises(Refused, match="went back to an older state"):
            Job(service.http(), after=1)
        project_id = next(context.store.list_named("records")).split("/")[1]
        with pytest.raises(StoreNotOurs, match="older state"):
            remove_record(context, project_id, first["id"])
        assert chunks(service) == before
    database = open_database(settings)
    raise_epoch(database, Actor.at_the_database())
    database.dispose()
    clock.advance(settings.sweep_interval_seconds)
    with running_service(settings) as service:
        check_all(service.context)
        claim_all(service.context, accept_loss=True)
        record_all(service.context)
        assert sweep(service.context).error is None
        collect(service.context)
        assert b"index frozen base" not in chunks(service), "who accepts the loss has told that it may go"
