"""The service's own calls to a bucket, through boto3. Here, and only here, botocore's errors become StoreErrors.

boto3 sends and signs; the retries are those of every store (stores/retry.py), so that a store that is away is given up
after the same time whatever it is. Messages name the host and the store's own code, never a URL: a presigned one is a
secret.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from datetime import UTC, datetime
from email.utils import format_datetime, parsedate_to_datetime
from typing import Any, TypeVar, cast

import urllib3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

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
    proxy_for,
    unreachable,
)
from holdfast_service.stores.retry import TRIES, with_retries
from holdfast_service.stores.s3.s3_location import S3Credentials, S3Location

_READ_BYTES = 1024 * 1024
_SENT_WHOLE_BYTES = 256 * 1024
_LACKING = {"NotImplemented", "MethodNotAllowed"}
_OTHER_REGION = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
_MISMATCH = {"BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch", "CrcMismatch"}
_FULL = {"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "StorageQuotaExceeded"}
_ARCHIVED = {"InvalidObjectState", "ObjectNotInActiveTierError"}
_LATER = {"SlowDown", "RequestTimeout", "ServiceUnavailable", "InternalError", "ConditionalRequestConflict"}
_REGION = re.compile(r"[a-z0-9-]{1,64}")

_Result = TypeVar("_Result")


class AlreadyDone(StoreError):  # noqa: N818
    """An object of this name is there and was not overwritten, or the restore is under way. It never leaves this
    folder."""


class S3Calls:
    """To one bucket. Safe to use from several threads. `guard` is called before each change."""

    def __init__(self, location: S3Location, credentials: S3Credentials) -> None:
        self.guard: Callable[[], None] = lambda: None
        self.pool = connections(location.origin)
        """For requests that carry their signature in the URL."""
        self._bucket = location.bucket
        self._name = f"the store at {location.origin}, bucket {location.bucket},"
        self._credentials = credentials
        proxy = proxy_for(location.origin)
        config = Config(
            connect_timeout=CONNECT_SECONDS,
            read_timeout=READ_SECONDS,
            max_pool_connections=CONNECTIONS,
            retries={"total_max_attempts": 1, "mode": "standard"},
            proxies=dict.fromkeys(("http", "https"), proxy) if proxy else {},
            s3={"addressing_style": location.addressing_style},
            # Stores that speak like S3 do not all know the checksums that boto3 adds by itself.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        try:
            self.client = credentials.session.client(
                "s3",
                region_name=location.region,
                endpoint_url=location.endpoint,
                verify=authorities() or True,
                config=config,
            )
        except BotoCoreError as error:
            raise StoreRefused(f"the AWS configuration cannot be used: {error}") from error
        self.client.meta.events.register_first("needs-retry.s3", _raise_at_once)

    def ask(self, operation: str, *, tries: int = TRIES, **parameters: Any) -> dict[str, Any]:
        """boto3's answer to an operation that changes nothing, by boto3's names. Raises StoreError."""
        return self._run(lambda: getattr(self.client, operation)(Bucket=self._bucket, **parameters), tries)

    def change(self, operation: str, **parameters: Any) -> dict[str, Any]:
        """As `ask`, for what writes or deletes. Raises what the guard raises."""
        self.guard()
        return self.ask(operation, **parameters)

    def put(self, key: str, data: bytes, **parameters: Any) -> dict[str, Any]:
        """boto3's answer. Raises what the guard raises, and AlreadyDone where only a new object may be written."""
        self.guard()

        def once() -> dict[str, Any]:
            # urllib3 applies the connect time-out to each send: in one piece a large body would have to fit into it.
            body = io.BytesIO(data) if len(data) > _SENT_WHOLE_BYTES else data
            return cast(dict[str, Any], self.client.put_object(Bucket=self._bucket, Key=key, Body=body, **parameters))

        return self._run(once, TRIES)

    def read_whole(self, key: str) -> bytes:
        """A small object."""

        def once() -> bytes:
            with closing(self.client.get_object(Bucket=self._bucket, Key=key)["Body"]) as body:
                return cast(bytes, body.read())

        return self._run(once, TRIES)

    def read(self, key: str, version: Mapping[str, Any]) -> Iterator[bytes]:
        """An object's bytes in pieces of at most 1 MiB. The request is made now; a short read raises."""
        return self._pieces(self.ask("get_object", Key=key, **version)["Body"])

    def _pieces(self, body: Any) -> Iterator[bytes]:
        with closing(body):
            # botocore raises if fewer bytes come than Content-Length promised.
            while piece := self._run(lambda: body.read(_READ_BYTES), tries=1):
                yield piece

    def clock(self, prefix: str) -> datetime:
        """The time by the store's clock. Whom it refuses for a clock that is too far off, it tells the time all the
        same."""

        def once() -> Mapping[str, Any]:
            try:
                return cast(
                    Mapping[str, Any], self.client.list_objects_v2(Bucket=self._bucket, Prefix=prefix, MaxKeys=1)
                )
            except ClientError as error:
                if _metadata(error.response).get("HTTPStatusCode") != 403:
                    raise
                return cast(Mapping[str, Any], error.response)

        try:
            return parsedate_to_datetime(_headers(self._run(once, TRIES))["date"]).astimezone(UTC)
        except (KeyError, ValueError):
            raise StoreUnavailable("the store does not say what time it is; try again") from None

    def unreachable(self, error: Exception) -> StoreError:
        """What stands between the service and the store."""
        return unreachable(self._name, error)

    def close(self) -> None:
        self.client.close()
        self.pool.clear()

    def _run(self, call: Callable[[], _Result], tries: int) -> _Result:
        def once() -> _Result:
            # botocore would refresh them in the middle of the call, and a role that fails is not the store's failure.
            self._credentials.current()
            try:
                return call()
            except ClientError as error:
                raise self._store_error(error) from error
            except (BotoCoreError, urllib3.exceptions.HTTPError) as error:
                raise self.unreachable(error) from error
            except (ResponseParserError, ValueError, TypeError, LookupError, AttributeError) as error:
                # What botocore raises when it reads an answer of something else, such as a proxy's page.
                raise StoreUnavailable(
                    f"{self._name} answered with something that is none of S3's answers ({type(error).__name__}); "
                    "check the endpoint and what stands before it"
                ) from error

        return with_retries(once, tries=tries)

    def _store_error(self, error: ClientError) -> StoreError:
        """The same failure as the contract has it."""
        status = int(_metadata(error.response).get("HTTPStatusCode") or 0)
        code = str(error.response.get("Error", {}).get("Code") or "")
        code = "" if code.isdecimal() else code  # botocore's own, for an answer without a document
        what = f"{code or 'no reason given'}, status {status}"
        if status == 412 or code == "RestoreAlreadyInProgress":
            return AlreadyDone(f"{self._name} has it already ({what})")
        if status == 507 or code in _FULL:
            return StoreFull(f"{self._name} is full ({what}); free some room or raise its quota")
        if code in _MISMATCH:
            return ObjectMismatch(f"{self._name} refused the bytes ({what})")
        if code in _ARCHIVED:
            return ObjectArchived("the object is archived in the store; thaw it before it is read")
        if code == "NoSuchBucket":
            return StoreRefused(f"{self._name} is not there; make the bucket, or correct its name in the store's URL")
        if code == "RequestTimeTooSkewed":
            return StoreRefused(
                f"{self._name} refuses what the service signs: by its clock it is "
                f"{_headers(error.response).get('date')}, and by the service's "
                f"{format_datetime(datetime.now(UTC), usegmt=True)}; set both by NTP"
            )
        region = _region_told(error.response, status, code)
        if region is not None:
            return StoreRefused(f"{self._name} is in the region {region}; write region={region} in the store's URL")
        if status == 501 or code in _LACKING:
            return StoreRefused(
                f"{self._name} lacks an operation that the service needs, {error.operation_name} ({what}); use a store "
                "that has it"
            )
        if status == 404 and code in {"", "NoSuchKey", "NoSuchVersion"}:
            return ObjectMissing("there is no such object in the store")
        if code in _LATER or status in {408, 409, 429} or status >= 500:
            return StoreUnavailable(f"{self._name} asks to come back later ({what})")
        return StoreRefused(
            f"{self._name} refuses the service ({what}); check credentials, permissions, region and clock"
        )


def _raise_at_once(response: Any, operation: Any, **_: Any) -> None:
    """Before botocore can follow a redirect into another region: the tickets would still be signed for this one."""
    if response is not None and _metadata(response[1]).get("HTTPStatusCode", 0) >= 300:
        raise ClientError(response[1], operation.name)


def _metadata(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    return answer.get("ResponseMetadata") or {}


def _headers(answer: Mapping[str, Any]) -> Mapping[str, str]:
    return _metadata(answer).get("HTTPHeaders") or {}


def _region_told(answer: Mapping[str, Any], status: int, code: str) -> str | None:
    """The bucket's own region, where the store says that it is not the one that was asked in."""
    if status not in {301, 307} and code not in _OTHER_REGION:
        return None
    told = _headers(answer).get("x-amz-bucket-region") or answer.get("Error", {}).get("Region")
    return told if told and _REGION.fullmatch(told) else None
