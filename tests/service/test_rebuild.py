"""A catalog from the bucket alone, and what keeps it possible: the records beside the data (rules fencing-token and
record-outbox)."""

from __future__ import annotations

import os
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from sqlalchemy import make_url, select

from holdfast_protocol.stores import FindingKind
from holdfast_service.attached_stores.epoch import NotCheckedError, raise_epoch
from holdfast_service.attached_stores.ownership import deletes_are_allowed
from holdfast_service.audit.record import Actor
from holdfast_service.collect.controller import reconcile as collect
from holdfast_service.db.engine import Database
from holdfast_service.db.tables.core import Checkpoint
from holdfast_service.rebuild.sources import RebuildRefusedError
from holdfast_service.records.documents import ManifestRecord, decode
from holdfast_service.records.scanning import scan_records
from holdfast_service.replicate.controller import reconcile as replicate
from holdfast_service.scrub.repair import reconcile as repair
from holdfast_service.scrub.verify import reconcile as prove
from holdfast_service.service import open_database, open_service
from holdfast_service.settings import ServiceSettings, SettingsError
from holdfast_service.stores.base import MOST_NAMED_BYTES
from holdfast_service.stores.posix.posix_store import PosixStore
from tests.service.conftest import Clock
from tests.support.death import Killed
from tests.support.rank import Job, Refused, answer, digest_of
from tests.support.rebuilt import check_all, claim_all, read_all, rebuild_into, rebuilt_service, record_all
from tests.support.retention import HOUR, pin, prune, purge, put_policy, states
from tests.support.service import RunningService, running_service
from tests.support.tallies import check_sums
from tests.support.wrong_sizes import save_with_wrong_size


def latest(service: RunningService, run: str = "demo/gpt") -> int | None:
    project, _, name = run.partition("/")
    point = service.http().get(f"/v1/projects/{project}/runs/{name}/restore-point").json()["restore_point"]
    return None if point is None else point["step"]


@pytest.mark.rule("record-outbox")
def test_after_the_database_is_lost_everything_is_back_from_the_bucket(
    service: RunningService, settings: ServiceSettings, empty_url: str
) -> None:
    http = service.http()
    first = Job(http, world_size=2)
    first.save(500)
    first.save(1000)
    second = Job(http, after=1, world_size=2)
    five_hundred = http.get("/v1/projects/demo/runs/gpt/checkpoints").json()["items"][-1]
    assert five_hundred["step"] == 500
    second.resumed_from(five_hundred["id"], rollback=True)
    saved = second.save(550, metrics={"loss": {"value": 0.25}}, blocked_seconds=1.5)
    http.patch(
        f"/v1/checkpoints/{saved['id']}", json={"labels": ["milestone"]}, headers={"If-Match": "*"}
    ).raise_for_status()
    said = {"tags": ["paper"], "note": "twice the data"}
    answer(http.patch("/v1/projects/demo/runs/gpt", json=said, headers={"If-Match": "*"}))
    record_all(service.context)
    before = http.get(f"/v1/checkpoints/{saved['id']}").json()
    assert latest(service) == 550

    with rebuilt_service(settings, empty_url) as (again, report):
        assert report.whole, report.lines()
        assert (report.projects, report.runs, report.attempts) == (1, 1, 2)
        assert latest(again) == 550, "1000 was rolled back and must not outrank it"
        http = again.http()
        after = http.get(f"/v1/checkpoints/{saved['id']}").json()
        assert {**after, "etag": None} == {**before, "etag": None}
        run = answer(http.get("/v1/projects/demo/runs/gpt"))
        assert {name: run[name] for name in said} == said
        for rank in range(2):
            data = f"demo/gpt 2 550 {rank}".encode()
            assert read_all(http, saved["id"], [data, b"index " + data])
        with pytest.raises(Refused) as refused:
            Job.call(second_at(second, http), "POST", f"{second.base}/checkpoints", step=600, world_size=2)
        assert refused.value.code == "stale_attempt", "a job of before the loss must not write any more"
        third = Job(http, after=2, world_size=2)
        assert third.number == 3
        assert third.opened["restore_point"]["step"] == 550


def second_at(job: Job, http: object) -> Job:
    job.http = http  # type: ignore[assignment]
    return job


@pytest.mark.rule("record-outbox")
def test_trash_pins_holds_and_policies_are_back_and_what_was_purged_is_not(
    s3_service: RunningService, empty_url: str, clock: Clock
) -> None:
    service = s3_service
    http = service.http()
    job = Job(http)
    ids = {step: job.save(step)["id"] for step in range(1, 6)}
    record_all(service.context)
    put_policy(service, keep_last=2)
    pin(service, ids[2])
    held = answer(http.post(f"/v1/checkpoints/{ids[3]}/holds", json={"reason": "evidence"}))
    assert prune(service, checkpoint_ids=[ids[1]])["trashed"]
    clock.advance(73 * HOUR)
    assert purge(service).done == 1
    collect(service.context)
    second = Job(http, after=1)
    second.resumed_from(ids[5])
    ids[6] = second.save(6)["id"]
    assert prune(service, checkpoint_ids=[ids[4]])["trashed"]
    record_all(service.context)
    assert states(service) == {
        1: "deleted",
        2: "committed",
        3: "committed",
        4: "trashed",
        5: "committed",
        6: "committed",
    }

    with rebuilt_service(service.context.settings, empty_url) as (again, report):
        assert report.whole, report.lines()
        assert (report.removed, report.orphans, report.holds) == (1, 0, 1)
        assert states(again) == {step: state for step, state in states(service).items() if step != 1}
        check_sums(again)
        http = again.http()
        with again.context.database.read() as session:
            pinned = session.get_one(Checkpoint, ids[2])
            trashed = session.get_one(Checkpoint, ids[4])
        assert (pinned.pin_reason, trashed.purge_at is not None) == ("paper", True)
        assert [one["id"] for one in answer(http.get("/v1/holds"))["items"]] == [held["id"]]
        policy = answer(http.get("/v1/projects/demo/runs/gpt/policies/retention"))
        assert policy["document"] == {"keep_last": 2}
        assert latest(again) == 6
        data = b"demo/gpt 1 3 0"
        assert read_all(http, ids[3], [data, b"index " + data])
        # Nothing is trusted before it was read, and nothing in the bucket is changed before it was claimed.
        third = Job(http, after=2)
        assert third.begin(7).negotiate(0, [data])["chunks"][0]["status"] == "upload"
        with pytest.raises(NotCheckedError):
            claim_all(again.context)
        found = check_all(again.context).stores[0].findings
        assert [(each.kind, each.blocks) for each in found] == [(FindingKind.OUTDATED_RECORDS, False)]
        claim_all(again.context)
        prove(again.context)
        assert third.begin(7).negotiate(0, [b"index " + data])["chunks"][0]["status"] == "present"
        # The old service is the one that is foreign now.
        old = service.context
        assert not deletes_are_allowed(old.store, old.store_id, old.catalog_id, old.epoch, old.claim)
        record_all(again.context)


@pytest.mark.rule("record-outbox")
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_what_a_restored_catalog_knows_still_is_not_left_out_as_purged(
    settings: ServiceSettings, empty_url: str, clock: Clock
) -> None:
    """Step 1 was purged after the backup. Step 2 has the very same bytes, so that step 1 is whole after the restore."""
    backup, data = sqlite3.connect(":memory:"), [b"frozen base", b"index frozen base"]
    catalog_path = str(make_url(settings.database_url_text).database)
    with running_service(settings) as service:
        job = Job(service.http())
        first = job.save(1, content=data[0])["id"]
        job.save(2, content=data[0])
        for step in range(3, 6):
            job.save(step)
        record_all(service.context)
        with sqlite3.connect(catalog_path) as catalog:
            catalog.backup(backup)
        assert prune(service, checkpoint_ids=[first])["trashed"]
        clock.advance(73 * HOUR)
        assert purge(service).done == 1
    with sqlite3.connect(catalog_path) as catalog:
        backup.backup(catalog)
    database = open_database(settings)
    raise_epoch(database, Actor.at_the_database())
    database.dispose()
    with running_service(settings) as service:
        told = {each.kind for each in check_all(service.context).stores[0].findings}
        assert FindingKind.REMOVED_RECORDS in told
        claim_all(service.context, accept_loss=True)
        record_all(service.context)
        assert FindingKind.REMOVED_RECORDS not in {each.kind for each in check_all(service.context).stores[0].findings}
        answer(service.http().post(f"/v1/checkpoints/{first}/holds", json={"reason": "the paper"}))
        record_all(service.context)
    with rebuilt_service(settings, empty_url) as (again, report):
        assert (report.removed, report.orphans, report.holds) == (0, 0, 1)
        assert states(again)[1] == "committed"
        assert read_all(again.http(), first, data)


@pytest.mark.rule("record-outbox")
def test_what_is_damaged_is_told_by_name_and_is_never_a_restore_point(
    service: RunningService, settings: ServiceSettings, empty_url: str
) -> None:
    job = Job(service.http())
    saved = {step: job.save(step) for step in range(1, 7)}
    record_all(service.context)
    store = service.context.store
    records = {each.subject.subject_id: each for each in scan_records(store)}
    record = {step: records[view["id"]] for step, view in saved.items()}
    # 6: its record; 5: its manifest; 4: its list; 3: a chunk; 2: one is no record, and the other has no end.
    store.write_named(str(record[6].newest_name), store.read_named(str(record[6].newest_name)).replace(b"ok", b"OK"))
    store.write_named(record[5].subject.manifest_name, b"not JSON")
    (shard,) = decode(store.read_named(record[4].subject.manifest_name), ManifestRecord).shards
    store.write_named(record[4].subject.list_name(shard.digest), b"")
    assert isinstance(store, PosixStore)
    lost = digest_of(b"demo/gpt 1 3 0")
    for path in store.root.glob(f"*/chunks/*/{lost}/*"):
        path.unlink()
    store.write_named(str(record[2].newest_name), b"{}")
    os.truncate(store.root / record[2].subject.manifest_name, MOST_NAMED_BYTES + 1)

    with rebuilt_service(settings, empty_url) as (again, report):
        assert not report.whole
        assert [name.partition(":")[0] for name in report.corrupt] == [f"demo/gpt@{step}#1" for step in (3, 4, 5, 6)]
        assert lost in report.corrupt[0]
        for step in (2, 4, 5, 6):
            assert any(saved[step]["id"] in name for name in report.damaged), step
        point = again.http().get("/v1/projects/demo/runs/gpt/restore-point").json()
        assert point["restore_point"]["step"] == 1
        assert [passed["reason"] for passed in point["skipped"]] == ["corrupt"] * 4
        # A mark goes only where every chunk is known and was read.
        check_all(again.context)
        with pytest.raises(NotCheckedError, match="would lose"):
            claim_all(again.context)
        claim_all(again.context, accept_loss=True)
        prove(again.context)
        repair(again.context)
        assert latest(again) == 6
        with again.context.database.read() as session:
            corrupt = session.scalars(
                select(Checkpoint.step).where(Checkpoint.health == "corrupt").order_by(Checkpoint.step)
            ).all()
        assert list(corrupt) == [3, 4, 5]


@pytest.mark.rule("project-in-key")
@pytest.mark.rule("record-outbox")
@pytest.mark.parametrize("wrong_first", [True, False])
def test_a_wrong_size_that_was_committed_costs_nobody_else_a_checkpoint(
    service: RunningService, settings: ServiceSettings, empty_url: str, wrong_first: bool
) -> None:
    if wrong_first:
        save_with_wrong_size(service, "demo/liar", b"weights", 5)
    honest = Job(service.http(), "demo/honest").save(1, content=b"weights")
    if not wrong_first:
        save_with_wrong_size(service, "demo/liar", b"weights", 5)
    record_all(service.context)
    with rebuilt_service(settings, empty_url) as (again, report):
        assert [name.partition(":")[0] for name in report.corrupt] == ["demo/liar@1#1"]
        assert latest(again, "demo/honest") == 1
        assert read_all(again.http(), honest["id"], [b"weights", b"index weights"])
        assert latest(again, "demo/liar") is None


@pytest.mark.rule("record-outbox")
def test_a_rebuild_that_dies_at_any_step_is_begun_again(
    service: RunningService, settings: ServiceSettings, empty_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(service.http(), world_size=2)
    for step in (1, 2):
        job.save(step)
    record_all(service.context)
    real = Database.transaction
    left = 0

    def dies(self: Database) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise Killed
        return real(self)

    tries = 0
    with monkeypatch.context() as patched:
        patched.setattr(Database, "transaction", dies)
        while True:
            tries += 1
            left = tries
            try:
                report = rebuild_into(empty_url, settings.store_url)
                break
            except Killed:
                if tries == 5:
                    with pytest.raises(SettingsError, match="half rebuilt"):
                        open_service(settings.model_copy(update={"database_url": SecretStr(empty_url)}))
    assert tries > 10
    assert (report.whole, report.checkpoints, report.copies) == (True, {"committed": 2}, 8)
    with pytest.raises(RebuildRefusedError, match="holds a catalog already"):
        rebuild_into(empty_url, settings.store_url)
    with running_service(settings.model_copy(update={"database_url": SecretStr(empty_url)})) as again:
        assert latest(again) == 2


@pytest.mark.rule("record-outbox")
def test_the_second_store_alone_gives_the_catalog_and_the_bytes_back(
    settings: ServiceSettings, empty_url: str, tmp_path: Path
) -> None:
    second = f"posix://{tmp_path / 'second'}"
    with running_service(settings.model_copy(update={"second_store": second})) as service:
        http = service.http()
        job = Job(http)
        saved = [job.save(step)["id"] for step in (1, 2)]
        answer(http.put("/v1/projects/demo/policies/copies", json={"document": {}}))
        assert replicate(service.context).whole
        job.save(3)
        record_all(service.context)
    shutil.rmtree(tmp_path / "store")
    alone = settings.model_copy(update={"store": second})
    with rebuilt_service(alone, empty_url) as (again, report):
        assert report.whole, report.lines()
        assert latest(again) == 2, "step 3 was never whole there"
        data = b"demo/gpt 1 2 0"
        assert read_all(again.http(), saved[1], [data, b"index " + data])
        assert Job(again.http(), after=1).number == 2
