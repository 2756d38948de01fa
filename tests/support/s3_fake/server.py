"""The server: a bucket on a port of this process. `advance` moves the archives' clock; signatures and the Date of each
answer go by the real one, and by `skew`."""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote, unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from tests.support.s3_fake.objects import Objects, Stored
from tests.support.s3_fake.replies import Refusal, Reply, xml
from tests.support.s3_fake.signatures import Keys, parsed_query, verify

_REGION = "us-east-1"
_RANGE = re.compile(r"bytes=(?P<first>\d+)-(?P<last>\d*)")
_SIGNING = {"x-amz-content-sha256", "x-amz-date"}
_KNOWN_HEADERS = {
    "HEAD": {"x-amz-checksum-mode"},
    "GET": {"x-amz-checksum-mode"},
    "PUT": {"x-amz-checksum-sha256", "x-amz-storage-class"},
    "COPY": {"x-amz-copy-source", "x-amz-storage-class", "x-amz-checksum-algorithm"},
    "POST": {"x-amz-checksum-sha256"},
    "DELETE": set(),
}
_SIGNED_QUERY = re.compile(r"X-Amz-[A-Za-z]+")
_LISTING = {"list-type", "prefix", "max-keys", "continuation-token", "encoding-type"}
_PAGE = 1000


class S3Fake:
    """`requests` holds (method, operation) of what came, for tests that count.

    `lenient` is what rclone and s3rver do: they take If-None-Match and a SHA-256 and look at neither. `versioned` is a
    bucket that keeps what is overwritten."""

    bucket = "holdfast"

    def __init__(self, *, lenient: bool = False, versioned: bool = False) -> None:
        self.lenient = lenient
        self.keys = Keys("test" + secrets.token_hex(6), secrets.token_hex(20), _REGION)
        self.ahead = timedelta()
        self.skew = timedelta()
        self.objects = Objects(self.now, versioned=versioned)
        self.requests: list[tuple[str, str]] = []
        fake = self

        class Handler(_Handler):
            s3 = fake

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def store_url_for(self, prefix: str) -> str:
        return f"s3://{self.bucket}/{prefix}?endpoint={quote(self.endpoint, safe=':/')}&region={_REGION}"

    @property
    def environment(self) -> dict[str, str]:
        return {"AWS_ACCESS_KEY_ID": self.keys.access_key, "AWS_SECRET_ACCESS_KEY": self.keys.secret_key}

    def now(self) -> datetime:
        return datetime.now(UTC) + self.ahead

    def clock(self) -> datetime:
        return datetime.now(UTC) + self.skew

    def advance(self, seconds: float) -> None:
        self.ahead += timedelta(seconds=seconds)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Reply:
        raw_path, _, raw_query = target.partition("?")
        query = parsed_query(raw_query)
        payload = verify(self.keys, method, raw_path, query, headers, self.clock())
        if payload not in ("UNSIGNED-PAYLOAD", hashlib.sha256(body).hexdigest()):
            raise Refusal(400, "XAmzContentSHA256Mismatch")
        bucket, _, key = unquote(raw_path).removeprefix("/").partition("/")
        if bucket != self.bucket:
            raise Refusal(404, "NoSuchBucket")
        wanted = {name: value for name, value in query.items() if not _SIGNED_QUERY.fullmatch(name)}
        operation = "COPY" if "x-amz-copy-source" in headers else method
        self.requests.append((operation, key))
        unknown = {name for name in headers if name.startswith("x-amz-")} - _KNOWN_HEADERS.get(operation, set())
        if unknown - _SIGNING:
            raise Refusal(501, "NotImplemented", f"There is no {sorted(unknown - _SIGNING)} for {operation} here.")
        match (operation, bool(key), wanted):
            case ("GET", False, {"list-type": "2"}):
                return self._list(wanted)
            case ("PUT", True, {}) if not wanted:
                return self._put(key, headers, body)
            case ("COPY", True, {}) if not wanted and not body:
                return self._copy(key, headers)
            case ("GET", False, {"versions": ""}) if wanted.keys() <= {"versions", "prefix", "encoding-type"}:
                return self._versions(wanted)
            case ("HEAD", True, {}) if not wanted.keys() - {"versionId"}:
                return self._described(self.objects.find(key, wanted.get("versionId")), headers)
            case ("GET", True, {}) if not wanted.keys() - {"versionId"}:
                return self._get(key, headers, wanted.get("versionId"))
            case ("DELETE", True, {}) if not wanted.keys() - {"versionId"}:
                hidden = self.objects.delete(key, wanted.get("versionId"))
                return Reply(204, {"x-amz-delete-marker": "true"} if hidden else {})
            case ("POST", True, {"restore": ""}) if len(wanted) == 1:
                _check_sha256(headers, body)
                return Reply(self.objects.restore(key, *_restore_request(body)))
        raise Refusal(501, "NotImplemented", f"There is no {operation} with {sorted(wanted)} here.")

    def _list(self, wanted: dict[str, str]) -> Reply:
        if wanted.keys() - _LISTING:
            raise Refusal(501, "NotImplemented", f"There is no listing with {sorted(wanted)} here.")
        after = wanted.get("continuation-token", "")
        names = [name for name in self.objects.names(wanted.get("prefix", "")) if name > after]
        page = names[: min(int(wanted.get("max-keys", _PAGE)), _PAGE)]
        encoding, spelt = _encoding(wanted)
        entries = encoding + "".join(self._entry(name, spelt(name)) for name in page)
        more = len(page) < len(names)
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more and page else ""
        shown = f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{entries}"
        return xml(f'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{shown}</ListBucketResult>')

    def _entry(self, name: str, spelt: str) -> str:
        stored = self.objects.find(name)
        modified = stored.modified_at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        return (
            f"<Contents><Key>{escape(spelt)}</Key><LastModified>{modified}</LastModified>"
            f"<Size>{len(stored.body)}</Size><StorageClass>{stored.storage_class}</StorageClass></Contents>"
        )

    def _versions(self, wanted: dict[str, str]) -> Reply:
        encoding, spelt = _encoding(wanted)
        found = sorted(self.objects.versions(wanted.get("prefix", "")), key=lambda each: each[0])
        more = str(len(found) > _PAGE).lower()
        entries = f"<IsTruncated>{more}</IsTruncated>{encoding}" + "".join(
            f"<Version><Key>{escape(spelt(key))}</Key><VersionId>{version_id}</VersionId></Version>"
            for key, version_id in found[:_PAGE]
        )
        return xml(
            f'<ListVersionsResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{entries}</ListVersionsResult>'
        )

    def _put(self, key: str, headers: dict[str, str], body: bytes) -> Reply:
        if self.lenient:
            stored = self.objects.put(key, body, "STANDARD", None, only_new=False)
            return Reply(200, {"etag": _etag(stored)})
        md5 = headers.get("content-md5")
        if md5 is not None and md5 != base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode():
            raise Refusal(400, "BadDigest", "The Content-MD5 you specified did not match what we received.")
        if headers.get("if-none-match") not in (None, "*"):
            raise Refusal(501, "NotImplemented", "Only If-None-Match: * is here.")
        sha256 = _check_sha256(headers, body)
        stored = self.objects.put(
            key, body, headers.get("x-amz-storage-class", "STANDARD"), sha256, only_new="if-none-match" in headers
        )
        return Reply(200, {"etag": _etag(stored)})

    def _copy(self, key: str, headers: dict[str, str]) -> Reply:
        bucket, _, source = unquote(headers["x-amz-copy-source"]).removeprefix("/").partition("/")
        if bucket != self.bucket:
            raise Refusal(404, "NoSuchBucket")
        if headers.get("x-amz-checksum-algorithm") not in (None, "SHA256"):
            raise Refusal(501, "NotImplemented", "Only SHA256 is here.")
        stored = self.objects.copy(
            source,
            key,
            headers.get("x-amz-storage-class", "STANDARD"),
            hashed="x-amz-checksum-algorithm" in headers,
        )
        return xml(f"<CopyObjectResult><ETag>{escape(_etag(stored))}</ETag></CopyObjectResult>")

    def _get(self, key: str, headers: dict[str, str], version_id: str | None = None) -> Reply:
        stored = self.objects.read(key, version_id)
        described = self._described(stored, headers)
        wanted = headers.get("range")
        if wanted is None:
            return Reply(200, described.headers, stored.body)
        match = _RANGE.fullmatch(wanted)
        if match is None or int(match["first"]) >= len(stored.body):
            raise Refusal(416, "InvalidRange")
        first, last = int(match["first"]), min(int(match["last"] or len(stored.body) - 1), len(stored.body) - 1)
        part = stored.body[first : last + 1]
        shown = {"content-length": str(len(part)), "content-range": f"bytes {first}-{last}/{len(stored.body)}"}
        return Reply(206, described.headers | shown, part)

    def _described(self, stored: Stored, headers: dict[str, str]) -> Reply:
        shown = {
            "content-length": str(len(stored.body)),
            "etag": _etag(stored),
            "last-modified": format_datetime(stored.modified_at, usegmt=True),
        }
        if stored.version_id is not None:
            shown["x-amz-version-id"] = stored.version_id
        if stored.storage_class != "STANDARD":  # as Amazon does it
            shown["x-amz-storage-class"] = stored.storage_class
        if headers.get("x-amz-checksum-mode") == "ENABLED" and stored.sha256 is not None:
            shown["x-amz-checksum-sha256"] = stored.sha256
        restore = self.objects.restore_header(stored)
        if restore is not None:
            shown["x-amz-restore"] = restore
        return Reply(200, shown)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    s3: S3Fake

    def _answer(self) -> None:
        headers: dict[str, str] = {}
        for name, value in self.headers.items():
            headers[name.lower()] = f"{headers[name.lower()]},{value}" if name.lower() in headers else value
        body = self.rfile.read(int(headers.get("content-length", "0")))
        try:
            if len(headers) != len(self.headers):
                raise Refusal(400, "InvalidRequest", "A header stands twice.")
            reply = self.s3.answer(self.command, self.path, headers, body)
        except Refusal as refusal:
            reply = refusal.as_reply()
        self.send_response_only(reply.status)
        usual = {"content-length": str(len(reply.body)), "date": format_datetime(self.s3.clock(), usegmt=True)}
        for name, value in (usual | reply.headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer

    def log_message(self, *args: Any) -> None:
        """URLs are secrets here as anywhere."""


@contextmanager
def s3_fake(*, lenient: bool = False, versioned: bool = False) -> Iterator[S3Fake]:
    """A fresh, empty bucket; gone afterwards."""
    fake = S3Fake(lenient=lenient, versioned=versioned)
    try:
        yield fake
    finally:
        fake.close()


def _encoding(wanted: dict[str, str]) -> tuple[str, Callable[[str], str]]:
    """How a listing names its encoding, and spells its keys."""
    match wanted.get("encoding-type"):
        case None:
            return "", str
        case "url":
            return "<EncodingType>url</EncodingType>", quote
    raise Refusal(400, "InvalidArgument", "Only url is an encoding-type.")


def _check_sha256(headers: dict[str, str], body: bytes) -> str | None:
    announced = headers.get("x-amz-checksum-sha256")
    if announced is not None and announced != base64.b64encode(hashlib.sha256(body).digest()).decode():
        raise Refusal(400, "BadDigest", "The SHA256 you specified did not match the calculated checksum.")
    return announced


def _restore_request(body: bytes) -> tuple[int, str]:
    try:
        root = ElementTree.fromstring(body)
    except ElementTree.ParseError:
        raise Refusal(400, "MalformedXML") from None
    names = {each.tag.rpartition("}")[2] for each in root.iter()}
    if names - {"RestoreRequest", "Days", "GlacierJobParameters", "Tier"} or "Days" not in names:
        raise Refusal(400, "MalformedXML")
    return int(root.findtext("{*}Days") or 0), root.findtext("{*}GlacierJobParameters/{*}Tier") or "Standard"


def _etag(stored: Stored) -> str:
    return f'"{hashlib.md5(stored.body, usedforsecurity=False).hexdigest()}"'
