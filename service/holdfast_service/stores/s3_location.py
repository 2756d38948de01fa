"""`s3://bucket/prefix?endpoint=...&public_endpoint=...&region=...&path_style=...` -> where requests go. Pure."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, urlsplit

EXAMPLE = "s3://my-bucket/checkpoints?region=eu-central-1, or with &endpoint=https://s3.example.org for other stores"
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"(?:[0-9A-Za-z_.~-]+/)*[0-9A-Za-z_.~-]+|")
_OPTIONS = ("endpoint", "public_endpoint", "region", "path_style")


@dataclass(frozen=True, slots=True)
class S3Location:
    """`origin` and `public_origin` are scheme and host, as the service and as the clients reach the store. `base`
    comes before every key: `/bucket/prefix` in path style, `/prefix` where the bucket is part of the host."""

    bucket: str
    prefix: str
    region: str
    origin: str
    public_origin: str
    bucket_path: str

    @property
    def key_prefix(self) -> str:
        """With its slash, as it stands in a key; empty if there is none."""
        return f"{self.prefix}/" if self.prefix else ""

    def path_of(self, relative_key: str) -> str:
        """The URL path of a key, which needs no quoting."""
        return f"{self.bucket_path}/{self.key_prefix}{relative_key}"


def parse_s3_url(url: str) -> S3Location:
    """ValueError says what is wrong with the URL."""
    parts = urlsplit(url)
    if parts.username or parts.password:
        raise ValueError("it holds credentials; give them as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead")
    bucket, prefix = parts.netloc, parts.path.strip("/")
    if not _BUCKET.fullmatch(bucket):
        raise ValueError(f"{bucket!r} is no bucket name")
    if not _PREFIX.fullmatch(prefix) or ".." in prefix.split("/"):
        raise ValueError(f"{prefix!r} is no prefix; use letters, digits and ._~- between slashes")
    options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    unknown = sorted(options.keys() - set(_OPTIONS))
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no option of it; there are {', '.join(_OPTIONS)}")
    endpoint = _origin(options["endpoint"], "endpoint") if "endpoint" in options else None
    region = options.get("region") or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if region is None and endpoint is None:
        raise ValueError("it names no region; add ?region=... or set AWS_REGION")
    region = region or "us-east-1"
    path_style = _flag(options.get("path_style"), default=endpoint is not None or "." in bucket)
    internal = endpoint or f"https://s3.{region}.amazonaws.com{'.cn' if region.startswith('cn-') else ''}"
    public = _origin(options["public_endpoint"], "public_endpoint") if "public_endpoint" in options else internal
    if path_style:
        return S3Location(bucket, prefix, region, internal, public, f"/{quote(bucket)}")
    return S3Location(bucket, prefix, region, _with_bucket(internal, bucket), _with_bucket(public, bucket), "")


def _origin(value: str, option: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.path.strip("/") or parts.query:
        raise ValueError(f"its {option} {value!r} is not of the form https://host or http://host:port")
    default_port = {"http": 80, "https": 443}[parts.scheme]
    # A client leaves the default port out of the Host header, so it must not be signed either.
    port = f":{parts.port}" if parts.port and parts.port != default_port else ""
    return f"{parts.scheme}://{parts.hostname}{port}"


def _with_bucket(origin: str, bucket: str) -> str:
    scheme, _, host = origin.partition("://")
    return f"{scheme}://{bucket}.{host}"


def _flag(value: str | None, *, default: bool) -> bool:
    if value is None:
        return default
    if value.lower() not in {"true", "false"}:
        raise ValueError(f"its path_style is {value!r}; say true or false")
    return value.lower() == "true"
