"""Keys and requests for tests of stores: what a client would send, with exactly the ticket's headers."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping

import urllib3

from holdfast_service.stores.base import GetTicket, ObjectKey, PutTicket, Store

TICKET_SECONDS = 300


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def chunk_key(data: bytes, project_id: str = "p1") -> ObjectKey:
    """A key for these bytes with a fresh generation."""
    return ObjectKey(project_id, sha256(data), secrets.token_hex(16))


def put_ticket(store: Store, key: ObjectKey, data: bytes, *, expires_in_seconds: int = TICKET_SECONDS) -> PutTicket:
    return store.presign_put(
        key,
        stored_bytes=len(data),
        stored_sha256=sha256(data),
        md5=hashlib.md5(data, usedforsecurity=False).hexdigest(),
        expires_in_seconds=expires_in_seconds,
    )


def send(
    service_url: str,
    ticket: PutTicket,
    body: bytes | Iterable[bytes],
    *,
    headers: Mapping[str, str] | None = None,
    url: str | None = None,
) -> urllib3.BaseHTTPResponse:
    """PUTs `body` with the ticket's headers (or `headers`) to the ticket's URL (or `url`)."""
    target = absolute(service_url, url or ticket.url)
    sent = dict(ticket.headers if headers is None else headers)
    return urllib3.request(ticket.method, target, headers=sent, body=body, retries=False, timeout=60)


def fetch(
    service_url: str, ticket: GetTicket, *, byte_range: str | None = None, url: str | None = None
) -> urllib3.BaseHTTPResponse:
    target = absolute(service_url, url or ticket.url)
    headers = {**ticket.headers, **({"range": f"bytes={byte_range}"} if byte_range else {})}
    return urllib3.request("GET", target, headers=headers, retries=False, timeout=60)


def absolute(service_url: str, url: str) -> str:
    return service_url + url if url.startswith("/") else url
