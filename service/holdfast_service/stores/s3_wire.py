"""Signed requests to a bucket over one connection pool, tried again where that can help.

Here, and only here, an HTTP status or a network failure becomes a StoreError. Messages name the host and the store's
own error code, never a URL: a presigned one is a secret.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from xml.etree import ElementTree

import urllib3

from holdfast_service.stores.base import (
    ObjectMismatch,
    ObjectMissing,
    StoreError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
)
from holdfast_service.stores.credentials import CredentialSource
from holdfast_service.stores.s3_location import S3Location
from holdfast_service.stores.sigv4 import EMPTY_SHA256, SigV4Signer, encoded_query

_CONNECT_SECONDS = 5.0
_READ_SECONDS = 60.0
_SEND_BYTES = 256 * 1024
_TRIES = 4
_FIRST_PAUSE_SECONDS = 0.2
_CONNECTIONS = 64
_MISMATCH = {"BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"}
_FULL = {"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "StorageQuotaExceeded"}
_LATER = {"SlowDown", "RequestTimeout", "ServiceUnavailable", "InternalError", "ConditionalRequestConflict"}


class S3Wire:
    """Header-signed requests from the service to the store. Safe to use from several threads."""

    def __init__(self, location: S3Location, credentials: CredentialSource, signer: SigV4Signer) -> None:
        self._location = location
        self._credentials = credentials
        self._signer = signer
        timeout = urllib3.Timeout(connect=_CONNECT_SECONDS, read=_READ_SECONDS)
        self.pool = urllib3.PoolManager(maxsize=_CONNECTIONS, timeout=timeout, retries=False)

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Sequence[tuple[str, str]] = (),
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        accept: Collection[int] = (200, 204, 206),
        stream: bool = False,
        tries: int = _TRIES,
    ) -> urllib3.BaseHTTPResponse:
        """The answer if its status is accepted, with its body read unless `stream`; else a StoreError."""
        for tried in range(1, tries + 1):
            try:
                answer = self._send(method, path, query=query, headers=headers or {}, body=body, stream=stream)
            except urllib3.exceptions.HTTPError as error:
                failure: StoreError = self.unavailable(error)
            else:
                if answer.status in accept:
                    return answer
                failure = self._failure(answer)
            if not failure.retryable or tried == tries:
                break
            # Full jitter: many service processes must not come back to a throttling store in step.
            time.sleep(random.uniform(0, _FIRST_PAUSE_SECONDS * 2**tried))  # noqa: S311
        raise failure

    def unavailable(self, error: Exception) -> StoreUnavailable:
        host = self._location.origin
        return StoreUnavailable(f"the store at {host} does not answer ({type(error).__name__}); check that it is up")

    def close(self) -> None:
        self.pool.clear()

    def _send(
        self,
        method: str,
        path: str,
        *,
        query: Sequence[tuple[str, str]],
        headers: Mapping[str, str],
        body: bytes,
        stream: bool,
    ) -> urllib3.BaseHTTPResponse:
        credentials, _ = self._credentials.current()
        signed = self._signer.sign_headers(
            credentials,
            method,
            self._location.origin,
            path,
            headers=headers,
            payload_sha256=hashlib.sha256(body).hexdigest() if body else EMPTY_SHA256,
            at=datetime.now(UTC),
            query=query,
        )
        url = f"{self._location.origin}{path}" + (f"?{encoded_query(query)}" if query else "")
        if method != "PUT":
            return self.pool.request(method, url, headers=signed, preload_content=not stream)
        # urllib3 applies the connect time-out to each send: in one piece a large body would have to fit into it.
        signed["content-length"] = str(len(body))
        slices = (body[start : start + _SEND_BYTES] for start in range(0, len(body), _SEND_BYTES))
        return self.pool.request(method, url, headers=signed, body=slices)

    def _failure(self, answer: urllib3.BaseHTTPResponse) -> StoreError:
        try:
            code = error_code(answer.data)
        except urllib3.exceptions.HTTPError as error:
            return self.unavailable(error)
        where = f"the store at {self._location.origin}, bucket {self._location.bucket},"
        what = f"{code or 'no reason given'}, status {answer.status}"
        if answer.status == 507 or code in _FULL:
            return StoreFull(f"{where} is full ({what}); free some room or raise its quota")
        if code in _MISMATCH:
            return ObjectMismatch(f"{where} refused the bytes ({what})")
        if answer.status == 404 and code in {"", "NoSuchKey", "NoSuchVersion"}:
            return ObjectMissing("there is no such object in the store")
        if code in _LATER or answer.status in {408, 409, 429} or (answer.status >= 500 and answer.status != 501):
            return StoreUnavailable(f"{where} asks to come back later ({what})")
        return StoreRefused(f"{where} refuses the service ({what}); check credentials, permissions, region and clock")


def error_code(body: bytes) -> str:
    """The `Code` of an S3 error document; empty if there is none (HEAD answers have no body)."""
    try:
        return ElementTree.fromstring(body).findtext("{*}Code") or ""  # noqa: S314  (our own store's answer)
    except ElementTree.ParseError:
        return ""
