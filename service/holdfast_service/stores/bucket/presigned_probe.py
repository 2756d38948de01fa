"""Sends a bucket what it ought to refuse, by presigned URLs, as a client would. What is enforced is decided by
the probe.py of each store.

Ceph before 18 and rclone accept a signed SHA-256 and ignore it; others answer a conditional PUT with 501. What a store
accepts and ignores must not be relied on (rules reuse-only-hashed and store-outage-degrades).
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
from collections.abc import Mapping
from types import MappingProxyType
from xml.etree import ElementTree

import urllib3

from holdfast_service.stores.base import ObjectKey, ObjectMissing, StoreUnavailable
from holdfast_service.stores.bucket.bucket_store import PROBE_PROJECT, BucketStore

_TICKET_SECONDS = 60
_FIRST_DIGIT = re.compile(r"(-Signature=|[?&]sig=)(.)", re.IGNORECASE)


class PresignedProbe:
    """Use it once, and `clean_up` at the end."""

    def __init__(self, store: BucketStore, always: Mapping[str, str] = MappingProxyType({})) -> None:
        """`always`: headers of every PUT."""
        self._store = store
        self._always = always
        self._keys: list[ObjectKey] = []

    def fresh_key(self, body: bytes) -> ObjectKey:
        key = ObjectKey(PROBE_PROJECT, hashlib.sha256(body).hexdigest(), secrets.token_hex(16))
        self._keys.append(key)
        return key

    def refuses(
        self,
        key: ObjectKey,
        body: bytes,
        headers: Mapping[str, str],
        *,
        signed_bytes: int | None = None,
        tampered: bool = False,
    ) -> bool:
        """A refusal that stores the object all the same is none. `tampered`: with a wrong digit in the signature."""
        if self.put(key, body, headers, signed_bytes=signed_bytes, tampered=tampered)[0]:
            return False
        try:
            self._store.head(key)
        except ObjectMissing:
            return True
        return False

    def put(
        self,
        key: ObjectKey,
        body: bytes,
        headers: Mapping[str, str],
        *,
        signed_bytes: int | None = None,
        tampered: bool = False,
    ) -> tuple[bool, str]:
        """Whether the store accepted it, and the reason if not. Signed for `signed_bytes`, sent as it is."""
        told = {**self._always, **headers}
        signed = {**told, "content-length": str(len(body) if signed_bytes is None else signed_bytes)}
        sent = {**told, "content-length": str(len(body))}
        answer = self._send("PUT", key, signed, sent, body, tampered=tampered)
        return answer.status < 300, _error_code(answer.data) or str(answer.status)

    def get_range(self, key: ObjectKey, first: int, last: int) -> bytes:
        return self._send("GET", key, {}, {"range": f"bytes={first}-{last}"}, None).data

    def leave_behind(self) -> None:
        """What cannot be deleted."""
        self._keys.clear()

    def clean_up(self) -> None:
        for key in self._keys:
            self._store.delete(key)

    def _send(
        self,
        method: str,
        key: ObjectKey,
        signed: Mapping[str, str],
        sent: Mapping[str, str],
        body: bytes | None,
        *,
        tampered: bool = False,
    ) -> urllib3.BaseHTTPResponse:
        url, _ = self._store.presign(method, key, signed, _TICKET_SECONDS, public=False)
        if tampered:
            url = _FIRST_DIGIT.sub(lambda found: found[1] + ("0" if found[2] != "0" else "1"), url)
        try:
            answer = self._store.calls.pool.request(method, url, headers=dict(sent), body=body)
        except urllib3.exceptions.HTTPError as error:
            raise self._store.calls.unreachable(error) from error
        if answer.status in {500, 502, 503, 504}:
            raise StoreUnavailable(f"the store answered the probe with status {answer.status}; try again later")
        return answer


def base64_md5(body: bytes) -> str:
    return base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()


def _error_code(body: bytes) -> str:
    """The reason in an error document; empty if there is none."""
    try:
        return ElementTree.fromstring(body).findtext("{*}Code") or ""  # noqa: S314  (our own store's answer)
    except ElementTree.ParseError:
        return ""
