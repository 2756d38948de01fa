"""Tiers: hot, cold, thawing, cold again, purged; what stays hot; what the policy and its plan say. On both databases,
in folders and in a bucket with archive classes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sqlalchemy import select, update
from typer.testing import CliRunner

from holdfast_client.cli.main import app
from holdfast_protocol.states import Scope
from holdfast_service.catalog.custody_tables import AuditEvent, CheckpointCopy
from holdfast_service.catalog.tables import Checkpoint, Copy, Project
from tests.service.conftest import Clock
from tests.support.databases import SqliteCatalogs
from tests.support.interleave import refused
from tests.support.rank import Job, answer
from tests.support.rebuilt import adopt_all, check_all, rebuilt_service, record_all
from tests.support.service import RunningService
from tests.support.tiers import DAY, READ_LEASE_SECONDS, Cold, weights

HOUR = 3600


class TestTheWholeLife:
    @pytest.mark.parametrize("kind", ["folder", "bucket"])
    def test_hot_cold_thawed_cold_again_and_purged(self, cold: Cold) -> None:
        job = cold.cooled()
        assert [cold.tier(step) for step in (1, 2, 3)] == ["cold", "hot", "hot"]
        place = "cold" if cold.fake is None else "GLACIER"
        assert cold.copies(weights(1)) == [("deleting", "primary"), ("cold", place)]
        cold.collect()
        assert cold.copies(weights(1)) == [("cold", place)]
        with refused("checkpoint_cold") as found:
            cold.tickets(1, weights(1))
        assert "holdfast thaw demo/gpt@1#1" in found.value.detail
        with refused("checkpoint_cold") as named:
            answer(cold.http.get(f"{job.base}/restore-point", params={"selector": "1"}))
        assert named.value.context["command"] == "holdfast thaw demo/gpt@1#1"

        asked = cold.thaw(1, days=2)
        assert (asked["tier"], asked["state"]) == ("thawing", "thawing")
        with refused("checkpoint_cold"):
            cold.tickets(1, weights(1))
        done = cold.thawed(1, days=2)
        assert (done["state"], done["readable_chunks"]) == ("thawed", done["chunks"])
        assert cold.content(1, weights(1)) == weights(1)
        assert cold.content(1, b"index " + weights(1)) == b"index " + weights(1)

        cold.advance(2 * DAY + 2 * READ_LEASE_SECONDS)  # its days, and the lease of the reads above
        cold.round()
        assert cold.tier(1) == "cold"
        cold.round()
        cold.collect()
        assert cold.copies(weights(1)) == [("cold", place)]
        with cold.context.database.transaction() as session:
            session.execute(update(Checkpoint).where(Checkpoint.step == 1).values(state="deleted"))
            project_id = session.scalars(select(Project.id)).one()
        before = cold.stored(project_id)
        cold.collect()
        assert cold.copies(weights(1)) == []
        assert len(before) - len(cold.stored(project_id)) == 2
        assert cold.content(3, weights(3)) == weights(3)

    def test_every_step_is_an_event_that_says_who_did_it(self, cold: Cold) -> None:
        cold.cooled()
        cold.thawed(1, days=1)
        cold.advance(DAY + 2 * HOUR)
        cold.round()
        with cold.context.database.read() as session:
            events = session.execute(
                select(AuditEvent.action, AuditEvent.actor_kind, AuditEvent.after)
                .where(AuditEvent.checkpoint_id == cold.view(1)["id"])
                .order_by(AuditEvent.id)
            ).all()
        # What was copied back from a folder can be read until its copies are taken away again.
        ends = [("thaw_end", "hot"), ("cool", "cold")] if cold.fake is None else [("thaw_end", "cold")]
        assert [(row.action, row.actor_kind, row.after["tier"]) for row in events] == [
            ("checkpoint.cool", "controller", "cold"),
            ("checkpoint.thaw", "person", "thawing"),
            ("checkpoint.thawed", "controller", "hot"),
            *((f"checkpoint.{action}", "controller", tier) for action, tier in ends),
        ]

    def test_the_restore_point_is_what_can_be_read_now_and_a_thaw_is_told(self, cold: Cold) -> None:
        job = cold.cooled(4)
        with cold.context.database.transaction() as session:
            session.execute(
                update(Checkpoint).where(Checkpoint.step.in_((3, 4))).values(health="diverged", health_reason="NaN")
            )
        cold.thawed(1)
        decision = answer(cold.http.get(f"{job.base}/restore-point"))
        assert decision["restore_point"]["step"] == 1
        (two,) = [each for each in decision["passed_over"] if each["reason"] == "cold"]
        assert two["step"] == 2
        assert "`holdfast thaw demo/gpt@2#1`" in two["detail"]
        assert ("5 hours (standard), 12 hours (bulk) or 5 minutes (expedited)" in two["detail"]) is bool(cold.fake)


class TestWhatIsMovedAndWhatStays:
    def test_labels_kinds_pins_and_the_newest_stay_hot(self, cold: Cold) -> None:
        job = Job(cold.http)
        for step, changes in enumerate(
            [{}, {"labels": ["milestone"]}, {"kind": "final"}, {}, {}, {"kind": "emergency"}], start=1
        ):
            save = job.begin(step, **changes)
            save.write(0, [weights(step), b"index"])
        with cold.context.database.transaction() as session:
            session.execute(update(Checkpoint).where(Checkpoint.step == 4).values(pinned_at=Checkpoint.created_at))
        cold.policy(stay_hot={"labels": ["milestone"], "kinds": ["final"]})
        cold.advance(8 * DAY)
        cold.round()
        assert [cold.tier(step) for step in range(1, 7)] == ["cold", "hot", "hot", "hot", "hot", "hot"]
        plan = answer(cold.http.get(f"{job.base}/tiers/plan"))
        assert {row["step"]: row["stays"] for row in plan["rows"]} == {
            6: "one of the two newest healthy points",
            5: "one of the two newest healthy points",
            4: "pinned",
            3: "its kind is final",
            2: "labelled milestone",
            1: None,
        }

    def test_what_an_active_attempt_resumed_from_stays_until_it_has_ended(self, cold: Cold) -> None:
        job = Job(cold.http)
        first = job.save(1)
        second = Job(cold.http, after=1)
        second.resumed_from(first["id"])
        for step in (2, 3):
            second.save(step)
        cold.policy()
        cold.advance(8 * DAY)
        cold.round()
        assert cold.tier(1) == "hot"
        second.end()
        cold.round()
        assert cold.tier(1) == "cold"

    @pytest.mark.rule("protocol-15")
    def test_a_chunk_is_as_hot_as_its_hottest_user(self, cold: Cold) -> None:
        """Two runs share their base. One gets cold, and only what nobody else needs moves."""
        base = b"frozen base"
        jobs = [Job(cold.http, "demo/gpt"), Job(cold.http, "demo/other")]
        for job in jobs:
            for step in (1, 2, 3):
                job.begin(step).write(0, [base, weights(step, job.run), b"index"])
        cold.policy(run="demo/gpt")
        cold.advance(8 * DAY)
        plan = answer(cold.http.get(f"{jobs[0].base}/tiers/plan"))
        assert plan["totals"][0]["due_bytes"] == len(weights(1))
        cold.round()
        assert cold.tier(1) == "cold"
        assert cold.copies(base) == [("verified", "primary")]
        assert cold.tier(1, "demo/other") == "hot"
        cold.policy(run="demo/other")
        cold.round()
        assert cold.copies(base) == [("verified", "primary")]  # the newest of both runs still need it
        assert cold.tier(1, "demo/other") == "cold"
        with cold.context.database.transaction() as session:
            session.execute(update(Checkpoint).where(Checkpoint.step > 1).values(state="trashed"))
        for job in jobs:  # newer points that do not need it
            for step in (4, 5):
                job.begin(step).write(0, [weights(step, job.run), b"other index"])
        cold.advance(2 * DAY)  # what was gone through is looked at again
        cold.round()
        assert [state for state, _ in cold.copies(base)] == ["deleting", "cold"]

    @pytest.mark.rule("protocol-29")
    def test_what_a_store_holds_locked_is_not_taken_away_before_it_is_unlocked(self, cold: Cold) -> None:
        job = Job(cold.http)
        for step in (1, 2, 3):
            job.save(step)
        with cold.context.database.transaction() as session:
            session.execute(update(Copy).values(lock="locked"))
        cold.policy()
        cold.advance(8 * DAY)
        cold.until_idle()
        assert [state for state, _ in cold.copies(weights(1))] == ["verified", "cold"]
        assert cold.tier(1) == "hot"
        with cold.context.database.transaction() as session:
            session.execute(update(Copy).values(lock=None))
        cold.advance(DAY)
        cold.until_idle()
        assert cold.tier(1) == "cold"

    def test_a_policy_that_is_deleted_moves_nothing_more_and_brings_nothing_back(self, cold: Cold) -> None:
        job = cold.cooled()
        for step in (4, 5):
            job.save(step)
        answer(cold.http.request("DELETE", f"{job.base}/policies/tiers", headers={"If-Match": "*"}))
        cold.advance(8 * DAY)
        cold.until_idle()
        assert [cold.tier(step) for step in (1, 2, 3)] == ["cold", "hot", "hot"]

    def test_the_next_save_sends_a_cold_chunk_again_and_the_chunk_gets_cold_anew(self, cold: Cold) -> None:
        job = cold.cooled()
        save = job.begin(4)
        (told,) = save.negotiate(0, [weights(1)])["chunks"]
        assert told["status"] == "upload"
        assert save.write(0, [weights(1), b"index"])["state"] == "committed"
        assert cold.content(4, weights(1)) == weights(1)
        for step in (5, 6):
            job.save(step)
        cold.advance(8 * DAY)
        cold.until_idle()
        assert cold.tier(4) == "cold"
        assert [state for state, _ in cold.copies(weights(1))][-1] == "deleting"
        assert ("cold", "cold" if cold.fake is None else "GLACIER") in cold.copies(weights(1))

    def test_what_another_store_has_not_got_yet_stays_hot_so_that_it_can(self, cold: Cold) -> None:
        job = Job(cold.http)
        for step in (1, 2, 3):
            job.save(step)
        with cold.context.database.transaction() as session:
            session.add(
                CheckpointCopy(
                    checkpoint_id=cold.view(1)["id"],
                    store_id=cold.context.store_id,
                    wanted=True,
                    checkpoint_version=1,
                    missing_bytes=1,
                )
            )
        cold.policy()
        cold.advance(8 * DAY)
        cold.until_idle()
        assert cold.tier(1) == "hot"
        with cold.context.database.transaction() as session:
            session.execute(
                update(CheckpointCopy)
                .values(complete_at=Checkpoint.created_at)
                .where(CheckpointCopy.checkpoint_id == Checkpoint.id)
            )
        cold.advance(HOUR)
        cold.until_idle()
        assert cold.tier(1) == "cold"


class TestThaw:
    def test_a_thaw_is_prolonged_never_shortened_and_a_hot_one_can_be_kept(self, cold: Cold) -> None:
        cold.cooled()
        first = cold.thawed(1, days=5)
        assert cold.thaw(1, days=2)["readable_until"] >= first["readable_until"]
        longer = cold.thaw(1, days=9)
        assert longer["state"] == "thawed"
        cold.round()
        cold.advance(7 * DAY)
        cold.round()
        assert cold.tier(1) == "hot"
        assert cold.content(1, weights(1)) == weights(1)
        # A hot one is kept hot.
        cold.thaw(2, days=30)
        job = Job(cold.http, after=1)
        for step in (4, 5):
            job.save(step)
        cold.advance(8 * DAY)
        cold.until_idle()
        assert cold.tier(2) == "hot"

    def test_what_is_being_read_stays_readable(self, cold: Cold) -> None:
        cold.cooled()
        cold.thawed(1, days=1)
        for hour in range(30):  # a slow reader, who takes tickets again and again
            if hour % 5 == 0:
                assert cold.content(1, weights(1)) == weights(1)
            # Rounds are minutes apart, and a bucket ends a thaw at midnight: a jump over it ends what a round prolongs.
            cold.advance(HOUR)
            cold.round()
        assert cold.tier(1) == "hot"
        cold.advance(2 * READ_LEASE_SECONDS)
        cold.round()
        assert cold.tier(1) == "cold"

    def test_a_thaw_of_what_is_in_the_trash_or_corrupt_is_refused_and_another_project_sees_nothing(
        self, cold: Cold, service_token: str
    ) -> None:
        cold.cooled()
        checkpoint_id = cold.view(1)["id"]
        stranger = cold.service.http(token=service_token)
        for reply in (
            stranger.post(f"/v1/checkpoints/{checkpoint_id}/thaw", json={}),
            stranger.get(f"/v1/checkpoints/{checkpoint_id}/thaw"),
        ):
            with refused("checkpoint_not_found"):
                answer(reply)
        reader = cold.service.http(token=cold.service.token(Scope.READ))
        with refused("forbidden"):
            answer(reader.post(f"/v1/checkpoints/{checkpoint_id}/thaw", json={}))
        assert answer(reader.get(f"/v1/checkpoints/{checkpoint_id}/thaw"))["state"] == "needed"
        for values in ({"state": "trashed"}, {"state": "committed", "health": "corrupt", "health_reason": "lost."}):
            with cold.context.database.transaction() as session:
                session.execute(update(Checkpoint).where(Checkpoint.id == checkpoint_id).values(**values))
            with refused("checkpoint_conflict"):
                answer(cold.http.post(f"/v1/checkpoints/{checkpoint_id}/thaw", json={}))

    @pytest.fixture
    def service_token(self, cold: Cold) -> str:
        cold.service.make_project("elsewhere")
        return cold.service.token(project="elsewhere")


@pytest.mark.parametrize(("kind", "database_url"), [("bucket", "sqlite")], indirect=["database_url"])
class TestABucketsClasses:
    def test_deep_archive_has_no_expedited_thaw_and_says_what_each_speed_takes(self, cold: Cold) -> None:
        cold.rule = {"storage_class": "DEEP_ARCHIVE"}
        cold.cooled()
        with refused("invalid_request") as found:
            cold.thaw(1, speed="expedited")
        assert "12 hours (standard) or 48 hours (bulk)" in found.value.detail
        told = cold.thaw_status(1)
        assert told["takes_seconds"] == {"bulk": 48 * HOUR, "standard": 12 * HOUR}
        assert told["state"] == "needed"

    def test_classes_that_are_read_at_once_keep_a_checkpoint_hot_and_reach_the_archive_later(self, cold: Cold) -> None:
        job = Job(cold.http)
        for step in (1, 2, 3):
            job.save(step)
        cold.policy({"after": "7d", "storage_class": "GLACIER_IR"}, {"after": "90d", "storage_class": "DEEP_ARCHIVE"})
        cold.advance(8 * DAY)
        cold.until_idle()
        assert cold.copies(weights(1)) == [("deleting", "primary"), ("verified", "GLACIER_IR")]
        assert cold.tier(1) == "hot"
        assert cold.content(1, weights(1)) == weights(1)
        cold.collect()
        assert cold.copies(weights(1)) == [("verified", "GLACIER_IR")]
        (told,) = job.begin(4).negotiate(0, [weights(1)])["chunks"]
        assert told["status"] == "present"
        with cold.context.database.transaction() as session:
            session.execute(update(Checkpoint).where(Checkpoint.step == 4).values(state="aborted"))
        cold.advance(90 * DAY)
        cold.until_idle()
        assert cold.copies(weights(1))[-1] == ("cold", "DEEP_ARCHIVE")
        assert cold.tier(1) == "cold"

    def test_nothing_moves_in_a_store_of_another_epoch(self, cold: Cold) -> None:
        job = Job(cold.http)
        for step in (1, 2, 3):
            job.save(step)
        cold.policy()
        cold.advance(8 * DAY)
        object.__setattr__(cold.context, "epoch", cold.context.epoch + 1)  # as after a restore of the database
        report = cold.round()
        assert report.done == report.retired_copies == 0
        assert "does not say" in str(report.error)
        assert cold.copies(weights(1)) == [("verified", "primary")]

    def test_a_catalog_that_is_rebuilt_from_the_bucket_knows_what_is_cold(
        self, cold: Cold, clock: Clock, sqlite_catalogs: SqliteCatalogs, tmp_path: Path
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
            adopt_all(service.context)
            assert again.thawed(1)["state"] == "thawed"
            assert again.content(1, weights(1)) == weights(1)
            again.close()


@pytest.mark.parametrize(("kind", "database_url"), [("bucket", "sqlite")], indirect=["database_url"])
class TestTheCommandLine:
    def test_the_plan_and_a_thaw_in_words(self, cold: Cold, monkeypatch: pytest.MonkeyPatch) -> None:
        def run(*arguments: str, exit_code: int = 0) -> str:
            result = CliRunner().invoke(app, list(arguments))
            assert result.exit_code == exit_code, result.stderr + result.stdout
            return result.stdout + result.stderr

        monkeypatch.setenv("HOLDFAST_URL", cold.service.url)
        monkeypatch.setenv("HOLDFAST_TOKEN", cold.service.token())
        monkeypatch.setenv("COLUMNS", "120")
        cold.rule = {"storage_class": "GLACIER"}
        job = cold.cooled()
        job.save(4)
        plan = run("tiers", "plan", "demo/gpt")
        assert "one of the two newest healthy points" in plan
        assert "to GLACIER: " in plan
        assert "paid for at least 90 days; to be thawed first (5 min expedited, 5 h standard, 12 h bulk)" in plan
        assert json.loads(run("tiers", "plan", "demo/gpt", "--json"))["policy_level"] == "run"
        assert "thaw           needed" in run("thaw", "demo/gpt@1", "--dry-run")
        assert "12 h (bulk, $0.00)" in run("thaw", "demo/gpt@1", "--status")
        assert cold.tier(1) == "cold"
        asked = json.loads(run("thaw", "demo/gpt@1", "--days", "2", "--speed", "bulk", "--json"))
        assert (asked["tier"], asked["speed"]) == ("thawing", "bulk")
        refused_by_name = run("restore-point", "demo/gpt@1", exit_code=7)
        assert "It is being thawed, expected by" in refused_by_name


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
class TestThePolicy:
    def test_what_the_stores_cannot_do_is_refused_with_what_they_can(self, service: RunningService) -> None:
        service.make_project("demo")
        for rule, says in (
            ({"after": "7d", "storage_class": "GLACIER"}, "HOLDFAST_COLD_STORE"),
            ({"after": "7d", "to": "cold"}, "Set HOLDFAST_COLD_STORE"),
        ):
            with refused("invalid_request") as found:
                answer(service.http().put("/v1/projects/demo/policies/tiers", json={"document": {"rules": [rule]}}))
            assert says in found.value.detail

    def test_a_bucket_without_archives_is_found_out(self, s3_service: RunningService) -> None:
        s3_service.make_project("demo")
        document = {"rules": [{"after": "7d", "storage_class": "GLACIER"}]}
        with refused("invalid_request") as found:
            answer(s3_service.http().put("/v1/projects/demo/policies/tiers", json={"document": document}))
        assert "GLACIER" in found.value.detail
