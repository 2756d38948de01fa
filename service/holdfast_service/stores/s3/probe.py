"""What an S3 bucket really enforces, found by sending it what it ought to refuse."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime

from holdfast_service.stores.base import Capabilities, StoreRefused
from holdfast_service.stores.bucket.bucket_store import BucketStore
from holdfast_service.stores.bucket.presigned_probe import PresignedProbe, base64_md5
from holdfast_service.stores.s3.classes import base64_sha256


def probe_s3(store: BucketStore) -> Capabilities:
    """StoreRefused if not even a plain presigned PUT goes through. Its objects are gone afterwards."""
    probe = PresignedProbe(store)
    try:
        body, other = secrets.token_bytes(32), secrets.token_bytes(32)
        right, wrong = {"x-amz-checksum-sha256": base64_sha256(body)}, {"x-amz-checksum-sha256": base64_sha256(other)}
        plain = probe.fresh_key(body)
        accepted, reason = probe.put(plain, body, right)
        if not accepted:
            raise StoreRefused(f"the store refuses a presigned PUT ({reason}); check permissions and region")
        facts = store.head(plain)
        conditional = probe.fresh_key(body)
        return Capabilities(
            sha256_enforced=probe.refuses(probe.fresh_key(body), body, wrong),
            sha256_reported=facts.sha256 == plain.digest,
            content_length_enforced=probe.refuses(probe.fresh_key(body), body, right, signed_bytes=len(body) - 1),
            conditional_put=probe.put(conditional, body, {**right, "if-none-match": "*"})[0]
            and not probe.put(conditional, body, {**right, "if-none-match": "*"})[0],
            md5_enforced=probe.refuses(probe.fresh_key(body), body, {"content-md5": base64_md5(other)}),
            range_get=probe.get_range(plain, 3, 9) == body[3:10],
            versioned=facts.version_id is not None,
            probed_at=datetime.now(UTC),
            signature_enforced=probe.refuses(probe.fresh_key(body), body, right, tampered=True),
        )
    finally:
        probe.clean_up()
