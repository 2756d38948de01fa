"""Who the service is to Azure, and who signs tickets: the account's key, or a key that Entra ID lends.

A service SAS is signed with the account's key. An identity without it (a managed identity, a workload identity) asks
Azure for a user delegation key, which signs in the same way and ends after a week at the latest. azure-identity is
imported only for that: a service with the account's key does not need it. Source:
https://learn.microsoft.com/rest/api/storageservices/create-user-delegation-sas
"""

from __future__ import annotations

import base64
import binascii
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Protocol

from holdfast_service.stores.base import Credentials, StoreError, StoreRefused

if TYPE_CHECKING:
    from azure.core.credentials import AzureNamedKeyCredential, TokenCredential
    from azure.storage.blob import UserDelegationKey

LONGEST_URL_SECONDS = 7 * 24 * 3600
_KEY_LIVES = timedelta(days=7)
_KEY_IS_RENEWED_BEFORE = timedelta(days=1)
_TRY_AGAIN_AFTER = timedelta(minutes=1)
# A key that begins in the future by Azure's clock signs nothing yet.
_SKEW = timedelta(minutes=15)


@dataclass(frozen=True, slots=True)
class Grant:
    """What a ticket allows. `permission` is one of Azure's letters: `c` creates and overwrites nothing, `r` reads."""

    container: str
    blob: str
    permission: str
    expires_at: datetime
    https_only: bool
    version_id: str | None = None


class Account(Protocol):
    """`longest_seconds`: how long a ticket can be relied on."""

    @property
    def credential(self) -> AzureNamedKeyCredential | TokenCredential:
        """As azure-storage-blob takes it."""

    def sign(self, grant: Grant, now: datetime) -> tuple[str, datetime]:
        """The query of a URL, and when it ends at the latest. Raises StoreError."""


@dataclass(frozen=True, slots=True)
class KeyAccount:
    """With the account's own key, which this process holds."""

    name: str
    key: str = field(repr=False)

    @property
    def credential(self) -> AzureNamedKeyCredential:
        from azure.core.credentials import AzureNamedKeyCredential

        return AzureNamedKeyCredential(self.name, self.key)

    def sign(self, grant: Grant, now: datetime) -> tuple[str, datetime]:
        return _signed(self.name, grant, account_key=self.key), grant.expires_at


class DelegatedAccount:
    """With keys that Azure lends to an identity. `borrow` asks for one from then until then. Safe to use from several
    threads."""

    def __init__(
        self, name: str, credential: TokenCredential, borrow: Callable[[datetime, datetime], UserDelegationKey]
    ) -> None:
        self.name = name
        self.credential = credential
        self._borrow = borrow
        self._lock = threading.Lock()
        self._key: tuple[UserDelegationKey, datetime] | None = None
        self._try_again_at = datetime.min.replace(tzinfo=UTC)

    def sign(self, grant: Grant, now: datetime) -> tuple[str, datetime]:
        with self._lock:
            # One request a week, under the lock: the tickets of a batch wait for one key and not for as many.
            if self._key is None or (self._key[1] - now < _KEY_IS_RENEWED_BEFORE and now >= self._try_again_at):
                self._renew(now, until=grant.expires_at)
            assert self._key is not None
            key, ends_at = self._key
        return _signed(self.name, grant, delegation_key=key), min(grant.expires_at, ends_at)

    def _renew(self, now: datetime, *, until: datetime) -> None:
        """Raises StoreError. While Azure does not answer, the key that is there signs for as long as it covers."""
        ends_at = now + _KEY_LIVES - _SKEW
        try:
            self._key = self._borrow(now - _SKEW, ends_at), ends_at
        except StoreError:
            if self._key is None or self._key[1] < until:
                raise
            self._try_again_at = now + _TRY_AGAIN_AFTER


def account_key(credentials: Credentials | None, account: str) -> str | None:
    """The key of the settings, else of the environment; None if there is none. StoreRefused for one that is none, or of
    another account."""
    if credentials is not None and credentials.access_key != account:
        raise StoreRefused(
            f"the access key's id in the settings is not {account}, the account that the store's URL names; write the "
            "account's name there, and its key as the secret"
        )
    key = credentials.secret_key if credentials is not None else os.environ.get("AZURE_STORAGE_KEY")
    if key is None:
        return None
    try:
        base64.b64decode(key, validate=True)
    except (binascii.Error, ValueError):
        raise StoreRefused("AZURE_STORAGE_KEY is no key of a storage account; copy it whole, with its =") from None
    return key


def default_credential() -> TokenCredential:
    """Whatever azure-identity finds: a managed identity, a workload identity, a service principal of the environment.
    StoreRefused if it is not installed."""
    try:
        from azure.identity import DefaultAzureCredential
    except ImportError as error:
        raise StoreRefused(
            "there is no key for the azure store; set AZURE_STORAGE_KEY, or `pip install azure-identity` for a managed "
            "identity with the roles Storage Blob Data Contributor and Storage Blob Delegator"
        ) from error
    credential: TokenCredential = DefaultAzureCredential()
    return credential


def _signed(
    name: str, grant: Grant, *, account_key: str | None = None, delegation_key: UserDelegationKey | None = None
) -> str:
    from azure.storage.blob import generate_blob_sas

    return generate_blob_sas(
        name,
        grant.container,
        grant.blob,
        account_key=account_key,
        user_delegation_key=delegation_key,
        permission=grant.permission,
        expiry=grant.expires_at,
        protocol="https" if grant.https_only else None,
        version_id=grant.version_id,
    )
