"""What checkpoints take up, figure by figure, against a count of its own; and what that costs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import select, text, update

from holdfast_protocol.states import CheckpointState, CopyState, Scope
from holdfast_protocol.usage import DEFAULT_PRICES, GIB
from holdfast_service.db import cached_read
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Checkpoint, Copy, Store
from holdfast_service.db.tables.operations import StoreMaintenance
from tests.support.interleave import refused
from tests.support.rank import Job, Refused, answer, digest_of
from tests.support.service import RunningService
from tests.support.tallies import take_up

PARTS = ("committed_bytes", "arriving_bytes", "trashed_bytes", "pending_collection_bytes")


def usage(service: RunningService, what: str, *, token: str = "") -> dict[str, Any]:
    take_up(service)
    project, _, run = what.partition("/")
    path = f"/v1/projects/{project}" + (f"/runs/{run}" if run else "")
    return answer(service.http(token=token).get(f"{path}/usage"))  # type: ignore[no-any-return]


def set_state(service: RunningService, checkpoint_id: str, **values: Any) -> None:
    with service.context.database.transaction() as session:
        session.execute(update(Checkpoint).where(Checkpoint.id == checkpoint_id).values(**values))


@pytest.fixture
def scene(service: RunningService) -> dict[str, Any]:
    """Of everything something: what is shared by committed and trashed, pinned and held, what arrives, and garbage."""
    job = Job(service.http())
    views = {}
    for step, chunks in {
        100: [b"base" * 100, b"one" * 10],
        200: [b"base" * 100, b"two" * 20],
        300: [b"base" * 100, b"three" * 30],
        400: [b"only in the trash" * 40],
        500: [b"nobody's" * 50],
    }.items():
        views[step] = job.begin(step).write(0, [*chunks, f"index {step}".encode()])
    other = Job(service.http(), "demo/fine-tuned")
    views["other"] = other.begin(10).write(0, [b"base" * 100, b"adapter" * 7, b"index"])
    set_state(service, views[300]["id"], state=CheckpointState.TRASHED)
    set_state(service, views[400]["id"], state=CheckpointState.TRASHED)
    set_state(service, views[500]["id"], state=CheckpointState.DELETED)
    with service.context.database.read() as session:
        now = database_now(session)
    set_state(service, views[100]["id"], pinned_at=now, pin_reason="mine")
    set_state(service, views[200]["id"], pinned_at=now, pinned_until=now - timedelta(seconds=1))
    answer(service.http().post(f"/v1/checkpoints/{views[400]['id']}/holds", json={"reason": "evidence"}))
    answer(service.http().post(f"/v1/checkpoints/{views[100]['id']}/holds", json={"reason": "evidence"}))
    underway = job.begin(600)
    underway.upload(0, [b"uploaded" * 60])
    underway.negotiate(0, [b"under way" * 70])
    with service.context.database.transaction() as session:
        session.execute(update(Copy).where(Copy.stored_digest == digest_of(b"two" * 20)).values(storage_class="rare"))
        session.execute(
            update(Copy)
            .where(Copy.stored_digest == digest_of(b"one" * 10))
            .values(storage_class="archive", state=CopyState.COLD)
        )
    return views


def counted_by_hand(service: RunningService, run: str | None = None) -> dict[str, int]:
    """From the bare rows, chunk by chunk, in Python: nothing of the query under test."""
    with service.context.database.read() as session:
        rows = session.execute(
            text(
                "SELECT c.id, c.state, c.pinned_at, c.pinned_until, r.name, e.chunk_id FROM checkpoints c "
                "JOIN runs r ON r.id = c.run_id JOIN shards s ON s.checkpoint_id = c.id "
                "JOIN chunk_list_entries e ON e.chunk_list_id = s.chunk_list_id"
            )
        ).all()
        negotiated = session.execute(
            text(
                "SELECT sc.chunk_id, r.name FROM shard_chunks sc JOIN shards s ON s.id = sc.shard_id "
                "JOIN checkpoints c ON c.id = s.checkpoint_id JOIN runs r ON r.id = c.run_id "
                "WHERE c.state = 'uploading'"
            )
        ).all()
        held = set(session.scalars(text("SELECT checkpoint_id FROM holds WHERE released_at IS NULL")))
        copies = session.execute(text("SELECT chunk_id, state, stored_bytes FROM copies WHERE state <> 'gone'")).all()
    mine = [row for row in rows if run in (None, row.name)]
    uses: dict[str, set[int]] = {
        "committed": {row.chunk_id for row in mine if row.state == "committed"},
        "trashed": {row.chunk_id for row in mine if row.state == "trashed"},
        "pinned": {row.chunk_id for row in mine if row.pinned_at and not row.pinned_until},
        "held": {row.chunk_id for row in mine if row.id in held},
        "arriving": {row.chunk_id for row in negotiated if run in (None, row.name)},
    }
    size = dict.fromkeys([*PARTS, "stored_bytes", "pinned_bytes", "held_bytes"], 0)
    for chunk_id, state, stored in copies:
        if run is not None and not any(chunk_id in uses[kind] for kind in ("committed", "trashed", "arriving")):
            continue
        kind = next(
            (
                kind
                for kind, is_so in (
                    ("arriving", state == "pending"),
                    ("committed", chunk_id in uses["committed"]),
                    ("arriving", chunk_id in uses["arriving"]),
                    ("trashed", chunk_id in uses["trashed"]),
                )
                if is_so
            ),
            "pending_collection",
        )
        size[f"{kind}_bytes"] += stored
        size["stored_bytes"] += stored
        size["pinned_bytes"] += stored if chunk_id in uses["pinned"] else 0
        size["held_bytes"] += stored if chunk_id in uses["held"] else 0
    return size


@pytest.mark.usefixtures("scene")
def test_each_figure_is_what_a_count_by_hand_gives_and_the_parts_add_up(service: RunningService) -> None:
    for run in (None, "gpt", "fine-tuned"):
        compare_with_a_count_by_hand(service, run)


def compare_with_a_count_by_hand(service: RunningService, run: str | None) -> None:
    shown = usage(service, "demo" if run is None else f"demo/{run}")
    expected = counted_by_hand(service, run)
    assert {name: shown[name] for name in expected} == expected
    assert sum(shown[part] for part in PARTS) == shown["stored_bytes"]
    for name in ("stored_bytes", *PARTS, "pinned_bytes", "held_bytes"):
        assert sum(stored[name] for stored in shown["stores"]) == shown[name]
    assert shown["held_bytes"] > 0 or run == "fine-tuned"
    if run is None:
        project = answer(service.http().get("/v1/projects/demo"))
        assert [shown[name] for name in ("stored_bytes", "logical_bytes", "deduplicated_bytes")] == [
            project[name] for name in ("stored_bytes", "logical_bytes", "deduplicated_bytes")
        ]
        assert shown["trashed_bytes"] == len(b"three" * 30 + b"index 300" + b"only in the trash" * 40 + b"index 400")
        assert shown["pending_collection_bytes"] == len(b"nobody's" * 50 + b"index 500")
        assert shown["arriving_bytes"] == len(b"uploaded" * 60 + b"under way" * 70)
        classes = {(one["storage_class"], one["tier"]): one["stored_bytes"] for one in shown["stores"]}
        assert (classes["rare", "hot"], classes["archive", "cold"]) == (60, 30)


@pytest.mark.usefixtures("scene")
def test_orphans_are_those_of_the_last_sweep_and_stand_beside(service: RunningService) -> None:
    assert usage(service, "demo")["orphaned_bytes"] is None
    with service.context.database.transaction() as session:
        now = database_now(session)
        found = {
            "store": "primary",
            "swept_at": now.isoformat(),
            "dry_run": False,
            "projects": [
                {"project": name, "objects": 9, "bytes": 900, "orphans": 2, "orphan_bytes": size, "missing": 0}
                | {"deleted": 1, "deleted_bytes": 100}
                for name, size in (("demo", 223), ("other", 4567))
            ],
            "due_orphans": 2,
            "due_bytes": 200,
            "deleted": 2,
            "deleted_bytes": 200,
            "kept": 0,
            "stopped": None,
        }
        session.add(StoreMaintenance(store_id=service.context.store_id, swept_at=now, sweep=found))
        detached = Store(kind="posix", url="posix:///detached", created_at=now)
        session.add(detached)
        session.flush()
        session.add(StoreMaintenance(store_id=detached.id, swept_at=now, sweep=found | {"store": "second"}))
    before = usage(service, "demo")
    assert before["orphaned_bytes"] == 123, "what the sweep has deleted is gone"
    told = {
        sample.labels["project"]: sample.value
        for family in text_string_to_metric_families(service.http().get("/metrics").text)
        for sample in family.samples
        if sample.name == "holdfast_bytes" and sample.labels["kind"] == "orphaned"
    }
    assert told == {"demo": 123, "other": 4467}
    assert before["stored_bytes"] == counted_by_hand(service)["stored_bytes"]
    assert usage(service, "demo/gpt")["orphaned_bytes"] is None


@pytest.mark.usefixtures("scene")
def test_prometheus_is_told_the_same_figures(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_read, "LONGEST_SECONDS", 0.0)
    take_up(service)
    seen = {
        sample.labels["kind"]: sample.value
        for family in text_string_to_metric_families(service.http().get("/metrics").text)
        for sample in family.samples
        if sample.name == "holdfast_bytes" and sample.labels["store"] == "primary"
    }
    expected = counted_by_hand(service)
    assert seen.keys() == {"committed", "arriving", "trashed", "pending_collection", "pinned", "held"}
    assert seen == {kind: expected[f"{kind}_bytes"] for kind in seen}


def test_a_projects_token_sees_its_own_usage_only(service: RunningService) -> None:
    Job(service.http()).save(100)
    service.make_project("other")
    mine = service.token(Scope.READ, project="other")
    shown = answer(service.http(token=mine).get("/v1/usage"))["items"]
    assert [one["project"] for one in shown] == ["other"]
    assert [one["project"] for one in answer(service.http().get("/v1/usage"))["items"]] == ["demo", "other"]
    with refused("forbidden"):
        usage(service, "demo", token=mine)


def test_cost_is_bytes_times_prices_and_prices_are_the_administrators(service: RunningService) -> None:
    job = Job(service.http())
    job.save(100, content=b"x" * 1000)
    http = service.http()
    with service.context.database.transaction() as session:
        session.execute(update(Copy).where(Copy.stored_bytes == 1000).values(storage_class="archive", stored_bytes=GIB))
        session.execute(update(Copy).where(Copy.stored_bytes == 1006).values(stored_bytes=3 * GIB))
    free = answer(http.get("/v1/projects/demo/cost"))
    assert (free["per_month"], free["unpriced_bytes"]) == (0.0, GIB), "a filesystem has no archive, and no price for it"
    shown = answer(http.get("/v1/prices"))
    assert (shown["is_default"], shown["prices"]) == (True, DEFAULT_PRICES.model_dump(mode="json"))
    wanted = {
        "as_of": "2026-11-01",
        "source": "our own",
        "currency": "EUR",
        "prices": [
            {"store_kind": "posix", "storage_class": None, "per_gib_month": 0.5},
            {"store_kind": "posix", "storage_class": "archive", "per_gib_month": 0.25},
        ],
    }
    with pytest.raises(Refused, match="edit_needs_version"):
        answer(http.put("/v1/prices", json=wanted))
    seen = {"If-Match": shown["etag"]}
    assert answer(http.put("/v1/prices", json=wanted, headers=seen))["prices"] == wanted
    with pytest.raises(Refused, match="edit_conflict"):
        answer(http.put("/v1/prices", json=wanted | {"source": "another contract"}, headers=seen))
    assert answer(http.put("/v1/prices", json=wanted))["updated_by"]
    cost = answer(http.get("/v1/projects/demo/runs/gpt/cost"))
    assert (cost["per_month"], cost["currency"], cost["unpriced_bytes"]) == (3 * 0.5 + 0.25, "EUR", 0)
    assert [event["action"] for event in answer(http.get("/v1/audit-events?action=prices."))["items"]] == ["prices.put"]
    for token, code in (
        (service.token(Scope.READ, Scope.OPERATE), "forbidden"),
        (service.token(project="demo"), "forbidden"),
    ):
        with refused(code):
            answer(service.http(token=token).put("/v1/prices", json=wanted))
    twice = wanted | {"prices": [wanted["prices"][0]] * 2}  # type: ignore[index]
    with refused("invalid_request"):
        answer(http.put("/v1/prices", json=twice))
    with service.context.database.read() as session:
        assert session.scalar(select(text("count(*)")).select_from(text("price_lists"))) == 1


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_what_is_being_thawed_is_in_the_line_of_its_storage_class(service: RunningService) -> None:
    Job(service.http()).save(100, content=b"x" * 1000)
    with service.context.database.transaction() as session:
        for size, state in ((1000, CopyState.COLD), (1006, CopyState.THAWING)):
            archived = {"storage_class": "archive", "state": state}
            session.execute(update(Copy).where(Copy.stored_bytes == size).values(**archived))
    cost = answer(service.http().get("/v1/projects/demo/runs/gpt/cost"))
    assert [(line["storage_class"], line["stored_bytes"]) for line in cost["lines"]] == [("archive", 2006)]
    assert len(usage(service, "demo/gpt")["stores"]) == 2


def test_a_forecast_counts_with_the_runs_own_rhythm_and_refuses_what_is_no_policy(service: RunningService) -> None:
    job = Job(service.http())
    http = service.http()
    path = "/v1/projects/demo/runs/gpt/cost/forecast"
    for step in (100, 200, 300):
        job.begin(step).write(0, [b"base" * 1000, f"{step}".encode() * 100, f"index {step}".encode()])
        if step == 100:
            with refused("invalid_request"):
                answer(http.post(path, json={}))
    with service.context.database.transaction() as session:
        now = database_now(session)
        for step in (100, 200, 300):
            session.execute(
                update(Checkpoint).where(Checkpoint.step == step).values(committed_at=now + timedelta(hours=step / 100))
            )
    prices = DEFAULT_PRICES.model_dump(mode="json")
    prices["prices"][-1]["per_gib_month"] = 2.0
    answer(http.put("/v1/prices", json=prices, headers={"If-Match": "*"}))
    found = answer(http.post(path, json={"retention": {"keep_last": 4}}))
    assert (found["save_interval_seconds"], found["bytes_per_save"], found["shared_bytes"]) == (3600, 309, 4000)
    assert (found["kept_checkpoints"], found["trashed_checkpoints"], found["grows_per_month"]) == (4, 1, 0)
    assert found["per_month"] == pytest.approx((4000 + 5 * 309) * 2.0 / GIB)
    kept = answer(http.post(path, json={"retention": {"keep_every_steps": 100}}))
    assert (kept["kept_checkpoints"], kept["trashed_checkpoints"]) == (365 * 24, 0), "nothing expires"
    endless = answer(http.post(path, json={}))
    assert (endless["kept_checkpoints"], endless["retention"], endless["trashed_checkpoints"]) == (365 * 24, None, 0)
    assert endless["grows_per_month"] == pytest.approx(30 * 24 * 309 * 2.0 / GIB)
    with refused("invalid_request"):
        answer(http.post(path, json={"retention": {"keep_lots": 4}}))


def test_a_forecast_says_how_many_bytes_have_no_price(service: RunningService) -> None:
    job, http = Job(service.http()), service.http()
    for step in (100, 200):
        job.save(step, content=b"x" * 1000)
    path = "/v1/projects/demo/runs/gpt/cost/forecast"
    priced = answer(http.post(path, json={}))
    assert (priced["unpriced_bytes"], any("without a price" in each for each in priced["limits"])) == (0, False)
    prices = DEFAULT_PRICES.model_dump(mode="json") | {"prices": [{"store_kind": "s3", "per_gib_month": 1.0}]}
    answer(http.put("/v1/prices", json=prices, headers={"If-Match": "*"}))
    found = answer(http.post(path, json={}))
    assert found["unpriced_bytes"] == sum(line["bytes"] for line in found["lines"]) > 0
    assert found["per_month"] == found["grows_per_month"] == 0
    assert any("without a price" in each for each in found["limits"])
