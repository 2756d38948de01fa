"""Quotas of each kind: what a hard one refuses, and what is told once of both hard and soft ones."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from holdfast_protocol.states import QuotaKind
from holdfast_service.db.tables.core import QUOTA_COLUMNS, Project
from holdfast_service.quotas.crossings import Level, level_of
from holdfast_service.quotas.limits import HARD, SOFT
from holdfast_service.rebuild.subjects import put_project
from holdfast_service.records.content import project_record
from holdfast_service.settings import ServiceSettings
from holdfast_service.tallies.controller import reconcile
from tests.service.test_statements_of_a_save import statements_of
from tests.support.interleave import refused
from tests.support.rank import Job, answer
from tests.support.service import RunningService

PATH = "/v1/projects/demo"
PARTS = [b"weights", b"index"]


@pytest.fixture
def settings(settings: ServiceSettings) -> ServiceSettings:
    """However slow the machine is, no heartbeat becomes due between two calls."""
    return settings.model_copy(update={"lost_after_seconds": 86_400.0})


def limit(service: RunningService, **quotas: int | None) -> dict[str, Any]:
    return dict(answer(service.http().put(PATH, json=quotas, headers={"If-Match": "*"})))


def told(service: RunningService) -> list[tuple[str, str]]:
    """The oldest first: the event, and what the quota counts."""
    reconcile(service.context)
    listed = answer(service.http().get("/v1/events", params={"project": "demo"}))["items"]
    quotas = [each for each in reversed(listed) if each["type"].startswith("quota.")]
    return [(each["type"].removeprefix("quota."), each["data"]["quota"]) for each in quotas]


def used(service: RunningService) -> dict[str, int]:
    return {each["kind"]: each["used"] for each in answer(service.http().get(PATH))["quotas"]}


def make_run(http: httpx.Client, name: str) -> httpx.Response:
    return http.put(f"{PATH}/runs/{name}")


@pytest.mark.rule("quota-reserved")
def test_objects_are_refused_with_what_is_left(service: RunningService) -> None:
    limit(service, quota_objects=3)
    save = Job(service.http()).begin(1)
    save.upload(0, PARTS)
    with refused("quota_exceeded") as caught:
        save.negotiate(0, [b"a", b"b"])
    assert caught.value.context == {"quota_objects": 3, "left_objects": 1, "wanted_objects": 2}
    save.negotiate(0, [b"a"])
    assert used(service)["objects"] == 3


@pytest.mark.rule("quota-reserved")
def test_one_checkpoint_more_is_not_begun_and_what_was_begun_and_saved_goes_on(service: RunningService) -> None:
    limit(service, quota_checkpoints=2)
    job = Job(service.http(), world_size=2)
    first, second = job.begin(1), job.begin(2)
    with refused("quota_exceeded") as caught:
        job.begin(3)
    assert caught.value.context == {"quota_checkpoints": 2, "left_checkpoints": 0, "wanted_checkpoints": 1}
    assert "Delete checkpoints" in caught.value.detail
    assert job.begin(2).id == second.id, "another rank of a step that was begun"
    for rank in (0, 1):
        first.write(rank, PARTS)
    assert first.now()["state"] == "committed"
    again = Job(service.http(), after=1)
    assert again.opened["restore_point"]["step"] == 1, "a restore is never refused; it aborts what was uploading"
    assert again.begin(3).view["state"] == "uploading"
    assert used(service)["checkpoints"] == 2


def test_one_run_more_is_not_made_and_those_that_are_there_go_on(service: RunningService) -> None:
    http = service.http()
    job = Job(http, "demo/one")
    limit(service, quota_runs=1)
    for reply in (
        make_run(http, "two"),
        http.post(f"{PATH}/runs/two/attempts", json={"launch_id": "l", "after": 0, "world_size": 1}),
    ):
        assert (reply.status_code, reply.json()["code"]) == (409, "quota_exceeded")
        assert reply.json()["context"] == {"quota_runs": 1, "left_runs": 0, "wanted_runs": 1}
    assert make_run(http, "one").status_code == 200
    assert Job(http, "demo/one", after=job.number).number == 2
    assert used(service)["runs"] == 1
    limit(service, quota_runs=2)
    assert make_run(http, "two").status_code == 201


@pytest.mark.rule("quota-reserved")
def test_rows_are_those_of_copies_and_of_lists_of_which_equal_ones_are_one(service: RunningService) -> None:
    job = Job(service.http())
    job.begin(1).write(0, PARTS)
    assert used(service)["rows"] == 4, "two copies, and a list of two"
    job.begin(2).write(0, PARTS)
    assert used(service)["rows"] == 4, "the same list"
    job.begin(3).write(0, [b"weights", b"another index"])
    assert used(service)["rows"] == 7, "one copy, and a list of two"
    reconcile(service.context)
    assert used(service)["rows"] == 7


@pytest.mark.rule("quota-reserved")
def test_rows_are_refused_where_chunks_are_referred_to_and_not_at_the_seal(service: RunningService) -> None:
    limit(service, quota_rows=6)
    job = Job(service.http())
    job.begin(1).write(0, PARTS)
    assert told(service) == []
    save = job.begin(2)
    more = [b"weights", b"new"]
    with refused("quota_exceeded") as caught:
        save.negotiate(0, more)
    assert caught.value.context == {"quota_rows": 6, "left_rows": 2, "wanted_rows": 3}, "a copy, and a list of two"
    assert told(service) == [("reached", "rows")]
    limit(service, quota_rows=7, soft_quota_rows=7)
    save.upload(0, more)
    limit(service, quota_rows=5, soft_quota_rows=5)
    assert save.seal(0, more)["state"] == "committed"
    assert used(service)["rows"] == 7
    with refused("quota_exceeded"):
        job.begin(3).negotiate(0, [b"weights"])
    assert told(service)[-2:] == [("reached", "rows"), ("reached", "soft rows")]


@pytest.mark.rule("quota-reserved")
def test_a_list_that_is_negotiated_bit_by_bit_is_refused_as_it_is_at_once(service: RunningService) -> None:
    job = Job(service.http())
    job.begin(1).write(0, [b"a", b"b", b"c"])
    limit(service, quota_rows=8)
    save = job.begin(2)
    save.negotiate(0, [b"c"])
    save.negotiate(0, [b"b"])
    with refused("quota_exceeded") as caught:
        save.negotiate(0, [b"a"])
    assert caught.value.context == {"quota_rows": 8, "left_rows": 0, "wanted_rows": 1}, "six, and two to come"
    save.negotiate(0, [b"b"])
    assert save.seal(0, [b"c", b"b"])["state"] == "committed"
    assert used(service)["rows"] == 8


def test_a_project_without_such_a_quota_pays_no_statement(service: RunningService) -> None:
    job = Job(service.http(), world_size=2)
    job.begin(1)
    job.heartbeat(1)
    with statements_of(service.context.database) as without:
        job.begin(2)
    limit(service, quota_checkpoints=100)
    with statements_of(service.context.database) as with_one:
        job.begin(3)
    assert len(with_one) == len(without) + 2, "the lock, and the sum"


def test_a_soft_quota_refuses_nothing_and_each_crossing_is_told_once(service: RunningService) -> None:
    limit(service, soft_quota_runs=5)
    http = service.http()
    for number in range(3):
        make_run(http, f"run-{number}").raise_for_status()
    assert told(service) == []
    make_run(http, "run-3").raise_for_status()
    assert told(service) == told(service) == [("near", "soft runs")]
    for number in range(4, 7):
        make_run(http, f"run-{number}").raise_for_status()
    assert told(service) == told(service) == [("near", "soft runs"), ("reached", "soft runs")]
    for number in range(4):
        answer(http.request("DELETE", f"{PATH}/runs/run-{number}", json={}, headers={"If-Match": "*"}))
    assert told(service)[2:] == [("relieved", "soft runs")]


def test_a_call_that_is_refused_tells_that_the_quota_is_reached(service: RunningService) -> None:
    limit(service, quota_bytes=100)
    save = Job(service.http()).begin(1)
    save.upload(0, [b"x" * 60])
    for _ in range(3):
        with refused("quota_exceeded"):
            save.negotiate(0, [b"y" * 41])
    assert told(service) == told(service) == [("reached", "bytes")], "though 60 of 100 are used"
    limit(service, quota_bytes=1000)
    assert told(service) == [("reached", "bytes"), ("relieved", "bytes")]


def test_a_large_call_that_was_refused_long_before_silences_nothing(service: RunningService) -> None:
    limit(service, quota_bytes=100)
    save = Job(service.http()).begin(1)
    save.upload(0, [b"x" * 40])
    with refused("quota_exceeded"):
        save.negotiate(0, [b"y" * 70])
    assert told(service) == [("reached", "bytes")]
    save.negotiate(0, [b"z" * 45])
    assert told(service) == told(service) == [("reached", "bytes"), ("near", "bytes")]
    with refused("quota_exceeded"):
        save.negotiate(0, [b"y" * 16])
    assert told(service) == [("reached", "bytes"), ("near", "bytes"), ("reached", "bytes")]


def test_a_quota_that_refused_while_nothing_was_used_is_relieved_by_a_call_that_fits(service: RunningService) -> None:
    limit(service, quota_bytes=100)
    save = Job(service.http()).begin(1)
    with refused("quota_exceeded"):
        save.negotiate(0, [b"x" * 101])
    assert told(service) == told(service) == [("reached", "bytes")]
    save.upload(0, [b"x" * 60])
    assert told(service) == told(service) == [("reached", "bytes"), ("relieved", "bytes")]


def test_a_changed_quota_is_told_of_at_once(service: RunningService) -> None:
    http = service.http()
    limit(service)
    for number in range(4):
        make_run(http, f"run-{number}").raise_for_status()
    limit(service, quota_runs=4)
    limit(service, quota_runs=5)
    limit(service, quota_runs=None)
    names = [("reached", "runs"), ("relieved", "runs"), ("near", "runs"), ("relieved", "runs")]
    assert told(service) == names


@pytest.mark.parametrize(
    ("used_now", "before", "level"),
    [
        (79, Level.CALM, Level.CALM),
        (80, Level.CALM, Level.NEAR),
        (99, Level.NEAR, Level.NEAR),
        (100, Level.NEAR, Level.REACHED),
        (99, Level.REACHED, Level.REACHED),
        (75, Level.REACHED, Level.REACHED),
        (75, Level.NEAR, Level.NEAR),
        (74, Level.REACHED, Level.CALM),
        (74, Level.NEAR, Level.CALM),
    ],
)
def test_a_level_ends_well_below_where_it_began(used_now: int, before: Level, level: Level) -> None:
    assert level_of(used_now, 100, before) is level


def test_a_refusal_is_over_when_less_is_used_than_then() -> None:
    assert [level_of(used_now, 100, Level.REACHED, 60) for used_now in (60, 59)] == [Level.REACHED, Level.CALM]
    assert [level_of(used_now, 100, Level.REACHED, 95) for used_now in (76, 74)] == [Level.REACHED, Level.CALM]


def test_a_soft_quota_above_the_hard_one_is_refused(service: RunningService) -> None:
    limit(service, quota_runs=5)
    reply = service.http().put(PATH, json={"soft_quota_runs": 6}, headers={"If-Match": "*"})
    assert (reply.status_code, reply.json()["code"]) == (422, "invalid_request")
    assert limit(service, soft_quota_runs=5)["quotas"][2] == {"kind": "runs", "hard": 5, "soft": 5, "used": 0}


def test_the_version_of_a_project_follows_from_all_its_quotas(service: RunningService) -> None:
    seen = limit(service, quota_bytes=10)["etag"]
    limit(service, quota_objects=5)
    stale = service.http().put(PATH, json={"quota_runs": 1}, headers={"If-Match": seen})
    assert (stale.status_code, stale.json()["code"]) == (412, "edit_conflict")
    (event,) = answer(service.http().get("/v1/audit-events", params={"action": "project.quota", "limit": 1}))["items"]
    assert (event["before"], event["after"]) == ({"quota_objects": None}, {"quota_objects": 5})


def test_metrics_tell_each_quota_and_what_counts_against_it(service: RunningService) -> None:
    limit(service, quota_runs=5, soft_quota_objects=7)
    Job(service.http()).save(1)
    text = service.http().get("/metrics").text
    for line in (
        'holdfast_quota{limit="hard",project="demo",quota="runs"} 5.0',
        'holdfast_quota{limit="soft",project="demo",quota="objects"} 7.0',
        'holdfast_quota_used{project="demo",quota="runs"} 1.0',
        f'holdfast_quota_used{{project="demo",quota="objects"}} {used(service)["objects"]}.0',
    ):
        assert line in text.splitlines()
    assert "holdfast_quota_bytes{" not in text


def test_a_rebuilt_project_has_its_quotas(service: RunningService) -> None:
    assert tuple(QUOTA_COLUMNS) == (*(HARD[kind] for kind in QuotaKind), *(SOFT[kind] for kind in QuotaKind))
    project_id = limit(service, quota_bytes=1, quota_runs=2, soft_quota_checkpoints=3)["id"]
    with service.context.database.transaction() as session:
        record = project_record(session, service.context, project_id, 1)
        assert (record.quota_bytes, record.quotas) == (1, {"quota_runs": 2, "soft_quota_checkpoints": 3})
        project = session.get_one(Project, project_id)
        project.quota_runs = project.soft_quota_checkpoints = None
        session.flush()
        put_project(session, record, service.context.store_id, None)
        assert (project.quota_runs, project.soft_quota_checkpoints) == (2, 3)
