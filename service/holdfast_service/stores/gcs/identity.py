"""Who the service is to Google, and the connections that its requests go over.

Found as every Google tool finds it (GOOGLE_APPLICATION_CREDENTIALS, gcloud's files, the metadata server): a key file,
the machine's own identity, or whatever else google-auth knows. Here, and only here, google-auth's errors become
StoreErrors.
"""

from __future__ import annotations

import io
import threading
from typing import Any

import google.auth
import requests
from google.auth.credentials import Credentials
from google.auth.exceptions import GoogleAuthError, TransportError
from google.auth.transport.requests import Request
from google.oauth2 import service_account
from requests.adapters import HTTPAdapter

from holdfast_service.stores.base import StoreRefused, StoreUnavailable
from holdfast_service.stores.bucket.network import CONNECT_SECONDS, CONNECTIONS, READ_SECONDS, authorities, proxy_for

# For the bucket and, without a key, for IAM's signBlob; what may be done is decided by the account's roles.
_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_SENT_WHOLE_BYTES = 256 * 1024


class _Adapter(HTTPAdapter):
    """With this project's time-outs, whatever the library asks for."""

    def send(self, request: requests.PreparedRequest, *arguments: Any, **options: Any) -> requests.Response:
        body = request.body
        if isinstance(body, bytes) and len(body) > _SENT_WHOLE_BYTES:
            # urllib3 applies the connect time-out to each send: in one piece a large body would have to fit into it.
            request.body = io.BytesIO(body)
        options["timeout"] = (CONNECT_SECONDS, READ_SECONDS)
        return super().send(request, *arguments, **options)


class GoogleSession(requests.Session):
    """Obeys the variables of stores/bucket/network.py. With an `identity`, each request carries its token."""

    def __init__(self, identity: GoogleIdentity | None = None) -> None:
        super().__init__()
        self.trust_env = False  # else a .netrc would replace the token
        self.max_redirects = 0
        self.verify = authorities() or True
        self.auth = None if identity is None else identity.authorize
        for scheme in ("http://", "https://"):
            self.mount(scheme, _Adapter(pool_maxsize=CONNECTIONS))

    def merge_environment_settings(
        self, url: Any, proxies: Any, stream: Any, verify: Any, cert: Any
    ) -> dict[str, Any]:  # what requests calls for each request
        del proxies, verify
        proxy = proxy_for(url)
        return {
            "proxies": {"all": proxy} if proxy else {},
            "stream": bool(stream),
            "verify": self.verify,
            "cert": cert,
        }


class GoogleIdentity:
    """Access tokens, and the key if there is one. Safe to use from several threads."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._request = Request(GoogleSession())
        self._refreshing = threading.Lock()

    @property
    def key(self) -> service_account.Credentials | None:
        """What signs as the account, if this identity came with its private key."""
        return self._credentials if isinstance(self._credentials, service_account.Credentials) else None

    def authorize(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        """The request with a token. Raises as `token`."""
        request.headers["authorization"] = f"Bearer {self.token()}"
        return request

    def token(self) -> str:
        """Good for some minutes at least. StoreRefused if Google refuses the identity; StoreUnavailable."""
        with self._refreshing:
            if not self._credentials.valid:
                self._refresh()
            return str(self._credentials.token)

    def email(self) -> str:
        """The service account's address. StoreRefused if it is none, such as a person's own login; as `token`."""
        found = getattr(self._credentials, "service_account_email", None)
        if found == "default":  # the machine's own account: its name comes with the first token
            self.token()
            found = getattr(self._credentials, "service_account_email", None)
        if found is None:
            raise StoreRefused(
                "these Google credentials are no service account's, and only those can sign; add "
                "?service_account=NAME@PROJECT.iam.gserviceaccount.com to HOLDFAST_STORE"
            )
        return str(found)

    def _refresh(self) -> None:
        try:
            self._credentials.refresh(self._request)
        except GoogleAuthError as error:
            unavailable = (
                isinstance(error, TransportError) or isinstance(error.__cause__, TransportError) or error.retryable
            )
            reason = type(error).__name__
            if unavailable:
                raise StoreUnavailable(
                    f"Google gives no access token ({reason}); check that it can be reached"
                ) from error
            raise StoreRefused(
                f"Google refuses these credentials ({reason}); check the key file, or the machine's service account"
            ) from error


def default_identity() -> GoogleIdentity:
    """StoreRefused if there are no credentials, or none that can be read."""
    try:
        credentials, _ = google.auth.default(scopes=[_SCOPE])
    except (GoogleAuthError, ValueError, OSError) as error:
        raise StoreRefused(
            "there are no Google credentials that can be used; set GOOGLE_APPLICATION_CREDENTIALS to a service "
            f"account's key file, or give the machine a service account ({type(error).__name__})"
        ) from error
    return GoogleIdentity(credentials)
