"""Reading: leases and tickets (rule read-lease), reports and re-reads (rule report-is-suspicion), proving (rule
reuse-only-hashed) and repairing."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select, update

import holdfast_service.restore.report_chunk as report_module
import holdfast_service.scrub.repair
import holdfast_service.scrub.verify
from holdfast_protocol.states import CopyState, Proof, Scope
from holdfast_service.audit.record import Actor
from holdfast_service.context import ServiceContext
from holdfast_service.copies.predicates import object_key
from holdfast_service.copies.read_back import Claim, Finding, claim, read_back, settle
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Checkpoint, Chunk, Copy, ReadLease
from holdfast_service.stores.base import StoreUnavailable
from holdfast_service.stores.posix.posix_store import PosixStore
from tests.service.conftest import Clock
from tests.support.rank import Job, Refused, Save, answer, digest_of, redeem
from tests.support.service import RunningService

CONTENT = b"weights of rank 0" * 1000
ACTOR = Actor.controller("test")


def reads(service: RunningService, checkpoint_id: str, *contents: bytes, **body: Any) -> Any:
    digests = [digest_of(content) for content in contents]
    return answer(service.http().post(f"/v1/checkpoints/{checkpoint_id}/reads", json={"digests": digests} | body))


def report(service: RunningService, checkpoint_id: str, content: bytes, problem: str = "mismatch") -> Any:
    body = {"digest": digest_of(content), "problem": problem}
    return answer(service.http().post(f"/v1/checkpoints/{checkpoint_id}/chunk-reports", json=body))


def object_file(service: RunningService, content: bytes) -> Path:
    """Where the store keeps the newest copy of it."""
    store = service.context.store
    assert isinstance(store, PosixStore)
    with service.context.database.read() as session:
        query = select(Copy).join(Chunk).where(Chunk.digest == digest_of(content)).order_by(Copy.id.desc()).limit(1)
        copy = session.scalars(query).one()
        return store.object_path(object_key(copy.project_id, digest_of(content), copy))


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


def cut_short(path: Path) -> None:
    path.chmod(0o644)
    os.truncate(path, path.stat().st_size - 1)


def health_of(service: RunningService, checkpoint_id: str) -> tuple[str, str | None]:
    with service.context.database.read() as session:
        row = session.get_one(Checkpoint, checkpoint_id)
        return row.health, row.health_reason


def copies_of(service: RunningService, content: bytes) -> list[tuple[str, str | None]]:
    with service.context.database.read() as session:
        query = select(Copy).join(Chunk).where(Chunk.digest == digest_of(content)).order_by(Copy.id)
        return [(copy.state, copy.proof) for copy in session.scalars(query)]


@pytest.fixture
def job(service: RunningService) -> Job:
    return Job(service.http())


@pytest.fixture
def saved(job: Job) -> dict[str, Any]:
    return job.save(100, content=CONTENT)


@pytest.mark.rule("read-lease")
def test_a_ticket_gives_the_bytes_under_a_lease(service: RunningService, saved: dict[str, Any]) -> None:
    given = reads(service, saved["id"], CONTENT)
    (ticket,) = given["chunks"]
    assert (ticket["kind"], ticket["bytes"], ticket["stored_bytes"]) == ("http", len(CONTENT), len(CONTENT))
    assert redeem(service.http(), ticket).content == CONTENT
    with service.context.database.read() as session:
        lease = session.get_one(ReadLease, given["lease_id"])
        assert lease.expires_at > database_now(session) + timedelta(seconds=ticket["expires_in_seconds"])


def test_a_shards_chunk_list_comes_along_with_tickets(service: RunningService, saved: dict[str, Any]) -> None:
    alone = answer(service.http().get(f"/v1/checkpoints/{saved['id']}/shards/0"))
    assert alone["chunks"][0]["digest"] == digest_of(CONTENT)
    assert reads(service, saved["id"], CONTENT, shard=0)["shard"] == alone
    assert reads(service, saved["id"], CONTENT)["shard"] is None
    with pytest.raises(Refused, match="There is no rank 1 in a world of 1"):
        reads(service, saved["id"], CONTENT, shard=1)


@pytest.mark.rule("read-lease")
def test_each_batch_renews_the_lease_and_release_ends_it(
    service: RunningService, saved: dict[str, Any], clock: Clock
) -> None:
    lease_id = reads(service, saved["id"], CONTENT)["lease_id"]
    with service.context.database.read() as session:
        first = session.get_one(ReadLease, lease_id).expires_at
    clock.advance(60)
    assert reads(service, saved["id"], CONTENT, lease_id=lease_id)["lease_id"] == lease_id
    with service.context.database.read() as session:
        assert session.get_one(ReadLease, lease_id).expires_at >= first + timedelta(seconds=60)
    other = service.http(token=service.token(Scope.READ))
    assert other.delete(f"/v1/read-leases/{lease_id}").status_code == 204
    with service.context.database.read() as session:
        assert session.get(ReadLease, lease_id) is not None, "another token ended this lease"
    assert service.http().delete(f"/v1/read-leases/{lease_id}").status_code == 204
    with service.context.database.read() as session:
        assert session.get(ReadLease, lease_id) is None
    assert service.http().delete(f"/v1/read-leases/{lease_id}").status_code == 204


@pytest.mark.rule("read-lease")
def test_a_lease_that_ran_out_is_replaced_and_cleared_away(
    service: RunningService, saved: dict[str, Any], clock: Clock
) -> None:
    old = reads(service, saved["id"], CONTENT)["lease_id"]
    clock.advance(service.context.settings.ticket_seconds + service.context.settings.read_lease_seconds + 1)
    new = reads(service, saved["id"], CONTENT, lease_id="0" * 32)["lease_id"]
    with service.context.database.read() as session:
        assert [lease.id for lease in session.scalars(select(ReadLease))] == [new] != [old]


def test_a_mount_that_is_proven_gives_paths_and_a_wrong_proof_gives_urls(
    service: RunningService, saved: dict[str, Any]
) -> None:
    offer = answer(service.http().post("/v1/mount-proofs"))
    proof = {"proof_id": offer["proof_id"], "content": Path(offer["path"]).read_text()}
    (ticket,) = reads(service, saved["id"], CONTENT, mount_proof=proof)["chunks"]
    assert ticket["kind"] == "file"
    assert Path(ticket["path"]).read_bytes() == CONTENT
    wrong = proof | {"content": "0" * 64}
    assert reads(service, saved["id"], CONTENT, mount_proof=wrong)["chunks"][0]["kind"] == "http"


def test_only_chunks_of_this_checkpoint_are_given(service: RunningService, job: Job, saved: dict[str, Any]) -> None:
    other = job.save(200, content=b"of another step")
    with pytest.raises(Refused) as refused:
        reads(service, saved["id"], CONTENT, b"of another step")
    assert refused.value.code == "chunk_not_found"
    assert refused.value.context["digests"] == [digest_of(b"of another step")]
    assert reads(service, other["id"], b"of another step")["chunks"][0]["kind"] == "http"


def test_what_is_not_wholly_there_cannot_be_read(service: RunningService, job: Job) -> None:
    uploading = job.begin(100)
    with pytest.raises(Refused) as refused:
        reads(service, uploading.id, CONTENT)
    assert refused.value.code == "incomplete_checkpoint"
    uploading.abort()
    with pytest.raises(Refused) as refused:
        reads(service, uploading.id, CONTENT)
    assert refused.value.code == "checkpoint_aborted"


@pytest.mark.rule("report-is-suspicion")
@pytest.mark.parametrize("damage", [flip_a_byte, cut_short, Path.unlink])
def test_a_lost_chunk_is_read_again_and_its_checkpoints_are_marked(
    service: RunningService, job: Job, damage: Callable[[Path], None]
) -> None:
    first, second = job.save(100, content=b"older"), job.save(200, content=CONTENT)
    third = job.save(300, content=CONTENT)
    damage(object_file(service, CONTENT))
    verdict = report(service, third["id"], CONTENT)
    assert verdict["readable"] is False
    assert verdict["corrupt_checkpoints"] == sorted([second["id"], third["id"]])
    assert [health_of(service, view["id"])[0] for view in (first, second, third)] == ["ok", "corrupt", "corrupt"]
    assert digest_of(CONTENT) in (health_of(service, third["id"])[1] or "")
    decision = answer(service.http().get(f"{job.base}/restore-point"))
    assert decision["restore_point"]["checkpoint_id"] == first["id"]
    assert [seen["reason"] for seen in decision["skipped"]] == ["corrupt", "corrupt"]
    # Again, with no copy left to read: the same answer.
    assert report(service, third["id"], CONTENT)["corrupt_checkpoints"] == verdict["corrupt_checkpoints"]
    assert reads(service, third["id"], CONTENT)["chunks"][0]["kind"] == "gone"


@pytest.mark.rule("report-is-suspicion")
def test_a_wrong_report_marks_nothing(service: RunningService, saved: dict[str, Any]) -> None:
    verdict = report(service, saved["id"], CONTENT)
    assert (verdict["readable"], verdict["corrupt_checkpoints"]) == (True, [])
    assert health_of(service, saved["id"]) == ("ok", None)
    assert copies_of(service, CONTENT) == [(CopyState.VERIFIED, Proof.READ)]


@pytest.mark.rule("report-is-suspicion")
def test_a_store_that_is_unavailable_proves_nothing_and_marks_nothing(
    service: RunningService, saved: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable(_key: object) -> Any:
        raise StoreUnavailable("no answer")

    before = copies_of(service, CONTENT)
    monkeypatch.setattr(service.context.store, "open_read", unavailable)
    with pytest.raises(Refused) as refused:
        report(service, saved["id"], CONTENT)
    assert (refused.value.status, refused.value.code) == (503, "store_unavailable")
    assert copies_of(service, CONTENT) == before
    assert health_of(service, saved["id"])[0] == "ok"


@pytest.mark.rule("report-is-suspicion")
def test_a_mount_that_is_absent_is_not_taken_for_lost_chunks(service: RunningService, saved: dict[str, Any]) -> None:
    store = service.context.store
    assert isinstance(store, PosixStore)
    store.root.rename(store.root.with_name("elsewhere"))
    store.prepare()  # an empty folder stands where the mount was
    with pytest.raises(Refused) as refused:
        report(service, saved["id"], CONTENT, "missing")
    assert refused.value.code == "store_unavailable"
    assert health_of(service, saved["id"])[0] == "ok"


@pytest.mark.rule("report-is-suspicion")
def test_a_wrong_report_stops_nobody_who_relies_on_the_chunk_meanwhile(
    service: RunningService, job: Job, saved: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    save = job.begin(200)
    save.upload(0, [CONTENT])
    met: list[Any] = []

    def looked_into(context: ServiceContext, claimed: Claim) -> Finding:
        other = Job(service.http(), run="demo/other").begin(1)
        met.append(other.negotiate(0, [CONTENT])["chunks"][0]["status"])
        met.append(save.seal(0, [CONTENT])["state"])
        return read_back(context, claimed)

    monkeypatch.setattr(report_module, "read_back", looked_into)
    assert report(service, saved["id"], CONTENT)["readable"] is True
    assert met == ["present", "committed"]


@pytest.mark.races
@pytest.mark.rule("report-is-suspicion")
def test_two_reports_at_once_read_once(service: RunningService, saved: dict[str, Any]) -> None:
    with service.context.database.transaction() as session:
        chunk = session.scalars(select(Chunk).where(Chunk.digest == digest_of(CONTENT))).one()
        copy = session.scalars(select(Copy).where(Copy.chunk_id == chunk.id)).one()
        held = claim(session, chunk, copy, seconds=60)
    with pytest.raises(Refused) as refused:
        report(service, saved["id"], CONTENT)
    assert refused.value.code == "busy"
    assert reads(service, saved["id"], CONTENT)["chunks"][0]["kind"] == "http", "it can be read meanwhile"
    assert settle(service.context, held, Finding.GOOD, ACTOR) == []
    assert report(service, saved["id"], CONTENT)["readable"] is True


def test_a_lease_that_was_lost_settles_nothing(service: RunningService, saved: dict[str, Any], clock: Clock) -> None:
    with service.context.database.transaction() as session:
        chunk = session.scalars(select(Chunk).where(Chunk.digest == digest_of(CONTENT))).one()
        copy = session.scalars(select(Copy).where(Copy.chunk_id == chunk.id)).one()
        slow = claim(session, chunk, copy, seconds=60)
    clock.advance(61)
    assert report(service, saved["id"], CONTENT)["readable"] is True
    assert settle(service.context, slow, Finding.WRONG_BYTES, ACTOR) is None
    assert health_of(service, saved["id"])[0] == "ok"


def make_unproven(service: RunningService) -> None:
    with service.context.database.transaction() as session:
        session.execute(update(Copy).values(proof=Proof.UNPROVEN))


@pytest.mark.rule("reuse-only-hashed")
def test_the_prover_reads_what_nobody_has_hashed(service: RunningService, job: Job) -> None:
    good, bad = job.save(100, content=b"good bytes"), job.save(200, content=CONTENT)
    make_unproven(service)
    flip_a_byte(object_file(service, CONTENT))
    found = holdfast_service.scrub.verify.reconcile(service.context)
    assert (found.good, found.bad, found.corrupt_checkpoints) == (3, 1, (bad["id"],))
    assert copies_of(service, b"good bytes") == [(CopyState.VERIFIED, Proof.READ)]
    assert copies_of(service, CONTENT) == [(CopyState.BAD, Proof.UNPROVEN)]
    assert health_of(service, good["id"])[0] == "ok"
    assert holdfast_service.scrub.verify.reconcile(service.context) == holdfast_service.scrub.verify.ProveReport()


@pytest.mark.rule("reuse-only-hashed")
def test_another_attempt_relies_on_a_copy_only_after_the_service_has_read_it(
    service: RunningService, job: Job, saved: dict[str, Any]
) -> None:
    make_unproven(service)
    later = Job(service.http(), after=1).begin(200)
    assert later.negotiate(0, [CONTENT])["chunks"][0]["status"] == "upload"
    holdfast_service.scrub.verify.reconcile(service.context)
    newest = Job(service.http(), after=2).begin(300)
    assert newest.negotiate(0, [CONTENT])["chunks"][0]["status"] == "present"
    assert saved["state"] == "committed"


def test_the_prover_puts_off_what_the_store_cannot_give(
    service: RunningService, job: Job, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.save(100, content=CONTENT)
    make_unproven(service)
    real, asked = service.context.store.open_read, []

    def first_one_fails(key: Any) -> Any:
        asked.append(key)
        if len(asked) == 1:
            raise StoreUnavailable("no answer")
        return real(key)

    monkeypatch.setattr(service.context.store, "open_read", first_one_fails)
    defer = holdfast_service.scrub.verify.reconcile(service.context)
    assert (defer.done, defer.failed, defer.error) == (0, 1, "primary store: no answer")
    assert holdfast_service.scrub.verify.reconcile(service.context).good == 1, "the other one is not held up"
    clock.advance(31)
    assert holdfast_service.scrub.verify.reconcile(service.context).good == 1


def test_a_corrupt_checkpoint_is_repaired_by_the_same_bytes_sent_anew(service: RunningService, job: Job) -> None:
    lost = job.save(100, content=CONTENT)
    object_file(service, CONTENT).unlink()
    report(service, lost["id"], CONTENT, "missing")
    assert health_of(service, lost["id"])[0] == "corrupt"
    assert holdfast_service.scrub.repair.reconcile(service.context).repaired_checkpoints == ()
    assert job.save(200, content=CONTENT)["state"] == "committed"
    assert holdfast_service.scrub.repair.reconcile(service.context).repaired_checkpoints == (lost["id"],)
    assert health_of(service, lost["id"]) == ("ok", None)
    assert reads(service, lost["id"], CONTENT)["chunks"][0]["kind"] == "http"


def test_what_was_in_quarantine_goes_back_there_when_it_is_whole_again(service: RunningService, job: Job) -> None:
    lost = job.save(100, content=CONTENT)
    with service.context.database.transaction() as session:
        row = session.get_one(Checkpoint, lost["id"])
        row.health, row.health_reason = "quarantined", "loss spike (see #12)"
    object_file(service, CONTENT).unlink()
    assert report(service, lost["id"], CONTENT, "missing")["corrupt_checkpoints"] == [lost["id"]]
    job.save(200, content=CONTENT)
    holdfast_service.scrub.repair.reconcile(service.context)
    assert health_of(service, lost["id"]) == ("quarantined", "loss spike (see #12)")


def test_a_chunk_that_was_lost_while_a_checkpoint_uploads_stops_its_commit(service: RunningService, job: Job) -> None:
    first = job.save(100, content=CONTENT)
    save: Save = job.begin(200)
    assert save.negotiate(0, [CONTENT])["chunks"][0]["status"] == "present"
    save.upload(0, [b"index"])
    object_file(service, CONTENT).unlink()
    report(service, first["id"], CONTENT, "missing")
    with pytest.raises(Refused) as refused:
        save.seal(0, [CONTENT, b"index"])
    assert refused.value.code in ("incomplete_checkpoint", "chunk_gone")
    save.write(0, [CONTENT, b"index"])
    assert save.now()["state"] == "committed"


def test_reading_works_the_same_from_s3(s3_service: RunningService) -> None:
    job = Job(s3_service.http())
    content = secrets.token_bytes(2_000_000)
    saved = job.save(100, content=content)
    (ticket,) = reads(s3_service, saved["id"], content)["chunks"]
    assert httpx.get(ticket["url"], timeout=60, headers=ticket["headers"]).content == content
    assert report(s3_service, saved["id"], content)["readable"] is True
    with s3_service.context.database.read() as session:
        chunk = session.scalars(select(Chunk).where(Chunk.digest == digest_of(content))).one()
        copy = session.scalars(select(Copy).where(Copy.chunk_id == chunk.id)).one()
        key = object_key(copy.project_id, chunk.digest, copy)
    s3_service.context.store.delete(key)
    verdict = report(s3_service, saved["id"], content, "missing")
    assert (verdict["readable"], verdict["corrupt_checkpoints"]) == (False, [saved["id"]])


@pytest.mark.races
@pytest.mark.rule("report-is-suspicion")
def test_a_checkpoint_that_commits_while_its_chunk_is_found_lost_is_marked_too(service: RunningService) -> None:
    """The commit has looked at the copies and not yet ended; whoever marks must wait for it, or it is missed."""
    save = Job(service.http(), world_size=2).begin(100)
    save.write(0, [CONTENT, b"index"])
    with service.context.database.transaction() as session:
        chunk = session.scalars(select(Chunk).where(Chunk.digest == digest_of(CONTENT))).one()
        copy = session.scalars(select(Copy).where(Copy.chunk_id == chunk.id)).one()
        claimed = claim(session, chunk, copy, seconds=60)
    with ThreadPoolExecutor(1) as other:
        with service.context.database.transaction() as committing:
            row = committing.execute(select(Checkpoint).where(Checkpoint.id == save.id).with_for_update()).scalar_one()
            settled = other.submit(settle, service.context, claimed, Finding.MISSING, ACTOR)
            # It usually comes to wait for the lock meanwhile; the outcome is the same if it does not.
            wait([settled], timeout=0.5)
            row.state, row.committed_at, row.digest = "committed", database_now(committing), "0" * 64
        assert settled.result(60) == [save.id]
    assert health_of(service, save.id)[0] == "corrupt"
