"""S3's Object Lock: what the bucket says of it, and the legal hold of one version.

Source: https://docs.aws.amazon.com/AmazonS3/latest/API/API_PutObjectLegalHold.html and
https://docs.aws.amazon.com/AmazonS3/latest/API/API_GetObjectLockConfiguration.html.
"""

from __future__ import annotations

from dataclasses import dataclass
from xml.etree import ElementTree

from holdfast_service.stores.base import ObjectKey, StoreRefused
from holdfast_service.stores.bucket_wire import BucketWire
from holdfast_service.stores.presigned_probe import base64_md5
from holdfast_service.stores.s3_location import S3Location

_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
# What buckets without it, stores that do not know it, and services that may not ask for it are answered.
_NONE = (400, 403, 404, 405, 501)


@dataclass(frozen=True)
class _Configuration:
    enabled: bool = False
    default_retention: bool = False


class S3ObjectLock:
    """What makes an S3Store a LockingStore."""

    location: S3Location
    wire: BucketWire

    def has_object_lock(self) -> bool:
        return self._configuration().enabled

    def set_legal_hold(self, key: ObjectKey, version_id: str | None, *, on: bool) -> None:
        status = "ON" if on else "OFF"
        body = f'<LegalHold xmlns="{_NAMESPACE}"><Status>{status}</Status></LegalHold>'.encode()
        query = [("legal-hold", "")] + ([("versionId", version_id)] if version_id else [])
        # S3 wants a checksum of the body of this call, and every store that speaks like it knows this one.
        headers = {"content-md5": base64_md5(body)}
        self.wire.request("PUT", self.location.path_of(key.path), query=query, headers=headers, body=body)

    def refuse_default_retention(self) -> None:
        """Raises StoreRefused: such a bucket locks every upload, and nothing could be deleted (protocol rule 29)."""
        if self._configuration().default_retention:
            raise StoreRefused(
                f"the bucket {self.location.bucket} has a default retention, which locks every upload, so that nothing "
                "could be deleted; take the default retention off (Object Lock itself may stay), or use another bucket"
            )

    def _configuration(self) -> _Configuration:
        path = f"{self.location.bucket_path}/"
        answer = self.wire.request("GET", path, query=[("object-lock", "")], accept=(200, *_NONE))
        if answer.status != 200:
            return _Configuration()
        try:
            document = ElementTree.fromstring(answer.data)  # noqa: S314  (our own store's answer)
        except ElementTree.ParseError:  # of a store that does not know the question
            return _Configuration()
        return _Configuration(
            enabled=document.findtext("{*}ObjectLockEnabled") == "Enabled",
            default_retention=document.find("{*}Rule/{*}DefaultRetention") is not None,
        )
