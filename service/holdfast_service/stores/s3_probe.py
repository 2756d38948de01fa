"""What a bucket really enforces, found by sending it what it ought to refuse.

Ceph before 18 and rclone accept a signed SHA-256 and ignore it; others answer a conditional PUT with 501. What a store
accepts and ignores must not be relied on (rules 14 and 34).
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import urllib3

from holdfast_service.stores.base import Capabilities, ObjectKey, ObjectMissing, StoreRefused, StoreUnavailable
from holdfast_service.stores.s3_wire import error_code

if TYPE_CHECKING:
    from holdfast_service.stores.s3 import S3Store

_PROBE_PROJECT = "probe"
_TICKET_SECONDS = 60


def probe_s3(store: S3Store) -> Capabilities:
    """StoreRefused if not even a plain presigned PUT goes through. Its objects are gone afterwards."""
    probe = _Probe(store)
    try:
        body, other = secrets.token_bytes(32), secrets.token_bytes(32)
        right, wrong = {"x-amz-checksum-sha256": _sha256(body)}, {"x-amz-checksum-sha256": _sha256(other)}
        plain = probe.fresh_key(body)
        accepted, reason = probe.put(plain, body, right)
        if not accepted:
            raise StoreRefused(f"the store refuses a presigned PUT ({reason}); check permissions and region")
        facts = store.head(plain)
        conditional = probe.fresh_key(body)
        return Capabilities(
            sha256_enforced=probe.refuses(probe.fresh_key(body), body, wrong),
            sha256_reported=facts.sha256 == plain.digest,
            content_length_enforced=probe.refuses(probe.fresh_key(body), body, right, signed_bytes=len(body) - 1),
            conditional_put=probe.put(conditional, body, {**right, "if-none-match": "*"})[0]
            and not probe.put(conditional, body, {**right, "if-none-match": "*"})[0],
            md5_enforced=probe.refuses(probe.fresh_key(body), body, {"content-md5": _md5(other)}),
            range_get=probe.get_range(plain, 3, 9) == body[3:10],
            versioned=facts.version_id is not None,
            probed_at=datetime.now(UTC),
        )
    finally:
        probe.clean_up()


class _Probe:
    def __init__(self, store: S3Store) -> None:
        self._store = store
        self._keys: list[ObjectKey] = []

    def fresh_key(self, body: bytes) -> ObjectKey:
        key = ObjectKey(_PROBE_PROJECT, hashlib.sha256(body).hexdigest(), secrets.token_hex(16))
        self._keys.append(key)
        return key

    def refuses(
        self, key: ObjectKey, body: bytes, headers: Mapping[str, str], *, signed_bytes: int | None = None
    ) -> bool:
        """A refusal that stores the object all the same is none."""
        if self.put(key, body, headers, signed_bytes=signed_bytes)[0]:
            return False
        try:
            self._store.head(key)
        except ObjectMissing:
            return True
        return False

    def put(
        self, key: ObjectKey, body: bytes, headers: Mapping[str, str], *, signed_bytes: int | None = None
    ) -> tuple[bool, str]:
        """Whether the store accepted it, and the reason if not. Signed for `signed_bytes`, sent as it is."""
        signed = {**headers, "content-length": str(len(body) if signed_bytes is None else signed_bytes)}
        sent = {**headers, "content-length": str(len(body))}
        answer = self._send("PUT", key, signed, sent, body)
        return answer.status < 300, error_code(answer.data) or str(answer.status)

    def get_range(self, key: ObjectKey, first: int, last: int) -> bytes:
        return self._send("GET", key, {}, {"range": f"bytes={first}-{last}"}, None).data

    def clean_up(self) -> None:
        for key in self._keys:
            self._store.delete(key)

    def _send(
        self, method: str, key: ObjectKey, signed: Mapping[str, str], sent: Mapping[str, str], body: bytes | None
    ) -> urllib3.BaseHTTPResponse:
        url, _ = self._store.presign(method, key, signed, _TICKET_SECONDS, public=False)
        try:
            answer = self._store.wire.pool.request(method, url, headers=dict(sent), body=body)
        except urllib3.exceptions.HTTPError as error:
            raise self._store.wire.unavailable(error) from error
        if answer.status in {500, 502, 503, 504}:
            raise StoreUnavailable(f"the store answered the probe with status {answer.status}; try again later")
        return answer


def _sha256(body: bytes) -> str:
    return base64.b64encode(hashlib.sha256(body).digest()).decode()


def _md5(body: bytes) -> str:
    return base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
