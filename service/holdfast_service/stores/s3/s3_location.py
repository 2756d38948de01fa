"""`s3://bucket/prefix?endpoint=...&public_endpoint=...&region=...&path_style=...&profile=...&kms_key=...`: where
requests go, which keys sign them, and which one encrypts what they write. Pure."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from holdfast_service.stores.base import Credentials, StoreRefused, StoreUnavailable
from holdfast_service.stores.bucket.location import BucketLocation, origin_option, split_bucket_url

EXAMPLE = "s3://my-bucket/checkpoints?region=eu-central-1, or with &endpoint=https://s3.example.org for other stores"
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PROFILE = re.compile(r"[0-9A-Za-z._-]{1,100}")
_KMS_KEY = re.compile(r"(?:arn:[a-z-]+:kms:[a-z0-9-]*:[0-9]*:)?(?:key/|alias/)?[0-9A-Za-z/_-]{1,250}")
_OPTIONS = ("endpoint", "public_endpoint", "region", "path_style", "profile", "kms_key")


@dataclass(frozen=True, slots=True)
class S3Location(BucketLocation):
    """A bucket with the region that its requests are signed for. `endpoint` is the service's way to all buckets.
    `profile`: the section of the AWS configuration that has its keys; None: the environment's. `kms_key`: the key of
    AWS KMS that every write asks for; None: the bucket's default encryption decides."""

    endpoint: str
    region: str
    profile: str | None = None
    kms_key: str | None = None

    @property
    def encryption_headers(self) -> dict[str, str]:
        """What a PUT says of it, all of it signed. Empty without `kms_key`."""
        if self.kms_key is None:
            return {}
        return {
            "x-amz-server-side-encryption": "aws:kms",
            "x-amz-server-side-encryption-aws-kms-key-id": self.kms_key,
        }

    @property
    def encryption(self) -> dict[str, str]:
        """The same as boto3 has it."""
        return {} if self.kms_key is None else {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": self.kms_key}

    @property
    def addressing_style(self) -> str:
        """As botocore calls it."""
        return "path" if self.bucket_path else "virtual"


def parse_s3_url(url: str) -> S3Location:
    """ValueError says what is wrong with the URL."""
    bucket, prefix, options = split_bucket_url(
        url, _BUCKET, _OPTIONS, keys_belong_in="AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    )
    endpoint = origin_option(options, "endpoint")
    region = options.get("region") or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if region is None and endpoint is None:
        raise ValueError("it names no region; add ?region=... or set AWS_REGION")
    region = region or "us-east-1"
    path_style = _flag(options.get("path_style"), default=endpoint is not None or "." in bucket)
    internal = endpoint or f"https://s3.{region}.amazonaws.com{'.cn' if region.startswith('cn-') else ''}"
    public = origin_option(options, "public_endpoint") or internal
    profile = options.get("profile")
    if profile is not None and not _PROFILE.fullmatch(profile):
        raise ValueError(f"its profile {profile!r} is no name of a section of the AWS configuration")
    kms_key = options.get("kms_key")
    if kms_key is not None and not _KMS_KEY.fullmatch(kms_key):
        raise ValueError("its kms_key is no ARN, id or alias of a key of AWS KMS")
    if path_style:
        return S3Location(bucket, prefix, internal, public, f"/{quote(bucket)}", internal, region, profile, kms_key)
    hosts = _with_bucket(internal, bucket), _with_bucket(public, bucket)
    return S3Location(bucket, prefix, *hosts, "", internal, region, profile, kms_key)


def _with_bucket(origin: str, bucket: str) -> str:
    scheme, _, host = origin.partition("://")
    return f"{scheme}://{bucket}.{host}"


def _flag(value: str | None, *, default: bool) -> bool:
    if value is None:
        return default
    if value.lower() not in {"true", "false"}:
        raise ValueError(f"its path_style is {value!r}; say true or false")
    return value.lower() == "true"


class S3Credentials:
    """The keys for a bucket: the given ones, or those that botocore's default chain finds (environment, profile, role),
    or finds in the `profile` that is named. It refreshes temporary keys. `session` makes clients with them. Raises
    StoreRefused if there are none."""

    def __init__(self, given: Credentials | None = None, profile: str | None = None) -> None:
        try:
            if given is not None:
                self.session = boto3.Session(given.access_key, given.secret_key, given.session_token)
            else:
                # A profile that is named comes before the environment's keys, which may be another store's.
                self.session = boto3.Session(profile_name=profile)
            found = self.session.get_credentials()
        except BotoCoreError as error:
            raise StoreRefused(f"reading the AWS credentials failed: {error}") from error
        if found is None:
            raise StoreRefused(
                "there are no credentials for the s3 store; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                "or give the machine a role"
            )
        self._found = found

    def current(self) -> tuple[Credentials, datetime | None]:
        """Credentials that are good now, and when they end (UTC), if they do. StoreUnavailable if they cannot be
        refreshed."""
        try:
            frozen = self._found.get_frozen_credentials()
        except (BotoCoreError, ClientError) as error:
            raise StoreUnavailable(f"the AWS credentials could not be refreshed: {error}") from error
        # botocore keeps the end of temporary credentials in no public place.
        ends_at: datetime | None = getattr(self._found, "_expiry_time", None)
        keys = Credentials(frozen.access_key, frozen.secret_key, frozen.token)
        return keys, ends_at.astimezone(UTC) if ends_at else None
