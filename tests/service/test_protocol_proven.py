"""What must stay of a run is counted over points whose bytes somebody other than the client has hashed (rule
two-verified-points).

The store here hashes nothing, as rclone, s3rver and others: each commit rests on copies that nobody has read yet.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

import holdfast_service.retention.purge
from holdfast_client.cli.main import app
from holdfast_protocol.states import Scope
from holdfast_service.retention.controller import reconcile as retain
from holdfast_service.retention.purge import PurgeReport
from holdfast_service.scrub.controller import reconcile as scrub
from holdfast_service.scrub.verify import reconcile as prove
from tests.service.conftest import Clock
from tests.support.interleave import hold_after, in_background, refused
from tests.support.rank import Job, answer
from tests.support.retention import HOUR, RUN, apply, expiring, pin, plan, prune, purge, put_policy, states
from tests.support.rot import flip, key_of
from tests.support.service import RunningService

pytestmark = pytest.mark.rule("two-verified-points")
DAY = 24 * HOUR


@pytest.fixture
def job(service: RunningService) -> Job:
    store = service.context.store
    assert store.capabilities is not None
    store.capabilities = replace(store.capabilities, sha256_enforced=False)
    return Job(service.http())


def content(step: int) -> bytes:
    return f"weights of step {step}".encode() * 100


def save(job: Job, *steps: int) -> list[str]:
    """Their ids."""
    return [job.save(step, content=content(step))["id"] for step in steps]


def flip_on_the_way(service: RunningService, *steps: int) -> None:
    """What a faulty proxy did to the PUT: the client has sent the right bytes."""
    for step in steps:
        flip(service.context.store, key_of(service, content(step)))


def reasons(shown: dict[str, Any]) -> dict[int, list[str]]:
    """By step, in words."""
    return {one["step"]: [reason["detail"] for reason in one["reasons"]] for one in shown["checkpoints"]}


def latest(service: RunningService) -> Any:
    return answer(service.http().get(f"{RUN}/restore-point"))


def test_the_only_proven_points_outlive_newer_ones_that_nobody_has_read(
    service: RunningService, job: Job, clock: Clock
) -> None:
    """The trial's: an honest client, a proxy that flips a bit of each PUT, a backlog of proofs, and keep_last 1."""
    save(job, 1, 2, 3)
    prove(service.context)
    save(job, 4, 5, 6)
    flip_on_the_way(service, 4, 5, 6)
    put_policy(service, keep_last=1)
    shown = reasons(plan(service))
    assert shown[3] == ["the newest proven point"]
    assert shown[2] == ["one of the two newest proven points"]
    retain(service.context)
    clock.advance(HOUR + 1)
    purge(service)
    assert states(service) == {
        1: "deleted",
        2: "committed",
        3: "committed",
        4: "deleted",
        5: "committed",
        6: "committed",
    }
    assert len(prove(service.context).corrupt_checkpoints) == 2
    assert latest(service)["restore_point"]["step"] == 3


def test_while_nothing_is_proven_every_healthy_point_stays_and_says_why(service: RunningService, job: Job) -> None:
    ids = save(job, 1, 2, 3, 4)
    put_policy(service, keep_last=1)
    shown = plan(service)
    assert expiring(shown) == []
    assert reasons(shown)[1] == ["not proven yet, and 0 of 2 points of the run are"]
    with refused("checkpoint_protected"):
        prune(service, checkpoint_ids=[ids[0]])
    prove(service.context)
    assert expiring(plan(service)) == [ids[1], ids[0]]


def test_what_nobody_has_read_is_shown_as_unproven(
    service: RunningService, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_URL", service.url)
    monkeypatch.setenv("HOLDFAST_TOKEN", service.token(Scope.READ))

    def listed() -> dict[int, bool]:
        return {one["step"]: one["unproven"] for one in answer(service.http().get(f"{RUN}/checkpoints"))["items"]}

    def said(*command: str) -> str:
        return CliRunner().invoke(app, list(command), env={"COLUMNS": "200"}).stdout

    save(job, 1)
    prove(service.context)
    save(job, 2)
    job.begin(3)
    assert listed() == {1: False, 2: True, 3: False}
    assert [word for word in said("checkpoints", "list", "demo/gpt").splitlines() if "unproven" in word] == [
        line for line in said("checkpoints", "list", "demo/gpt").splitlines() if line.startswith("demo/gpt@2#")
    ]
    assert "proven" not in said("checkpoints", "show", "demo/gpt@1")
    assert "not yet: the service has still to read back" in said("checkpoints", "show", "demo/gpt@2")
    assert answer(service.http().get(f"{RUN}/checkpoints/2"))["unproven"]
    prove(service.context)
    assert listed() == {1: False, 2: False, 3: False}


def test_a_person_is_refused_the_newest_proven_point_by_name(service: RunningService, job: Job) -> None:
    ids = save(job, 1, 2, 3)
    prove(service.context)
    save(job, 4, 5)
    with refused("checkpoint_protected") as refusal:
        prune(service, checkpoint_ids=[ids[2]])
    assert "(the newest proven point)" in refusal.value.detail
    prune(service, checkpoint_ids=[ids[0]])
    job.end()
    assert len(prune(service, filter={}, all_of_run=True)["trashed"]) == 4


def expired(service: RunningService, job: Job) -> None:
    """Step 1 is in the trash, and steps 2 and 3 are proven."""
    save(job, 1, 2, 3)
    prove(service.context)
    put_policy(service, keep_last=1)
    assert [one["step"] for one in apply(service, plan(service))["trashed"]] == [1]


def find_bad(service: RunningService, clock: Clock, step: int) -> None:
    flip_on_the_way(service, step)
    clock.advance(30 * DAY)
    assert scrub(service.context).bad == 1


def test_a_purge_waits_when_a_point_that_was_counted_is_found_bad(
    service: RunningService, job: Job, clock: Clock
) -> None:
    expired(service, job)
    find_bad(service, clock, 3)
    assert purge(service) == PurgeReport(short_runs=1)
    assert states(service)[1] == "trashed"
    with service.context.database.read() as session:
        assert holdfast_service.retention.purge.backlog(session, service.context).due == 0
    save(job, 4)
    assert purge(service) == PurgeReport(short_runs=1)
    prove(service.context)
    assert purge(service) == PurgeReport(done=1)


def test_a_point_that_is_found_bad_between_the_look_and_the_lock_is_seen(
    service: RunningService, job: Job, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    expired(service, job)
    gate = hold_after(monkeypatch, holdfast_service.retention.purge, "_ids")
    clock.advance(HOUR + 1)
    with in_background(gate) as sides:
        purging = sides.submit(purge, service)
        gate.wait_until_reached()
        find_bad(service, clock, 2)
        gate.open()
        assert purging.result() == PurgeReport()
    assert states(service)[1] == "trashed"


def test_the_last_healthy_point_stays_in_the_trash_when_what_was_bad_is_cleared_away(
    service: RunningService, job: Job, clock: Clock
) -> None:
    expired(service, job)
    find_bad(service, clock, 2)
    find_bad(service, clock, 3)
    job.end()
    assert [one["step"] for one in prune(service, filter={"health": ["corrupt"]})["trashed"]] == [3, 2]
    clock.advance(72 * HOUR + 1)
    purge(service)
    assert states(service)[1] == "trashed", "nobody has asked for it to go, and the run has nothing else"


def test_a_healthy_point_that_a_person_deleted_stays_while_all_others_are_bad_and_pinned(
    service: RunningService, job: Job, clock: Clock
) -> None:
    _, second, third = save(job, 1, 2, 3)
    prove(service.context)
    assert [one["step"] for one in prune(service, filter={"before_step": 2})["trashed"]] == [1]
    find_bad(service, clock, 2)
    find_bad(service, clock, 3)
    for each in (second, third):
        pin(service, each)
    purge(service)
    assert states(service)[1] == "trashed", "the run was to keep two healthy points when it was deleted"


def test_nothing_has_to_be_kept_for_a_run_that_a_person_deleted(
    service: RunningService, job: Job, clock: Clock
) -> None:
    expired(service, job)
    job.end()
    prune(service, filter={}, all_of_run=True)
    clock.advance(72 * HOUR + 1)
    assert purge(service) == PurgeReport(done=3)
