"""`s3://bucket/prefix?endpoint=...&public_endpoint=...&region=...&path_style=...&profile=...` -> where requests go, and
whose keys they are signed with. Pure."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from urllib.parse import quote

from holdfast_service.stores.bucket_location import BucketLocation, origin_option, split_bucket_url

EXAMPLE = "s3://my-bucket/checkpoints?region=eu-central-1, or with &endpoint=https://s3.example.org for other stores"
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PROFILE = re.compile(r"[0-9A-Za-z._-]{1,100}")
_OPTIONS = ("endpoint", "public_endpoint", "region", "path_style", "profile")


@dataclass(frozen=True, slots=True)
class S3Location(BucketLocation):
    """A bucket with the region that its requests are signed for. `profile`: the section of the AWS configuration that
    has its keys; None: the environment's."""

    region: str
    profile: str | None = None

    def copy_source(self, relative_key: str) -> str:
        """As `x-amz-copy-source` has it: the bucket is always named."""
        return f"/{quote(self.bucket)}/{self.key_prefix}{relative_key}"


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
    if path_style:
        return S3Location(bucket, prefix, internal, public, f"/{quote(bucket)}", region, profile)
    return S3Location(bucket, prefix, _with_bucket(internal, bucket), _with_bucket(public, bucket), "", region, profile)


def _with_bucket(origin: str, bucket: str) -> str:
    scheme, _, host = origin.partition("://")
    return f"{scheme}://{bucket}.{host}"


def _flag(value: str | None, *, default: bool) -> bool:
    if value is None:
        return default
    if value.lower() not in {"true", "false"}:
        raise ValueError(f"its path_style is {value!r}; say true or false")
    return value.lower() == "true"
