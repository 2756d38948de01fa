"""How the service's own requests to S3 are signed. The rest of a request is bucket_wire.py's."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from holdfast_service.stores.bucket_wire import BucketWire
from holdfast_service.stores.credentials import CredentialSource
from holdfast_service.stores.s3_location import S3Location
from holdfast_service.stores.sigv4 import EMPTY_SHA256, SigV4Signer


class S3Wire(BucketWire):
    """Header-signed requests from the service to the store."""

    def __init__(self, location: S3Location, credentials: CredentialSource, signer: SigV4Signer) -> None:
        super().__init__(
            location.origin,
            name=f"the store at {location.origin}, bucket {location.bucket},",
            remedy="check credentials, permissions, region and clock",
        )
        self._credentials = credentials
        self._signer = signer

    def _signed(
        self, method: str, path: str, *, query: Sequence[tuple[str, str]], headers: Mapping[str, str], body: bytes
    ) -> dict[str, str]:
        credentials, _ = self._credentials.current()
        return self._signer.sign_headers(
            credentials,
            method,
            self._origin,
            path,
            headers=headers,
            payload_sha256=hashlib.sha256(body).hexdigest() if body else EMPTY_SHA256,
            at=datetime.now(UTC),
            query=query,
        )
