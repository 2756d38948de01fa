"""Who signs tickets: the private key of a key file, or IAM for an identity that has none.

google-cloud-storage makes the V4 URLs, and has credentials sign them. What remains here is IAM's signBlob: the
library's own knows one address of IAM only, and neither this project's time-outs nor what to tell an operator. IAM's
keys rotate, so a signature can be relied on for twelve hours only. Source:
https://cloud.google.com/storage/docs/authentication/creating-signatures
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from urllib.parse import quote

from google.auth.credentials import Signing

from holdfast_service.stores.gcs.calls import GoogleCalls
from holdfast_service.stores.gcs.gcs_location import GcsLocation
from holdfast_service.stores.gcs.identity import GoogleIdentity

_LONGEST_URL_SECONDS = 7 * 24 * 3600
_IAM_KEY_SECONDS = 12 * 3600
_IAM_AT_ONCE = 16
_REMEDY = (
    "give it roles/iam.serviceAccountTokenCreator on the account that signs, and enable the IAM Service Account "
    "Credentials API; or use a key file"
)


@dataclass(frozen=True, slots=True)
class TicketSigner:
    """`longest_seconds` is how long a signature can be relied on, `at_once` how many are worth making at the same
    time."""

    credentials: Signing
    longest_seconds: int
    at_once: int


class IamSigning(Signing):
    """With a key that Google keeps: each signature is a request. As the account of the URL, else as the identity."""

    def __init__(self, location: GcsLocation, identity: GoogleIdentity) -> None:
        self._origin = location.iam_origin
        self._account = location.service_account
        self._identity = identity
        self._calls = GoogleCalls(location.iam_origin, f"Google's IAM at {location.iam_origin}", _REMEDY, identity)

    @property
    def signer_email(self) -> str:
        """Raises StoreError, because Google may have to be asked for it."""
        return self._account or self._identity.email()

    @property
    def signer(self) -> IamSigning:
        return self

    def sign_bytes(self, message: bytes) -> bytes:
        """RSASSA-PKCS1-v1_5 with SHA-256. Raises StoreError."""
        url = f"{self._origin}/v1/projects/-/serviceAccounts/{quote(self.signer_email)}:signBlob"
        asked = {"payload": base64.b64encode(message).decode()}

        def once() -> bytes:
            answer = self._calls.request("POST", url, json=asked)
            return base64.b64decode(answer.json()["signedBlob"], validate=True)

        return self._calls.read(once)


def signer_for(location: GcsLocation, identity: GoogleIdentity) -> TicketSigner:
    """The key if there is one for the account that is to sign, else IAM."""
    key = identity.key
    if key is not None and location.service_account in (None, key.signer_email):
        return TicketSigner(key, _LONGEST_URL_SECONDS, 1)
    return TicketSigner(IamSigning(location, identity), _IAM_KEY_SECONDS, _IAM_AT_ONCE)
