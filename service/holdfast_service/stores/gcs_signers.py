"""Who signs tickets: the private key of a key file, or IAM for an identity that has none.

Without a key each signature is a request to IAM's signBlob. Its keys are Google's and rotate, so a signature can be
relied on for twelve hours only. Source: https://cloud.google.com/storage/docs/authentication/creating-signatures
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import quote

import urllib3

from holdfast_service.stores.base import StoreRefused, StoreUnavailable
from holdfast_service.stores.gcs_credentials import GoogleIdentity
from holdfast_service.stores.gcs_location import GcsLocation
from holdfast_service.stores.gcs_signing import LONGEST_URL_SECONDS, RsaSigner
from holdfast_service.stores.gcs_wire import IamWire

if TYPE_CHECKING:
    from google.auth.crypt import Signer

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
