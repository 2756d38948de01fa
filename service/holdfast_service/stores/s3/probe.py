"""What an S3 bucket really enforces, found by sending it what it ought to refuse."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime

from holdfast_service.stores.base import Capabilities, ObjectKey, StoreRefused
from holdfast_service.stores.bucket.presigned_probe import PresignedProbe, base64_md5
from holdfast_service.stores.s3.classes import S3StorageClasses, base64_sha256


def probe_s3(store: S3StorageClasses) -> Capabilities:
    """StoreRefused if not even a plain presigned PUT goes through, or if its object is not encrypted as the store's URL
    says. Its objects are gone afterwards."""
    probe = PresignedProbe(store, store.location.encryption_headers)
    try:
        body, other = secrets.token_bytes(32), secrets.token_bytes(32)
        right, wrong = {"x-amz-checksum-sha256": base64_sha256(body)}, {"x-amz-checksum-sha256": base64_sha256(other)}
        plain = probe.fresh_key(body)
        accepted, reason = probe.put(plain, body, right)
        if not accepted:
            raise StoreRefused(f"the store refuses a presigned PUT ({reason}); check permissions and region")
        _check_encryption(store, plain)
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


def _check_encryption(store: S3StorageClasses, key: ObjectKey) -> None:
    """What is accepted and ignored must not pass for encrypted. S3 answers with the ARN of the key that an id or an
    alias means, so only that there is a key of KMS can be compared for an alias."""
    wanted = store.location.kms_key
    if wanted is None:
        return
    told = store.described(key)
    used = str(told.get("SSEKMSKeyId") or "")
    name = wanted.rpartition("key/")[2]
    same = "alias/" in wanted or used.rpartition("key/")[2] == name
    if told.get("ServerSideEncryption") != "aws:kms" or not used or not same:
        raise StoreRefused(
            f"the store says of an object that was written with kms_key={wanted} that it is encrypted by "
            f"{used or told.get('ServerSideEncryption') or 'nothing'}; correct kms_key, or give the bucket a default"
        )
