"""The JSON API, as far as the service and Google's own library use it: list, describe, read, upload, delete."""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import unquote

from tests.support.gcs_fake.accounts import STORAGE_SCOPES, Accounts, may_use_storage
from tests.support.gcs_fake.objects import Incoming, Objects, StoredObject, check_hashes
from tests.support.gcs_fake.replies import Refusal, Reply, json_reply
from tests.support.gcs_fake.requests import Request

_PATH = re.compile(r"/(?P<kind>storage|upload/storage|download/storage)/v1/b/(?P<bucket>[^/]+)/o(?:/(?P<name>[^/]+))?")
_FIELDS = re.compile(r"items\((?P<items>[\w,]+)\),nextPageToken")
_PAGE = 1000
_BOUNDARY = re.compile(r'multipart/related; boundary="?(?P<boundary>[^"]+)"?')
_PART = re.compile(r"bytes (?P<first>\d+)-(?P<last>\d+)/(?P<whole>\d+)")
_RANGE = re.compile(r"bytes=(?P<first>\d+)-(?P<last>\d+)")
_KNOWN_IN_A_LISTING = {"prefix", "versions", "pageToken", "maxResults", "fields", "projection", "prettyPrint"}


@dataclass
class _Resumable:
    """An upload whose bytes come after its description."""

    bucket: str
    facts: dict[str, Any]
    generation_match: int | None
    incoming: Incoming


class JsonApi:
    def __init__(self, accounts: Accounts, objects: Objects) -> None:
        self._accounts = accounts
        self._objects = objects
        self._resumable: dict[str, _Resumable] = {}

    def speaks(self, request: Request) -> bool:
        return _PATH.fullmatch(request.raw_path) is not None

    async def answer(self, request: Request) -> Reply:
        may_use_storage(self._accounts.who(request.header("authorization") or "", STORAGE_SCOPES))
        path = _PATH.fullmatch(request.raw_path)
        assert path is not None
        bucket, name = unquote(path["bucket"]), unquote(path["name"] or "")
        match (request.method, path["kind"], bool(name)):
            case ("GET", "storage", False):
                return self._list(request, bucket)
            case ("POST", "upload/storage", False):
                return await self._upload(request, bucket)
            case ("PUT", "upload/storage", False):
                return await self._resume(request)
            case ("GET", "storage" | "download/storage", True):
                return self._read(request, bucket, name)
            case ("DELETE", "storage", True):
                generation = request.number(request.query.get("generation"), "generation")
                only = request.number(request.query.get("ifGenerationMatch"), "ifGenerationMatch")
                self._objects.delete(bucket, name, generation, generation_match=only)
                return Reply(204)
        raise Refusal(404, "NotFound", reason="notFound")

    def _list(self, request: Request, bucket: str) -> Reply:
        query = request.query
        if query.keys() - _KNOWN_IN_A_LISTING:
            raise Refusal(400, "InvalidArgument", f"There is no listing with {sorted(query)} here.")
        versions = query.get("versions") in {"true", "True"}  # as Google's own library writes it
        most = min(int(query.get("maxResults", _PAGE)), _PAGE)
        page, token = self._objects.page(
            bucket, query.get("prefix", ""), query.get("pageToken", ""), most, versions=versions
        )
        wanted = _FIELDS.fullmatch(query.get("fields", ""))
        names = wanted["items"].split(",") if wanted else None
        items = [{key: value for key, value in self._shown(each).items() if not names or key in names} for each in page]
        # As Google does it: what is empty is left out.
        return json_reply(({"items": items} if items else {}) | ({"nextPageToken": token} if token else {}))

    def _shown(self, stored: StoredObject) -> dict[str, Any]:
        until = self._objects.retained_until(stored)
        return _shown(stored) | ({} if until is None else {"retentionExpirationTime": _time(until)})

    async def _upload(self, request: Request, bucket: str) -> Reply:
        only = request.number(request.query.get("ifGenerationMatch"), "ifGenerationMatch")
        match request.query.get("uploadType"):
            case "multipart":
                facts, media = _parts(request.header("content-type") or "", await request.body())
                return self._finished(_Resumable(bucket, facts, only, self._objects.receive(bucket)), media)
            case "resumable":
                facts = json.loads(await request.body())
                upload = secrets.token_hex(8)
                self._resumable[upload] = _Resumable(bucket, facts, only, self._objects.receive(bucket))
                where = f"http://{request.header('host')}{request.raw_path}?uploadType=resumable&upload_id={upload}"
                return Reply(200, {"location": where})
        raise Refusal(400, "InvalidArgument", "Only multipart and resumable uploads are here.")

    async def _resume(self, request: Request) -> Reply:
        upload = self._resumable.get(request.query.get("upload_id", ""))
        part = _PART.fullmatch(request.header("content-range") or "")
        if upload is None or part is None or int(part["first"]) != upload.incoming.size:
            raise Refusal(400, "InvalidArgument", "There is no such upload, or its next part is another one.")
        async for piece in request.pieces():
            upload.incoming.write(piece)
        if upload.incoming.size != int(part["last"]) + 1:
            raise Refusal(400, "IncompleteBody")
        if upload.incoming.size < int(part["whole"]):
            return Reply(308, {"range": f"bytes=0-{part['last']}"})
        del self._resumable[request.query["upload_id"]]
        return self._finished(upload, b"")

    def _finished(self, upload: _Resumable, rest: bytes) -> Reply:
        try:
            upload.incoming.write(rest)
            _check_described(upload.incoming, upload.facts)
            stored = self._objects.publish(
                upload.bucket, upload.facts["name"], upload.incoming, generation_match=upload.generation_match
            )
        finally:
            upload.incoming.close()
        return json_reply(self._shown(stored))

    def _read(self, request: Request, bucket: str, name: str) -> Reply:
        generation = request.number(request.query.get("generation"), "generation")
        stored = self._objects.find(bucket, name, generation)
        if request.query.get("alt") != "media":
            return json_reply(self._shown(stored))
        headers = {
            "content-type": "application/octet-stream",
            "x-goog-hash": f"crc32c={stored.crc32c},md5={stored.md5}",
            "x-goog-generation": str(stored.generation),
        }
        wanted = request.header("range")
        if wanted is None:
            return Reply(200, headers, self._objects.body(stored.generation).read_bytes())
        found = _RANGE.fullmatch(wanted)
        if found is None or int(found["first"]) >= stored.size:
            raise Refusal(416, "InvalidRange", reason="requestedRangeNotSatisfiable")
        first, last = int(found["first"]), min(int(found["last"]), stored.size - 1)
        with self._objects.body(stored.generation).open("rb") as file:
            file.seek(first)
            body = file.read(last + 1 - first)
        return Reply(206, headers | {"content-range": f"bytes {first}-{last}/{stored.size}"}, body)


def _parts(content_type: str, body: bytes) -> tuple[dict[str, Any], bytes]:
    """What describes the object, and its bytes."""
    found = _BOUNDARY.fullmatch(content_type)
    if found is None:
        raise Refusal(400, "InvalidArgument", "The upload names no boundary.")
    between = b"--" + found["boundary"].encode()
    if not body.startswith(between + b"\r\n") or not body.endswith(b"\r\n" + between + b"--"):
        raise Refusal(400, "InvalidArgument", "The upload is malformed.")
    described, _, media = body[len(between) + 2 : -len(between) - 4].partition(b"\r\n" + between + b"\r\n")
    facts = json.loads(described.partition(b"\r\n\r\n")[2])
    return facts, media.partition(b"\r\n\r\n")[2]


def _check_described(incoming: Incoming, facts: dict[str, Any]) -> None:
    try:
        check_hashes(incoming, ",".join(f"{kind}={facts[key]}" for kind, key in _HASHES if key in facts))
    except Refusal as refusal:
        # As Google words it in JSON, where it has no code of its own.
        sentence = f'Provided MD5 hash "{facts.get("md5Hash")}" doesn\'t match calculated MD5 hash "{incoming.md5}".'
        raise Refusal(400, refusal.code, sentence) from None


_HASHES = (("md5", "md5Hash"), ("crc32c", "crc32c"))


def _shown(stored: StoredObject) -> dict[str, Any]:
    """Numbers are strings, as in all of Google's JSON."""
    created = _time(stored.created_at)
    return {
        "kind": "storage#object",
        "name": stored.name,
        "bucket": stored.bucket,
        "generation": str(stored.generation),
        "metageneration": "1",
        "size": str(stored.size),
        "md5Hash": stored.md5,
        "crc32c": stored.crc32c,
        "timeCreated": created,
        "updated": created,
        "contentType": "application/octet-stream",
    }


def _time(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
