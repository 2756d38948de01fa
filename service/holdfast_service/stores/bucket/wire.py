"""Requests to a bucket over one connection pool, tried again where that can help."""

from __future__ import annotations

import json
import re
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import format_datetime, parsedate_to_datetime
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment, proxy_bypass_environment  # type: ignore[attr-defined]
from xml.etree import ElementTree

import urllib3

from holdfast_service.stores.base import (
    ObjectArchived,
    ObjectMismatch,
    ObjectMissing,
    StoreError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
)
from holdfast_service.stores.bucket.canonical_request import encoded_query
from holdfast_service.stores.bucket.network import authorities
from holdfast_service.stores.retry import TRIES, with_retries

# Connections to buckets, with the authorities and the proxies that the environment names, as for the vendors' tools.
#
# AWS_CA_BUNDLE, REQUESTS_CA_BUNDLE, SSL_CERT_FILE   a file (or folder) of certificates to trust; the first that is set
# HTTPS_PROXY, HTTP_PROXY, ALL_PROXY, NO_PROXY       also in lower case

_CONNECT_SECONDS = 5.0
_READ_SECONDS = 60.0
_CONNECTIONS = 64
_NEVER_BY_PROXY = ("localhost", "metadata.google.internal", "169.254.169.254", "::1")
"""This machine, and what a cloud tells it of itself."""


class StorePool(urllib3.PoolManager):
    """Never retries and follows no redirect: whoever uses it knows what may be repeated."""

    def __init__(self) -> None:
        options: dict[str, Any] = {
            "maxsize": _CONNECTIONS,
            "timeout": urllib3.Timeout(connect=_CONNECT_SECONDS, read=_READ_SECONDS),
            "retries": False,
            "ca_certs": authorities(),
        }
        super().__init__(**options)
        self._proxies = getproxies_environment()
        # Made now, so that a proxy that is no URL stops the start.
        self._by_proxy = {proxy: _proxy_manager(proxy, options) for proxy in set(self._proxies.values()) if proxy}

    def urlopen(  # type: ignore[override]
        self, method: str, url: str, redirect: bool = False, **options: Any
    ) -> urllib3.BaseHTTPResponse:
        del redirect
        proxy = self._proxy_of(url)
        if proxy is not None:
            return self._by_proxy[proxy].urlopen(method, url, redirect=False, **options)
        return super().urlopen(method, url, redirect=False, **options)

    def clear(self) -> None:
        super().clear()
        for each in self._by_proxy.values():
            each.clear()

    def _proxy_of(self, url: str) -> str | None:
        parts = urlsplit(url)
        host = parts.hostname or ""
        if host in _NEVER_BY_PROXY or host.startswith("127."):
            return None
        if proxy_bypass_environment(parts.netloc.rpartition("@")[2], self._proxies):
            return None
        return self._proxies.get(parts.scheme) or self._proxies.get("all") or None


def _proxy_manager(proxy: str, options: dict[str, Any]) -> urllib3.ProxyManager:
    url = proxy if "://" in proxy else f"http://{proxy}"
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise StoreRefused("HTTPS_PROXY, HTTP_PROXY or ALL_PROXY is no http:// or https:// URL; correct it")
    headers = None
    if parts.username is not None:
        both = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers = urllib3.make_headers(proxy_basic_auth=both)
    return urllib3.ProxyManager(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}", proxy_headers=headers, **options)


# Requests to a bucket over one connection pool, tried again where that can help. A subclass says how they are signed.
#
# Here, and only here, an HTTP status or a network failure becomes a StoreError. Messages name the host and the store's
# own error code, never a URL: a presigned one is a secret.

_READ_BYTES = 1024 * 1024
_SEND_BYTES = 256 * 1024
_NO_BUCKET = {"NoSuchBucket", "notFound"}  # the latter is Google's JSON, in which only the bucket is asked for
_LACKING = {"NotImplemented", "MethodNotAllowed"}
_OTHER_REGION = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
_MISMATCH = {"BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch", "CrcMismatch"}
_FULL = {"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "StorageQuotaExceeded"}
_ARCHIVED = {"InvalidObjectState", "ObjectNotInActiveTierError"}
_SKEWED = {"RequestTimeTooSkewed"}
_READING = {"GET", "HEAD"}
_REGION = re.compile(r"[a-z0-9-]{1,64}")
# What OpenSSL calls an answer that is no TLS, by its version.
_NO_TLS = {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL", "PACKET_LENGTH_TOO_LONG"}
_LATER = {"SlowDown", "RequestTimeout", "ServiceUnavailable", "InternalError", "ConditionalRequestConflict"}


class BucketWire(ABC):
    """Requests from the service to `origin`. Safe to use from several threads. `name` begins a sentence about it,
    `remedy` ends the one about a refusal."""

    def __init__(self, origin: str, *, name: str, remedy: str, pool: urllib3.PoolManager | None = None) -> None:
        self._origin = origin
        self._name = name
        self._remedy = remedy
        self.pool = StorePool() if pool is None else pool
        self.guard: Callable[[], None] = lambda: None

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
        tries: int = TRIES,
    ) -> urllib3.BaseHTTPResponse:
        """The answer if its status is accepted, with its body read unless `stream`; else a StoreError."""
        if method not in _READING:
            self.guard()

        def once() -> urllib3.BaseHTTPResponse:
            # Signed anew each time: a signature and a token have an end.
            signed = self._signed(method, path, query=query, headers=headers or {}, body=body)
            url = f"{self._origin}{path}" + (f"?{encoded_query(query)}" if query else "")
            try:
                answer = self._send(method, url, signed, body, stream)
            except urllib3.exceptions.HTTPError as error:
                raise self.unreachable(error) from error
            if answer.status not in accept:
                raise self._failure(answer, " ".join([method, *(name for name, _ in query)]))
            return answer

        return with_retries(once, tries=tries)

    def read(self, path: str, query: Sequence[tuple[str, str]] = ()) -> Iterator[bytes]:
        """An object's bytes in pieces of at most 1 MiB. The request is made now; a short read raises."""
        return self._pieces(self.request("GET", path, query=query, stream=True))

    def _pieces(self, answer: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
        try:
            # urllib3 raises if fewer bytes come than Content-Length promised.
            yield from answer.stream(_READ_BYTES, decode_content=False)
        except urllib3.exceptions.HTTPError as error:
            raise self.unreachable(error) from error
        finally:
            answer.close()

    def unreachable(self, error: Exception) -> StoreError:
        """What stands between the service and the store; to be tried again only where that may help."""
        if isinstance(error, urllib3.exceptions.ProxyError):
            return StoreUnavailable(
                f"{self._name} is not reached: the proxy on the way does not let the service through "
                f"({type(error.original_error).__name__}); check HTTPS_PROXY, HTTP_PROXY and NO_PROXY"
            )
        tls = error.args[0] if isinstance(error, urllib3.exceptions.SSLError) and error.args else None
        if isinstance(tls, ssl.SSLCertVerificationError):
            return StoreRefused(
                f"{self._name} shows a certificate that is not trusted ({tls.verify_message}); name the file of its "
                "authority in AWS_CA_BUNDLE, or put a right certificate on the server"
            )
        if isinstance(tls, ssl.SSLError) and tls.reason in _NO_TLS:
            return StoreRefused(
                f"{self._name} does not speak TLS on this port; write endpoint=http://… in the store's URL, or name "
                "the port of its https"
            )
        return StoreUnavailable(f"{self._name} does not answer ({type(error).__name__}); check that it is up")

    def close(self) -> None:
        self.pool.clear()

    @abstractmethod
    def _signed(
        self, method: str, path: str, *, query: Sequence[tuple[str, str]], headers: Mapping[str, str], body: bytes
    ) -> dict[str, str]:
        """The headers to send: the given ones, and what says who asks."""

    def _send(
        self, method: str, url: str, headers: dict[str, str], body: bytes, stream: bool
    ) -> urllib3.BaseHTTPResponse:
        if method not in {"PUT", "POST"}:
            return self.pool.request(method, url, headers=headers, preload_content=not stream)
        # urllib3 applies the connect time-out to each send: in one piece a large body would have to fit into it.
        slices = (body[start : start + _SEND_BYTES] for start in range(0, len(body), _SEND_BYTES))
        return self.pool.request(method, url, headers={**headers, "content-length": str(len(body))}, body=slices)

    def _failure(self, answer: urllib3.BaseHTTPResponse, operation: str) -> StoreError:
        try:
            code = error_code(answer.data)
        except urllib3.exceptions.HTTPError as error:
            return self.unreachable(error)
        what = f"{code or 'no reason given'}, status {answer.status}"
        if answer.status == 507 or code in _FULL:
            return StoreFull(f"{self._name} is full ({what}); free some room or raise its quota")
        if code in _MISMATCH:
            return ObjectMismatch(f"{self._name} refused the bytes ({what})")
        if code in _ARCHIVED:
            return ObjectArchived("the object is archived in the store; thaw it before it is read")
        if code in _NO_BUCKET:
            return StoreRefused(f"{self._name} is not there; make the bucket, or correct its name in the store's URL")
        if code in _SKEWED:
            return StoreRefused(
                f"{self._name} refuses what the service signs: by its clock it is {answer.headers.get('date')}, and by "
                f"the service's {format_datetime(datetime.now(UTC), usegmt=True)}; set both by NTP"
            )
        region = _region_told(answer, code)
        if region is not None:
            return StoreRefused(f"{self._name} is in the region {region}; write region={region} in the store's URL")
        if answer.status == 501 or code in _LACKING:
            return StoreRefused(
                f"{self._name} lacks an operation that the service needs, {operation} ({what}); use a store that has it"
            )
        if answer.status == 404 and code in {"", "NoSuchKey", "NoSuchVersion"}:
            return ObjectMissing("there is no such object in the store")
        if code in _LATER or answer.status in {408, 409, 429} or (answer.status >= 500 and answer.status != 501):
            return StoreUnavailable(f"{self._name} asks to come back later ({what})")
        return StoreRefused(f"{self._name} refuses the service ({what}); {self._remedy}")


def _region_told(answer: urllib3.BaseHTTPResponse, code: str) -> str | None:
    """The bucket's own region, where the store says that it is not the one that was asked in."""
    if answer.status not in {301, 307} and code not in _OTHER_REGION:
        return None
    told = answer.headers.get("x-amz-bucket-region")
    if told is None:
        with suppress(ElementTree.ParseError):
            told = ElementTree.fromstring(answer.data).findtext("{*}Region")  # noqa: S314  (our own store's answer)
    return told if told and _REGION.fullmatch(told) else None


def date_of(answer: urllib3.BaseHTTPResponse) -> datetime:
    """When the store says that it answered."""
    try:
        return parsedate_to_datetime(answer.headers["date"]).astimezone(UTC)
    except (KeyError, ValueError):
        raise StoreUnavailable("the store does not say what time it is; try again") from None


def error_code(body: bytes) -> str:
    """The reason in an error document, S3's and Google's XML or Google's JSON; empty if there is none (HEAD answers
    have no body)."""
    try:
        return ElementTree.fromstring(body).findtext("{*}Code") or ""  # noqa: S314  (our own store's answer)
    except ElementTree.ParseError:
        pass
    try:
        error = json.loads(body)["error"]
        return str(error["errors"][0]["reason"] if "errors" in error else error["status"])
    except (ValueError, KeyError, TypeError, LookupError):
        return ""
