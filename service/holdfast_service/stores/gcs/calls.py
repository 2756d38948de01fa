"""The service's own calls to Google, through google-cloud-storage. Only here its errors become StoreErrors."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, TypeVar, cast

import requests
import urllib3
from google.api_core.exceptions import GoogleAPICallError, NotFound, from_http_response
from google.auth.credentials import AnonymousCredentials
from google.cloud.storage import Blob, Client
from google.cloud.storage.exceptions import DataCorruption, InvalidResponse

from holdfast_service.stores.base import ObjectMismatch, ObjectMissing, ObjectTooLarge, StoreRefused, StoreUnavailable
from holdfast_service.stores.bucket.bucket_calls import Answer, BucketCalls, Codes, time_of
from holdfast_service.stores.bucket.presigned_probe import base64_md5
from holdfast_service.stores.gcs.gcs_location import GcsLocation
from holdfast_service.stores.gcs.identity import GoogleIdentity, GoogleSession
from holdfast_service.stores.retry import TRIES

_RANGE_BYTES = 16 * 1024 * 1024
_PIECE_BYTES = 1024 * 1024
# Else the library asks for the bucket in a thread of its own, to name it in traces, which are not collected here.
_NO_LOOK_AT_THE_BUCKET = "DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA"

_Result = TypeVar("_Result")


class _Bounded(io.BytesIO):
    """Takes a download piece by piece, up to `most_bytes`. A range would spare it, but an empty object has none."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__()
        self._most_bytes = most_bytes

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self._most_bytes:
            raise ObjectTooLarge(self._most_bytes)
        return super().write(data)


class GoogleCalls(BucketCalls):
    """To one of Google's services. `session` is for what the library does not do."""

    errors = (
        GoogleAPICallError,
        requests.RequestException,
        urllib3.exceptions.HTTPError,
        InvalidResponse,
        DataCorruption,
        ConnectionError,
    )
    codes = Codes(done=frozenset({"conditionNotMet"}), lacking=frozenset({"methodNotAllowed"}))

    def __init__(self, origin: str, name: str, remedy: str, identity: GoogleIdentity) -> None:
        super().__init__(origin, name, remedy)
        self.session = GoogleSession(identity)

    def request(self, method: str, url: str, **options: Any) -> requests.Response:
        """An answer that is no error; inside `read` or `change`."""
        answer = self.session.request(method, url, **options)
        if not answer.ok:
            raise from_http_response(answer)
        return answer

    def answer_of(self, error: Exception) -> Answer | None:
        if not isinstance(error, GoogleAPICallError):
            return None
        try:
            told = error.response.json()["error"]
            reason = str(told["errors"][0]["reason"] if "errors" in told else told["status"])
        except (ValueError, LookupError, TypeError, AttributeError):
            told, reason = {}, ""
        if error.code == 400 and "calculated MD5 hash" in str(told.get("message")):  # Google has no reason for it
            raise ObjectMismatch(f"{self.name} refused the bytes ({reason}, status 400)")
        return Answer(int(error.code or 0), reason)


class GcsCalls(GoogleCalls):
    """To one bucket."""

    def __init__(self, location: GcsLocation, identity: GoogleIdentity) -> None:
        super().__init__(
            location.origin,
            f"the store at {location.origin}, bucket {location.bucket},",
            "check credentials, permissions (roles/storage.objectUser on the bucket) and the bucket's name",
            identity,
        )
        self._location = location
        os.environ.setdefault(_NO_LOOK_AT_THE_BUCKET, "true")
        self._client = Client(
            project=None,
            credentials=AnonymousCredentials(),  # the session says who asks
            _http=self.session,
            client_options={"api_endpoint": location.origin},
        )
        self._bucket = self._client.bucket(location.bucket)

    def blob(self, key: str, generation: str | None = None) -> Blob:
        """The library's object of this name, or one generation of it. Asks nothing."""
        return self._bucket.blob(key, generation=None if generation is None else int(generation))

    def read(self, call: Callable[[], _Result], *, tries: int = TRIES) -> _Result:
        def told_apart() -> _Result:
            try:
                return call()
            except NotFound:
                # Google gives one reason for both, and the difference is everything.
                self._check_bucket()
                raise ObjectMissing("there is no such object in the store") from None

        return super().read(told_apart, tries=tries)

    def described(self, key: str, generation: str | None = None) -> Blob:
        """The library's object with what Google says of it. Raises StoreError."""
        blob = self.blob(key, generation)

        def once() -> tuple[int | None, int | None]:
            blob.reload(retry=None)
            return blob.size, blob.generation

        if None in self.read(once):
            raise StoreUnavailable(f"{self.name} does not say how large the object is, or which; try again")
        return blob

    def put(self, key: str, data: bytes, *, only_new: bool = False, storage_class: str | None = None) -> str:
        """The generation that was made. Raises what the guard raises, and AlreadyDone."""

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

    def read_whole(self, key: str, most_bytes: int) -> bytes:
        """A small object. Raises ObjectTooLarge."""
        blob = self.blob(key)

        def once() -> bytes:
            data = _Bounded(most_bytes)
            blob.download_to_file(data, raw_download=True, retry=None)
            return data.getvalue()

        return self.read(once)

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
            raise StoreUnavailable(f"{self.name} sent {len(data)} bytes of {end - start}; try again")
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
            # A new iterator for each page: a failed one would end where it failed.
            found = self._client.list_blobs(self._bucket, page_token=token or None, **asked)
            return list(next(found.pages, ())), found.next_page_token

        return self.read(once, tries=tries)

    def ping(self) -> None:
        """Returns if a listing does. Raises StoreError after one try."""
        self._page(self._location.key_prefix, "name", "", tries=1, max_results=1)

    def clock(self) -> datetime:
        """The time by the store's clock. The library hides the header that has it."""
        url = f"{self._location.origin}/storage/v1/b/{self._location.bucket}/o"
        asked = {"maxResults": "1", "prefix": self._location.key_prefix}
        return time_of(self.read(lambda: self.request("GET", url, params=asked)).headers.get("date"))

    def close(self) -> None:
        super().close()
        self._client.close()

    def _check_bucket(self) -> None:
        try:
            next(self._client.list_blobs(self._bucket, max_results=1, retry=None).pages, None)
        except NotFound:
            raise StoreRefused(
                f"{self.name} is not there; make the bucket, or correct its name in the store's URL"
            ) from None
