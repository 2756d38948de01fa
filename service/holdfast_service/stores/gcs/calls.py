"""The service's own calls to Google, through google-cloud-storage. Here, and only here, its errors become StoreErrors.

The library sends; the retries are those of every store (stores/retry.py), so that a store that is away is given up
after the same time whatever it is. Messages name the host and Google's own reason, never a URL: a signed one is a
secret.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar, cast

import requests
import urllib3
from google.api_core.exceptions import GoogleAPICallError, NotFound, from_http_response
from google.auth.credentials import AnonymousCredentials
from google.cloud.storage import Blob, Client
from google.cloud.storage.exceptions import DataCorruption, InvalidResponse

from holdfast_service.stores.base import (
    ObjectMismatch,
    ObjectMissing,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)
from holdfast_service.stores.bucket.network import connections, unreachable
from holdfast_service.stores.bucket.presigned_probe import base64_md5
from holdfast_service.stores.gcs.gcs_location import GcsLocation
from holdfast_service.stores.gcs.identity import GoogleIdentity, GoogleSession
from holdfast_service.stores.retry import TRIES, with_retries

_RANGE_BYTES = 16 * 1024 * 1024
_PIECE_BYTES = 1024 * 1024
# Else the library asks for the bucket in a thread of its own, to name it in traces that nobody collects.
_NO_LOOK_AT_THE_BUCKET = "DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA"

_Result = TypeVar("_Result")


class AlreadyThere(StoreError):  # noqa: N818
    """An object of this name is there, and was not overwritten. It never leaves this folder."""


class GcsCalls:
    """To one bucket. Safe to use from several threads. `guard` is called before each change."""

    def __init__(self, location: GcsLocation, identity: GoogleIdentity) -> None:
        self.guard: Callable[[], None] = lambda: None
        self.pool = connections(location.origin)
        """For requests that carry their signature in the URL."""
        self._location = location
        self._name = f"the store at {location.origin}, bucket {location.bucket},"
        self._session = GoogleSession(identity)
        os.environ.setdefault(_NO_LOOK_AT_THE_BUCKET, "true")
        self._client = Client(
            project=None,
            credentials=AnonymousCredentials(),  # the session says who asks
            _http=self._session,
            client_options={"api_endpoint": location.origin},
        )
        self._bucket = self._client.bucket(location.bucket)

    def blob(self, key: str, generation: str | None = None) -> Blob:
        """The library's object of this name, or one generation of it. Asks nothing."""
        return self._bucket.blob(key, generation=None if generation is None else int(generation))

    def read(self, call: Callable[[], _Result], *, tries: int = TRIES) -> _Result:
        """What `call` returns. Raises StoreError; ObjectMissing only if the bucket is there."""

        def once() -> _Result:
            with google_errors(self._name, _REMEDY):
                try:
                    return call()
                except NotFound:
                    # Google gives one reason for both, and the difference is everything.
                    self._check_bucket()
                    raise ObjectMissing("there is no such object in the store") from None

        return with_retries(once, tries=tries)

    def change(self, call: Callable[[], _Result]) -> _Result:
        """As `read`, for what writes or deletes. Raises what the guard raises."""
        self.guard()
        return self.read(call)

    def described(self, key: str, generation: str | None = None) -> Blob:
        """The library's object with what Google says of it. Raises StoreError."""
        blob = self.blob(key, generation)
        self.read(lambda: blob.reload(retry=None))
        return blob

    def put(self, key: str, data: bytes, *, only_new: bool = False, storage_class: str | None = None) -> str:
        """The generation that was made. Raises what the guard raises, and AlreadyThere."""

        def once() -> str:
            blob = self.blob(key)
            blob.md5_hash = base64_md5(data)  # which Google compares with what arrives
            if storage_class is not None:
                blob.storage_class = storage_class
            blob.upload_from_string(
                data,
                content_type="application/octet-stream",
                if_generation_match=0 if only_new else None,
                checksum=None,
                retry=None,
            )
            return str(blob.generation)

        return self.change(once)

    def delete(self, key: str, generation: str | None) -> None:
        """That generation; without one, what is newest, whose bytes a bucket with versions keeps."""
        blob = self.blob(key, generation)
        self.change(lambda: blob.delete(retry=None))

    def read_whole(self, key: str) -> bytes:
        """A small object."""
        blob = self.blob(key)
        return self.read(lambda: cast(bytes, blob.download_as_bytes(raw_download=True, retry=None)))

    def read_pieces(self, key: str, generation: str | None) -> Iterator[bytes]:
        """An object's bytes in pieces of at most 1 MiB. The first request is made now; a short read raises."""
        found = self.described(key, generation)
        return self._pieces(self.blob(key, str(found.generation)), int(found.size))

    def _pieces(self, blob: Blob, size: int) -> Iterator[bytes]:
        for start in range(0, size, _RANGE_BYTES):
            data = self._range(blob, start, min(start + _RANGE_BYTES, size))
            for piece in range(0, len(data), _PIECE_BYTES):
                yield data[piece : piece + _PIECE_BYTES]

    def _range(self, blob: Blob, start: int, end: int) -> bytes:
        asked = {"start": start, "end": end - 1, "raw_download": True, "checksum": None, "retry": None}
        data = self.read(lambda: cast(bytes, blob.download_as_bytes(**asked)))
        if len(data) != end - start:
            raise StoreUnavailable(f"{self._name} sent {len(data)} bytes of {end - start}; try again")
        return data

    def listed(self, prefix: str, fields: str, **options: Any) -> Iterator[Blob]:
        """Entries of a listing with these fields, page by page. A page that fails raises rather than end it."""
        token: str | None = ""
        while token is not None:
            entries, token = self._page(prefix, fields, token, **options)
            yield from entries

    def _page(
        self, prefix: str, fields: str, token: str, *, tries: int = TRIES, **options: Any
    ) -> tuple[list[Blob], str | None]:
        asked = {"prefix": prefix, "fields": f"items({fields}),nextPageToken", "retry": None, **options}

        def once() -> tuple[list[Blob], str | None]:
            # A new iterator for each page: one that failed would end where it failed.
            found = self._client.list_blobs(self._bucket, page_token=token or None, **asked)
            return list(next(found.pages, ())), found.next_page_token

        return self.read(once, tries=tries)

    def ping(self) -> None:
        """Returns if a listing does. Raises StoreError after one try."""
        self._page(self._location.key_prefix, "name", "", tries=1, max_results=1)

    def clock(self) -> datetime:
        """The time by the store's clock. The library hides the header that has it."""
        url = f"{self._location.origin}/storage/v1/b/{self._location.bucket}/o"

        def ask() -> requests.Response:
            answer = self._session.get(url, params={"maxResults": "1", "prefix": self._location.key_prefix})
            if not answer.ok:
                raise from_http_response(answer)
            return answer

        try:
            return parsedate_to_datetime(self.read(ask).headers["date"]).astimezone(UTC)
        except (KeyError, ValueError):
            raise StoreUnavailable("the store does not say what time it is; try again") from None

    def unreachable(self, error: Exception) -> StoreError:
        """What stands between the service and the store."""
        return unreachable(self._name, error)

    def close(self) -> None:
        self._client.close()
        self.pool.clear()

    def _check_bucket(self) -> None:
        try:
            next(self._client.list_blobs(self._bucket, max_results=1, retry=None).pages, None)
        except NotFound:
            raise StoreRefused(
                f"{self._name} is not there; make the bucket, or correct its name in the store's URL"
            ) from None


_REMEDY = "check credentials, permissions (roles/storage.objectUser on the bucket) and the bucket's name"


@contextmanager
def google_errors(name: str, remedy: str) -> Iterator[None]:
    """Makes StoreErrors of what the block raises. `name` begins a sentence about the service of Google's, `remedy` ends
    the one about a refusal."""
    try:
        yield
    except GoogleAPICallError as error:
        raise _store_error(error, name, remedy) from error
    except (
        requests.exceptions.InvalidJSONError,
        InvalidResponse,
        DataCorruption,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
    ) as error:
        # What the library raises when it reads an answer of something else, such as a proxy's page.
        raise StoreUnavailable(
            f"{name} answered with something that is none of Google's answers ({type(error).__name__}); check the "
            "endpoint and what stands before it"
        ) from error
    except (requests.RequestException, urllib3.exceptions.HTTPError, ConnectionError) as error:
        raise unreachable(name, error) from error


def _store_error(error: GoogleAPICallError, name: str, remedy: str) -> StoreError:
    """The same failure as the contract has it."""
    status, (reason, message) = int(error.code or 0), _told(error)
    what = f"{reason or 'no reason given'}, status {status}"
    if status == 412:
        return AlreadyThere(f"{name} has an object of this name ({what})")
    if status == 400 and "match" in message and "hash" in message:
        return ObjectMismatch(f"{name} refused the bytes ({what})")
    if status in {405, 501}:
        return StoreRefused(f"{name} lacks an operation that the service needs ({what}); use a store that has it")
    if status in {408, 409, 429} or status >= 500:
        return StoreUnavailable(f"{name} asks to come back later ({what})")
    return StoreRefused(f"{name} refuses the service ({what}); {remedy}")


def _told(error: GoogleAPICallError) -> tuple[str, str]:
    """Google's reason and its sentence; empty if there are none."""
    try:
        told = error.response.json()["error"]
        reason = told["errors"][0]["reason"] if "errors" in told else told["status"]
        return str(reason), str(told.get("message", ""))
    except (ValueError, LookupError, TypeError, AttributeError):
        return "", ""
