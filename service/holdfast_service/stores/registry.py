"""Store URL -> store. Opening does no network I/O, so a store that is away degrades the service and does not stop it.

The caller keeps what `store.probe()` found (in the catalog) and gives it back as `capabilities` at the next start.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from holdfast_service.stores.base import Capabilities, StoreUnavailable
from holdfast_service.stores.bucket.wire import StorePool
from holdfast_service.stores.gcs import gcs_url as gcs_location
from holdfast_service.stores.gcs.gcs_store import GcsStore
from holdfast_service.stores.gcs.identity import GcsWire, default_identity, signer_for
from holdfast_service.stores.posix.posix_store import PosixStore
from holdfast_service.stores.posix.signed_urls import UrlSigner
from holdfast_service.stores.s3 import s3_url as s3_location
from holdfast_service.stores.s3.s3_store import S3Store
from holdfast_service.stores.s3.s3_url import DefaultChainCredentials, FixedCredentials
from holdfast_service.stores.s3.signer import Credentials

_POSIX_EXAMPLE = "posix:///var/lib/holdfast/store"


class StoreUrlError(ValueError):
    """A store URL that cannot be used, and how one looks that can."""

    def __init__(self, url: str, wrong: str, example: str) -> None:
        shown = url.partition("?")[0].rpartition("@")[2]
        super().__init__(f"the store URL {shown!r} cannot be used: {wrong}. Example: {example}")


def open_store(
    url: str,
    signing_key: bytes,
    credentials: Credentials | None = None,
    *,
    group: int | None = None,
    capabilities: Capabilities | None = None,
) -> PosixStore | S3Store | GcsStore:
    """`signing_key` (32 bytes or more) signs the service's own URLs; `credentials` are S3's and else come from the
    environment, as Google's always do.

    StoreUrlError for a wrong URL, StoreRefused if there are no credentials at all, or for a posix folder that is open
    to others. A posix folder that does not exist is made; in one that exists nothing is made until `probe()`, since it
    may be a mount point without its mount. `group` is the posix store's (see PosixStore).
    """
    scheme = urlsplit(url).scheme
    if scheme == "posix":
        return _open_posix(url, UrlSigner(signing_key), group, capabilities)
    if scheme == "s3":
        try:
            location = s3_location.parse_s3_url(url)
        except ValueError as error:
            raise StoreUrlError(url, str(error), s3_location.EXAMPLE) from error
        source = FixedCredentials(credentials) if credentials else DefaultChainCredentials(location.profile)
        return S3Store(location, source, capabilities=capabilities)
    if scheme == "gs":
        return _open_gcs(url, capabilities)
    if scheme == "gcs":
        raise StoreUrlError(url, "Google's own tools write gs://, and so does Holdfast", gcs_location.EXAMPLE)
    raise StoreUrlError(url, f"it begins with {scheme!r}, not with posix, s3 or gs", _POSIX_EXAMPLE)


def _open_posix(url: str, signer: UrlSigner, group: int | None, capabilities: Capabilities | None) -> PosixStore:
    parts = urlsplit(url)
    if parts.netloc:
        raise StoreUrlError(url, f"{parts.netloc!r} stands where the path begins; use three slashes", _POSIX_EXAMPLE)
    root = Path(unquote(parts.path))
    if not root.is_absolute() or root == Path("/") or parts.query:
        raise StoreUrlError(url, "it must be the absolute path of one folder and nothing more", _POSIX_EXAMPLE)
    store = PosixStore(root, signer, group=group, capabilities=capabilities)
    with suppress(StoreUnavailable):
        if root.exists():
            store.close_to_others()
        else:
            store.prepare()
    return store


def _open_gcs(url: str, capabilities: Capabilities | None) -> GcsStore:
    try:
        location = gcs_location.parse_gcs_url(url)
    except ValueError as error:
        raise StoreUrlError(url, str(error), gcs_location.EXAMPLE) from error
    pool = StorePool()
    identity = default_identity(pool)
    wire = GcsWire(location, identity, pool)
    return GcsStore(location, wire, signer_for(location, identity, pool), capabilities=capabilities)
