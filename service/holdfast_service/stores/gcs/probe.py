"""What a GCS bucket really enforces, found by sending it what it ought to refuse."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from holdfast_service.stores.base import Capabilities, StoreRefused
from holdfast_service.stores.bucket.presigned_probe import PresignedProbe, base64_md5

if TYPE_CHECKING:
    from holdfast_service.stores.gcs.gcs_store import GcsStore


def probe_gcs(store: GcsStore) -> Capabilities:
    """StoreRefused if not even a plain presigned PUT goes through. Its objects are gone afterwards."""
    probe = PresignedProbe(store)
    try:
        body, other = secrets.token_bytes(32), secrets.token_bytes(32)
        right, wrong = {"x-goog-hash": f"md5={base64_md5(body)}"}, {"x-goog-hash": f"md5={base64_md5(other)}"}
        only_new = {**right, "x-goog-if-generation-match": "0"}
        plain = probe.fresh_key(body)
        accepted, reason = probe.put(plain, body, only_new)
        if not accepted:
            raise StoreRefused(f"the store refuses a presigned PUT ({reason}); check permissions and who signs")
        if store.is_retained(plain):
            probe.leave_behind()  # the store forbids its deletion, and the error must not be that
            raise StoreRefused(
                "the bucket has a retention policy or holds what is new, which locks every upload, so that nothing "
                "could be deleted; take that off the bucket, or use another one"
            )
        return Capabilities(
            sha256_enforced=False,  # Google compares MD5 and CRC32C, and nothing else
            sha256_reported=False,
            content_length_enforced=probe.refuses(probe.fresh_key(body), body, right, signed_bytes=len(body) - 1),
            conditional_put=not probe.put(plain, body, only_new)[0],
            md5_enforced=probe.refuses(probe.fresh_key(body), body, wrong),
            range_get=probe.get_range(plain, 3, 9) == body[3:10],
            versioned=store.hides_deleted(plain),
            probed_at=datetime.now(UTC),
            signature_enforced=probe.refuses(probe.fresh_key(body), body, right, tampered=True),
        )
    finally:
        probe.clean_up()
