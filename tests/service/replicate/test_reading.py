"""The second store gives back what it holds: to readers, for a restore point, in a drill (rule
store-outage-degrades)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from holdfast_client.client import Client
from holdfast_client.settings import ClientSettings
from holdfast_protocol.copies import DrillResult
from holdfast_protocol.states import CopyState, StoreRole
from holdfast_service.background.registry import OPERATION_KINDS
from holdfast_service.copies.predicates import object_key
from holdfast_service.copies.read_back import claim_first, let_go
from holdfast_service.db.tables.core import Copy
from holdfast_service.operations.controller import reconcile
from tests.service.conftest import Clock
from tests.support.little_checkpoints import save_little_checkpoint
from tests.support.rank import Job, Refused, answer, digest_of, redeem
from tests.support.replicated import CONTENT, SECOND, file_of, put_policy, replicate
from tests.support.retention import HOUR, purge
from tests.support.rot import attached, copies_of, flip, overwrite, states_of
from tests.support.service import RunningService


def _read(service: RunningService, checkpoint_id: str, **body: Any) -> dict[str, Any]:
    digests = {"digests": [digest_of(CONTENT)]}
    reply = answer(service.http().post(f"/v1/checkpoints/{checkpoint_id}/reads", json=digests | body))
    ticket: dict[str, Any] = reply["chunks"][0]
    return ticket


def _bytes_of(service: RunningService, ticket: dict[str, Any]) -> bytes:
    return redeem(service.http(), ticket).content


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.rule("store-outage-degrades")
def test_a_reader_is_sent_to_the_second_store_when_the_first_is_silent_avoided_or_has_lost_the_chunk(
    service: RunningService, saved: dict[str, Any], tmp_path: Path
) -> None:
    assert not _read(service, saved["id"])["elsewhere"]
    replicate(service)
    ticket = _read(service, saved["id"])
    assert (ticket["store"], ticket["elsewhere"], _bytes_of(service, ticket)) == ("primary", True, CONTENT)
    ticket = _read(service, saved["id"], avoid_stores=["primary"])
    assert (ticket["store"], ticket["elsewhere"], _bytes_of(service, ticket)) == ("second", False, CONTENT)

    (tmp_path / "store").rename(tmp_path / "not mounted")
    service.context.store_watch.reconcile()
    ticket = _read(service, saved["id"])
    assert (ticket["store"], _bytes_of(service, ticket)) == ("second", CONTENT)
    offer = answer(service.http().post("/v1/mount-proofs"))
    assert (offer["path"], offer["unavailable"], len(offer["others"])) == (None, True, 1)
    proof = {"proof_id": offer["others"][0]["proof_id"], "content": Path(offer["others"][0]["path"]).read_text()}
    ticket = _read(service, saved["id"], other_mount_proofs=[proof])
    assert (ticket["kind"], Path(ticket["path"]).read_bytes()) == ("file", CONTENT)
    assert service.http().get("/readyz").status_code == 200, "a service that can still give back is not asked any more"
    (tmp_path / "not mounted").rename(tmp_path / "store")
    service.context.store_watch.reconcile()

    file_of(service, StoreRole.PRIMARY, copies_of(service, CONTENT)[0]).unlink()
    report = {"digest": digest_of(CONTENT), "problem": "missing"}
    verdict = answer(service.http().post(f"/v1/checkpoints/{saved['id']}/chunk-reports", json=report))
    assert (verdict["readable"], verdict["corrupt_checkpoints"]) == (True, [])
    assert states_of(service, CONTENT) == [CopyState.BAD]
    assert _bytes_of(service, _read(service, saved["id"])) == CONTENT


@pytest.mark.rule("store-outage-degrades")
def test_while_the_first_store_is_unavailable_the_restore_point_is_what_the_second_holds_whole(
    service: RunningService, saved: dict[str, Any], tmp_path: Path
) -> None:
    replicate(service)
    job = Job(service.http(), after=1)
    job.resumed_from(saved["id"])
    newer = job.save(200, content=b"newer")
    url = "/v1/projects/demo/runs/gpt/restore-point"
    assert answer(service.http().get(url))["restore_point"]["step"] == 200
    (tmp_path / "store").rename(tmp_path / "not mounted")
    service.context.store_watch.reconcile()
    decision = answer(service.http().get(url))
    assert decision["restore_point"]["step"] == 100
    assert [(each["step"], each["reason"]) for each in decision["skipped"]] == [(200, "unavailable")]
    assert "primary store has not answered" in decision["note"]
    older_client = service.http(headers=[("Holdfast-Protocol", "1.1")])
    assert answer(older_client.get(url))["skipped"][0]["reason"] == "cold", "it does not know the word"
    named = answer(service.http().get(url, params={"selector": newer["id"]}))
    assert named["restore_point"]["step"] == 200, "what was named never falls back"
    opened = Job(service.http(), after=2).opened
    assert (opened["restore_point"]["step"], opened["note"] != "") == (100, True)


def _take_silence_for_short(service: RunningService, seconds: float = 3600) -> None:
    """A store that does not answer is waited for so long."""
    context = service.context
    object.__setattr__(context, "settings", context.settings.model_copy(update={"store_unavailable_seconds": seconds}))


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.rule("report-is-suspicion")
@pytest.mark.parametrize("rots", [True, False])
def test_a_chunk_is_not_called_lost_while_a_store_that_is_waited_for_may_have_it(
    service: RunningService, saved: dict[str, Any], tmp_path: Path, *, rots: bool
) -> None:
    """The second store has it rotten, or has not got it yet: a job that hears that it is lost takes an older one."""
    if rots:
        replicate(service)
        (copy,) = copies_of(service, CONTENT, SECOND)
        flip(attached(service, SECOND).store, object_key(copy.project_id, copy.stored_digest, copy))
    _take_silence_for_short(service)
    (tmp_path / "store").rename(tmp_path / "not mounted")
    service.context.store_watch.reconcile()

    def report() -> Any:
        said = {"digest": digest_of(CONTENT), "problem": "mismatch"}
        return answer(service.http().post(f"/v1/checkpoints/{saved['id']}/chunk-reports", json=said))

    with pytest.raises(Refused, match="503 store_unavailable"):
        report()
    assert states_of(service, CONTENT, SECOND) == ([CopyState.BAD] if rots else [])
    _take_silence_for_short(service, 0)
    assert not report()["readable"], "the restore point is an older one by now"
    (tmp_path / "not mounted").rename(tmp_path / "store")
    service.context.store_watch.reconcile()
    verdict = report()
    assert (verdict["readable"], verdict["corrupt_checkpoints"]) == (True, [])


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_short_silence_does_not_cost_training_time(
    service: RunningService, saved: dict[str, Any], tmp_path: Path
) -> None:
    """An older checkpoint is taken only when the first store was silent for a while."""
    replicate(service)
    Job(service.http(), after=1).save(200, content=b"newer")
    _take_silence_for_short(service)
    context = service.context
    (tmp_path / "store").rename(tmp_path / "not mounted")
    context.store_watch.reconcile()
    decision = answer(service.http().get("/v1/projects/demo/runs/gpt/restore-point"))
    assert (decision["restore_point"]["step"], decision["note"]) == (200, "")


def _drill(service: RunningService, run: str = "gpt", **body: Any) -> dict[str, Any]:
    started = answer(service.http().post(f"/v1/projects/demo/runs/{run}/drills", json=body))
    reconcile(service.context, kinds=OPERATION_KINDS)
    ended: dict[str, Any] = answer(service.http().get(f"/v1/operations/{started['id']}"))
    return ended


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_drill_tells_why_the_second_store_does_not_give_it_back(
    service: RunningService, saved: dict[str, Any]
) -> None:
    ended = _drill(service)
    assert ended["state"] == "failed"
    assert "not whole in the stores that answer" in ended["error"]
    replicate(service)
    (copy,) = copies_of(service, CONTENT, SECOND)
    key, second = object_key(copy.project_id, copy.stored_digest, copy), attached(service, SECOND).store
    flip(second, key)
    ended = _drill(service)
    assert ended["state"] == "failed"
    assert digest_of(CONTENT)[:12] in ended["error"]
    assert states_of(service, CONTENT, SECOND) == [CopyState.SUSPECT], "what the drill found rotten is not looked at"
    overwrite(second, key, CONTENT)
    with service.context.database.transaction() as session:
        session.execute(update(Copy).where(Copy.id == copy.id).values(state=CopyState.VERIFIED))
    ended = _drill(service)
    assert "cannot be put together" in ended["error"], "its index is no index"
    of_second = 'holdfast_drill_succeeded{project="demo",run="gpt",store="second"} 0.0'
    assert of_second in service.http().get("/metrics").text
    assert service.http().post("/v1/projects/demo/runs/gpt/drills", json={"store": "cold"}).status_code == 422


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_what_a_drill_found_rotten_stays_suspect_when_a_process_gives_its_lease_of_it_back(
    service: RunningService, saved: dict[str, Any]
) -> None:
    """It had claimed the copy before, and its store did not answer."""
    replicate(service)
    (copy,) = copies_of(service, CONTENT, SECOND)
    flip(attached(service, SECOND).store, object_key(copy.project_id, copy.stored_digest, copy))
    with service.context.database.transaction() as session:
        claimed = claim_first(session, Copy.id == copy.id, seconds=600)
    assert claimed is not None
    assert _drill(service)["state"] == "failed"
    let_go(service.context, claimed)
    assert states_of(service, CONTENT, SECOND) == [CopyState.SUSPECT]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_drill_of_a_named_checkpoint_restores_no_other_and_is_found_by_it(
    service: RunningService, saved: dict[str, Any]
) -> None:
    http = service.http()
    job = Job(http, after=1)
    job.resumed_from(saved["id"])
    newer = job.save(200, content=b"newer")
    best = {"metrics": {"loss": {"value": 0.1}}}
    answer(http.patch(f"/v1/checkpoints/{saved['id']}", json=best, headers={"If-Match": "*"}))
    replicate(service)
    for selector in (saved["id"], "100", "best:loss"):
        ended = _drill(service, selector=selector)
        # The content of this test is no index, which is found when all of it was read.
        assert "Every chunk of step 100 has its digest" in ended["error"], selector
    assert "Every chunk of step 200" in _drill(service)["error"]

    def drills_of(checkpoint_id: str) -> list[str]:
        listed = answer(http.get("/v1/operations", params={"kind": "drill", "checkpoint_id": checkpoint_id}))
        return [each["arguments"]["selector"] for each in listed["items"]]

    assert drills_of(saved["id"]) == ["best:loss", "100", saved["id"]]
    assert drills_of(newer["id"]) == ["latest"]

    unknown = http.post("/v1/projects/demo/runs/gpt/drills", json={"selector": f"ck_{'0' * 32}"})
    assert unknown.status_code == 404
    assert unknown.json()["code"] == "checkpoint_not_found"


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_the_age_of_a_checkpoint_that_a_person_names_misses_no_objective(service: RunningService, clock: Clock) -> None:
    with Client(ClientSettings(url=service.url, token=service.token())) as client:
        save_little_checkpoint(client, "demo")
        clock.advance(7200)
        save_little_checkpoint(client, "demo")
    put_policy(service)
    while replicate(service).done:
        pass
    objectives = {"document": {"rpo_seconds": 60, "rto_seconds": 600}}
    answer(service.http().put("/v1/projects/demo/policies/objectives", json=objectives))
    _, older = answer(service.http().get("/v1/projects/demo/runs/doctor/checkpoints"))["items"]
    results = [_drill(service, run="doctor", selector=selector)["result"] for selector in (older["id"], "latest")]
    named, latest = (DrillResult.model_validate(each) for each in results)
    assert named.rpo_seconds >= 7200
    assert (named.rpo_objective_seconds, named.rto_objective_seconds, named.missed) == (None, 600, [])
    assert (latest.rpo_seconds, latest.rpo_objective_seconds) == (0, 60)


def test_a_drill_from_the_first_store_hides_no_failed_one_from_the_second(service: RunningService) -> None:
    with Client(ClientSettings(url=service.url, token=service.token())) as client:
        save_little_checkpoint(client, "demo")
    assert _drill(service, run="doctor")["state"] == "failed", "nothing was copied"
    assert _drill(service, run="doctor", store="primary")["state"] == "done"
    assert _drills_told(service) == {"primary": 1.0, "second": 0.0}


def test_a_drill_from_the_first_store_lets_none_from_the_second_be_forgotten(
    service: RunningService, clock: Clock
) -> None:
    with Client(ClientSettings(url=service.url, token=service.token())) as client:
        save_little_checkpoint(client, "demo")
    for store in ("second", "second", "primary"):
        _drill(service, run="doctor", store=store)
        clock.advance(HOUR)
    clock.advance(91 * 24 * HOUR)
    assert purge(service).forgotten_rows == 1
    assert _drills_told(service) == {"primary": 1.0, "second": 0.0}


def test_a_drill_of_a_clock_that_was_ahead_neither_hides_nor_drops_the_last_one(
    service: RunningService, clock: Clock
) -> None:
    with Client(ClientSettings(url=service.url, token=service.token())) as client:
        save_little_checkpoint(client, "demo")
    ahead = 400 * 24 * HOUR
    clock.advance(ahead)
    assert _drill(service, run="doctor")["state"] == "failed", "nothing was copied"
    clock.advance(-ahead)
    put_policy(service)
    while replicate(service).done:
        pass
    assert _drill(service, run="doctor")["state"] == "done"
    clock.advance(ahead / 2)
    purge(service)
    assert _drills_told(service) == {"second": 1.0}


def test_the_failed_drill_of_a_deleted_run_is_told_no_more(service: RunningService) -> None:
    with Client(ClientSettings(url=service.url, token=service.token())) as client:
        save_little_checkpoint(client, "demo")
    assert _drill(service, run="doctor")["state"] == "failed", "nothing was copied"
    path = "/v1/projects/demo/runs/doctor"
    answer(service.http().request("DELETE", path, json={}, headers={"If-Match": "*"}))
    assert _drills_told(service) == {}


def _drills_told(service: RunningService) -> dict[str, float]:
    """Of the run `doctor`: by store, whether the last one went well."""
    told = re.findall(
        r'holdfast_drill_succeeded\{project="demo",run="doctor",store="(\w+)"\} ([\d.]+)',
        service.http().get("/metrics").text,
    )
    return {store: float(succeeded) for store, succeeded in told}


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_drill_of_what_the_clock_dated_too_late_says_what_is_newer(service: RunningService, clock: Clock) -> None:
    ahead = 10 * 86400
    with Client(ClientSettings(url=service.url, token=service.token())) as client:
        clock.advance(ahead)
        save_little_checkpoint(client, "demo")
        put_policy(service)
        while replicate(service).done:
            pass
        clock.advance(-ahead)
        save_little_checkpoint(client, "demo")
    found = DrillResult.model_validate(_drill(service, run="doctor")["result"])
    assert (found.step, found.newest_step, found.rpo_steps) == (1, 2, 1)
