"""The service's own requests to Google: with an access token. The rest of a request is bucket_wire.py's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import urllib3

from holdfast_service.stores.bucket_wire import BucketWire
from holdfast_service.stores.gcs_credentials import GoogleIdentity
from holdfast_service.stores.gcs_location import GcsLocation


class _TokenWire(BucketWire):
    _identity: GoogleIdentity

    def _signed(
        self, method: str, path: str, *, query: Sequence[tuple[str, str]], headers: Mapping[str, str], body: bytes
    ) -> dict[str, str]:
        return {**headers, "authorization": f"Bearer {self._identity.token()}"}


class GcsWire(_TokenWire):
    """To the bucket."""

    def __init__(self, location: GcsLocation, identity: GoogleIdentity, pool: urllib3.PoolManager) -> None:
        super().__init__(
            location.origin,
            name=f"the store at {location.origin}, bucket {location.bucket},",
            remedy="check credentials, permissions (roles/storage.objectUser on the bucket) and the bucket's name",
            pool=pool,
        )
        self._identity = identity


class IamWire(_TokenWire):
    """To the service that signs."""

    def __init__(self, location: GcsLocation, identity: GoogleIdentity, pool: urllib3.PoolManager) -> None:
        super().__init__(
            location.iam_origin,
            name=f"Google's IAM at {location.iam_origin}",
            remedy="give it roles/iam.serviceAccountTokenCreator on the account that signs, and enable the IAM "
            "Service Account Credentials API; or use a key file",
            pool=pool,
        )
        self._identity = identity
