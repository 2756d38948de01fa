"""Many chunks: the uploader and the fetcher against a small service with a store, and its faults."""

from __future__ import annotations

import gc
import hashlib
import os
import threading

import pytest

from holdfast_client import Client, ClientSettings, errors
from holdfast_client.chunks import fetcher as fetcher_module
from holdfast_client.chunks import uploader as uploader_module
from holdfast_client.chunks.fetcher import ShardFetcher
from holdfast_client.chunks.outgoing import OutgoingChunk
from holdfast_client.chunks.uploader import ShardUploader
from holdfast_client.chunks.workers import TransferWorkers
from holdfast_protocol.fencing import Fence
from tests.support.scripted_http import Reply, ScriptedServer, as_json, problem


class Service(ScriptedServer):
    """Negotiates, stores, verifies and reads like the real one; `faults` maps a name to how often it strikes."""

    def __init__(self, mount=None, asks_md5=False) -> None:
        self.objects: dict[str, bytes] = {}
        self.faults: dict[str, int] = {}
        self.verified: set[str] = set()
        self.readable: set[str] = set()
        self.mount = mount
        self.asks_md5 = asks_md5
        self.most_at_once = self.now_running = 0
        self._count = threading.Lock()
        super().__init__(self.respond)

    def strikes(self, fault: str) -> bool:
        with self._count:
            if self.faults.get(fault, 0) <= 0:
                return False
            self.faults[fault] -= 1
            return True

    def respond(self, seen):
        if seen.path == "/v1/server":
            return as_json(
                {
                    "version": "1",
                    "protocol": "1.0",
                    "catalog_id": "c",
                    "epoch": 1,
                    "now": "2025-01-01T00:00:00Z",
                    "store_kind": "s3",
                    "store_asks_md5": self.asks_md5,
                    "token_name": "t",
                    "token_project": None,
                    "token_scopes": ["train"],
                }
            )
        if seen.path == "/v1/mount-proofs":
            if self.mount is None:
                return as_json({"proof_id": None, "path": None, "expires_in_seconds": 60})
            (self.mount / "proof").write_text("ab" * 32)
            return as_json({"proof_id": "0" * 32, "path": str(self.mount / "proof"), "expires_in_seconds": 60})
        if seen.path.endswith("/chunks"):
            return self.negotiate(seen.json)
        if seen.path.endswith("/reads"):
            return self.reads(seen.json)
        if seen.path.endswith("/chunk-reports"):
            digest = seen.json["digest"]
            readable = digest in self.readable
            return as_json(
                {
                    "digest": digest,
                    "readable": readable,
                    "detail": "one is good" if readable else "no copy has its bytes",
                    "corrupt_checkpoints": [] if readable else ["ck_1"],
                }
            )
        if seen.path.startswith("/store/"):
            return self.store(seen, seen.path.removeprefix("/store/"))
        return Reply(204)

    def ticket(self, digest: str, proven: bool) -> dict:
        expires = 0 if self.strikes("dead ticket") else 60
        if proven and self.mount is not None:
            return {"kind": "file", "path": str(self.mount / digest), "expires_in_seconds": expires}
        return {"kind": "http", "url": f"/store/{digest}?sig=1", "headers": {}, "expires_in_seconds": expires}

    def proven(self, body) -> bool:
        return bool(body["mount_proof"]) and body["mount_proof"]["content"] == "ab" * 32

    def negotiate(self, body):
        if self.strikes("stale"):
            return problem("stale_attempt")
        answers = []
        for offer in body["chunks"]:
            if offer["digest"] in self.verified:
                answers.append({"digest": offer["digest"], "status": "present"})
            else:
                ticket = self.ticket(offer["digest"], self.proven(body))
                answers.append({"digest": offer["digest"], "status": "upload", "ticket": ticket})
        return as_json(
            {"chunks": answers, "finished": [{"digest": d, "state": self.verify(d)} for d in body["finished"]]}
        )

    def verify(self, digest: str) -> str:
        if self.strikes("lost object"):
            self.objects.pop(digest, None)
        if self.mount is not None and (self.mount / digest).exists():
            self.objects[digest] = (self.mount / digest).read_bytes()
        if digest not in self.objects:
            return "missing"
        if hashlib.sha256(self.objects[digest]).hexdigest() != digest or self.strikes("mismatch"):
            return "mismatch"
        self.verified.add(digest)
        return "verified"

    def reads(self, body):
        chunks = []
        for digest in body["digests"]:
            if digest not in self.objects:
                chunks.append(
                    {"digest": digest, "bytes": 0, "stored_bytes": 0, "kind": "gone", "expires_in_seconds": 0}
                )
                continue
            size = len(self.objects[digest])
            ticket = self.ticket(digest, self.proven(body))
            chunks.append({"digest": digest, "bytes": size, "stored_bytes": size, **ticket})
        return as_json({"lease_id": "lease-1", "lease_expires_in_seconds": 60, "chunks": chunks})

    def store(self, seen, digest: str) -> Reply:
        with self._count:
            self.now_running += 1
            self.most_at_once = max(self.most_at_once, self.now_running)
        try:
            if self.strikes("refused ticket"):
                return Reply(403, b"<Code>AccessDenied</Code>")
            if self.strikes("slow down"):
                return Reply(503, b"<Code>SlowDown</Code>")
            if self.strikes("full"):
                return Reply(507)
            if seen.method == "PUT":
                self.objects[digest] = seen.body
                return Reply(200)
            if self.strikes("flipped"):
                return Reply(200, bytes([self.objects[digest][0] ^ 1]) + self.objects[digest][1:])
            return Reply(200, self.objects[digest])
        finally:
            with self._count:
                self.now_running -= 1


@pytest.fixture
def service():
    started = Service()
    yield started
    started.close()


@pytest.fixture
def mounted(tmp_path):
    started = Service(mount=tmp_path)
    yield started
    started.close()


@pytest.fixture(autouse=True)
def _threads_do_not_leak():
    yield
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("holdfast-transfer")]
    assert left == []


@pytest.fixture(autouse=True)
def _no_long_pauses(monkeypatch):
    monkeypatch.setattr(uploader_module, "MISSING_PAUSE_SECONDS", 0.01)


def client_of(service, **settings) -> Client:
    return Client(ClientSettings(url=service.url, token="hold_t_s", retry_seconds=5, **settings))


def some_chunks(count=20, size=10_000) -> dict[str, bytes]:
    bodies = [os.urandom(size + number) for number in range(count)]
    return {hashlib.sha256(body).hexdigest(): body for body in bodies}


def upload(service, chunks, **options):
    with client_of(service, **options) as client:
        uploader = ShardUploader(client, "ck_1", 0, Fence(epoch=1, attempt=1))
        return uploader.upload(outgoing(chunks))


def outgoing(chunks) -> list[OutgoingChunk]:
    return [OutgoingChunk.of(body, digest) for digest, body in chunks.items()]


def fetch(service, digests, **options) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    with client_of(service, **options) as client, ShardFetcher(client, "ck_1") as fetcher:
        fetcher.fetch(digests, lambda digest, view: found.__setitem__(digest, bytes(view)))
    return found


def negotiations(service) -> list[dict]:
    return [seen.json for seen in service.of("POST", "/v1/checkpoints/ck_1/shards/0/chunks")]


def test_all_chunks_are_verified_and_several_go_up_at_once(service):
    chunks = some_chunks()
    done = upload(service, chunks)
    assert service.objects == chunks
    assert service.verified == set(chunks)
    assert (done.chunks, done.sent_chunks) == (20, 20)
    assert done.bytes == done.sent_bytes == sum(map(len, chunks.values()))
    assert len(service.of("GET", "/v1/server")) == 1


@pytest.mark.rule("protocol-15")
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


@pytest.mark.rule("protocol-11")
def test_finished_uploads_are_reported_in_the_call_that_offers_the_next(service, monkeypatch):
    monkeypatch.setattr(uploader_module, "OFFER_BYTES_WHEN_IDLE", 50_000)
    monkeypatch.setattr(uploader_module, "OFFER_BYTES_WHEN_BUSY", 50_000)

    def slowly():
        for digest, body in some_chunks(60).items():
            yield OutgoingChunk.of(body, digest)
            threading.Event().wait(0.005)

    with client_of(service) as client:
        ShardUploader(client, "ck_1", 0, Fence(epoch=1, attempt=1)).upload(slowly())
    assert any(call["chunks"] and call["finished"] for call in negotiations(service))


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


@pytest.mark.rule("training-16")
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


@pytest.mark.rule("protocol-14")
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


@pytest.mark.rule("protocol-18")
def test_on_a_shared_mount_no_byte_goes_over_http(mounted, tmp_path):
    chunks = some_chunks()
    upload(mounted, chunks)
    assert {path.name for path in tmp_path.iterdir()} == {*chunks, "proof"}
    assert fetch(mounted, chunks) == chunks
    assert not [seen for seen in mounted.seen if seen.path.startswith("/store/")]
    assert len(mounted.of("POST", "/v1/mount-proofs")) == 2, "once per client"


@pytest.mark.rule("protocol-18")
def test_a_mount_that_cannot_be_used_is_left_silently(mounted, tmp_path):
    chunks = some_chunks()
    real_ticket = mounted.ticket

    def elsewhere(digest, proven):
        ticket = real_ticket(digest, proven)
        return {**ticket, "path": "/nonexistent/folder/x"} if ticket["kind"] == "file" else ticket

    mounted.ticket = elsewhere
    upload(mounted, chunks)
    assert mounted.objects == chunks


def test_direct_files_can_be_switched_off(mounted):
    chunks = some_chunks(3)
    upload(mounted, chunks, direct_files=False)
    assert not mounted.of("POST", "/v1/mount-proofs")
    assert fetch(mounted, chunks, direct_files=False) == chunks


def test_fetching_gives_each_chunk_once_under_one_lease_that_is_given_back(service):
    chunks = some_chunks(200, size=500)
    service.objects = dict(chunks)
    assert fetch(service, [*chunks, *chunks]) == chunks
    reads = [seen.json for seen in service.of("POST", "/v1/checkpoints/ck_1/reads")]
    assert reads[0]["lease_id"] is None
    assert {call["lease_id"] for call in reads[1:]} == {"lease-1"}
    assert sum(len(call["digests"]) for call in reads) == 200
    assert max(len(call["digests"]) for call in reads) <= fetcher_module.TICKETS_AT_ONCE
    assert len(service.of("DELETE", "/v1/read-leases/lease-1")) == 1


def test_fetching_into_buffers_fills_them(service):
    chunks = some_chunks()
    service.objects = dict(chunks)
    buffers = {digest: bytearray(len(body)) for digest, body in chunks.items()}
    with client_of(service) as client, ShardFetcher(client, "ck_1") as fetcher:
        fetcher.fetch_into({digest: memoryview(buffer) for digest, buffer in buffers.items()})
    assert buffers == chunks


def test_a_chunk_arrives_in_the_buffer_that_it_is_given_if_it_fits(service):
    chunks = some_chunks(3)
    service.objects = dict(chunks)
    fits, too_short, _ = chunks
    into = {fits: memoryview(bytearray(len(chunks[fits]))), too_short: memoryview(bytearray(7))}
    views = {}
    with client_of(service) as client, ShardFetcher(client, "ck_1") as fetcher:
        fetcher.fetch(chunks, lambda digest, view: views.__setitem__(digest, (view, bytes(view))), into)
    assert {digest: body for digest, (_, body) in views.items()} == chunks
    assert [digest for digest, (view, _) in views.items() if view is into.get(digest)] == [fits]
    assert into[too_short] == bytes(7)


@pytest.mark.parametrize("told", [{"sizes": 5}, {"most_bytes": 5}], ids=["another size", "too large"])
def test_no_memory_is_taken_for_a_size_that_the_layout_does_not_have(service, monkeypatch, told):
    chunks = some_chunks(3)
    service.objects = dict(chunks)
    lent = []
    borrow = ShardFetcher._borrow
    monkeypatch.setattr(ShardFetcher, "_borrow", lambda self, size: (lent.append(size), borrow(self, size))[1])
    limits = {"sizes": dict.fromkeys(chunks, 5)} if "sizes" in told else told
    with client_of(service) as client, ShardFetcher(client, "ck_1") as fetcher:
        with pytest.raises(errors.IntegrityError, match="layout"):
            fetcher.fetch(chunks, lambda *_: None, **limits)
    assert lent == []


def test_what_has_just_the_size_that_the_layout_says_is_fetched(service):
    chunks = some_chunks(3)
    service.objects = dict(chunks)
    sizes = {digest: len(body) for digest, body in chunks.items()}
    found = {}
    with client_of(service) as client, ShardFetcher(client, "ck_1") as fetcher:
        fetcher.fetch(
            chunks,
            lambda digest, view: found.__setitem__(digest, bytes(view)),
            sizes=sizes,
            most_bytes=max(sizes.values()),
        )
    assert found == chunks


def test_a_buffer_that_does_not_fit_its_chunk_is_an_integrity_error(service):
    chunks = some_chunks(1)
    service.objects = dict(chunks)
    with client_of(service) as client, ShardFetcher(client, "ck_1") as fetcher:
        with pytest.raises(errors.IntegrityError, match="layout"):
            fetcher.fetch_into({digest: memoryview(bytearray(7)) for digest in chunks})


@pytest.mark.parametrize("fault", ["refused ticket", "dead ticket", "slow down"])
def test_a_fetch_survives(service, fault):
    service.faults[fault] = 3
    chunks = some_chunks()
    service.objects = dict(chunks)
    assert fetch(service, chunks) == chunks
    assert service.faults[fault] == 0


@pytest.mark.rule("protocol-22")
def test_a_corrupt_chunk_is_reported_and_read_again_if_the_service_finds_a_good_copy(service):
    chunks = some_chunks()
    service.objects = dict(chunks)
    service.readable = set(chunks)
    service.faults["flipped"] = 1
    assert fetch(service, chunks) == chunks
    (report,) = service.of("POST", "/v1/checkpoints/ck_1/chunk-reports")
    assert report.json["problem"] == "mismatch"


@pytest.mark.rule("protocol-22")
@pytest.mark.parametrize("damage", ["flipped", "gone"])
def test_a_lost_chunk_is_named_and_never_delivered(service, damage):
    chunks = some_chunks()
    service.objects = dict(chunks)
    lost = list(chunks)[7]
    if damage == "gone":
        del service.objects[lost]
    else:
        service.objects[lost] = bytes(10_007)
    found = {}
    with client_of(service) as client, ShardFetcher(client, "ck_1") as fetcher:
        with pytest.raises(errors.ChunkLost) as caught:
            fetcher.fetch(chunks, lambda digest, view: found.__setitem__(digest, bytes(view)))
    assert caught.value.digest == lost
    assert caught.value.corrupt_checkpoints == ["ck_1"]
    assert "no copy has its bytes" in str(caught.value)
    assert lost not in found
    assert all(chunks[digest] == body for digest, body in found.items())


@pytest.mark.rule("protocol-22")
def test_bytes_that_only_arrive_wrong_here_are_not_read_for_ever(service):
    chunks = some_chunks(1)
    service.objects = dict(chunks)
    service.readable = set(chunks)
    service.faults["flipped"] = 10_000
    with pytest.raises(errors.ChunkLost, match="arrives here wrong twice"):
        fetch(service, chunks)


def test_a_file_that_reads_wrong_is_read_again_over_http(mounted, tmp_path):
    chunks = some_chunks(3)
    mounted.objects = dict(chunks)
    mounted.readable = set(chunks)
    for digest, body in chunks.items():
        (tmp_path / digest).write_bytes(body)
    stale = list(chunks)[1]
    (tmp_path / stale).unlink()
    assert fetch(mounted, chunks) == chunks
    assert len(mounted.of("GET", f"/store/{stale}")) == 1


def test_what_on_chunk_raises_ends_the_fetch(service):
    chunks = some_chunks()
    service.objects = dict(chunks)

    def refuse(digest, view):
        raise RuntimeError("does not fit")

    with client_of(service) as client, ShardFetcher(client, "ck_1") as fetcher:
        with pytest.raises(RuntimeError, match="does not fit"):
            fetcher.fetch(chunks, refuse)


@pytest.mark.rule("protocol-21")
def test_a_slow_fetch_renews_its_lease(service, monkeypatch):
    monkeypatch.setattr(fetcher_module, "_RENEW_LEASE_AT", 0.002)
    chunks = some_chunks(2)
    service.objects = dict(chunks)
    slow = threading.Event()

    def slowly(digest, view):
        slow.wait(0.5)

    with client_of(service) as client, ShardFetcher(client, "ck_1") as fetcher:
        fetcher.fetch(chunks, slowly)
    reads = [seen.json for seen in service.of("POST", "/v1/checkpoints/ck_1/reads")]
    assert len(reads) >= 3
    assert {call["lease_id"] for call in reads[1:]} == {"lease-1"}
