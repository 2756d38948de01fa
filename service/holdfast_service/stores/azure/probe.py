"""What a container of Azure really enforces, found by sending it what it ought to refuse."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime

from holdfast_service.stores.base import Capabilities, StoreRefused
from holdfast_service.stores.bucket.bucket_store import BucketStore
from holdfast_service.stores.bucket.presigned_probe import PresignedProbe, base64_md5

_BLOCK_BLOB = {"x-ms-blob-type": "BlockBlob"}


def probe_azure(store: BucketStore) -> Capabilities:
    """StoreRefused if not even a plain PUT by a SAS goes through. Its objects are gone afterwards."""
    probe = PresignedProbe(store)
    try:
        body, other = secrets.token_bytes(32), secrets.token_bytes(32)
        right = {**_BLOCK_BLOB, "content-md5": base64_md5(body)}
        plain = probe.fresh_key(body)
        accepted, reason = probe.put(plain, body, right)
        if not accepted:
            raise StoreRefused(f"the store refuses a PUT by a SAS ({reason}); check permissions and the key")
        overwritten = probe.put(plain, other, _BLOCK_BLOB)[0]
        unchanged = probe.get_range(plain, 0, len(body) - 1) == body
        return Capabilities(
            sha256_enforced=False,  # Azure compares MD5 and CRC64, and nothing else
            sha256_reported=False,
            content_length_enforced=probe.refuses(probe.fresh_key(body), body, right, signed_bytes=len(body) - 1),
            # Without If-None-Match: the permission alone must keep what is there.
            conditional_put=not overwritten and unchanged,
            md5_enforced=probe.refuses(probe.fresh_key(body), body, {**_BLOCK_BLOB, "content-md5": base64_md5(other)}),
            range_get=probe.get_range(plain, 3, 9) == body[3:10],
            versioned=store.head(plain).version_id is not None,
            probed_at=datetime.now(UTC),
            signature_enforced=probe.refuses(probe.fresh_key(body), body, right, tampered=True),
        )
    finally:
        probe.clean_up()
