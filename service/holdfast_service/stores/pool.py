"""Connections to buckets, with the authorities and the proxies that the environment names, as for the vendors' tools.

AWS_CA_BUNDLE, REQUESTS_CA_BUNDLE, SSL_CERT_FILE   a file (or folder) of certificates to trust; the first that is set
HTTPS_PROXY, HTTP_PROXY, ALL_PROXY, NO_PROXY       also in lower case
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment, proxy_bypass_environment  # type: ignore[attr-defined]

import urllib3

from holdfast_service.stores.base import StoreRefused

_CONNECT_SECONDS = 5.0
_READ_SECONDS = 60.0
_CONNECTIONS = 64
_CA_VARIABLES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")
_NEVER_BY_PROXY = ("localhost", "metadata.google.internal", "169.254.169.254", "::1")
"""This machine, and what a cloud tells it of itself."""


class StorePool(urllib3.PoolManager):
    """Never retries and follows no redirect: whoever uses it knows what may be repeated."""

    def __init__(self) -> None:
        options: dict[str, Any] = {
            "maxsize": _CONNECTIONS,
            "timeout": urllib3.Timeout(connect=_CONNECT_SECONDS, read=_READ_SECONDS),
            "retries": False,
            **_authorities(),
        }
        super().__init__(**options)
        self._proxies = getproxies_environment()
        # Made now, so that a proxy that is no URL stops the start.
        self._by_proxy = {proxy: _proxy_manager(proxy, options) for proxy in set(self._proxies.values()) if proxy}

    def urlopen(  # type: ignore[override]
        self, method: str, url: str, redirect: bool = False, **options: Any
    ) -> urllib3.BaseHTTPResponse:
        del redirect
        proxy = self._proxy_of(url)
        if proxy is not None:
            return self._by_proxy[proxy].urlopen(method, url, redirect=False, **options)
        return super().urlopen(method, url, redirect=False, **options)

    def clear(self) -> None:
        super().clear()
        for each in self._by_proxy.values():
            each.clear()

    def _proxy_of(self, url: str) -> str | None:
        parts = urlsplit(url)
        host = parts.hostname or ""
        if host in _NEVER_BY_PROXY or host.startswith("127."):
            return None
        if proxy_bypass_environment(parts.netloc.rpartition("@")[2], self._proxies):
            return None
        return self._proxies.get(parts.scheme) or self._proxies.get("all") or None


def _authorities() -> dict[str, str]:
    for variable in _CA_VARIABLES:
        path = os.environ.get(variable)
        if path:
            if not Path(path).exists():
                raise StoreRefused(f"{variable} names {path}, which is not there; correct it or leave it out")
            return {"ca_cert_dir" if Path(path).is_dir() else "ca_certs": path}
    return {}


def _proxy_manager(proxy: str, options: dict[str, Any]) -> urllib3.ProxyManager:
    url = proxy if "://" in proxy else f"http://{proxy}"
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise StoreRefused("HTTPS_PROXY, HTTP_PROXY or ALL_PROXY is no http:// or https:// URL; correct it")
    headers = None
    if parts.username is not None:
        both = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers = urllib3.make_headers(proxy_basic_auth=both)
    return urllib3.ProxyManager(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}", proxy_headers=headers, **options)
