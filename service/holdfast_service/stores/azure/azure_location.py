"""`az://container/prefix?account=...&endpoint=...` -> where the container is. Pure.

`endpoint` is for private endpoints, sovereign clouds and test servers. Where its host does not begin with the account's
name, the account stands in the path, as with Azurite; `path_style=false` is for a domain of one's own.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from holdfast_service.stores.bucket.location import BucketLocation, origin_option, split_bucket_url

EXAMPLE = "az://my-container/checkpoints?account=myaccount"
_CONTAINER = re.compile(r"(?=.{3,63}$)[a-z0-9]+(?:-[a-z0-9]+)*")
_ACCOUNT = re.compile(r"[a-z0-9]{3,24}")
_OPTIONS = ("account", "endpoint", "public_endpoint", "path_style")


@dataclass(frozen=True, slots=True)
class AzureLocation(BucketLocation):
    """A container (`bucket`) of a storage account. `account_path` comes before the container: `/account`, or nothing
    where the account is part of the host."""

    account: str
    account_path: str

    @property
    def account_url(self) -> str:
        """As the service reaches the account."""
        return self.origin + self.account_path


def parse_azure_url(url: str) -> AzureLocation:
    """ValueError says what is wrong with the URL."""
    container, prefix, options = split_bucket_url(url, _CONTAINER, _OPTIONS, keys_belong_in="AZURE_STORAGE_KEY")
    account = options.get("account") or os.environ.get("AZURE_STORAGE_ACCOUNT")
    if account is None:
        raise ValueError("it names no storage account; add ?account=... or set AZURE_STORAGE_ACCOUNT")
    if not _ACCOUNT.fullmatch(account):
        raise ValueError(f"its account {account!r} is no name of a storage account")
    endpoint = origin_option(options, "endpoint")
    origin = endpoint or f"https://{account}.blob.core.windows.net"
    public = origin_option(options, "public_endpoint") or origin
    named_by_host = (urlsplit(origin).hostname or "").startswith(f"{account}.")
    path_style = options.get("path_style", str(not named_by_host)).lower()
    if path_style not in {"true", "false"}:
        raise ValueError(f"its path_style is {options['path_style']!r}; say true or false")
    account_path = f"/{account}" if path_style == "true" else ""
    return AzureLocation(container, prefix, origin, public, f"{account_path}/{container}", account, account_path)
