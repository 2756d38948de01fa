"""What a bucket's storage classes can do, what a policy is told where there are none, and all of it in words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import update
from typer.testing import CliRunner

from holdfast_client.cli.main import app
from holdfast_protocol.states import CopyState
from holdfast_service.db.tables.core import Checkpoint
from holdfast_service.scrub import repair
from tests.service.conftest import Clock
from tests.support.databases import SqliteCatalogs
from tests.support.interleave import refused
from tests.support.rank import Job, answer, digest_of
from tests.support.rebuilt import check_all, claim_all, rebuilt_service, record_all
from tests.support.rot import copies_of
from tests.support.service import RunningService
from tests.support.tiers import DAY, HOUR, IN_A_BUCKET, Cold, weights


@IN_A_BUCKET
def test_deep_archive_has_no_expedited_thaw_and_says_what_each_speed_takes(cold: Cold) -> None:
    cold.rule = {"storage_class": "deep_archive"}
    cold.cooled()
    with refused("invalid_request") as found:
        cold.thaw(1, speed="expedited")
    assert "12 hours (standard) or 48 hours (bulk)" in found.value.detail
    told = cold.thaw_status(1)
    assert told["takes_seconds"] == {"bulk": 48 * HOUR, "standard": 12 * HOUR}
    assert told["state"] == "needed"


@IN_A_BUCKET
def test_classes_that_are_read_at_once_keep_a_checkpoint_hot_and_reach_the_archive_later(cold: Cold) -> None:
    job = Job(cold.http)
    for step in (1, 2, 3):
        job.save(step)
    cold.policy({"after": "7d", "storage_class": "rare"}, {"after": "90d", "storage_class": "deep_archive"})
    cold.advance(8 * DAY)
    cold.until_idle()
    assert cold.copies(weights(1)) == [("deleting", "primary"), ("verified", "rare")]
    assert cold.tier(1) == "hot"
    assert cold.content(1, weights(1)) == weights(1)
    cold.collect()
    assert cold.copies(weights(1)) == [("verified", "rare")]
    (told,) = job.begin(4).negotiate(0, [weights(1)])["chunks"]
    assert told["status"] == "present"
    with cold.context.database.transaction() as session:
        session.execute(update(Checkpoint).where(Checkpoint.step == 4).values(state="aborted"))
    cold.advance(90 * DAY)
    cold.until_idle()
    assert cold.copies(weights(1))[-1] == ("cold", "deep_archive")
    assert cold.tier(1) == "cold"


@IN_A_BUCKET
def test_nothing_moves_in_a_store_of_another_epoch(cold: Cold) -> None:
    cold.aged()
    object.__setattr__(cold.context, "epoch", cold.context.epoch + 1)  # as after a restore of the database
    report = cold.round()
    assert report.done == report.retired_copies == 0
    assert "does not say" in str(report.error)
    assert cold.copies(weights(1)) == [("verified", "primary")]


@IN_A_BUCKET
def test_a_catalog_that_is_rebuilt_from_the_bucket_knows_what_is_cold(
    cold: Cold, clock: Clock, sqlite_catalogs: SqliteCatalogs, tmp_path: Path
) -> None:
    cold.cooled()
    cold.collect()
    record_all(cold.context)
    folder = tmp_path / "again"
    folder.mkdir()
    with rebuilt_service(cold.context.settings, sqlite_catalogs.new(folder)) as (service, _):
        again = Cold(service, clock.advance, cold.fake)
        assert [again.tier(step) for step in (1, 2, 3)] == ["cold", "hot", "hot"]
        with refused("checkpoint_cold"):
            again.tickets(1, weights(1))
        check_all(service.context)
        claim_all(service.context)
        assert again.thawed(1)["state"] == "thawed"
        assert again.content(1, weights(1)) == weights(1)


@IN_A_BUCKET
def test_what_a_rebuild_cannot_look_into_is_named_and_repaired_once_its_bytes_are_sent_again(
    cold: Cold, sqlite_catalogs: SqliteCatalogs, tmp_path: Path
) -> None:
    Job(cold.http).save(1)
    record_all(cold.context)
    assert cold.fake is not None
    everything = cold.fake.objects._stored
    (name,) = (name for name in everything if digest_of(weights(1)) in name)
    everything[name] = replace(everything[name], body=b"of another length", storage_class="GLACIER")
    folder = tmp_path / "again"
    folder.mkdir()
    with rebuilt_service(cold.context.settings, sqlite_catalogs.new(folder)) as (service, report):
        (note,) = (note for note in report.notes if "no record says how it is encoded" in note)
        assert digest_of(weights(1)) in note
        (copy,) = copies_of(service, weights(1))
        assert (copy.state, copy.finding is not None) == (CopyState.BAD, True)
        check_all(service.context)
        claim_all(service.context, accept_loss=True)
        http = service.http()
        saved = Job(http, after=1).save(2, content=weights(1))
        assert repair.reconcile(service.context).repaired_copies == 1
        first = answer(http.get("/v1/projects/demo/runs/gpt/checkpoints/1"))
        assert (first["health"], saved["health"]) == ("ok", "ok")


@IN_A_BUCKET
def test_the_plan_and_a_thaw_in_words(cold: Cold, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: str, exit_code: int = 0) -> str:
        result = CliRunner().invoke(app, list(arguments))
        assert result.exit_code == exit_code, result.stderr + result.stdout
        return result.stdout + result.stderr

    monkeypatch.setenv("HOLDFAST_URL", cold.service.url)
    monkeypatch.setenv("HOLDFAST_TOKEN", cold.service.token())
    monkeypatch.setenv("COLUMNS", "120")
    cold.rule = {"storage_class": "archive"}
    job = cold.cooled()
    job.save(4)
    plan = run("tiers", "plan", "demo/gpt")
    assert "one of the two newest healthy points" in plan
    assert "to archive: " in plan
    assert "paid for at least 90 days; to be thawed first (5 min expedited, 5 h standard, 12 h bulk)" in plan
    assert json.loads(run("tiers", "plan", "demo/gpt", "--json"))["policy_level"] == "run"
    assert "thaw           needed" in run("checkpoints", "thaw", "demo/gpt@1", "--dry-run")
    assert "12 h (bulk, $0.00)" in run("checkpoints", "thaw", "demo/gpt@1", "--status")
    assert cold.tier(1) == "cold"
    asked = json.loads(run("checkpoints", "thaw", "demo/gpt@1", "--days", "2", "--speed", "bulk", "--json"))
    assert (asked["tier"], asked["speed"]) == ("thawing", "bulk")
    refused_by_name = run("runs", "restore-point", "demo/gpt@1", exit_code=7)
    assert "It is being thawed, expected by" in refused_by_name


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_what_the_stores_cannot_do_is_refused_with_what_they_can(service: RunningService) -> None:
    service.make_project("demo")
    for rule, says in (
        ({"after": "7d", "storage_class": "archive"}, "HOLDFAST_COLD_STORE"),
        ({"after": "7d", "to": "cold"}, "Set HOLDFAST_COLD_STORE"),
    ):
        with refused("invalid_request") as found:
            answer(service.http().put("/v1/projects/demo/policies/tiers", json={"document": {"rules": [rule]}}))
        assert says in found.value.detail


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_bucket_without_archives_is_found_out(s3_service: RunningService) -> None:
    s3_service.make_project("demo")
    document = {"rules": [{"after": "7d", "storage_class": "archive"}]}
    with refused("invalid_request") as found:
        answer(s3_service.http().put("/v1/projects/demo/policies/tiers", json={"document": document}))
    assert "archive" in found.value.detail
