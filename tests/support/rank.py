"""A training job's side of the protocol, call by call over HTTP: attempts, ranks, and what they send.

Thin on purpose: a test sees each call and can leave one out, repeat it or send it wrong. The SDK is another matter.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from holdfast_protocol.digests import shard_digest

_launches = itertools.count(1)


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Refused(Exception):
    """The service's problem+json, whatever its status."""

    def __init__(self, reply: httpx.Response) -> None:
        problem = reply.json()
        super().__init__(f"{reply.status_code} {problem['code']}: {problem['detail']}")
        self.status = reply.status_code
        self.code: str = problem["code"]
        self.detail: str = problem["detail"]
        self.context: dict[str, Any] = problem["context"]


def answer(reply: httpx.Response) -> Any:
    if reply.is_success:
        return reply.json()
    raise Refused(reply)


class Job:
    """One attempt of `project/run`. `opened` is the service's answer."""

    def __init__(
        self,
        http: httpx.Client,
        run: str = "demo/gpt",
        *,
        after: int = 0,
        world_size: int = 1,
        launch_id: str | None = None,
        create: bool | None = None,
        environment: dict[str, str] | None = None,
        config: object = None,
        host: str = "",
        rolls_back: int | None = None,
    ) -> None:
        self.http = http
        self.run = run
        self.project, _, self.run_name = run.partition("/")
        self.base = f"/v1/projects/{self.project}/runs/{self.run_name}"
        self.world_size = world_size
        self.launch_id = launch_id or f"launch-{next(_launches)}"
        body: dict[str, Any] = {"launch_id": self.launch_id, "after": after, "world_size": world_size, "host": host}
        if create is not None:
            body["create"] = create
        if environment is not None:
            body["environment"] = environment
        if config is not None:
            body["config"] = config
        if rolls_back is not None:
            body["rolls_back"] = rolls_back
        self.opened = answer(http.post(f"{self.base}/attempts", json=body))
        self.number: int = self.opened["attempt"]
        self.fence = {"epoch": self.opened["epoch"], "attempt": self.number, "launch_id": self.launch_id}

    def call(self, method: str, path: str, **body: Any) -> Any:
        return answer(self.http.request(method, path, json=self.fence | body))

    def begin(self, step: int, **changes: Any) -> Save:
        view = self.call(
            "POST", f"{self.base}/checkpoints", **({"step": step, "world_size": self.world_size} | changes)
        )
        return Save(self, view)

    def resumed_from(self, checkpoint_id: str | None, *, rollback: bool = False) -> Any:
        return self.call(
            "PUT", f"{self.base}/attempts/{self.number}/resumed-from", checkpoint_id=checkpoint_id, rollback=rollback
        )

    def heartbeat(self, step: int | None = None, **account: Any) -> Any:
        return self.call("POST", f"{self.base}/attempts/{self.number}/heartbeat", step=step, **account)

    def end(self, outcome: str = "finished", **account: Any) -> Any:
        return self.call("POST", f"{self.base}/attempts/{self.number}/end", outcome=outcome, **account)

    def view(self) -> Any:
        return answer(self.http.get(f"{self.base}/attempts/{self.number}"))

    def save(self, step: int, *, content: bytes | None = None, **seal: Any) -> dict[str, Any]:
        """A whole checkpoint, all ranks; the view after the last seal."""
        save = self.begin(step)
        view: dict[str, Any] = save.view
        for rank in range(self.world_size):
            data = content if content is not None else f"{self.run} {self.number} {step} {rank}".encode()
            view = save.write(rank, [data, b"index " + data], **(seal if rank == 0 else {}))
        return view


class Save:
    """One checkpoint of a job."""

    def __init__(self, job: Job, view: dict[str, Any]) -> None:
        self.job = job
        self.view = view
        self.id: str = view["id"]

    def now(self, wait: float | None = None) -> Any:
        return answer(self.job.http.get(f"/v1/checkpoints/{self.id}", params={} if wait is None else {"wait": wait}))

    def negotiate(
        self,
        rank: int,
        chunks: Iterable[bytes] = (),
        *,
        finished: Iterable[bytes] = (),
        mount_proof: dict[str, str] | None = None,
    ) -> Any:
        body: dict[str, Any] = {
            "chunks": [{"digest": digest_of(data), "bytes": len(data), "md5": _md5(data)} for data in chunks],
            "finished": [digest_of(data) for data in finished],
        }
        if mount_proof is not None:
            body["mount_proof"] = mount_proof
        return self.job.call("POST", f"/v1/checkpoints/{self.id}/shards/{rank}/chunks", **body)

    def send(self, chunks: Sequence[bytes], answers: Sequence[dict[str, Any]]) -> None:
        """PUTs what the answers ask for."""
        by_digest = {digest_of(data): data for data in chunks}
        for each in answers:
            if each["status"] == "upload":
                self.put(by_digest[each["digest"]], each["ticket"]).raise_for_status()

    def put(self, data: bytes, ticket: dict[str, Any]) -> httpx.Response:
        if ticket["kind"] == "file":
            Path(ticket["path"]).write_bytes(data)
            return httpx.Response(200, request=httpx.Request("PUT", "file:"))
        return redeem(self.job.http, ticket, data)

    def upload(self, rank: int, chunks: Sequence[bytes]) -> Any:
        """Negotiates, sends what is not there and reports it as finished."""
        reply = self.negotiate(rank, chunks)
        self.send(chunks, reply["chunks"])
        sent = {each["digest"] for each in reply["chunks"] if each["status"] == "upload"}
        self.negotiate(rank, finished=[data for data in chunks if digest_of(data) in sent])
        return reply

    def seal(self, rank: int, chunks: Sequence[bytes], /, **changes: Any) -> Any:
        body = seal_of(rank, chunks) | changes
        return self.job.call("PUT", f"/v1/checkpoints/{self.id}/shards/{rank}", **body)

    def seal_together(self, shards: Mapping[int, Sequence[bytes]]) -> Any:
        """The seals of several ranks in one call. `shards`: their chunks, by rank."""
        seals = [{"rank": rank} | self.job.fence | seal_of(rank, chunks) for rank, chunks in shards.items()]
        return answer(self.job.http.put(f"/v1/checkpoints/{self.id}/shards", json={"seals": seals}))

    def write(self, rank: int, chunks: Sequence[bytes], /, **changes: Any) -> Any:
        """Uploads and seals."""
        self.upload(rank, chunks)
        return self.seal(rank, chunks, **changes)

    def fail(self, rank: int, reason: str = "out of memory") -> Any:
        return self.job.call("PUT", f"/v1/checkpoints/{self.id}/shards/{rank}", outcome="failed", reason=reason)

    def abort(self, reason: str = "given up") -> Any:
        return self.job.call("POST", f"/v1/checkpoints/{self.id}/abort", reason=reason)


def offer_of(rank: int, chunks: Sequence[bytes]) -> dict[str, Any]:
    """A rank's first offer, for a begin."""
    return {"rank": rank, "chunks": [{"digest": digest_of(data), "bytes": len(data)} for data in chunks]}


def seal_of(rank: int, chunks: Sequence[bytes]) -> dict[str, Any]:
    """A rank's seal without its fence. The last chunk stands for the index, and rank 0's first for the layout."""
    digests = [digest_of(data) for data in chunks]
    index = {"shard": len(digests) - 1}
    if rank == 0:
        index["layout"] = 0
    return {
        "outcome": "sealed",
        "digest": shard_digest(digests),
        "chunks": digests,
        "index": index,
        "logical_bytes": sum(map(len, chunks)),
        "components": {"model": {"kind": "model", "logical_bytes": sum(map(len, chunks))}},
    }


def redeem(http: httpx.Client, ticket: dict[str, Any], content: bytes | None = None) -> httpx.Response:
    """The request that a ticket allows, with its headers alone: no token goes to a store. `http` is a client of the
    service that gave it, which is where a ticket without a host leads."""
    url = http.base_url.join(ticket["url"])
    request = httpx.Request(ticket.get("method", "GET"), url, content=content, headers=ticket["headers"])
    if url.host == http.base_url.host and url.port == http.base_url.port:
        return http.send(request)
    with httpx.Client(timeout=60) as outside:
        return outside.send(request)


def _md5(data: bytes) -> str:
    """Given always: a store may enforce it and nothing else."""
    return hashlib.md5(data, usedforsecurity=False).hexdigest()
