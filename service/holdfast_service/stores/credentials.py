"""Where the keys for a bucket come from: given, or found by botocore's default chain (environment, profile, role)."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Protocol

from holdfast_service.stores.base import StoreRefused, StoreUnavailable
from holdfast_service.stores.sigv4 import Credentials


class CredentialSource(Protocol):
    def current(self) -> tuple[Credentials, datetime | None]:
        """Credentials that are good now, and when they end (UTC), if they do."""


class FixedCredentials:
    """Long-lived keys."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    def current(self) -> tuple[Credentials, datetime | None]:
        return self._credentials, None


class DefaultChainCredentials:
    """Whatever botocore finds, or what it finds in the `profile` that is named; temporary ones are refreshed by it."""

    def __init__(self, profile: str | None = None) -> None:
        # Imported here because it takes 0.2 s and a service with a posix store never needs it.
        from botocore.exceptions import BotoCoreError
        from botocore.session import Session

        self._refresh_failure = BotoCoreError
        try:
            # A profile that is named comes before the environment's keys, which may be another store's.
            found = Session(profile=profile).get_credentials()
        except BotoCoreError as error:
            raise StoreRefused(f"reading the AWS credentials failed: {error}") from error
        if found is None:
            raise StoreRefused(
                "there are no credentials for the s3 store; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                "or give the machine a role"
            )
        self._found = found

    def current(self) -> tuple[Credentials, datetime | None]:
        try:
            frozen = self._found.get_frozen_credentials()
        except self._refresh_failure as error:
            raise StoreUnavailable(f"the AWS credentials could not be refreshed: {error}") from error
        # botocore keeps the end of temporary credentials in no public place.
        ends_at: datetime | None = getattr(self._found, "_expiry_time", None)
        keys = Credentials(frozen.access_key, frozen.secret_key, frozen.token)
        return keys, ends_at.astimezone(UTC) if ends_at else None
