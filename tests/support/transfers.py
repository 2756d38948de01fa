"""A small service with a store, and its faults, for the tests of the uploader and the fetcher."""

from __future__ import annotations

import hashlib
import os
import threading

from holdfast_client import Client, ClientSettings
from holdfast_client.chunks.fetcher import ShardFetcher
from holdfast_client.chunks.transfer import OutgoingChunk
from holdfast_client.chunks.uploader import ShardUploader
from holdfast_protocol.base import Fence
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
        self.lists_chunks = True
        """False: as a service before 1.7."""
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
        if seen.path == "/v1/service":
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
            for folder in ("proofs", "incoming"):
                (self.mount / folder).mkdir(exist_ok=True)
            proof = self.mount / "proofs" / ("0" * 32)
            proof.write_text("ab" * 32)
            return as_json({"proof_id": proof.name, "path": str(proof), "expires_in_seconds": 60})
        if seen.path.endswith("/chunks"):
            return self.negotiate(seen.json)
        if seen.path.endswith("/reads"):
            return self.reads(seen.json)
        if "/shards/" in seen.path and seen.method == "GET":
            return as_json(self.shard(seen.path.rpartition("/")[2]))
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
            return {"kind": "file", "path": str(self.mount / "incoming" / digest), "expires_in_seconds": expires}
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
        if self.mount is not None and (file := self.mount / "incoming" / digest).exists():
            self.objects[digest] = file.read_bytes()
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
        listed = self.shard(body["shard"]) if self.lists_chunks and body.get("shard") is not None else None
        return as_json({"lease_id": "lease-1", "lease_expires_in_seconds": 60, "chunks": chunks, "shard": listed})

    def shard(self, rank) -> dict:
        return {"rank": int(rank), "digest": f"d{rank}", "chunks": []}

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


def client_of(service, **settings) -> Client:
    return Client(ClientSettings(url=service.url, token="hold_t_s", retry_seconds=60, **settings))


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
