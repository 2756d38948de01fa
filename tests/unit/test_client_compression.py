"""The uploader with compress="zstd": asks first, encodes only what is not there, in bounded memory, lets go early."""

from __future__ import annotations

import hashlib
import os
import random
import threading

import pytest

from holdfast_client import Client, ClientSettings, errors
from holdfast_client.chunks import uploader as uploader_module
from holdfast_client.chunks.transfer import HashedChunk, OutgoingChunk
from holdfast_client.chunks.uploader import EncodingQueue, OpenChunk, ShardUploader, WireForm, encode_chunk
from holdfast_protocol.base import Fence
from holdfast_protocol.codecs import Codec, decode
from tests.support.scripted_http import Reply, ScriptedServer, as_json

KIB = 1024


class Service(ScriptedServer):
    """Negotiates, stores and verifies encoded chunks like the real one; `stored` is by the chunk's digest."""

    def __init__(self, codecs: list[str] | None = None, *, asks_md5: bool = False) -> None:
        self.codecs = [codec.value for codec in Codec] if codecs is None else codecs
        self.asks_md5 = asks_md5
        self.offers: list[dict] = []
        self.promised: dict[str, dict] = {}
        self.stored: dict[str, bytes] = {}
        self.present: set[str] = set()
        self.refuse_puts = 0
        super().__init__(self.respond)

    def respond(self, seen):
        if seen.path == "/v1/service":
            return as_json(
                {
                    "version": "1",
                    "protocol": "1.1",
                    "catalog_id": "c",
                    "epoch": 1,
                    "now": "2025-01-01T00:00:00Z",
                    "store_kind": "s3",
                    "codecs": self.codecs,
                    "store_asks_md5": self.asks_md5,
                    "token_name": "t",
                    "token_project": None,
                    "token_scopes": ["train"],
                }
            )
        if seen.path == "/v1/mount-proofs":
            return as_json({"proof_id": None, "path": None, "expires_in_seconds": 60})
        if seen.path.endswith("/chunks"):
            return as_json(
                {
                    "chunks": [self.answer_to(offer) for offer in seen.json["chunks"]],
                    "finished": [{"digest": digest, "state": self.verify(digest)} for digest in seen.json["finished"]],
                }
            )
        if self.refuse_puts:
            self.refuse_puts -= 1
            return Reply(403, b"<Code>AccessDenied</Code>")
        self.stored[seen.path.removeprefix("/store/")] = seen.body
        return Reply(200)

    def answer_to(self, offer):
        digest = offer["digest"]
        self.offers.append(offer)
        if digest in self.present:
            return {"digest": digest, "status": "present"}
        if offer["ask"]:
            return {"digest": digest, "status": "absent"}
        self.promised[digest] = offer
        ticket = {"kind": "http", "url": f"/store/{digest}", "headers": {}, "expires_in_seconds": 60}
        return {"digest": digest, "status": "upload", "ticket": ticket}

    def verify(self, digest: str) -> str:
        offer, stored = self.promised[digest], self.stored[digest]
        wire = (offer["stored_digest"] or digest, offer["stored_bytes"] or offer["bytes"])
        if (hashlib.sha256(stored).hexdigest(), len(stored)) != wire:
            return "mismatch"
        if self.asks_md5 and hashlib.md5(stored).hexdigest() != offer["md5"]:
            return "mismatch"
        return "verified"

    def raw(self, digest: str) -> bytes:
        offer = self.promised[digest]
        if offer["codec"] == "raw":
            return self.stored[digest]
        return b"".join(
            bytes(block) for block in decode(Codec(offer["codec"]), offer["bytes"], iter([self.stored[digest]]))
        )


@pytest.fixture
def service():
    started = Service()
    yield started
    started.close()


def compressible(size: int = 300 * KIB, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(4 * KIB) * (size // (4 * KIB)) + bytes(size % (4 * KIB))


def digest_of(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def upload(service: Service, chunks: list[OutgoingChunk], compress: str = "zstd"):
    settings = ClientSettings(url=service.url, token="hold_t_s", retry_seconds=60, compress=compress)
    with Client(settings) as client:
        return ShardUploader(client, "ck_1", 0, Fence(epoch=1, attempt=1)).upload(chunks)


def test_what_pays_is_sent_encoded_and_the_rest_as_it_is(service) -> None:
    bodies = {"shrinks": compressible(), "noise": os.urandom(300 * KIB), "small": bytes(10 * KIB), "empty": b""}
    done = upload(service, [OutgoingChunk.of(body, item_bytes=4) for body in bodies.values()])
    codecs = {name: service.promised[digest_of(body)]["codec"] for name, body in bodies.items()}
    assert codecs == {"shrinks": "zstd-shuffle4", "noise": "raw", "small": "raw", "empty": "raw"}
    assert all(service.raw(digest_of(body)) == body for body in bodies.values())
    assert done.sent_chunk_bytes == done.bytes == sum(map(len, bodies.values()))
    assert done.sent_bytes == sum(map(len, service.stored.values())) < done.bytes


def test_every_chunk_that_may_be_encoded_is_asked_for_first_and_once(service) -> None:
    upload(service, [OutgoingChunk.of(compressible()), OutgoingChunk.of(b"small")])
    large = [(offer["ask"], offer["codec"]) for offer in service.offers if offer["bytes"] > KIB]
    assert large == [(True, "raw"), (False, "zstd")]
    assert [offer["ask"] for offer in service.offers if offer["bytes"] < KIB] == [False]


@pytest.mark.rule("present-is-referenced")
def test_what_is_present_costs_no_compression(service, monkeypatch) -> None:
    bodies = [compressible(seed=seed) for seed in range(5)]
    service.present = {digest_of(body) for body in bodies}
    monkeypatch.setattr(uploader_module, "encode_chunk", None)
    released = []
    chunks = [
        OutgoingChunk(lambda _, body=body: memoryview(body), release=lambda: released.append(1)) for body in bodies
    ]
    done = upload(service, chunks)
    assert (done.sent_chunks, done.sent_bytes, len(released)) == (0, 0, 5)
    assert service.stored == {}


def test_without_compression_nothing_is_asked_for(service) -> None:
    upload(service, [OutgoingChunk.of(compressible())], compress="none")
    assert [(offer["ask"], offer["codec"]) for offer in service.offers] == [(False, "raw")]


def test_a_service_that_does_not_take_it_gets_everything_as_it_is() -> None:
    older = Service(codecs=["raw"])
    try:
        upload(older, [OutgoingChunk.of(compressible())])
        assert [(offer["ask"], offer["codec"]) for offer in older.offers] == [(False, "raw")]
    finally:
        older.close()


def test_the_md5_that_a_store_asks_for_is_that_of_the_bytes_on_the_wire() -> None:
    by_md5 = Service(asks_md5=True)
    try:
        done = upload(by_md5, [OutgoingChunk.of(compressible()), OutgoingChunk.of(os.urandom(300 * KIB))])
        assert done.sent_chunks == 2
    finally:
        by_md5.close()


def test_a_refused_ticket_sends_the_same_encoded_bytes_again(service) -> None:
    service.refuse_puts = 2
    body = compressible()
    done = upload(service, [OutgoingChunk.of(body)])
    promised = {offer["stored_digest"] for offer in service.offers if not offer["ask"]}
    assert len(promised) == 1
    assert done.sent_chunks == 1
    assert service.raw(digest_of(body)) == body


def test_the_chunks_own_bytes_are_let_go_once_they_are_encoded_and_only_once(service) -> None:
    """A window of one chunk: the next is loaded only when the last one was let go."""
    room = threading.Semaphore(1)
    bodies = [compressible(seed=seed) for seed in range(6)]
    released: list[int] = []

    def load(body: bytes, stop: threading.Event) -> memoryview:
        while not room.acquire(timeout=0.05):
            if stop.is_set():
                raise errors.TransferStopped("stopped")
        return memoryview(body)

    def release(number: int) -> None:
        released.append(number)
        room.release()

    done = upload(
        service,
        [
            OutgoingChunk(lambda stop, body=body: load(body, stop), release=lambda number=number: release(number))
            for number, body in enumerate(bodies)
        ],
    )
    assert sorted(released) == list(range(6))
    assert done.sent_chunks == 6
    assert all(service.raw(digest_of(body)) == body for body in bodies)


def test_an_upload_that_is_stopped_while_it_encodes_ends(service, monkeypatch) -> None:
    begun = threading.Event()

    def endless(chunk: HashedChunk, stop: threading.Event) -> WireForm:
        begun.set()
        assert stop.wait(30)
        return encode_chunk(chunk, stop)

    monkeypatch.setattr(uploader_module, "encode_chunk", endless)
    with Client(ClientSettings(url=service.url, token="hold_t_s", compress="zstd")) as client:
        uploader = ShardUploader(client, "ck_1", 0, Fence(epoch=1, attempt=1))

        def stop() -> None:
            begun.wait(30)
            uploader.stop()

        stopper = threading.Thread(target=stop)
        stopper.start()
        with pytest.raises(errors.TransferStopped):
            uploader.upload([OutgoingChunk.of(compressible())])
        stopper.join()
    assert service.stored == {}


def opened(body: bytes, *, encodes: bool = True) -> OpenChunk:
    return OpenChunk.of(HashedChunk(digest_of(body), None, memoryview(body), None, 4), encodes=encodes)


def form_of(chunk: OpenChunk) -> WireForm:
    assert chunk.raw is not None
    return encode_chunk(chunk.raw, threading.Event())


def test_no_more_is_encoded_than_there_is_memory_for(monkeypatch) -> None:
    monkeypatch.setattr(uploader_module, "ENCODED_BYTES", 310 * KIB)
    waiting = EncodingQueue()
    chunks = [opened(os.urandom(150 * KIB) + bytes(150 * KIB)) for _ in range(4)]
    for chunk in chunks:
        waiting.add(chunk)
    first, second = waiting.begin(8), waiting.begin(8)
    assert (first, second) == (chunks[0], chunks[1]), "a first one always has room"
    assert waiting.begin(8) is None, "600 KiB are being encoded"
    waiting.end(chunks[0], form_of(chunks[0]))
    assert waiting.begin(8) is None, "150 KiB are held, and 300 KiB are being encoded"
    waiting.end(chunks[1], form_of(chunks[1]))
    assert waiting.begin(8) is chunks[2], "300 KiB are held"
    assert waiting.begin(8) is None
    waiting.close(chunks[0])
    waiting.close(chunks[1])
    assert waiting.begin(1) is None, "one is being encoded already"
    assert waiting.begin(2) is chunks[3]


def test_what_does_not_pay_holds_no_memory_of_its_own() -> None:
    waiting = EncodingQueue()
    noise = opened(os.urandom(300 * KIB))
    waiting.add(noise)
    assert waiting.begin(1) is noise
    waiting.end(noise, form_of(noise))
    assert noise.form is not None
    assert noise.form.codec is Codec.RAW
    assert noise.raw is not None
    assert waiting._bytes == 0
