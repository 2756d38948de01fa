"""The way to a bucket: the certificates that are trusted, the proxy that is used, and what a failure on the way means.

AWS_CA_BUNDLE, REQUESTS_CA_BUNDLE, SSL_CERT_FILE   a file of certificates to trust; the first that is set
HTTPS_PROXY, HTTP_PROXY, ALL_PROXY, NO_PROXY       also in lower case

Each vendor's library reads some of these variables. They are read here, because every store must obey all of them.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import urllib3

from holdfast_protocol import stores
from holdfast_service.stores.base import StoreError, StoreRefused, StoreUnavailable

CONNECT_SECONDS = 5.0
READ_SECONDS = 60.0
CONNECTIONS = 64
_CA_VARIABLES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")
# What OpenSSL calls an answer that is no TLS, by its version.
_NO_TLS = {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL", "PACKET_LENGTH_TOO_LONG"}


def authorities() -> str | None:
    """The file of certificates to trust: the environment's, else the machine's own; None if there is neither.
    StoreRefused if the environment names a file that is not there."""
    for variable in _CA_VARIABLES:
        path = os.environ.get(variable)
        if path:
            if not Path(path).is_file():
                raise StoreRefused(f"{variable} names {path}, which is not there as a file; correct it or leave it out")
            return path
    return ssl.get_default_verify_paths().cafile


def proxy_for(url: str) -> str | None:
    """The proxy that requests to `url` go by; None: they go directly. StoreRefused if it is no URL."""
    try:
        return stores.proxy_for(url)
    except ValueError as error:
        raise StoreRefused(str(error)) from None


def connections(origin: str) -> urllib3.PoolManager:
    """For requests to `origin` that carry their signature in the URL. It repeats nothing and follows no redirect."""
    options: dict[str, Any] = {
        "maxsize": CONNECTIONS,
        "timeout": urllib3.Timeout(connect=CONNECT_SECONDS, read=READ_SECONDS),
        "retries": urllib3.Retry(total=False, redirect=False, raise_on_status=False),
        "ca_certs": authorities(),
    }
    proxy = proxy_for(origin)
    if proxy is None:
        return urllib3.PoolManager(**options)
    address, login = stores.split_login(proxy)
    return urllib3.ProxyManager(address, proxy_headers=urllib3.make_headers(proxy_basic_auth=login), **options)


def unreachable(name: str, error: BaseException) -> StoreError:
    """What stands between the service and the store; to be tried again only if that may help. `name` begins the
    sentence. The libraries wrap urllib3's and OpenSSL's exceptions, so what they wrapped decides."""
    for cause in _causes(error):
        if isinstance(cause, urllib3.exceptions.ProxyError):
            return StoreUnavailable(
                f"{name} is not reached: the proxy on the way does not let the service through "
                f"({type(cause.original_error).__name__}); check HTTPS_PROXY, HTTP_PROXY and NO_PROXY"
            )
        if isinstance(cause, ssl.SSLCertVerificationError):
            return StoreRefused(
                f"{name} shows a certificate that is not trusted ({cause.verify_message}); name the file of its "
                "authority in AWS_CA_BUNDLE, or put a right certificate on the server"
            )
        if isinstance(cause, ssl.SSLError) and cause.reason in _NO_TLS:
            return StoreRefused(
                f"{name} does not speak TLS on this port; write endpoint=http://… in the store's URL, or name the port "
                "of its https"
            )
    return StoreUnavailable(f"{name} does not answer ({type(error).__name__}); check that it is up")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The exception and what it was raised from, or holds, nearest first."""
    left, seen = [error], set[int]()
    while left:
        found = left.pop(0)
        if id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        held = (*found.args, getattr(found, "reason", None), found.__cause__, found.__context__)
        left += [each for each in held if isinstance(each, BaseException)]
