"""What proves to the receiver that a call is ours, as the Standard Webhooks specification has it. Pure."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets

SECRET_BYTES = 32
_PREFIX = "whsec_"


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


def shown(secret: bytes) -> str:
    """As libraries of the specification take it."""
    return _PREFIX + base64.b64encode(secret).decode()


def signature(secret: bytes, message_id: str, timestamp: int, body: bytes) -> str:
    """The `webhook-signature` header. `timestamp` in seconds since 1970; it is signed, so that an old call cannot be
    played again."""
    signed = b".".join((message_id.encode(), str(timestamp).encode(), body))
    return "v1," + base64.b64encode(hmac.new(secret, signed, hashlib.sha256).digest()).decode()
