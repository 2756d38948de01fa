"""The service's own signed URLs, for clients of a posix store that do not see its mount. Pure: no I/O.

`/v1/objects/<payload>?signature=<signature>`: the payload says what is allowed (base64url of compact JSON), the
signature is HMAC-SHA256 over the payload as it stands, so there is nothing to canonicalise and nothing to alter.
Each posix store has a key of its own: which of them a URL leads to is whose signature it bears.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from holdfast_protocol.states import StoreRole
from holdfast_service.stores.base import ObjectKey

OBJECTS_PATH = "/v1/objects"
_SHORTEST_KEY_BYTES = 32


def new_signing_key() -> bytes:
    return secrets.token_bytes(_SHORTEST_KEY_BYTES)


def key_of_role(signing_key: bytes, role: StoreRole) -> bytes:
    """The primary store's is the service's own key, the others' are made from it."""
    if role is StoreRole.PRIMARY:
        return signing_key
    return hmac.digest(signing_key, f"store {role.value}".encode(), hashlib.sha256)


class SignatureInvalid(Exception):  # noqa: N818
    """It was not signed by this service for this method, or it was altered."""

    def __init__(self) -> None:
        super().__init__("the signature of this URL is not valid for this request; ask the service for a new ticket")


class TicketExpired(Exception):  # noqa: N818
    """It was good and is too old."""

    def __init__(self) -> None:
        super().__init__("this ticket has expired; ask the service for a new one")


@dataclass(frozen=True, slots=True)
class Grant:
    """What a verified URL allows: one method on one object; for PUT, exactly these bytes."""

    method: Literal["PUT", "GET"]
    key: ObjectKey
    stored_bytes: int | None
    stored_sha256: str | None


class UrlSigner:
    """Signs and verifies with one secret of at least 32 bytes. `now` gives Unix seconds."""

    def __init__(self, signing_key: bytes, *, now: Callable[[], float] = time.time) -> None:
        if len(signing_key) < _SHORTEST_KEY_BYTES:
            raise ValueError(f"the URL signing key has {len(signing_key)} bytes; give at least {_SHORTEST_KEY_BYTES}")
        self._key = signing_key
        self._now = now

    def sign(self, grant: Grant, *, expires_in_seconds: int) -> str:
        """A URL relative to the service."""
        terms = [
            grant.method,
            grant.key.path,
            grant.stored_bytes,
            grant.stored_sha256,
            int(self._now()) + expires_in_seconds,
        ]
        payload = _encode(json.dumps(terms, separators=(",", ":")).encode())
        return f"{OBJECTS_PATH}/{payload}?signature={self._signature(payload)}"

    def verify(self, method: str, payload: str, signature: str) -> Grant:
        """What the URL allows; SignatureInvalid, also for another method; TicketExpired."""
        if not hmac.compare_digest(self._signature(payload).encode(), signature.encode()):
            raise SignatureInvalid
        signed_method, path, stored_bytes, stored_sha256, expires_at_seconds = json.loads(_decode(payload))
        if signed_method != method:
            raise SignatureInvalid
        if self._now() >= expires_at_seconds:
            raise TicketExpired
        return Grant(signed_method, ObjectKey.from_path(path), stored_bytes, stored_sha256)

    def _signature(self, payload: str) -> str:
        return _encode(hmac.digest(self._key, payload.encode(), hashlib.sha256))


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
