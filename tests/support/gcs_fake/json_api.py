"""The JSON API, as far as the service and Google's own library use it: list, describe, read, upload, delete."""

from __future__ import annotations

import json
import re
from email import message_from_bytes
from typing import Any
from urllib.parse import unquote

from tests.support.gcs_fake.accounts import STORAGE_SCOPES, Accounts, may_use_storage
from tests.support.gcs_fake.objects import Objects, StoredObject, check_hashes
from tests.support.gcs_fake.replies import Refusal, Reply, json_reply
from tests.support.gcs_fake.requests import Request

_PATH = re.compile(r"/(?P<kind>storage|upload/storage|download/storage)/v1/b/(?P<bucket>[^/]+)/o(?:/(?P<name>[^/]+))?")
_FIELDS = re.compile(r"items\((?P<items>[\w,]+)\),nextPageToken")
_PAGE = 1000
_KNOWN_IN_A_LISTING = {"prefix", "versions", "pageToken", "maxResults", "fields", "projection", "prettyPrint"}


class JsonApi:
    def __init__(self, accounts: Accounts, objects: Objects) -> None:
        self._accounts = accounts
        self._objects = objects

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
        versions = query.get("versions") == "true"
        most = min(int(query.get("maxResults", _PAGE)), _PAGE)
        page, token = self._objects.page(
            bucket, query.get("prefix", ""), query.get("pageToken", ""), most, versions=versions
        )
        wanted = _FIELDS.fullmatch(query.get("fields", ""))
        names = wanted["items"].split(",") if wanted else None
        items = [
            {key: value for key, value in self._listed(each).items() if not names or key in names} for each in page
        ]
        # As Google does it: what is empty is left out.
        return json_reply(({"items": items} if items else {}) | ({"nextPageToken": token} if token else {}))

    def _listed(self, stored: StoredObject) -> dict[str, Any]:
        until = self._objects.retained_until(stored)
        return _shown(stored) | ({} if until is None else {"retentionExpirationTime": until.isoformat()})

    async def _upload(self, request: Request, bucket: str) -> Reply:
        if request.query.get("uploadType") != "multipart":
            raise Refusal(400, "InvalidArgument", "Only multipart uploads are here.")
        only = request.number(request.query.get("ifGenerationMatch"), "ifGenerationMatch")
        head = f"content-type: {request.header('content-type')}\r\n\r\n".encode()
        described, media = message_from_bytes(head + await request.body()).get_payload()
        facts = json.loads(described.get_payload())
        incoming = self._objects.receive(bucket)
        try:
            incoming.write(media.get_payload(decode=True))
            check_hashes(incoming, ",".join(f"{kind}={facts[key]}" for kind, key in _HASHES if key in facts))
            stored = self._objects.publish(bucket, facts["name"], incoming, generation_match=only)
        finally:
            incoming.close()
        return json_reply(_shown(stored))

    def _read(self, request: Request, bucket: str, name: str) -> Reply:
        generation = request.number(request.query.get("generation"), "generation")
        stored = self._objects.find(bucket, name, generation)
        if request.query.get("alt") != "media":
            return json_reply(_shown(stored))
        headers = {
            "content-type": "application/octet-stream",
            "x-goog-hash": f"crc32c={stored.crc32c},md5={stored.md5}",
            "x-goog-generation": str(stored.generation),
        }
        return Reply(200, headers, self._objects.body(stored.generation).read_bytes())


_HASHES = (("md5", "md5Hash"), ("crc32c", "crc32c"))


def _shown(stored: StoredObject) -> dict[str, Any]:
    """Numbers are strings, as in all of Google's JSON."""
    created = stored.created_at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
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
