"""The service's own calls to S3, through boto3. Only here botocore's errors become StoreErrors."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from datetime import datetime
from typing import Any, TypeVar, cast

import urllib3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from holdfast_service.stores.base import ObjectTooLarge, StoreRefused
from holdfast_service.stores.bucket.bucket_calls import Answer, BucketCalls, Codes, time_of
from holdfast_service.stores.bucket.network import CONNECT_SECONDS, CONNECTIONS, READ_SECONDS, authorities, proxy_for
from holdfast_service.stores.retry import TRIES
from holdfast_service.stores.s3.s3_location import S3Credentials, S3Location

_READ_BYTES = 1024 * 1024
_SENT_WHOLE_BYTES = 256 * 1024
_OTHER_REGION = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
_REGION = re.compile(r"[a-z0-9-]{1,64}")
_Result = TypeVar("_Result")


class S3Calls(BucketCalls):
    """To one bucket, by boto3's names of operations and parameters."""

    errors = (ClientError, BotoCoreError, ResponseParserError, urllib3.exceptions.HTTPError)
    codes = Codes(
        done=frozenset({"PreconditionFailed", "RestoreAlreadyInProgress"}),
        missing=frozenset({"", "NoSuchKey", "NoSuchVersion"}),
        no_bucket=frozenset({"NoSuchBucket"}),
        mismatch=frozenset(
            {"BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch", "CrcMismatch"}
        ),
        archived=frozenset({"InvalidObjectState", "ObjectNotInActiveTierError"}),
        full=frozenset({"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "StorageQuotaExceeded"}),
        skewed=frozenset({"RequestTimeTooSkewed"}),
        lacking=frozenset({"NotImplemented", "MethodNotAllowed"}),
        later=frozenset(
            {
                "SlowDown",
                "RequestTimeout",
                "IncompleteBody",  # something in between has cut the body off
                "ServiceUnavailable",
                "InternalError",
                "ConditionalRequestConflict",
                "Throttling",
                "ThrottlingException",
                "RequestLimitExceeded",
                "TooManyRequests",
            }
        ),
    )

    def __init__(self, location: S3Location, credentials: S3Credentials) -> None:
        super().__init__(
            location.origin,
            f"the store at {location.origin}, bucket {location.bucket},",
            "check credentials, permissions, region and clock",
        )
        self._bucket = location.bucket
        self._prefix = location.key_prefix
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

    def read(self, call: Callable[[], _Result], *, tries: int = TRIES) -> _Result:
        def with_credentials() -> _Result:
            # botocore would refresh them in the middle of the call, and a role that fails is not the store's failure.
            self._credentials.current()
            return call()

        return super().read(with_credentials, tries=tries)

    def ask(self, operation: str, *, tries: int = TRIES, **parameters: Any) -> dict[str, Any]:
        """boto3's answer to an operation that changes nothing. Raises StoreError."""
        return self.read(lambda: getattr(self.client, operation)(Bucket=self._bucket, **parameters), tries=tries)

    def do(self, operation: str, **parameters: Any) -> dict[str, Any]:
        """As `ask`, for what writes or deletes. Raises what the guard raises."""
        return self.change(lambda: getattr(self.client, operation)(Bucket=self._bucket, **parameters))

    def put(self, key: str, data: bytes, **parameters: Any) -> dict[str, Any]:
        """boto3's answer. Raises what the guard raises, and AlreadyDone if only a new object may be written."""

        def once() -> dict[str, Any]:
            # urllib3 applies the connect time-out to each send: in one piece a large body would have to fit into it.
            body = io.BytesIO(data) if len(data) > _SENT_WHOLE_BYTES else data
            return cast(dict[str, Any], self.client.put_object(Bucket=self._bucket, Key=key, Body=body, **parameters))

        return self.change(once)

    def read_whole(self, key: str, most_bytes: int) -> bytes:
        """A small object. Raises ObjectTooLarge."""

        def once() -> bytes:
            found = self.client.get_object(Bucket=self._bucket, Key=key)
            with closing(found["Body"]) as body:
                if found["ContentLength"] > most_bytes:
                    raise ObjectTooLarge(most_bytes)
                return cast(bytes, body.read())

        return self.read(once)

    def read_pieces(self, key: str, version: Mapping[str, Any]) -> Iterator[bytes]:
        """An object's bytes in pieces of at most 1 MiB. The request is made now; a short read raises."""
        return self._pieces(self.ask("get_object", Key=key, **version)["Body"])

    def _pieces(self, body: Any) -> Iterator[bytes]:
        with closing(body):
            # botocore raises if fewer bytes come than Content-Length promised.
            while piece := self.read(lambda: body.read(_READ_BYTES), tries=1):
                yield piece

    def clock(self) -> datetime:
        """The time by the store's clock. Whom it refuses for a clock that is too far off, it tells the time all the
        same."""

        def once() -> Mapping[str, Any]:
            try:
                listed = self.client.list_objects_v2(Bucket=self._bucket, Prefix=self._prefix, MaxKeys=1)
                return cast(Mapping[str, Any], listed)
            except ClientError as error:
                if _metadata(error.response).get("HTTPStatusCode") != 403:
                    raise
                return cast(Mapping[str, Any], error.response)

        return time_of(_headers(self.read(once)).get("date"))

    def answer_of(self, error: Exception) -> Answer | None:
        if not isinstance(error, ClientError):
            return None
        status = int(_metadata(error.response).get("HTTPStatusCode") or 0)
        code = str(error.response.get("Error", {}).get("Code") or "")
        if code.isdecimal():  # botocore's own, for an answer without a document
            code = "PreconditionFailed" if status == 412 else ""
        if status in {301, 307} or code in _OTHER_REGION:
            headers = _headers(error.response)
            region = headers.get("x-amz-bucket-region") or error.response.get("Error", {}).get("Region") or ""
            if _REGION.fullmatch(region):
                raise StoreRefused(f"{self.name} is in the region {region}; write region={region} in the store's URL")
        return Answer(status, code, _headers(error.response).get("date"), error.operation_name)

    def close(self) -> None:
        super().close()
        self.client.close()


def _raise_at_once(response: Any, operation: Any, **_: Any) -> None:
    """Before botocore can follow a redirect into another region: the tickets would still be signed for this one."""
    if response is not None and _metadata(response[1]).get("HTTPStatusCode", 0) >= 300:
        raise ClientError(response[1], operation.name)


def _metadata(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    return answer.get("ResponseMetadata") or {}


def _headers(answer: Mapping[str, Any]) -> Mapping[str, str]:
    return _metadata(answer).get("HTTPHeaders") or {}
