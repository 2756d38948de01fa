"""Who signs tickets for Google Cloud Storage, and how."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Protocol
from urllib.parse import quote

import urllib3

from holdfast_service.stores.base import StoreRefused, StoreUnavailable
from holdfast_service.stores.bucket.canonical_request import canonical_headers, joined, quoted_pairs
from holdfast_service.stores.gcs.gcs_location import GcsLocation

if TYPE_CHECKING:
    from google.auth.crypt import Signer


from holdfast_service.stores.gcs.identity import GoogleIdentity, IamWire

# Google's V4 signed URLs (GOOG4-RSA-SHA256). Pure but for the signature itself: that is the given signer's.
#
# The same canonical request as Amazon's, other names, and an RSA signature of the string instead of an HMAC: about 0.3
# ms of CPU with a key file of 2048 bits, and a request over the network without one (`IamSigner`). The tests compare
# the URLs with those of google-cloud-storage. Source:
# https://cloud.google.com/storage/docs/authentication/canonical-requests

LONGEST_URL_SECONDS = 7 * 24 * 3600
_ALGORITHM = "GOOG4-RSA-SHA256"


class RsaSigner(Protocol):
    """Signs as one service account. `longest_seconds` is how long a signature can be relied on, `at_once` how many
    are worth making at the same time."""

    longest_seconds: int
    at_once: int

    def email(self) -> str: ...

    def sign(self, message: bytes) -> bytes:
        """RSASSA-PKCS1-v1_5 with SHA-256. Raises StoreError."""


def presign(
    signer: RsaSigner,
    method: str,
    origin: str,
    path: str,
    *,
    headers: Mapping[str, str],
    expires_in_seconds: int,
    at: datetime,
    query: Sequence[tuple[str, str]] = (),
) -> str:
    """A URL that allows this method with these headers (lower-case, all signed). `path` is percent-encoded, `at` UTC.

    The payload is not part of the signature: it is held by the headers that Google compares it with.
    """
    timestamp = at.strftime("%Y%m%dT%H%M%SZ")
    scope = f"{timestamp[:8]}/auto/storage/goog4_request"
    names, header_lines = canonical_headers(origin, headers)
    terms = [
        ("X-Goog-Algorithm", _ALGORITHM),
        ("X-Goog-Credential", f"{signer.email()}/{scope}"),
        ("X-Goog-Date", timestamp),
        ("X-Goog-Expires", str(expires_in_seconds)),
        ("X-Goog-SignedHeaders", names),
    ]
    pairs = joined(sorted(quoted_pairs([*query, *terms])))
    canonical = f"{method}\n{path}\n{pairs}\n{header_lines}\n{names}\nUNSIGNED-PAYLOAD"
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    signature = signer.sign(f"{_ALGORITHM}\n{timestamp}\n{scope}\n{digest}".encode())
    return f"{origin}{path}?{pairs}&X-Goog-Signature={signature.hex()}"


# Who signs tickets: the private key of a key file, or IAM for an identity that has none.
#
# Without a key each signature is a request to IAM's signBlob. Its keys are Google's and rotate, so a signature can be
# relied on for twelve hours only. Source: https://cloud.google.com/storage/docs/authentication/creating-signatures

_IAM_KEY_SECONDS = 12 * 3600
_IAM_AT_ONCE = 16


def signer_for(location: GcsLocation, identity: GoogleIdentity, pool: urllib3.PoolManager) -> RsaSigner:
    """The key if there is one for the account that is to sign, else IAM."""
    key = identity.key
    if key is not None and location.service_account in (None, key[0]):
        return KeySigner(*key)
    wire = IamWire(location, identity, pool)
    return IamSigner(wire, lambda: location.service_account or identity.email())


class KeySigner:
    """With a service account's private key, which this process holds."""

    longest_seconds = LONGEST_URL_SECONDS
    at_once = 1

    def __init__(self, email: str, key: Signer) -> None:
        self._email = email
        self._key = key

    def email(self) -> str:
        return self._email

    def sign(self, message: bytes) -> bytes:
        return bytes(self._key.sign(message))


class IamSigner:
    """With a key that Google keeps. `find_email` may have to ask for it, so it is asked when it is needed."""

    longest_seconds = _IAM_KEY_SECONDS
    at_once = _IAM_AT_ONCE

    def __init__(self, wire: IamWire, find_email: Callable[[], str | None]) -> None:
        self._wire = wire
        self._find_email = find_email

    def email(self) -> str:
        email = self._find_email()
        if email is None:
            raise StoreRefused(
                "these Google credentials are no service account's, and only those can sign; add "
                "?service_account=NAME@PROJECT.iam.gserviceaccount.com to HOLDFAST_STORE"
            )
        return email

    def sign(self, message: bytes) -> bytes:
        path = f"/v1/projects/-/serviceAccounts/{quote(self.email())}:signBlob"
        body = json.dumps({"payload": base64.b64encode(message).decode()}).encode()
        answer = self._wire.request("POST", path, headers={"content-type": "application/json"}, body=body)
        try:
            return base64.b64decode(json.loads(answer.data)["signedBlob"], validate=True)
        except (ValueError, KeyError, TypeError) as error:
            raise StoreUnavailable("Google's IAM answered with something that is no signature; try again") from error
