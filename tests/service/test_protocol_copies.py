"""Copies in a second store (protocol rule 28): under leases, proven on the way, whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select, update

import holdfast_service.catalog.copying as copying
import holdfast_service.collect.tick
import holdfast_service.replicate.copy_checkpoint
import holdfast_service.replicate.tick
from holdfast_protocol.states import CheckpointState, CopyState, Proof, Scope, StoreRole
from holdfast_service.catalog.copies import object_key
from holdfast_service.catalog.custody_tables import AuditEvent, CheckpointCopy
from holdfast_service.catalog.record_tables import WrittenRecord
from holdfast_service.catalog.stored_bytes import bytes_against_quota
from holdfast_service.catalog.tables import Checkpoint, Chunk, Copy, Project
from holdfast_service.clock import database_now
from holdfast_service.replicate import rows
from holdfast_service.replicate.tick import ReplicateReport
from holdfast_service.settings import ServiceSettings
from holdfast_service.stores.base import ObjectKey
from holdfast_service.stores.posix import PosixStore
from tests.service.conftest import Clock
from tests.support.interleave import hold_after, in_background, until_blocked_or_done
from tests.support.rank import Job, answer, digest_of
from tests.support.service import RunningService

CONTENT = b"weights of rank 0" * 1000
SECOND = StoreRole.SECOND


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the process runs after it."""


@pytest.fixture
def settings(settings: ServiceSettings, tmp_path: Path) -> ServiceSettings:
    changes = {"second_store": f"posix://{tmp_path / 'second'}", "store_away_seconds": 0}
    return settings.model_copy(update=changes)


@pytest.fixture
def saved(service: RunningService) -> dict[str, Any]:
    """A checkpoint of two chunks, in a project whose policy asks for copies of everything."""
    view = Job(service.http()).save(100, content=CONTENT)
    put_policy(service)
    return view


def put_policy(service: RunningService, **document: Any) -> None:
    http = service.http(headers=[("If-Match", "*")])
    answer(http.put("/v1/projects/demo/policies/copies", json={"document": document}))


def replicate(service: RunningService) -> ReplicateReport:
    return holdfast_service.replicate.tick.tick(service.context)


def store_of(service: RunningService, role: StoreRole) -> tuple[PosixStore, int]:
    attached = service.context.attached(role)
    assert attached is not None
    assert isinstance(attached.store, PosixStore)
    return attached.store, attached.store_id


def copies_in(service: RunningService, role: StoreRole, content: bytes = CONTENT) -> list[Copy]:
    _, store_id = store_of(service, role)
    with service.context.database.read() as session:
        query = select(Copy).join(Chunk).where(Chunk.digest == digest_of(content), Copy.store_id == store_id)
        return list(session.scalars(query.order_by(Copy.id)))


def file_of(service: RunningService, role: StoreRole, copy: Copy, content: bytes = CONTENT) -> Path:
    return store_of(service, role)[0].object_path(object_key(copy.project_id, digest_of(content), copy))


def objects_in(service: RunningService, role: StoreRole) -> set[ObjectKey]:
    store, _ = store_of(service, role)
    with service.context.database.read() as session:
        projects = session.scalars(select(Copy.project_id).distinct()).all()
    return {found.key for project_id in projects for found in store.list_objects(project_id)}


def begin(service: RunningService, content: bytes = CONTENT) -> copying.CopyTask | None:
    _, store_id = store_of(service, SECOND)
    with service.context.database.transaction() as session:
        chunk_id = session.execute(select(Chunk.id).where(Chunk.digest == digest_of(content))).scalar_one()
        return copying.begin_copy(session, service.context, chunk_id, store_id)


def row_of(service: RunningService, checkpoint_id: str) -> CheckpointCopy:
    with service.context.database.read() as session:
        return session.get_one(CheckpointCopy, (checkpoint_id, store_of(service, SECOND)[1]))


def test_a_policy_brings_every_chunk_of_a_checkpoint_to_the_second_store(service: RunningService) -> None:
    saved = Job(service.http()).save(100, content=CONTENT)
    assert replicate(service).done == 0, "nobody asked for a copy"
    put_policy(service)
    report = replicate(service)
    assert (report.done, report.failed, report.error, report.whole) == (2, 0, None, (saved["id"],))
    (copy,) = copies_in(service, SECOND)
    (source,) = copies_in(service, StoreRole.PRIMARY)
    assert (copy.state, copy.proof, copy.attempt_id) == (CopyState.VERIFIED, Proof.STORE_SHA256, source.attempt_id)
    assert copy.generation != source.generation
    assert file_of(service, SECOND, copy).read_bytes() == CONTENT
    row = row_of(service, saved["id"])
    assert (row.wanted, row.missing_bytes, row.complete_at is not None) == (True, 0, True)
    with service.context.database.read() as session:
        assert session.get(WrittenRecord, ("checkpoint", saved["id"], row.store_id)) is not None, "no record is due"
        event = session.execute(select(AuditEvent).where(AuditEvent.action == "checkpoint.copy")).scalar_one()
        assert (event.actor_kind, event.actor, event.checkpoint_id) == ("controller", "replicate", saved["id"])
    assert replicate(service).idle


def _die(*_args: Any, **_kwargs: Any) -> Any:
    raise Killed


def _die_after(real: Callable[..., Any]) -> Callable[..., Any]:
    def dies(*args: Any, **kwargs: Any) -> Any:
        real(*args, **kwargs)
        raise Killed

    return dies


@pytest.mark.rule("protocol-28")
@pytest.mark.parametrize("moment", ["before reading", "before writing", "after writing", "after settling"])
def test_a_worker_killed_between_two_steps_leaves_nothing_that_the_next_one_cannot_finish(
    service: RunningService, saved: dict[str, Any], clock: Clock, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    task = begin(service)
    assert task is not None
    with monkeypatch.context() as patch:
        patch.setattr(copying, "give_up_copy", lambda *_: None)  # the dead give nothing back
        if moment == "before reading":
            patch.setattr(copying, "_read", _die)
        elif moment == "before writing":
            patch.setattr(copying, "_write", _die)
        elif moment == "after writing":
            patch.setattr(copying, "_write", _die_after(copying._write))
        else:
            patch.setattr(copying, "settle_copy", _die_after(copying.settle_copy))
        with pytest.raises(Killed):
            copying.copy_now(service.context, task)
    report = replicate(service)
    if moment == "after settling":
        assert (report.done, report.whole) == (1, (saved["id"],))
    else:
        assert (report.done, report.whole) == (1, ()), "the dead worker's chunk was taken under its lease"
        clock.advance(service.context.settings.chunk_lease_seconds + 60)
        report = replicate(service)
        assert (report.done, report.whole) == (1, (saved["id"],))
    (copy,) = copies_in(service, SECOND)
    assert (copy.state, copy.generation) == (CopyState.VERIFIED, task.target_key.generation)
    assert file_of(service, SECOND, copy).read_bytes() == CONTENT
    assert len(objects_in(service, SECOND)) == 2, "something was left behind in the second store"


@pytest.mark.rule("protocol-28")
def test_two_workers_at_one_chunk_make_one_copy(
    service: RunningService, saved: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold_after(monkeypatch, copying, "best_source")
    with in_background(gate) as threads:
        first = threads.submit(begin, service)
        gate.wait_until_reached()
        second = threads.submit(begin, service)
        until_blocked_or_done(service, second)
        gate.open()
        begun = [first.result(60), second.result(60)]
    assert begun.count(None) == 1, "both workers copy the same chunk"
    assert len(copies_in(service, SECOND)) == 1


@pytest.mark.rule("protocol-28")
def test_who_lost_the_lease_settles_nothing(service: RunningService, saved: dict[str, Any], clock: Clock) -> None:
    slow = begin(service)
    assert slow is not None
    assert begin(service) is None
    moved = copying.move_bytes(service.context, slow)
    clock.advance(service.context.settings.chunk_lease_seconds + 60)
    quick = begin(service)
    assert quick is not None
    assert quick.copy_id == slow.copy_id, "what a dead worker left is taken up"
    assert not copying.settle_copy(service.context, slow, moved), "a lease that was lost has settled the copy"
    copying.give_up_copy(service.context, slow, copying.TargetBadError())
    assert copies_in(service, SECOND)[0].state == CopyState.COPYING
    assert copying.copy_now(service.context, quick)
    assert copies_in(service, SECOND)[0].state == CopyState.VERIFIED


def test_a_worker_whose_lease_is_over_writes_no_more(service: RunningService, saved: dict[str, Any]) -> None:
    task = begin(service)
    assert task is not None
    late = copying.CopyTask(**(vars(task) | {"ends_at": 0.0}))
    with pytest.raises(copying.LeaseOverError):
        copying.move_bytes(service.context, late)
    assert not objects_in(service, SECOND)


@pytest.mark.rule("protocol-28")
def test_a_source_that_rots_while_it_is_copied_spoils_nothing(service: RunningService, saved: dict[str, Any]) -> None:
    (source,) = copies_in(service, StoreRole.PRIMARY)
    path = file_of(service, StoreRole.PRIMARY, source)
    path.chmod(0o644)
    path.write_bytes(CONTENT[:-1] + b"?")
    report = replicate(service)
    assert (report.done, report.failed, report.whole) == (1, 1, ())
    assert report.error is not None
    assert digest_of(CONTENT) in report.error
    assert copies_in(service, StoreRole.PRIMARY)[0].state == CopyState.SUSPECT, "nobody looks at the rotten source"
    assert [copy.state for copy in copies_in(service, SECOND)] == [CopyState.COPYING]
    assert {key.digest for key in objects_in(service, SECOND)} == {digest_of(b"index " + CONTENT)}
    path.write_bytes(CONTENT)
    with service.context.database.transaction() as session:
        session.execute(update(Copy).where(Copy.id == source.id).values(state=CopyState.VERIFIED))
        session.execute(update(CheckpointCopy).values(retry_at=None))
    assert replicate(service).whole == (saved["id"],)


def test_other_bytes_under_the_copys_key_are_not_believed(service: RunningService, saved: dict[str, Any]) -> None:
    task = begin(service)
    assert task is not None
    store, _ = store_of(service, SECOND)
    store.put_bytes(task.target_key, b"somebody else's")
    with pytest.raises(copying.TargetBadError):
        copying.copy_now(service.context, task)
    assert replicate(service).whole == (saved["id"],)
    bad, good = copies_in(service, SECOND)
    assert (bad.state, good.state) == (CopyState.BAD, CopyState.VERIFIED)
    assert file_of(service, SECOND, good).read_bytes() == CONTENT


@pytest.mark.rule("protocol-28")
def test_what_a_dead_worker_left_is_collected_once_none_of_its_writes_can_land(
    service: RunningService, saved: dict[str, Any], clock: Clock
) -> None:
    task = begin(service)
    assert task is not None
    copying.move_bytes(service.context, task)
    put_policy(service, kinds=["final"])  # nobody takes it up
    settings = service.context.settings
    clock.advance(settings.chunk_lease_seconds + 60)
    holdfast_service.collect.tick.tick(service.context)
    assert len(objects_in(service, SECOND)) == 1, "a write of a worker that only slept may still land"
    clock.advance(settings.longest_upload_seconds + settings.ticket_seconds)
    for _ in range(3):
        holdfast_service.collect.tick.tick(service.context)
    assert not objects_in(service, SECOND)
    assert len(objects_in(service, StoreRole.PRIMARY)) == 2


@pytest.mark.rule("protocol-28")
def test_a_second_store_that_is_away_is_told_and_tried_again_and_blocks_nothing_else(
    service: RunningService, saved: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "second").rename(tmp_path / "not mounted")
    report = replicate(service)
    assert report.done == 0
    assert report.error is not None
    assert "second store" in report.error
    later = Job(service.http(), after=1).save(200, content=b"saved meanwhile")
    (tmp_path / "not mounted").rename(tmp_path / "second")
    attached = service.context.attached(SECOND)
    assert attached is not None
    attached.watch.tick()
    assert set(replicate(service).whole) == {saved["id"], later["id"]}


def test_what_is_in_the_second_store_does_not_count_against_the_jobs_quota(
    service: RunningService, saved: dict[str, Any]
) -> None:
    assert replicate(service).whole == (saved["id"],)
    service.make_project("demo", quota_bytes=3 * len(CONTENT))
    Job(service.http(), after=1).save(200, content=b"w" * (len(CONTENT) // 3))
    # A process that lacks the second store counts the same.
    lacking = replace(service.context, stores=service.context.stores[:1])
    with service.context.database.read() as session:
        projects = session.scalars(select(Project.id)).all()
        counted = [bytes_against_quota(session, each, projects) for each in (service.context, lacking)]
    assert counted[0] == counted[1]


def test_the_newest_checkpoint_goes_first_and_only_its_own_chunks_move(
    service: RunningService, saved: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    second = Job(service.http(), after=1).save(200, content=b"newer")
    order: list[str] = []
    real = holdfast_service.replicate.tick.copy_checkpoint

    def noted(context: Any, target: Any, checkpoint_id: str, **kwargs: Any) -> Any:
        order.append(checkpoint_id)
        return real(context, target, checkpoint_id, **kwargs)

    monkeypatch.setattr(holdfast_service.replicate.tick, "copy_checkpoint", noted)
    replicate(service)
    assert order == [second["id"], saved["id"]]
    assert replicate(service).idle


def test_a_chunk_that_the_second_store_lost_is_copied_there_again(
    service: RunningService, saved: dict[str, Any]
) -> None:
    replicate(service)
    (copy,) = copies_in(service, SECOND)
    file_of(service, SECOND, copy).unlink()
    with service.context.database.transaction() as session:
        lost = {"state": CopyState.BAD, "bad_at": database_now(session), "finding": "is not in the store"}
        session.execute(update(Copy).where(Copy.id == copy.id).values(**lost))
    report = replicate(service)
    assert (report.reopened, report.done, report.whole) == (1, 1, (saved["id"],))
    assert copies_in(service, SECOND)[-1].state == CopyState.VERIFIED


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_what_is_lost_there_for_good_keeps_no_other_from_being_due_again(
    service: RunningService, saved: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More is lost, in both stores, than one round looks at."""
    monkeypatch.setattr(rows, "_ROWS", 1)
    Job(service.http(), "demo/other").save(1)
    put_policy(service)
    for _ in range(4):
        replicate(service)
    store_id = store_of(service, StoreRole.SECOND)[1]
    with service.context.database.transaction() as session:
        session.execute(update(Copy).values(state=CopyState.BAD, bad_at=database_now(session)))
    assert [rows.reopen_damaged(service.context, store_id) for _ in range(3)] == [1, 1, 0]
    with service.context.database.read() as session:
        assert session.scalars(select(CheckpointCopy.complete_at)).all() == [None, None]


@pytest.mark.rule("protocol-30")
def test_a_checkpoint_that_is_purged_while_it_is_copied_leaves_no_record_there(
    service: RunningService, saved: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def purged(context: Any, task: Any, on_bytes: Any) -> bool:
        with context.database.transaction() as session:
            gone = {"state": CheckpointState.DELETING}
            session.execute(update(Checkpoint).where(Checkpoint.id == saved["id"]).values(**gone))
        return copying.copy_now(context, task, on_bytes)

    monkeypatch.setattr(holdfast_service.replicate.copy_checkpoint, "copy_now", purged)
    assert replicate(service).whole == ()
    with service.context.database.read() as session:
        assert session.get(WrittenRecord, ("checkpoint", saved["id"], store_of(service, SECOND)[1])) is None
    replicate(service)
    with service.context.database.read() as session:
        assert session.get(CheckpointCopy, (saved["id"], store_of(service, SECOND)[1])) is None


def test_a_policy_that_changes_its_mind_keeps_what_is_there_and_begins_nothing_new(service: RunningService) -> None:
    put = {"kinds": ["final"], "labels": ["milestone"], "every_steps": 1000}
    job = Job(service.http())
    put_policy(service, **put)
    plain, thousandth = job.save(100, content=b"a"), job.save(2000, content=b"b")
    assert replicate(service).whole == (thousandth["id"],)
    edited = service.http().patch(
        f"/v1/checkpoints/{plain['id']}", json={"labels": ["milestone"]}, headers={"If-Match": plain["etag"]}
    )
    assert edited.is_success, edited.text
    assert replicate(service).whole == (plain["id"],), "a label that was given later counts"
    put_policy(service, labels=["release"])
    job.save(3000, content=b"c")
    assert replicate(service).done == 0
    assert not row_of(service, thousandth["id"]).wanted
    assert copies_in(service, SECOND, b"b")[0].state == CopyState.VERIFIED


def test_the_lag_is_told_before_any_controller_has_looked(
    service: RunningService, saved: dict[str, Any], clock: Clock
) -> None:
    http = service.http()
    clock.advance(120)
    behind = answer(http.get("/v1/projects/demo/runs/gpt/copies"))
    assert behind["lag_seconds"] >= 120
    assert (behind["waiting"], behind["copied_step"], behind["newest_step"]) == (1, None, 100)
    assert behind["lag_bytes"] == len(CONTENT) * 2 + len(b"index ")
    metrics = http.get("/metrics").text
    assert 'holdfast_copy_lag_seconds{project="demo",run="gpt"} 1' in metrics
    replicate(service)
    (even,) = answer(http.get("/v1/projects/demo/copies"))["items"]
    assert (even["lag_seconds"], even["lag_steps"], even["lag_bytes"], even["copied_step"]) == (0, 0, 0, 100)
    service.make_project("other")
    stranger = service.http(token=service.token(Scope.READ, Scope.OPERATE, project="other"))
    assert stranger.get("/v1/projects/demo/copies").status_code in (403, 404)
    assert stranger.post("/v1/projects/demo/runs/gpt/drills", json={}).status_code in (403, 404)
    reader = service.http(token=service.token(Scope.READ))
    assert reader.post("/v1/projects/demo/runs/gpt/drills", json={}).status_code == 403


def _read(service: RunningService, checkpoint_id: str, **body: Any) -> dict[str, Any]:
    digests = {"digests": [digest_of(CONTENT)]}
    reply = answer(service.http().post(f"/v1/checkpoints/{checkpoint_id}/reads", json=digests | body))
    ticket: dict[str, Any] = reply["chunks"][0]
    return ticket


def _bytes_of(service: RunningService, ticket: dict[str, Any]) -> bytes:
    with httpx.Client(base_url=service.url) as without_token:
        return without_token.get(ticket["url"], headers=ticket["headers"]).content


@pytest.mark.rule("protocol-34")
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
    service.context.store_watch.tick()
    ticket = _read(service, saved["id"])
    assert (ticket["store"], _bytes_of(service, ticket)) == ("second", CONTENT)
    offer = answer(service.http().post("/v1/mount-proofs"))
    assert (offer["path"], offer["away"], len(offer["others"])) == (None, True, 1)
    proof = {"proof_id": offer["others"][0]["proof_id"], "content": Path(offer["others"][0]["path"]).read_text()}
    ticket = _read(service, saved["id"], other_mount_proofs=[proof])
    assert (ticket["kind"], Path(ticket["path"]).read_bytes()) == ("file", CONTENT)
    assert service.http().get("/readyz").status_code == 200, "a service that can still give back is not asked any more"
    (tmp_path / "not mounted").rename(tmp_path / "store")
    service.context.store_watch.tick()

    file_of(service, StoreRole.PRIMARY, copies_in(service, StoreRole.PRIMARY)[0]).unlink()
    report = {"digest": digest_of(CONTENT), "problem": "missing"}
    verdict = answer(service.http().post(f"/v1/checkpoints/{saved['id']}/chunk-reports", json=report))
    assert (verdict["readable"], verdict["corrupt_checkpoints"]) == (True, [])
    assert copies_in(service, StoreRole.PRIMARY)[0].state == CopyState.BAD
    assert _bytes_of(service, _read(service, saved["id"])) == CONTENT


@pytest.mark.rule("protocol-34")
def test_while_the_first_store_is_away_the_restore_point_is_what_the_second_holds_whole(
    service: RunningService, saved: dict[str, Any], tmp_path: Path
) -> None:
    replicate(service)
    job = Job(service.http(), after=1)
    job.resumed_from(saved["id"])
    newer = job.save(200, content=b"newer")
    url = "/v1/projects/demo/runs/gpt/restore-point"
    assert answer(service.http().get(url))["restore_point"]["step"] == 200
    (tmp_path / "store").rename(tmp_path / "not mounted")
    service.context.store_watch.tick()
    decision = answer(service.http().get(url))
    assert decision["restore_point"]["step"] == 100
    assert [(each["step"], each["reason"]) for each in decision["passed_over"]] == [(200, "away")]
    assert "primary store has not answered" in decision["note"]
    older_client = service.http(headers=[("Holdfast-Protocol", "1.1")])
    assert answer(older_client.get(url))["passed_over"][0]["reason"] == "cold", "it does not know the word"
    named = answer(service.http().get(url, params={"selector": newer["id"]}))
    assert named["restore_point"]["step"] == 200, "what was named never falls back"
    opened = Job(service.http(), after=2).opened
    assert (opened["restore_point"]["step"], opened["note"] != "") == (100, True)


def test_a_short_silence_does_not_cost_training_time(
    service: RunningService, saved: dict[str, Any], tmp_path: Path
) -> None:
    """An older checkpoint is taken only when the first store was silent for a while."""
    replicate(service)
    Job(service.http(), after=1).save(200, content=b"newer")
    context = service.context
    patient = context.settings.model_copy(update={"store_away_seconds": 3600})
    object.__setattr__(context, "settings", patient)
    (tmp_path / "store").rename(tmp_path / "not mounted")
    context.store_watch.tick()
    decision = answer(service.http().get("/v1/projects/demo/runs/gpt/restore-point"))
    assert (decision["restore_point"]["step"], decision["note"]) == (200, "")


def _drill(service: RunningService, **body: Any) -> dict[str, Any]:
    from holdfast_service.operation_kinds import OPERATION_KINDS
    from holdfast_service.operations.tick import tick

    started = answer(service.http().post("/v1/projects/demo/runs/gpt/drills", json=body))
    tick(service.context, kinds=OPERATION_KINDS)
    ended: dict[str, Any] = answer(service.http().get(f"/v1/operations/{started['id']}"))
    return ended


def test_a_drill_tells_why_the_second_store_does_not_give_it_back(
    service: RunningService, saved: dict[str, Any]
) -> None:
    ended = _drill(service)
    assert ended["state"] == "failed"
    assert "not whole in the stores that answer" in ended["error"]
    replicate(service)
    (copy,) = copies_in(service, SECOND)
    path = file_of(service, SECOND, copy)
    path.chmod(0o644)
    path.write_bytes(CONTENT[:-1] + b"?")
    ended = _drill(service)
    assert ended["state"] == "failed"
    assert digest_of(CONTENT)[:12] in ended["error"]
    assert copies_in(service, SECOND)[0].state == CopyState.SUSPECT, "what the drill found rotten is not looked at"
    path.write_bytes(CONTENT)
    with service.context.database.transaction() as session:
        session.execute(update(Copy).where(Copy.id == copy.id).values(state=CopyState.VERIFIED))
    ended = _drill(service)
    assert "cannot be put together" in ended["error"], "its index is no index"
    assert 'holdfast_drill_succeeded{project="demo",run="gpt"} 0.0' in service.http().get("/metrics").text
    assert service.http().post("/v1/projects/demo/runs/gpt/drills", json={"store": "cold"}).status_code == 422
