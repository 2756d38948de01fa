"""Who the service is to Google, and who signs for it."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Protocol
from urllib.parse import quote

import urllib3

from holdfast_service.stores.base import StoreRefused, StoreUnavailable
from holdfast_service.stores.bucket.canonical_request import canonical_headers, joined, quoted_pairs
from holdfast_service.stores.bucket.wire import BucketWire
from holdfast_service.stores.gcs.gcs_url import GcsLocation

if TYPE_CHECKING:
    from google.auth.credentials import Credentials
    from google.auth.crypt import Signer


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


# Who the service is to Google: a key file, the machine's own identity, or whatever else google-auth finds.
#
# Found as every Google tool finds them (GOOGLE_APPLICATION_CREDENTIALS, gcloud's files, the metadata server). Here, and
# only here, google-auth's errors become StoreErrors. It is imported late: a service with another store needs it not.

# For the bucket and, without a key, for IAM's signBlob; what may be done is decided by the account's roles.
_SCOPE = "https://www.googleapis.com/auth/cloud-platform"


class GoogleIdentity:
    """Access tokens, and the key if there is one. Safe to use from several threads."""

    def __init__(self, credentials: Credentials, pool: urllib3.PoolManager) -> None:
        from google.auth.transport.urllib3 import Request

        self._credentials = credentials
        self._request = Request(pool)
        self._refreshing = threading.Lock()

    @property
    def key(self) -> tuple[str, Signer] | None:
        """The account and its private key, if this identity came with one."""
        from google.oauth2 import service_account

        if isinstance(self._credentials, service_account.Credentials):
            return str(self._credentials.service_account_email), self._credentials.signer
        return None

    def token(self) -> str:
        """Good for some minutes at least. StoreRefused if Google refuses the identity; StoreUnavailable."""
        with self._refreshing:
            if not self._credentials.valid:
                self._refresh()
            return str(self._credentials.token)

    def email(self) -> str | None:
        """The service account's address; None if it is not one, such as a person's own login."""
        found = getattr(self._credentials, "service_account_email", None)
        if found == "default":  # the machine's own account: its name comes with the first token
            self.token()
            found = getattr(self._credentials, "service_account_email", None)
        return None if found is None else str(found)

    def _refresh(self) -> None:
        from google.auth.exceptions import GoogleAuthError, TransportError

        try:
            self._credentials.refresh(self._request)
        except GoogleAuthError as error:
            away = isinstance(error, TransportError) or isinstance(error.__cause__, TransportError) or error.retryable
            reason = type(error).__name__
            if away:
                raise StoreUnavailable(
                    f"Google gives no access token ({reason}); check that it can be reached"
                ) from error
            raise StoreRefused(
                f"Google refuses these credentials ({reason}); check the key file, or the machine's service account"
            ) from error


def default_identity(pool: urllib3.PoolManager) -> GoogleIdentity:
    """StoreRefused if there are no credentials, or none that can be read."""
    try:
        import google.auth
        from google.auth.exceptions import GoogleAuthError
    except ImportError as error:
        raise StoreRefused("the gcs store needs google-auth; install holdfast[gcs]") from error
    try:
        credentials, _ = google.auth.default(scopes=[_SCOPE])
    except (GoogleAuthError, ValueError, OSError) as error:
        raise StoreRefused(
            "there are no Google credentials that can be used; set GOOGLE_APPLICATION_CREDENTIALS to a service "
            f"account's key file, or give the machine a service account ({type(error).__name__})"
        ) from error
    return GoogleIdentity(credentials, pool)


# The service's own requests to Google: with an access token. The rest of a request is stores/bucket/wire.py's.


class _TokenWire(BucketWire):
    _identity: GoogleIdentity

    def _signed(
        self, method: str, path: str, *, query: Sequence[tuple[str, str]], headers: Mapping[str, str], body: bytes
    ) -> dict[str, str]:
        return {**headers, "authorization": f"Bearer {self._identity.token()}"}


class GcsWire(_TokenWire):
    """To the bucket."""

    def __init__(self, location: GcsLocation, identity: GoogleIdentity, pool: urllib3.PoolManager) -> None:
        super().__init__(
            location.origin,
            name=f"the store at {location.origin}, bucket {location.bucket},",
            remedy="check credentials, permissions (roles/storage.objectUser on the bucket) and the bucket's name",
            pool=pool,
        )
        self._identity = identity


class IamWire(_TokenWire):
    """To the service that signs."""

    def __init__(self, location: GcsLocation, identity: GoogleIdentity, pool: urllib3.PoolManager) -> None:
        super().__init__(
            location.iam_origin,
            name=f"Google's IAM at {location.iam_origin}",
            remedy="give it roles/iam.serviceAccountTokenCreator on the account that signs, and enable the IAM "
            "Service Account Credentials API; or use a key file",
            pool=pool,
        )
        self._identity = identity


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
