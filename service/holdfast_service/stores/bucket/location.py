"""Where a bucket is and how its URL is read: what `s3://` and `gs://` have in common. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

# What SSE-C, Google's CSEK and Azure's customer-provided keys are called.
_KEY_OF_THE_CALLER = re.compile(r"sse.?c|csek|cpk|(customer|encryption|provided).*key|sse.*key", re.IGNORECASE)
_PREFIX = re.compile(r"(?:[0-9A-Za-z_.~-]+/)*[0-9A-Za-z_.~-]+|")


@dataclass(frozen=True, slots=True)
class BucketLocation:
    """`origin` and `public_origin` are scheme and host, as the service and as the clients reach the store.
    `bucket_path` comes before every key: `/bucket`, or nothing if the bucket is part of the host."""

    bucket: str
    prefix: str
    origin: str
    public_origin: str
    bucket_path: str

    @property
    def key_prefix(self) -> str:
        """With its slash, as it stands in a key; empty if there is none."""
        return f"{self.prefix}/" if self.prefix else ""

    def path_of(self, relative_key: str) -> str:
        """The URL path of a key, which needs no quoting."""
        return f"{self.bucket_path}/{self.key_of(relative_key)}"

    def key_of(self, relative_key: str) -> str:
        """As the bucket has it, with the prefix."""
        return f"{self.key_prefix}{relative_key}"


def split_bucket_url(
    url: str, bucket_names: re.Pattern[str], known_options: Collection[str], *, keys_belong_in: str
) -> tuple[str, str, dict[str, str]]:
    """Bucket, prefix and options. ValueError says what is wrong with the URL."""
    parts = urlsplit(url)
    if parts.username or parts.password:
        raise ValueError(f"it holds credentials; give them as {keys_belong_in} instead")
    bucket, prefix = parts.netloc, parts.path.strip("/")
    if not bucket_names.fullmatch(bucket):
        raise ValueError(f"{bucket!r} is no bucket name")
    if not _PREFIX.fullmatch(prefix) or ".." in prefix.split("/"):
        raise ValueError(f"{prefix!r} is no prefix; use letters, digits and ._~- between slashes")
    options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    unknown = sorted(options.keys() - set(known_options))
    if any(_KEY_OF_THE_CALLER.search(name) for name in unknown):
        # docs/adr/0078-keys-of-buckets.md. The key itself must not be repeated.
        raise ValueError(
            "it gives a key that each request would have to bring (SSE-C, CSEK, CPK); every trainer would need that "
            "key, and neither a server-side copy nor a second store could read without it. Encrypt the bucket with a "
            "key of your KMS instead (docs/operating/encryption.md)"
        )
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no option of it; there are {', '.join(known_options)}")
    return bucket, prefix, options


def origin_option(options: dict[str, str], name: str) -> str | None:
    """The option's scheme and host; None if it is not given. ValueError if it is none."""
    value = options.get(name)
    if value is None:
        return None
    parts = urlsplit(value)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.path.strip("/") or parts.query:
        raise ValueError(f"its {name} {value!r} is not of the form https://host or http://host:port")
    default_port = {"http": 80, "https": 443}[parts.scheme]
    # A client leaves the default port out of the Host header, so it must not be signed either.
    port = f":{parts.port}" if parts.port and parts.port != default_port else ""
    return f"{parts.scheme}://{parts.hostname}{port}"
