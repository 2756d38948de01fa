"""Negotiating chunks: rule project-in-key to 19, over HTTP on both databases."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, update

import holdfast_service.db.engine
import holdfast_service.training.negotiate
from holdfast_service.copies.predicates import object_key
from holdfast_service.db.engine import Database
from holdfast_service.db.tables.core import Chunk, Copy, ShardChunk, Store
from tests.service.conftest import Clock
from tests.support.interleave import hold_after, in_background, overlap, refused
from tests.support.rank import Job, Save, answer, digest_of
from tests.support.rebuilt import read_all
from tests.support.service import RunningService
from tests.support.wrong_sizes import offer_with, save_with_wrong_size


@pytest.fixture
def job(service: RunningService) -> Job:
    return Job(service.http(), world_size=2)


def statuses(reply: Any) -> list[str]:
    return [each["status"] for each in reply["chunks"]]


def change_copies(service: RunningService, data: bytes, **values: Any) -> None:
    with service.context.database.transaction() as session:
        session.execute(update(Copy).where(Copy.stored_digest == digest_of(data)).values(**values))


def copies_of(service: RunningService, data: bytes) -> list[Copy]:
    with service.context.database.read() as session:
        rows = session.scalars(select(Copy).where(Copy.stored_digest == digest_of(data)).order_by(Copy.id))
        return list(rows)


def later_attempt(service: RunningService, after: int) -> Save:
    return Job(service.http(), after=after, world_size=2).begin(10_000)


@pytest.mark.rule("project-in-key")
def test_another_projects_chunk_is_neither_present_nor_reused(service: RunningService) -> None:
    Job(service.http(), "one/run").save(1, content=b"the same bytes")
    other = Job(service.http(), "two/run").begin(1)
    assert statuses(other.negotiate(0, [b"the same bytes"])) == ["upload"]
    with service.context.database.read() as session:
        projects = session.scalars(select(Chunk.project_id).where(Chunk.digest == digest_of(b"the same bytes"))).all()
    assert len(set(projects)) == 2


@pytest.mark.rule("project-in-key")
def test_a_chunk_that_only_another_project_has_must_be_sent(service: RunningService) -> None:
    Job(service.http(), "one/run").begin(1).negotiate(0, [b"the same bytes"])  # offered, and never sent
    Job(service.http(), "two/run").save(1, content=b"the same bytes")
    again = Job(service.http(), "one/run", after=1).begin(1)
    assert statuses(again.negotiate(0, [b"the same bytes"])) == ["upload"]


@pytest.mark.rule("project-in-key")
def test_anothers_checkpoint_does_not_exist_for_a_project_token(service: RunningService) -> None:
    save = Job(service.http(), "one/run").begin(1)
    service.make_project("two")
    stranger = service.http(token=service.token(project="two"))
    with refused("checkpoint_not_found"):
        answer(stranger.get(f"/v1/checkpoints/{save.id}"))
    with refused("checkpoint_not_found"):
        answer(stranger.post(f"/v1/checkpoints/{save.id}/shards/0/chunks", json=save.job.fence))


def sizes_of(service: RunningService, checkpoint_id: str) -> list[int]:
    shard = answer(service.http().get(f"/v1/checkpoints/{checkpoint_id}/shards/0"))
    return [chunk["bytes"] for chunk in shard["chunks"]]


@pytest.mark.rule("project-in-key")
def test_a_wrong_size_that_is_offered_first_binds_nobody_else(service: RunningService) -> None:
    offer_with(Job(service.http(), "demo/liar").begin(1), b"weights", 5)
    honest = Job(service.http(), "demo/honest").save(1, content=b"weights")
    assert honest["state"] == "committed"
    assert sizes_of(service, honest["id"]) == [7, 13]
    assert read_all(service.http(), honest["id"], [b"weights", b"index weights"])


@pytest.mark.rule("project-in-key")
def test_a_wrong_size_that_is_offered_later_binds_nobody_either(service: RunningService) -> None:
    Job(service.http(), "demo/honest").save(1, content=b"weights")
    offer_with(Job(service.http(), "demo/liar").begin(1), b"weights", 5)
    assert statuses(Job(service.http(), "demo/other").begin(1).negotiate(0, [b"weights"])) == ["present"]


@pytest.mark.rule("project-in-key")
def test_a_list_of_the_same_chunks_with_a_wrong_size_is_another_list(service: RunningService) -> None:
    liar = save_with_wrong_size(service, "demo/liar", b"weights", 5)
    honest = Job(service.http(), "demo/honest").save(1, content=b"weights")
    assert sizes_of(service, liar.id) == [5, 13]
    assert sizes_of(service, honest["id"]) == [7, 13]
    assert read_all(service.http(), honest["id"], [b"weights", b"index weights"])


@pytest.mark.rule("project-in-key")
def test_two_sizes_of_one_chunk_are_refused_within_a_shard_and_within_a_checkpoint(
    job: Job, service: RunningService
) -> None:
    save = job.begin(1)
    save.write(0, [b"weights", b"index"])
    offer_with(save, b"weights", 5, rank=1)
    with refused("invalid_request"):
        save.negotiate(1, [b"weights"])
    with service.context.database.transaction() as session:
        session.execute(update(Copy).where(Copy.stored_bytes == 5).values(state="verified", proof="unproven"))
    save.upload(1, [b"index 1"])
    with refused("invalid_request") as caught:
        save.seal(1, [b"weights", b"index 1"], logical_bytes=5 + len(b"index 1"))
    assert "two sizes" in caught.value.detail
    assert save.now()["state"] == "aborted"


@pytest.mark.rule("reuse-only-hashed")
def test_an_unproven_copy_is_good_for_its_own_attempt_only(job: Job, service: RunningService) -> None:
    save = job.begin(1)
    save.upload(0, [b"frozen"])
    change_copies(service, b"frozen", proof="unproven")
    assert statuses(save.negotiate(1, [b"frozen"])) == ["present"]
    other = later_attempt(service, 1)
    assert statuses(other.negotiate(0, [b"frozen"])) == ["upload"]
    for proof in ("read", "store_sha256"):
        change_copies(service, b"frozen", state="verified", proof=proof)
        assert statuses(other.negotiate(1, [b"frozen"])) == ["present"]


@pytest.mark.rule("reuse-only-hashed")
def test_a_checksum_proves_nothing_where_the_store_was_not_seen_to_enforce_it(
    job: Job, service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = job.begin(1)
    save.upload(0, [b"checked"])
    assert [copy.proof for copy in copies_of(service, b"checked")] == ["store_sha256"]
    monkeypatch.setattr(service.context.store, "capabilities", None)
    save.upload(0, [b"unchecked"])
    assert [copy.proof for copy in copies_of(service, b"unchecked")] == ["unproven"]


@pytest.mark.rule("reuse-only-hashed")
def test_what_is_offered_raw_is_stored_as_it_is(job: Job) -> None:
    save = job.begin(1)
    for other in ({"stored_digest": digest_of(b"encoded")}, {"stored_bytes": 3}):
        chunk = {"digest": digest_of(b"raw"), "bytes": 4} | other
        with refused("invalid_request"):
            job.call("POST", f"/v1/checkpoints/{save.id}/shards/0/chunks", chunks=[chunk])


@pytest.mark.rule("present-is-referenced")
@pytest.mark.parametrize("state", ["pending", "suspect", "bad", "deleting", "gone"])
def test_only_a_verified_copy_is_present(job: Job, service: RunningService, state: str) -> None:
    job.save(1, content=b"weights")
    other = later_attempt(service, 1)
    assert statuses(other.negotiate(0, [b"weights"])) == ["present"]
    change_copies(service, b"weights", state=state)
    assert statuses(other.negotiate(1, [b"weights"])) == ["upload"]
    assert other.write(1, [b"weights"])["sealed_ranks"] == 1


@pytest.mark.rule("present-is-referenced")
def test_a_copy_in_another_store_is_not_present(job: Job, service: RunningService) -> None:
    job.save(1, content=b"weights")
    with service.context.database.transaction() as session:
        here = session.execute(select(Store)).scalar_one()
        away = Store(url="s3://cold", kind="s3", created_at=here.created_at)
        session.add(away)
        session.flush()
        session.execute(update(Copy).values(store_id=away.id))
    assert statuses(job.begin(2).negotiate(0, [b"weights"])) == ["upload"]


@pytest.mark.rule("present-is-referenced")
def test_present_comes_with_a_reference(job: Job, service: RunningService) -> None:
    job.save(1, content=b"weights")
    save = job.begin(2)
    save.negotiate(0, [b"weights"])
    with service.context.database.read() as session:
        held = session.scalars(
            select(Chunk.digest).join(ShardChunk, ShardChunk.chunk_id == Chunk.id).where(~ShardChunk.uploading)
        ).all()
    assert held == [digest_of(b"weights")]


@pytest.mark.rule("sorted-inserts")
def test_overlapping_batches_in_any_order_never_deadlock(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = 8
    job = Job(service.http(), world_size=ranks)
    save = job.begin(1)
    real = Database.run
    # A deadlock is not repeated here but seen.
    monkeypatch.setattr(Database, "run", lambda database, work: real(database, work, tries=1))
    chunks = [b"chunk %d" % number for number in range(400)]

    def negotiate(rank: int) -> int:
        mine = random.Random(rank).sample(chunks, 300)
        return len(save.negotiate(rank, mine)["chunks"])

    with in_background() as threads:
        for _ in range(2):
            assert list(threads.map(negotiate, range(ranks))) == [300] * ranks
    with service.context.database.read() as session:
        assert session.scalar(select(func.count()).select_from(Chunk)) == len(chunks)


@pytest.mark.rule("sorted-inserts")
def test_a_chunk_that_two_ranks_offer_at_the_same_moment_is_one_chunk(
    job: Job, service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = job.begin(1)
    for rank in (0, 1):
        save.negotiate(rank, [b"own %d" % rank])
    gate = hold_after(monkeypatch, holdfast_service.training.negotiate, "_copies")
    # Inserted, and not committed.
    one, other = overlap(service, gate, lambda: save.negotiate(0, [b"shared"]), lambda: save.negotiate(1, [b"shared"]))
    assert statuses(one.result()) == statuses(other.result()) == ["upload"]
    generations = {copy.generation for copy in copies_of(service, b"shared")}
    assert len(generations) == 2  # neither relies on the other to finish


@pytest.mark.rule("random-generation")
def test_asking_again_gives_the_same_copy_with_a_fresh_ticket(job: Job, service: RunningService, clock: Clock) -> None:
    save = job.begin(1)
    save.negotiate(0, [b"weights"])
    (first,) = copies_of(service, b"weights")
    clock.advance(service.context.settings.ticket_seconds - 60)
    save.negotiate(0, [b"weights"])
    (again,) = copies_of(service, b"weights")
    assert again.generation == first.generation
    assert again.ticket_expires_at > first.ticket_expires_at


@pytest.mark.rule("random-generation")
def test_a_retry_that_overtakes_its_first_call_gets_the_same_copy(
    job: Job, service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = job.begin(1)
    save.negotiate(0)
    save.negotiate(1, [b"weights"])  # the chunk has its row: inserting it holds nobody up
    gate = hold_after(monkeypatch, holdfast_service.training.negotiate, "_refer")
    first, retry = overlap(
        service, gate, lambda: save.negotiate(0, [b"weights"]), lambda: save.negotiate(0, [b"weights"])
    )
    assert statuses(first.result()) == statuses(retry.result()) == ["upload"]
    assert len(copies_of(service, b"weights")) == 2  # one for each rank


@pytest.mark.rule("random-generation")
def test_an_expired_ticket_is_followed_by_a_new_generation(job: Job, service: RunningService, clock: Clock) -> None:
    save = job.begin(1)
    late = save.negotiate(0, [b"weights"])["chunks"][0]["ticket"]
    clock.advance(service.context.settings.ticket_seconds + 1)
    save.upload(0, [b"weights"])
    old, new = copies_of(service, b"weights")
    assert old.generation != new.generation
    assert (old.state, new.state) == ("pending", "verified")
    save.put(b"weights", late)  # wherever it lands, it is not where the other one is
    assert save.seal(0, [b"weights"])["sealed_ranks"] == 1


@pytest.mark.rule("random-generation")
def test_a_chunk_that_arrived_wrong_gets_a_new_generation(job: Job, service: RunningService) -> None:
    save = job.begin(1)
    ticket = save.negotiate(0, [b"weights"])["chunks"][0]["ticket"]
    assert save.put(b"WEIGHTS", ticket).status_code == 422  # the store itself refuses wrong bytes
    (copy,) = copies_of(service, b"weights")
    path = service.context.store.object_path(_key(service, copy))  # type: ignore[attr-defined]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"short")  # a store that did not
    (finished,) = save.negotiate(0, finished=[b"weights"])["finished"]
    assert finished["state"] == "mismatch"
    assert "5 bytes, announced 7" in finished["detail"]
    with refused("incomplete_checkpoint"):
        save.seal(0, [b"weights"])
    save.upload(0, [b"weights"])
    assert [each.state for each in copies_of(service, b"weights")] == ["bad", "verified"]
    assert save.seal(0, [b"weights"])["sealed_ranks"] == 1


@pytest.mark.rule("random-generation")
def test_a_ticket_that_is_used_twice_changes_nothing(job: Job) -> None:
    save = job.begin(1)
    ticket = save.negotiate(0, [b"weights"])["chunks"][0]["ticket"]
    assert save.put(b"weights", ticket).status_code == 201
    assert save.put(b"weights", ticket).status_code in (200, 201, 412)
    assert save.seal(0, [b"weights"])["sealed_ranks"] == 1


def _key(service: RunningService, copy: Copy) -> Any:
    return object_key(copy.project_id, copy.stored_digest, copy)


def mount_proof(job: Job) -> dict[str, str]:
    offer = answer(job.http.post("/v1/mount-proofs"))
    return {"proof_id": offer["proof_id"], "content": Path(offer["path"]).read_text().strip()}


@pytest.mark.rule("drop-box")
def test_a_client_with_the_mount_hands_over_files_and_the_service_publishes_them(
    job: Job, service: RunningService
) -> None:
    save = job.begin(1)
    reply = save.negotiate(0, [b"weights", b"index"], mount_proof=mount_proof(job))
    tickets = [each["ticket"] for each in reply["chunks"]]
    assert [ticket["kind"] for ticket in tickets] == ["file", "file"]
    assert all("/incoming/" in ticket["path"] for ticket in tickets)
    save.send([b"weights", b"index"], reply["chunks"])
    (copy,) = copies_of(service, b"weights")
    published = service.context.store.object_path(_key(service, copy))  # type: ignore[attr-defined]
    assert not published.exists()
    assert [each["state"] for each in save.negotiate(0, finished=[b"weights"])["finished"]] == ["verified"]
    assert published.read_bytes() == b"weights"
    assert save.seal(0, [b"weights", b"index"])["sealed_ranks"] == 1
    # The service has hashed them when it made its own copy.
    assert [each.proof for each in copies_of(service, b"weights")] == ["store_sha256"]


@pytest.mark.rule("durable-publish")
def test_a_file_that_stays_open_changes_no_committed_chunk(job: Job, service: RunningService) -> None:
    save = job.begin(1)
    reply = save.negotiate(0, [b"weights"], mount_proof=mount_proof(job))
    with Path(reply["chunks"][0]["ticket"]["path"]).open("wb") as mine:
        mine.write(b"weights")
        mine.flush()
        assert [each["state"] for each in save.negotiate(0, finished=[b"weights"])["finished"]] == ["verified"]
        mine.seek(0)
        mine.write(b"poison!")
    (copy,) = copies_of(service, b"weights")
    published = service.context.store.object_path(_key(service, copy))  # type: ignore[attr-defined]
    assert published.read_bytes() == b"weights"


@pytest.mark.rule("durable-publish")
def test_other_bytes_that_are_handed_over_are_refused_at_once(job: Job, service: RunningService) -> None:
    save = job.begin(1)
    reply = save.negotiate(0, [b"weights"], mount_proof=mount_proof(job))
    save.put(b"poison!", reply["chunks"][0]["ticket"])
    assert [each["state"] for each in save.negotiate(0, finished=[b"weights"])["finished"]] == ["mismatch"]
    assert [each.state for each in copies_of(service, b"weights")] == ["bad"]


@pytest.mark.rule("durable-publish")
def test_what_a_dead_service_linked_is_verified_only_with_its_name_durable(
    job: Job, service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = job.begin(1)
    save.send([b"weights"], save.negotiate(0, [b"weights"])["chunks"])
    (copy,) = copies_of(service, b"weights")
    linked = service.context.store.object_path(_key(service, copy))  # type: ignore[attr-defined]
    linked.with_name(linked.name + ".sha256").unlink()  # it died between the link and this
    real, synced = os.fsync, set()

    def fsync(descriptor: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    assert [each["state"] for each in save.negotiate(0, finished=[b"weights"])["finished"]] == ["verified"]
    assert str(linked.parent) in synced
    assert [each.proof for each in copies_of(service, b"weights")] == ["unproven"]


@pytest.mark.rule("drop-box")
@pytest.mark.parametrize("wrong", ["content", "proof_id"])
def test_whoever_cannot_read_the_nonce_gets_signed_urls(job: Job, wrong: str) -> None:
    proof = mount_proof(job)
    proof[wrong] = "0" * len(proof[wrong])
    (each,) = job.begin(1).negotiate(0, [b"weights"], mount_proof=proof)["chunks"]
    assert each["ticket"]["kind"] == "http"
    assert each["ticket"]["path"] == ""


@pytest.mark.rule("limits-before-work")
def test_those_who_come_at_once_are_offered_one_file(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast_service.attached_stores.attached.SHARED_PROOF_SECONDS", 60.0)
    offers = [answer(service.http().post("/v1/mount-proofs")) for _ in range(5)]
    (path,) = {Path(offer["path"]) for offer in offers}
    path.unlink()  # as where the mount is absent
    assert Path(answer(service.http().post("/v1/mount-proofs"))["path"]).exists()


@pytest.mark.rule("drop-box")
def test_a_file_of_the_wrong_size_is_not_published(job: Job, service: RunningService) -> None:
    save = job.begin(1)
    reply = save.negotiate(0, [b"weights"], mount_proof=mount_proof(job))
    save.put(b"wei", reply["chunks"][0]["ticket"])
    assert [each["state"] for each in save.negotiate(0, finished=[b"weights"])["finished"]] == ["mismatch"]
    assert [each.state for each in copies_of(service, b"weights")] == ["bad"]


def test_what_is_not_there_yet_is_missing_and_may_still_come(job: Job) -> None:
    save = job.begin(1)
    reply = save.negotiate(0, [b"weights"])
    assert [each["state"] for each in save.negotiate(0, finished=[b"weights"])["finished"]] == ["missing"]
    save.send([b"weights"], reply["chunks"])
    assert [each["state"] for each in save.negotiate(0, finished=[b"weights"])["finished"]] == ["verified"]
    assert [each["state"] for each in save.negotiate(0, finished=[b"weights"])["finished"]] == ["verified"]
    with refused("chunk_not_negotiated"):
        save.negotiate(0, finished=[b"never offered"])


def test_many_chunks_are_reported_and_offered_in_one_call(job: Job) -> None:
    chunks = [b"chunk %d" % number for number in range(40)]
    save = job.begin(1)
    save.send(chunks[:20], save.negotiate(0, chunks[:20])["chunks"])
    reply = save.negotiate(0, chunks, finished=chunks[:20])
    assert [each["state"] for each in reply["finished"]] == ["verified"] * 20
    assert statuses(reply) == ["present"] * 20 + ["upload"] * 20


@pytest.mark.rule("quota-reserved")
def test_what_exceeds_the_quota_is_refused_with_what_is_left(service: RunningService) -> None:
    service.make_project("small", quota_bytes=100)
    job = Job(service.http(), "small/run")
    save = job.begin(1)
    save.upload(0, [b"x" * 60])
    with refused("quota_exceeded") as caught:
        save.negotiate(0, [b"y" * 30, b"z" * 11])
    assert caught.value.context == {"quota_bytes": 100, "left_bytes": 40, "wanted_bytes": 41}
    assert "has 40 bytes left" in caught.value.detail
    assert statuses(save.negotiate(0, [b"x" * 60, b"y" * 40])) == ["present", "upload"]
    assert statuses(save.negotiate(0, [b"y" * 40])) == ["upload"]  # reserved already


@pytest.mark.rule("quota-reserved")
def test_two_ranks_at_the_same_moment_cannot_both_have_the_last_bytes(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.make_project("small", quota_bytes=100)
    save = Job(service.http(), "small/run", world_size=2).begin(1)
    for rank in (0, 1):
        save.negotiate(rank, [])
    gate = hold_after(monkeypatch, holdfast_service.training.negotiate, "refuse_over_quota")
    one, other = overlap(service, gate, lambda: save.negotiate(0, [b"x" * 60]), lambda: save.negotiate(1, [b"y" * 60]))
    assert statuses(one.result()) == ["upload"]
    with refused("quota_exceeded"):
        other.result()


def test_a_whole_save_goes_straight_to_s3(s3_service: RunningService) -> None:
    job = Job(s3_service.http(), world_size=2)
    save = job.begin(1)
    for rank in (0, 1):
        save.write(rank, [b"weights %d" % rank, b"index %d" % rank])
    view = save.now()
    assert (view["state"], view["uploaded_bytes"]) == ("committed", 32)
    assert [copy.proof for copy in copies_of(s3_service, b"weights 1")] == ["store_sha256"]
    assert statuses(later_attempt(s3_service, 1).negotiate(0, [b"weights 0"])) == ["present"]
