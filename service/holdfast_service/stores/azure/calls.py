"""The service's own calls to Azure, through azure-storage-blob. Only here its errors become StoreErrors."""

from __future__ import annotations

from datetime import datetime
from typing import Any

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
from holdfast_service.stores.base import StoreRefused, StoreUnavailable
from holdfast_service.stores.bucket.bucket_calls import Answer, BucketCalls, Codes, time_of
from holdfast_service.stores.bucket.network import CONNECT_SECONDS, CONNECTIONS, READ_SECONDS, authorities

LARGEST_PUT_BYTES = 5000 * 1024 * 1024
"""The limit of one Put Blob: https://learn.microsoft.com/rest/api/storageservices/put-blob"""
_RANGE_BYTES = 4 * 1024 * 1024

# https://learn.microsoft.com/rest/api/storageservices/blob-service-error-codes
TAKEN = frozenset({"BlobAlreadyExists", "UnauthorizedBlobOverwrite"})
ARCHIVED = frozenset({"BlobArchived", "BlobBeingRehydrated"})
MISMATCH = frozenset({"Md5Mismatch", "InvalidMd5", "Crc64Mismatch"})


class AzureCalls(BucketCalls):
    """To one container."""

    errors = (AzureError,)
    codes = Codes(
        done=TAKEN,
        missing=frozenset({"BlobNotFound", "ResourceNotFound"}),
        no_bucket=frozenset({"ContainerNotFound"}),
        mismatch=MISMATCH,
        archived=ARCHIVED,
        held=frozenset({"BlobImmutableDueToLegalHold", "BlobImmutableDueToPolicy"}),
        lacking=frozenset({"NotImplemented", "FeatureNotSupportedForAccount", "APINotImplemented"}),
    )
    place = "container"

    def __init__(self, location: AzureLocation, credential: Any) -> None:
        super().__init__(
            location.origin,
            f"the store at {location.origin}, container {location.bucket},",
            "check AZURE_STORAGE_KEY, or the roles of the identity (Storage Blob Data Contributor and Storage Blob "
            "Delegator), and the account's firewall",
        )
        options: dict[str, Any] = {
            "credential": credential,
            "retry_total": 0,
            "max_single_put_size": LARGEST_PUT_BYTES,
            "max_single_get_size": _RANGE_BYTES,
            "max_chunk_get_size": _RANGE_BYTES,
        }
        self.container = ContainerClient(location.account_url, location.bucket, transport=_transport(), **options)
        self.account = BlobServiceClient(location.account_url, transport=_transport(), **options)

    def clock(self) -> datetime:
        """The time by the store's clock. Whom it refuses for a clock that is too far off, it tells the time all the
        same."""

        def ask() -> str | None:
            seen: list[Any] = []
            try:
                self.container.get_container_properties(raw_response_hook=seen.append)
            except HttpResponseError as error:
                if error.response is None or error.response.status_code != 403:
                    raise
                return _date(_headers(error))
            return _date(seen[0].http_response.headers)

        return time_of(self.read(ask))

    def answer_of(self, error: Exception) -> Answer | None:
        if isinstance(error, HttpResponseError) and error.response is not None:
            headers = _headers(error)
            code = getattr(error, "error_code", None) or headers.get("x-ms-error-code") or ""
            return Answer(error.response.status_code or 0, str(getattr(code, "value", code)), _date(headers))
        if isinstance(error, ClientAuthenticationError):
            raise StoreRefused(
                f"Entra ID gives no token for {self.name} ({type(error).__name__}); check the identity, or set "
                "AZURE_STORAGE_KEY"
            )
        if not isinstance(error, ServiceRequestError | ServiceResponseError | IncompleteReadError):
            raise StoreUnavailable(f"{self.name} could not be asked ({type(error).__name__}); try again")
        return None

    def close(self) -> None:
        super().close()
        self.container.close()
        self.account.close()


def _date(headers: Any) -> str | None:
    date = headers.get("date")
    return None if date is None else str(date)


def _headers(error: HttpResponseError) -> Any:
    return getattr(error.response, "headers", {})


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
