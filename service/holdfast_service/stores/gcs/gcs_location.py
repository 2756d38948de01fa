"""`gs://bucket/prefix?endpoint=...&public_endpoint=...&service_account=...` -> where requests go. Pure.

`endpoint` is for private endpoints and for test servers; `iam_endpoint` the same for the service that signs for those
who have no key.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote

from holdfast_service.stores.bucket.location import BucketLocation, origin_option, split_bucket_url

EXAMPLE = "gs://my-bucket/checkpoints, or with ?service_account=NAME@PROJECT.iam.gserviceaccount.com to sign as another"
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
_EMAIL = re.compile(r"[0-9A-Za-z._-]+@[0-9A-Za-z.-]+")
_OPTIONS = ("endpoint", "public_endpoint", "iam_endpoint", "service_account")


@dataclass(frozen=True, slots=True)
class GcsLocation(BucketLocation):
    """A bucket, the service that signs its URLs, and the account that it signs as. Without an account the credentials'
    own account signs."""

    iam_origin: str
    service_account: str | None


def parse_gcs_url(url: str) -> GcsLocation:
    """ValueError says what is wrong with the URL."""
    bucket, prefix, options = split_bucket_url(
        url, _BUCKET, _OPTIONS, keys_belong_in="a key file that GOOGLE_APPLICATION_CREDENTIALS names"
    )
    origin = origin_option(options, "endpoint") or "https://storage.googleapis.com"
    public = origin_option(options, "public_endpoint") or origin
    iam = origin_option(options, "iam_endpoint") or "https://iamcredentials.googleapis.com"
    account = options.get("service_account")
    if account is not None and not _EMAIL.fullmatch(account):
        raise ValueError(f"its service_account {account!r} is not of the form NAME@PROJECT.iam.gserviceaccount.com")
    return GcsLocation(bucket, prefix, origin, public, f"/{quote(bucket)}", iam, account)
