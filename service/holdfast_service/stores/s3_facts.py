"""What the headers of S3's answers say of an object. Pure."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping
from typing import Any

from holdfast_service.stores.base import ObjectFacts


def facts_of(headers: Mapping[str, Any]) -> ObjectFacts:
    """Of a HEAD or GET with checksum mode on: else no checksum comes back."""
    version_id = headers.get("x-amz-version-id")
    return ObjectFacts(
        int(headers["content-length"]),
        _hex_sha256(headers.get("x-amz-checksum-sha256")),
        None if version_id in {None, "null"} else str(version_id),
    )


def _hex_sha256(header: str | None) -> str | None:
    """None for a missing one, and for a multipart's digest of digests (`...-3`), which is no SHA-256 of the bytes."""
    try:
        digest = base64.b64decode(header or "", validate=True)
    except binascii.Error:
        return None
    return digest.hex() if len(digest) == hashlib.sha256().digest_size else None
