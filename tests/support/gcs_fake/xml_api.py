"""The XML API: one object at a time, with a signed URL or an access token."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from email.utils import format_datetime

from tests.support.gcs_fake.accounts import STORAGE_SCOPES, Accounts, may_use_storage
from tests.support.gcs_fake.objects import Objects, StoredObject, check_hashes
from tests.support.gcs_fake.replies import Refusal, Reply
from tests.support.gcs_fake.requests import Request
from tests.support.gcs_fake.signatures import is_signed, verify

_RANGE = re.compile(r"bytes=(?P<first>\d*)-(?P<last>\d*)")
# What a signed URL adds to a request's query; anything else in it would be a feature that is not there.
_SIGNATURE_TERMS = "X-Goog-"


class XmlApi:
    def __init__(self, accounts: Accounts, objects: Objects) -> None:
        self._accounts = accounts
        self._objects = objects

    async def answer(self, request: Request) -> tuple[Reply, range | None]:
        """The reply, and which bytes of its object's file (named by its x-goog-generation) are its body."""
        self._authorize(request)
        bucket, _, name = request.path.removeprefix("/").partition("/")
        known = {"generation"} if request.method != "PUT" else set()
        query = {name: value for name, value in request.query.items() if not name.startswith(_SIGNATURE_TERMS)}
        if not name or query.keys() - known:
            raise Refusal(400, "InvalidArgument", f"There is no {request.method} with {sorted(query)} here.")
        generation = request.number(query.get("generation"), "generation")
        if request.method == "PUT":
            return await self._put(request, bucket, name), None
        if request.method == "DELETE":
            self._objects.delete(bucket, name, generation)
            return Reply(204), None
        if request.method in {"GET", "HEAD"}:
            return self._get(request, self._objects.find(bucket, name, generation))
        raise Refusal(405, "MethodNotAllowed")

    def _authorize(self, request: Request) -> None:
        if is_signed(request.raw_query):
            now = datetime.now(UTC)
            signer = verify(
                self._accounts, request.method, request.raw_path, request.raw_query, request.headers, now=now
            )
        elif (authorization := request.header("authorization")) is not None:
            signer = self._accounts.who(authorization, STORAGE_SCOPES)
        else:
            raise Refusal(403, "AccessDenied", "Anonymous caller does not have access to the bucket.")
        may_use_storage(signer)

    async def _put(self, request: Request, bucket: str, name: str) -> Reply:
        length = request.number(request.header("content-length"), "content-length")
        if length is None and request.header("transfer-encoding") != "chunked":
            raise Refusal(411, "MissingContentLength")
        match = request.number(request.header("x-goog-if-generation-match"), "x-goog-if-generation-match")
        incoming = self._objects.receive(bucket)
        try:
            async for piece in request.pieces():
                incoming.write(piece)
            if length is not None and incoming.size != length:
                raise Refusal(400, "IncompleteBody")
            self._check_length(request, incoming.size)
            check_hashes(incoming, request.header("x-goog-hash") or "")
            if (md5 := request.header("content-md5")) is not None:
                check_hashes(incoming, f"md5={md5}")
            stored = self._objects.publish(bucket, name, incoming, generation_match=match)
        finally:
            incoming.close()
        return Reply(200, _facts(stored))

    @staticmethod
    def _check_length(request: Request, size: int) -> None:
        allowed = request.header("x-goog-content-length-range")
        if allowed is None:
            return
        least, _, most = allowed.partition(",")
        if size < int(least):
            raise Refusal(400, "EntityTooSmall")
        if size > int(most):
            raise Refusal(400, "EntityTooLarge")

    @staticmethod
    def _get(request: Request, stored: StoredObject) -> tuple[Reply, range | None]:
        headers = {**_facts(stored), "accept-ranges": "bytes"}
        whole, wanted = range(stored.size), request.header("range")
        part = whole if wanted is None else _part(wanted, stored.size)
        if part != whole or wanted is not None:
            headers["content-range"] = f"bytes {part.start}-{part.stop - 1}/{stored.size}"
        headers["content-length"] = str(len(part))
        return Reply(200 if wanted is None else 206, headers), part if request.method == "GET" else None


def _part(wanted: str, size: int) -> range:
    found = _RANGE.fullmatch(wanted)
    if found is None or not (found["first"] or found["last"]):
        raise Refusal(400, "InvalidArgument", "The range is malformed.")
    if not found["first"]:
        first, last = max(0, size - int(found["last"])), size - 1
    else:
        first, last = int(found["first"]), min(int(found["last"] or size), size - 1)
    if first > last:
        raise Refusal(416, "InvalidRange", "The requested range cannot be satisfied.")
    return range(first, last + 1)


def _facts(stored: StoredObject) -> dict[str, str]:
    return {
        "x-goog-generation": str(stored.generation),
        "x-goog-metageneration": "1",
        "x-goog-stored-content-encoding": "identity",
        "x-goog-stored-content-length": str(stored.size),
        "x-goog-hash": f"crc32c={stored.crc32c},md5={stored.md5}",
        "x-goog-storage-class": "STANDARD",
        "last-modified": format_datetime(stored.created_at, usegmt=True),
        "content-type": "application/octet-stream",
    }
