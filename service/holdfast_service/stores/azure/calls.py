"""The service's own calls to Azure, through azure-storage-blob. Here, and only here, its errors become StoreErrors.

Azure's library sends and signs; the retries are those of every store (stores/retry.py), so that a store that is away is
given up after the same time whatever it is. Messages name the host and Azure's own code, never a URL: one with a
signature is a secret.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime, parsedate_to_datetime
from typing import Any, TypeVar

import requests
import urllib3
from azure.core.exceptions import (
    AzureError,
    ClientAuthenticationError,
    HttpResponseError,
    IncompleteReadError,
    ServiceRequestError,
    ServiceResponseError,
)
from azure.core.pipeline.transport import RequestsTransport
from azure.storage.blob import BlobServiceClient, ContainerClient
from requests.adapters import HTTPAdapter

from holdfast_service.stores.azure.azure_location import AzureLocation
from holdfast_service.stores.base import (
    ObjectArchived,
    ObjectMismatch,
    ObjectMissing,
    StoreError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
)
from holdfast_service.stores.bucket.network import (
    CONNECT_SECONDS,
    CONNECTIONS,
    READ_SECONDS,
    authorities,
    connections,
    unreachable,
)
from holdfast_service.stores.retry import TRIES, with_retries

LARGEST_PUT_BYTES = 5000 * 1024 * 1024
"""Of one Put Blob: https://learn.microsoft.com/rest/api/storageservices/put-blob"""
_RANGE_BYTES = 4 * 1024 * 1024
_SKEW = timedelta(minutes=14)

# https://learn.microsoft.com/rest/api/storageservices/blob-service-error-codes
TAKEN = {"BlobAlreadyExists", "UnauthorizedBlobOverwrite"}
ARCHIVED = {"BlobArchived", "BlobBeingRehydrated"}
MISMATCH = {"Md5Mismatch", "InvalidMd5", "Crc64Mismatch"}
_HELD = {"BlobImmutableDueToLegalHold", "BlobImmutableDueToPolicy"}
_MISSING = {"BlobNotFound", "ResourceNotFound"}
_LACKING = {"NotImplemented", "FeatureNotSupportedForAccount", "APINotImplemented"}

_Result = TypeVar("_Result")


class AlreadyThere(StoreError):  # noqa: N818
    """An object of this name is there, and was not overwritten. It never leaves this folder."""


class AzureCalls:
    """To one container. Safe to use from several threads. `guard` is called before each change."""

    def __init__(self, location: AzureLocation, credential: Any) -> None:
        self.location = location
        self.guard: Callable[[], None] = lambda: None
        self.pool = connections(location.origin)
        """For requests that carry their signature in the URL."""
        self._name = f"the store at {location.origin}, container {location.bucket},"
        options: dict[str, Any] = {
            "credential": credential,
            "retry_total": 0,
            "max_single_put_size": LARGEST_PUT_BYTES,
            "max_single_get_size": _RANGE_BYTES,
            "max_chunk_get_size": _RANGE_BYTES,
        }
        self.container = ContainerClient(location.account_url, location.bucket, transport=_transport(), **options)
        self.account = BlobServiceClient(location.account_url, transport=_transport(), **options)

    def read(self, call: Callable[[], _Result], *, tries: int = TRIES) -> _Result:
        """What `call` returns. Raises StoreError."""

        def once() -> _Result:
            try:
                return call()
            except AzureError as error:
                raise self.store_error(error) from error
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                # What azure-storage-blob raises when it reads an answer of something else, such as a proxy's page.
                raise StoreUnavailable(
                    f"{self._name} answered with something that is none of Azure's answers ({type(error).__name__}); "
                    "check the endpoint and what stands before it"
                ) from error

        return with_retries(once, tries=tries)

    def change(self, call: Callable[[], _Result]) -> _Result:
        """As `read`, for what writes or deletes. Raises what the guard raises."""
        self.guard()
        return self.read(call)

    def clock(self) -> datetime:
        """The time by the store's clock. Whom it refuses for a clock that is too far off, it tells the time all the
        same."""

        def ask() -> datetime | None:
            seen: list[Any] = []
            try:
                self.container.get_container_properties(raw_response_hook=seen.append)
            except HttpResponseError as error:
                if error.response is None or error.response.status_code != 403:
                    raise
                return date_of(_headers(error))
            return date_of(seen[0].http_response.headers)

        told = self.read(ask)
        if told is None:
            raise StoreUnavailable("the store does not say what time it is; try again")
        return told

    def unreachable(self, error: Exception) -> StoreError:
        """What stands between the service and the store."""
        return unreachable(self._name, error)

    def store_error(self, error: AzureError) -> StoreError:
        """The same failure as the contract has it."""
        status, code, headers = _told(error)
        if status is None:
            if isinstance(error, ClientAuthenticationError):
                return StoreRefused(
                    f"Entra ID gives no token for {self._name} ({type(error).__name__}); check the identity, or set "
                    "AZURE_STORAGE_KEY"
                )
            if isinstance(error, ServiceRequestError | ServiceResponseError | IncompleteReadError):
                return self.unreachable(error)
            return StoreUnavailable(f"{self._name} could not be asked ({type(error).__name__}); try again")
        what = f"{code or 'no reason given'}, status {status}"
        if code in TAKEN:
            return AlreadyThere(f"{self._name} has an object of this name ({what})")
        if code in ARCHIVED:
            return ObjectArchived("the object is archived in the store; thaw it before it is read")
        if code in MISMATCH:
            return ObjectMismatch(f"{self._name} refused the bytes ({what})")
        if code == "ContainerNotFound":
            return StoreRefused(
                f"{self._name} is not there; make the container, or correct its name in the store's URL"
            )
        if status == 404 and code in _MISSING:
            return ObjectMissing("there is no such object in the store")
        if code in _HELD:
            return StoreRefused(f"{self._name} holds the object, and lets nobody delete or change it ({what})")
        if status == 507:
            return StoreFull(f"{self._name} is full ({what}); free some room or raise its quota")
        if status == 501 or code in _LACKING:
            return StoreRefused(f"{self._name} lacks an operation that the service needs ({what})")
        if status in {408, 409, 429} or status >= 500:
            return StoreUnavailable(f"{self._name} asks to come back later ({what})")
        if status == 403 and (theirs := date_of(headers)) is not None and abs(theirs - datetime.now(UTC)) > _SKEW:
            return StoreRefused(
                f"{self._name} refuses what the service signs: by its clock it is {headers.get('date')}, and by the "
                f"service's {format_datetime(datetime.now(UTC), usegmt=True)}; set both by NTP"
            )
        return StoreRefused(
            f"{self._name} refuses the service ({what}); check AZURE_STORAGE_KEY, or the roles of the identity "
            "(Storage Blob Data Contributor and Storage Blob Delegator), and the account's firewall"
        )

    def close(self) -> None:
        self.container.close()
        self.account.close()
        self.pool.clear()


def date_of(headers: Any) -> datetime | None:
    """When the store says that it answered; None if it does not."""
    try:
        return parsedate_to_datetime(headers["date"]).astimezone(UTC)
    except (KeyError, TypeError, ValueError):
        return None


def _headers(error: HttpResponseError) -> Any:
    return getattr(error.response, "headers", {})


def _told(error: AzureError) -> tuple[int | None, str, Any]:
    """Status (None: there was no answer), Azure's own code, and the headers."""
    if not isinstance(error, HttpResponseError) or error.response is None:
        return None, "", {}
    headers = _headers(error)
    code = getattr(error, "error_code", None) or headers.get("x-ms-error-code") or ""
    return error.response.status_code, str(getattr(code, "value", code)), headers


def _transport() -> RequestsTransport:
    """Its own pool holds ten connections; a seal asks after sixteen objects at once, and so do the tickets."""
    session = requests.Session()
    adapter = HTTPAdapter(
        pool_maxsize=CONNECTIONS, max_retries=urllib3.Retry(total=False, redirect=False, raise_on_status=False)
    )
    for scheme in ("http://", "https://"):
        session.mount(scheme, adapter)
    return RequestsTransport(
        session=session,
        connection_timeout=CONNECT_SECONDS,
        read_timeout=READ_SECONDS,
        # The same authorities as for every other store: requests alone would look at one variable of the three.
        connection_verify=authorities() or True,
    )
