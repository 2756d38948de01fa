"""Chunks in a container of Azure Blob Storage. Clients send and read by URLs with a shared access signature (SAS).

A service SAS covers no header: neither length nor checksum can be signed in, as S3 and Google have it. What holds a
ticket is its permission. `c` creates a blob and never overwrites one, so a ticket that still lives changes nothing that
is there. The client is told to send Content-MD5, which Azure compares with what arrives. A client that leaves it out
reaches its own new blob only; the seal compares the size, and the copy is unproven until the service has read it (rule
14), because Azure reports no SHA-256.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

from holdfast_protocol.checkpoints import StoreAnswer
from holdfast_service.stores.azure.azure_location import EXAMPLE, AzureLocation, parse_azure_url
from holdfast_service.stores.azure.calls import (
    ARCHIVED,
    LARGEST_PUT_BYTES,
    MISMATCH,
    TAKEN,
    AzureCalls,
)
from holdfast_service.stores.azure.classes import AzureClasses, class_of, facts_of
from holdfast_service.stores.azure.probe import probe_azure
from holdfast_service.stores.azure.signer import (
    LONGEST_URL_SECONDS,
    Account,
    DelegatedAccount,
    Grant,
    KeyAccount,
    account_key,
    default_credential,
)
from holdfast_service.stores.base import (
    Capabilities,
    ObjectFacts,
    ObjectKey,
    ObjectMissing,
    Opening,
    PutTicket,
    StoreRefused,
    StoreUrlError,
)
from holdfast_service.stores.bucket.bucket_store import Entry

_PUT_HEADERS = {"x-ms-blob-type": "BlockBlob", "if-none-match": "*"}
_PUT_ANSWERS = dict.fromkeys(TAKEN, StoreAnswer.STORED) | dict.fromkeys(MISMATCH, StoreAnswer.MISMATCH)
# What is archived is the service's to tell: the client reports the chunk, and hears that the checkpoint is cold.
_GET_ANSWERS = dict.fromkeys(("BlobNotFound", *ARCHIVED), StoreAnswer.MISSING)
_PIECE_BYTES = 1024 * 1024
_PAGE = 5000


class AzureStore(AzureClasses):
    """A Store, a ClassedStore and a LockingStore."""

    kind = "azure"
    get_answers = _GET_ANSWERS

    def __init__(
        self,
        location: AzureLocation,
        account: Account,
        calls: AzureCalls,
        *,
        capabilities: Capabilities | None = None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.location = location
        self.calls = calls
        self.account = account
        self.capabilities = capabilities
        self._now = now

    # Tickets.

    def presign_put(
        self, key: ObjectKey, *, stored_bytes: int, stored_sha256: str, md5: str | None = None, expires_in_seconds: int
    ) -> PutTicket:
        if stored_bytes > LARGEST_PUT_BYTES:
            raise StoreRefused("Azure takes no more than 5000 MiB in one piece; save in smaller chunks")
        headers = {"content-length": str(stored_bytes), **_PUT_HEADERS}
        if md5 is not None:
            headers["content-md5"] = base64.b64encode(bytes.fromhex(md5)).decode()
        url, lives_seconds = self.presign("PUT", key, headers, expires_in_seconds)
        return PutTicket("PUT", url, headers, lives_seconds, _PUT_ANSWERS)

    def presign(
        self, method: str, key: ObjectKey, headers: Mapping[str, str], expires_in_seconds: int, *, public: bool = True
    ) -> tuple[str, int]:
        """The URL and how long it really lives. `public` as clients reach the store, else as the service does. A SAS
        covers no headers."""
        del headers
        origin = self.location.public_origin if public else self.location.origin
        # Azure's times have whole seconds.
        now = self._now().replace(microsecond=0)
        version_id = key.version_id if method == "GET" else None
        grant = Grant(
            container=self.location.bucket,
            blob=self.location.key_prefix + key.path,
            permission="c" if method == "PUT" else "r",
            expires_at=now + timedelta(seconds=min(expires_in_seconds, LONGEST_URL_SECONDS)),
            https_only=origin.startswith("https:"),
            version_id=version_id,
        )
        query, ends_at = self.account.sign(grant, now)
        version = f"versionid={quote(version_id, safe='')}&" if version_id else ""
        lives_seconds = int((ends_at - now).total_seconds())
        return f"{origin}{self.location.path_of(key.path)}?{version}{query}", lives_seconds

    # What the service itself reads and writes.

    def head(self, key: ObjectKey) -> ObjectFacts:
        return facts_of(self.properties(key))

    def open_read(self, key: ObjectKey) -> Iterator[bytes]:
        # As it lies there: the library would decode what an uploader has called encoded.
        blob = self.blob_of(key)
        download = self.calls.read(lambda: blob.download_blob(version_id=key.version_id, decompress=False))
        return self._pieces(download.chunks())

    def _pieces(self, ranges: Iterator[bytes]) -> Iterator[bytes]:
        # Each range names the ETag of the first: what comes back is one object, or an error.
        while (part := self.calls.read(lambda: next(ranges, None), tries=1)) is not None:
            for start in range(0, len(part), _PIECE_BYTES):
                yield part[start : start + _PIECE_BYTES]

    def remove(self, key: str, version_id: str | None = None) -> None:
        blob = self.blob(key)
        with suppress(ObjectMissing):
            if version_id is not None:
                self.calls.change(lambda: blob.delete_blob(version_id=version_id))
            else:
                self.calls.change(lambda: blob.delete_blob(delete_snapshots="include"))
        if version_id is None and (self.capabilities is None or self.capabilities.versioned):
            # In an account with versions that only made the newest one an old one: its bytes stay until all are gone.
            for version in self._versions(key):
                self.remove(key, version)

    def _versions(self, key: str) -> list[str]:
        found = self._listed(key, include=["versions"])
        return [str(each.version_id) for each in found if each.name == key and each.version_id]

    def _listed(self, prefix: str, **options: Any) -> Iterator[Any]:
        """Entries of a listing, page by page. A page that fails is asked for again, and raises rather than end it."""
        pages = self.calls.container.list_blobs(name_starts_with=prefix, results_per_page=_PAGE, **options).by_page()
        while (page := self.calls.read(lambda: next(pages, None))) is not None:
            yield from page

    def entries(self, prefix: str) -> Iterator[Entry]:
        for each in self._listed(prefix):
            yield Entry(each.name, each.size, each.last_modified, class_of(each))

    def probe(self) -> Capabilities:
        self.refuse_retention()
        self.refuse_folders()
        self.capabilities = probe_azure(self)
        return self.capabilities

    def clock(self) -> datetime:
        return self.calls.clock()

    def ping(self) -> None:
        self.calls.read(self.calls.container.get_container_properties, tries=1)


def open_store(url: str, opening: Opening) -> AzureStore:
    """Raises StoreUrlError, and StoreRefused if there are no credentials."""
    try:
        location = parse_azure_url(url)
    except ValueError as error:
        raise StoreUrlError(url, str(error), EXAMPLE) from error
    key = account_key(opening.credentials, location.account)
    if key is not None:
        account: Account = KeyAccount(location.account, key)
        return AzureStore(
            location, account, AzureCalls(location, account.credential), capabilities=opening.capabilities
        )
    credential = default_credential()
    return delegated_store(location, credential, capabilities=opening.capabilities)


def delegated_store(location: AzureLocation, credential: Any, *, capabilities: Capabilities | None) -> AzureStore:
    """For an identity without the account's key."""
    calls = AzureCalls(location, credential)
    account = DelegatedAccount(
        location.account,
        credential,
        lambda since, until: calls.read(lambda: calls.account.get_user_delegation_key(since, until)),
    )
    return AzureStore(location, account, calls, capabilities=capabilities)
