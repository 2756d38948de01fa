"""Who the service is to Google, and its own requests with that identity."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import urllib3

from holdfast_service.stores.base import StoreRefused, StoreUnavailable
from holdfast_service.stores.bucket.wire import BucketWire
from holdfast_service.stores.gcs.gcs_location import GcsLocation

if TYPE_CHECKING:
    from google.auth.credentials import Credentials
    from google.auth.crypt import Signer


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
