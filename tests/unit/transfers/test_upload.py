"""Many chunks on their way up, against a small service with a store, and its faults."""

from __future__ import annotations

import gc
import hashlib
import os
import shutil
import threading

import pytest

from holdfast_client import Client, ClientSettings, errors
from holdfast_client.chunks import uploader as uploader_module
from holdfast_client.chunks.transfer import OutgoingChunk
from holdfast_client.chunks.uploader import ShardUploader
from holdfast_client.chunks.workers import TransferWorkers
from holdfast_protocol.base import Fence
from tests.support.transfers import Service, client_of, fetch, negotiations, outgoing, some_chunks, upload


def test_all_chunks_are_verified_and_several_go_up_at_once(service):
    chunks = some_chunks()
    done = upload(service, chunks)
    assert service.objects == chunks
    assert service.verified == set(chunks)
    assert (done.chunks, done.sent_chunks) == (20, 20)
    assert done.bytes == done.sent_bytes == sum(map(len, chunks.values()))
    assert len(service.of("GET", "/v1/service")) == 1


@pytest.mark.rule("present-is-referenced")
def test_what_is_present_is_not_sent(service):
    chunks = some_chunks()
    upload(service, chunks)
    before = len(service.seen)
    done = upload(service, chunks)
    assert (done.chunks, done.sent_chunks, done.sent_bytes) == (20, 0, 0)
    assert not [seen for seen in service.seen[before:] if seen.method == "PUT"]


def test_a_chunk_that_comes_twice_is_offered_once(service):
    (digest, body), *_ = some_chunks(1).items()
    with client_of(service) as client:
        done = ShardUploader(client, "ck_1", 0, Fence(epoch=1, attempt=1)).upload([OutgoingChunk.of(body, digest)] * 3)
    assert done.chunks == 1
    assert sum(len(call["chunks"]) for call in negotiations(service)) == 1


@pytest.mark.rule("verify-while-uploading")
def test_finished_uploads_are_reported_in_the_call_that_offers_the_next(service):
    def slowly():
        for digest, body in some_chunks(60).items():
            yield OutgoingChunk.of(body, digest)
            threading.Event().wait(0.005)

    with client_of(service) as client:
        ShardUploader(client, "ck_1", 0, Fence(epoch=1, attempt=1), held_bytes=400_000).upload(slowly())
    assert any(call["chunks"] and call["finished"] for call in negotiations(service))


@pytest.mark.usefixtures("patient")
def test_no_batch_is_larger_than_the_protocol_allows(service):
    chunks = some_chunks(2300, size=10)
    upload(service, chunks)
    assert service.verified == set(chunks)
    assert max(len(call["chunks"]) for call in negotiations(service)) == 1000
    assert len(negotiations(service)) < 200


def test_memory_that_is_held_is_bounded(service, monkeypatch):
    monkeypatch.setattr(uploader_module, "HELD_BYTES", 50_000)
    chunks = some_chunks(30)
    most = 0

    def watched():
        nonlocal most
        given = 0
        for digest, body in chunks.items():
            given += len(body)
            most = max(most, given - sum(len(service.objects[one]) for one in list(service.verified)))
            yield OutgoingChunk.of(body, digest)

    with client_of(service) as client:
        ShardUploader(client, "ck_1", 0, Fence(epoch=1, attempt=1)).upload(watched())
    assert most < 50_000 + 2 * 10_100


def test_chunks_that_are_shown_late_are_waited_for_together(service, monkeypatch):
    """On a network filesystem a whole batch may be, and the uploading thread does not wait for one after another."""
    pause, chunks, waited = 0.05, some_chunks(), []

    class Counting(threading.Event):
        def wait(self, timeout=None):
            waited.append(timeout)
            return super().wait(timeout)

    monkeypatch.setattr(uploader_module, "MISSING_PAUSE_SECONDS", pause)
    service.faults["lost object"] = len(chunks)
    with client_of(service) as client:
        uploader = ShardUploader(client, "ck_1", 0, Fence(epoch=1, attempt=1))
        uploader._stop = Counting()
        uploader.upload(OutgoingChunk.of(body, digest) for digest, body in chunks.items())
    assert service.verified == set(chunks)
    assert sum(waited) < len(chunks) * pause / 2


@pytest.mark.parametrize("fault", ["refused ticket", "dead ticket", "slow down", "lost object", "mismatch"])
def test_an_upload_survives(service, fault):
    service.faults[fault] = 3
    chunks = some_chunks()
    done = upload(service, chunks)
    assert service.verified == set(chunks)
    assert done.sent_chunks == 20
    assert service.faults[fault] == 0


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("refused ticket", errors.StoreRefused),
        ("lost object", errors.StoreUnavailable),
        ("mismatch", errors.ChecksumMismatch),
        ("full", errors.StoreFull),
        ("stale", errors.StaleAttempt),
    ],
)
def test_an_upload_that_cannot_succeed_raises_and_lets_go_of_the_memory(service, fault, error):
    service.faults[fault] = 10_000
    bodies = [bytearray(body) for body in some_chunks().values()]
    with pytest.raises(error):
        upload(service, {hashlib.sha256(body).hexdigest(): body for body in bodies})
    gc.collect()  # the exception's own frames
    for body in bodies:
        body.clear()  # BufferError if a thread still held a view


def test_bytes_that_change_after_hashing_are_never_verified(service):
    body = bytearray(os.urandom(10_000))
    digest = hashlib.sha256(body).hexdigest()
    body[5] ^= 1
    with pytest.raises(errors.IntegrityError):
        upload(service, {digest: body})
    assert service.verified == set()


def test_what_the_iterator_raises_comes_through_and_threads_end(service):
    def broken():
        yield from outgoing(some_chunks(3))
        raise RuntimeError("staging failed")

    with client_of(service) as client, pytest.raises(RuntimeError, match="staging failed"):
        ShardUploader(client, "ck_1", 0, Fence(epoch=1, attempt=1)).upload(broken())


@pytest.mark.rule("finish-or-supersede")
def test_a_stopped_upload_ends_and_shared_workers_live_on(service):
    with client_of(service) as client, TransferWorkers(2) as workers:
        uploader = ShardUploader(client, "ck_1", 0, Fence(epoch=1, attempt=1), workers=workers)

        def stopping():
            for number, (digest, body) in enumerate(some_chunks().items()):
                if number == 5:
                    uploader.stop()
                yield OutgoingChunk.of(body, digest)

        with pytest.raises(errors.TransferStopped):
            uploader.upload(stopping())
        chunks = some_chunks()
        ShardUploader(client, "ck_1", 0, Fence(epoch=1, attempt=1), workers=workers).upload(outgoing(chunks))
    assert set(chunks) <= service.verified
    assert service.most_at_once <= 2


@pytest.mark.rule("reuse-only-hashed")
def test_md5_is_computed_only_where_the_store_asks_for_it(service):
    chunks = some_chunks(2)
    upload(service, chunks)
    assert {offer["md5"] for call in negotiations(service) for offer in call["chunks"]} == {None}
    asking = Service(asks_md5=True)
    try:
        upload(asking, chunks)
        told = {offer["digest"]: offer["md5"] for call in negotiations(asking) for offer in call["chunks"]}
        assert told == {digest: hashlib.md5(body).hexdigest() for digest, body in chunks.items()}
    finally:
        asking.close()


@pytest.mark.rule("drop-box")
def test_on_a_shared_mount_no_byte_goes_over_http(mounted, tmp_path):
    chunks = some_chunks()
    upload(mounted, chunks)
    assert {path.name for path in (tmp_path / "incoming").iterdir()} == set(chunks)
    assert fetch(mounted, chunks) == chunks
    assert not [seen for seen in mounted.seen if seen.path.startswith("/store/")]
    assert len(mounted.of("POST", "/v1/mount-proofs")) == 2, "once per client"


@pytest.mark.rule("drop-box")
def test_a_mount_that_cannot_be_used_is_left_silently(mounted, tmp_path):
    chunks = some_chunks()
    real_ticket = mounted.ticket

    def unwritable(digest, proven):
        ticket = real_ticket(digest, proven)
        shutil.rmtree(tmp_path / "incoming", ignore_errors=True)
        return ticket

    mounted.ticket = unwritable
    upload(mounted, chunks)
    assert mounted.objects == chunks


def test_a_mount_that_does_not_answer_any_more_is_left_for_http(mounted, monkeypatch):
    def fails(*_):
        raise errors.StoreUnavailable("The store's filesystem failed (EIO)")

    monkeypatch.setattr("holdfast_client.chunks.transfer.write_incoming", fails)
    chunks = some_chunks()
    with Client(ClientSettings(url=mounted.url, token="hold_t_s", retry_seconds=0)) as client:
        ShardUploader(client, "ck_1", 0, Fence(epoch=1, attempt=1)).upload(outgoing(chunks))
    assert mounted.objects == chunks


def test_what_the_service_does_not_see_in_the_mount_is_sent_over_http(mounted, monkeypatch):
    """The mount that was proven is another one by now."""
    monkeypatch.setattr("holdfast_client.chunks.transfer.write_incoming", lambda *_: None)
    chunks = some_chunks()
    upload(mounted, chunks)
    assert mounted.objects == chunks


@pytest.mark.rule("drop-box")
@pytest.mark.parametrize(
    "where",
    [
        "{outside}/0123456789",
        "{mount}/incoming/../../{outside.name}/0123456789",
        "{mount}/0123456789",
        "{mount}/incoming/a.b",
    ],
)
def test_no_file_outside_of_the_drop_box_is_written(mounted, tmp_path, where):
    outside = tmp_path.with_name(f"{tmp_path.name} beside")
    outside.mkdir()
    (outside / "0123456789").write_text("precious")
    chunks = some_chunks(3)
    real_ticket = mounted.ticket

    def elsewhere(digest, proven):
        ticket = real_ticket(digest, proven)
        path = where.format(outside=outside, mount=tmp_path)
        return {**ticket, "path": path} if ticket["kind"] == "file" else ticket

    mounted.ticket = elsewhere
    upload(mounted, chunks)
    assert mounted.objects == chunks
    assert (outside / "0123456789").read_text() == "precious"
    assert not list((tmp_path / "incoming").iterdir())
    assert {path.name for path in tmp_path.iterdir()} == {"incoming", "proofs"}


def test_direct_files_can_be_switched_off(mounted):
    chunks = some_chunks(3)
    upload(mounted, chunks, direct_files=False)
    assert not mounted.of("POST", "/v1/mount-proofs")
    assert fetch(mounted, chunks, direct_files=False) == chunks


def sealing(service, chunks, *answers):
    """Uploads with a seal that raises what `answers` has, one after another. Returns what each seal was given."""
    given, left = [], list(answers)

    def seal(digests):
        given.append(digests)
        if left and (error := left.pop(0)) is not None:
            raise error

    with client_of(service) as client:
        uploader = ShardUploader(client, "ck_1", 0, Fence(epoch=1, attempt=1), seal=seal)
        done = uploader.upload(outgoing(chunks))
    return given, done


@pytest.mark.usefixtures("patient")
@pytest.mark.rule("verify-while-uploading")
def test_the_seal_takes_the_place_of_the_last_report(service):
    chunks = some_chunks(2)
    given, done = sealing(service, chunks)
    assert given == [list(chunks)]
    [call] = negotiations(service)
    # They are offered as they are hashed, on several threads.
    assert (sorted(each["digest"] for each in call["chunks"]), call["finished"]) == (sorted(chunks), [])
    assert (done.sent_chunks, service.objects) == (2, chunks)


@pytest.mark.usefixtures("patient")
@pytest.mark.rule("seal-only-negotiated")
def test_what_a_seal_does_not_find_is_sent_again_before_the_next(service):
    service.faults["lost object"] = 1
    chunks = some_chunks(2)
    given, done = sealing(service, chunks, errors.IncompleteCheckpoint("one is missing"))
    assert given == [list(chunks)] * 2
    assert [len(call["finished"]) for call in negotiations(service)][1] == 2, "the report that says which"
    assert (done.sent_chunks, service.objects) == (2, chunks)


def test_what_a_seal_is_refused_for_ends_the_upload(service):
    with pytest.raises(errors.CheckpointAborted):
        sealing(service, some_chunks(2), errors.CheckpointAborted("rank 1 failed"))


def test_where_nothing_is_sent_there_is_no_report_for_the_seal_to_replace(service):
    chunks = some_chunks(2)
    upload(service, chunks)
    assert sealing(service, chunks)[0] == []
