"""Service accounts: their keys, what they may do, and access tokens that say who somebody is.

Tokens carry their content and a MAC, so that one is as good after a restart as before.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from tests.support.gcs_fake.replies import Refusal

TOKEN_SECONDS = 3600
STORAGE_SCOPES = {
    "https://www.googleapis.com/auth/cloud-platform",
    "https://www.googleapis.com/auth/devstorage.full_control",
    "https://www.googleapis.com/auth/devstorage.read_write",
}
IAM_SCOPES = {"https://www.googleapis.com/auth/cloud-platform", "https://www.googleapis.com/auth/iam"}


@dataclass(frozen=True)
class Account:
    """`private_keys` are PEM: that of its key file, and the one that Google keeps for it. `signed_for_by` are those
    who may have Google sign as this account."""

    email: str
    private_keys: list[str] = field(repr=False)
    uses_storage: bool
    signed_for_by: list[str]

    def sign(self, message: bytes) -> bytes:
        """With the key that Google keeps."""
        return _private(self.private_keys[-1]).sign(message, padding.PKCS1v15(), hashes.SHA256())

    def has_signed(self, message: bytes, signature: bytes) -> bool:
        for key in self.private_keys:
            try:
                _private(key).public_key().verify(signature, message, padding.PKCS1v15(), hashes.SHA256())
            except InvalidSignature:
                continue
            return True
        return False


class Accounts:
    def __init__(self, accounts: list[Account], secret: bytes) -> None:
        self._by_email = {account.email: account for account in accounts}
        self._secret = secret

    def find(self, email: str) -> Account | None:
        return self._by_email.get(email)

    def new_token(self, email: str, scopes: str) -> str:
        payload = _encode(json.dumps([email, scopes, time.time() + TOKEN_SECONDS]).encode())
        return f"ya29.{payload}.{self._mac(payload)}"

    def who(self, authorization: str, scopes: set[str]) -> Account:
        """The account that a `Bearer` header stands for; 401 or 403 if it may not even ask."""
        kind, _, token = authorization.partition(" ")
        _, _, rest = token.partition("ya29.")
        payload, _, mac = rest.partition(".")
        if kind != "Bearer" or not hmac.compare_digest(self._mac(payload), mac):
            raise Refusal(401, "AuthenticationRequired", "Invalid Credentials", reason="authError")
        email, granted, ends_at = json.loads(_decode(payload))
        if time.time() >= ends_at:
            raise Refusal(401, "AuthenticationRequired", "The access token has expired.", reason="authError")
        if not scopes & set(granted.split()):
            raise Refusal(403, "AccessDenied", "Insufficient authentication scopes.", reason="insufficientPermissions")
        return self._by_email[email]

    def _mac(self, payload: str) -> str:
        return _encode(hmac.digest(self._secret, payload.encode(), hashlib.sha256))


def may_use_storage(account: Account) -> Account:
    if not account.uses_storage:
        details = f"{account.email} does not have storage.objects access to the bucket."
        raise Refusal(403, "AccessDenied", details, reason="forbidden")
    return account


def _private(pem: str) -> rsa.RSAPrivateKey:
    key = serialization.load_pem_private_key(pem.encode(), None)
    assert isinstance(key, rsa.RSAPrivateKey)
    return key


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
