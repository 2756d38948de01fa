"""Where a webhook may call, and where never: a URL that a user gives must not make the service talk to its own network.

The name is resolved here, every address that it has must be public, and the call goes to the very address that was
looked at (`deliver.py`): a name that answers differently a moment later changes nothing. Hosts that the operator has
put on the list of HOLDFAST_WEBHOOK_ALLOWED_HOSTS are exempt, and only they may be called over http.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Sequence[str]]

_REFUSED = tuple(
    ipaddress.ip_network(network)
    for network in (
        "100.64.0.0/10",  # shared with a provider's other customers; the metadata of one cloud is there
        "168.63.129.16/32",  # Azure's host
        "192.0.0.0/24",  # protocol assignments; Oracle's metadata
        "192.88.99.0/24",  # relays of 6to4
        "fec0::/10",  # once site-local
    )
)
_EMBEDS_IPV4 = tuple(ipaddress.IPv6Network(network) for network in ("64:ff9b::/96", "64:ff9b:1::/48", "::/96"))


class RefusedTargetError(ValueError):
    """The service does not call this. The message says why, and what to do; it does not repeat the URL."""


@dataclass(frozen=True)
class Target:
    """`addresses`: those that were looked at, in the order in which to try them."""

    tls: bool
    host: str
    port: int
    path: str
    addresses: tuple[str, ...]


def parsed(url: str, allowed_hosts: Collection[str]) -> SplitResult:
    """The URL, as far as it can be judged without asking a name server. Raises RefusedTargetError."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise RefusedTargetError("The URL is not one. Write it as https://host/path.") from None
    if not url.isascii() or any(letter <= " " or letter in "\\\x7f" for letter in url):
        raise RefusedTargetError("The URL has letters that a URL cannot have. Write them as %xx, the name as xn--….")
    if not host:
        raise RefusedTargetError("The URL names no host. Write it as https://host/path.")
    try:
        host.encode("idna")  # as the resolver does, which raises for a part that is empty or has more than 63 letters
    except UnicodeError:
        raise RefusedTargetError("The URL's host is no name that can be looked up. Correct it.") from None
    if parts.username is not None or parts.password is not None:
        raise RefusedTargetError("The URL holds a user or a password. Check the signature instead.")
    if parts.scheme == "https" or (parts.scheme == "http" and is_allowed(host, port or 80, allowed_hosts)):
        return parts
    raise RefusedTargetError(
        "Only https:// is called. An operator can put a host of their own network on HOLDFAST_WEBHOOK_ALLOWED_HOSTS."
    )


def find_target(url: str, allowed_hosts: Collection[str], resolve: Resolve | None = None) -> Target:
    """Resolves the name. Raises RefusedTargetError, and OSError if there is no such name."""
    parts = parsed(url, allowed_hosts)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    addresses = tuple(dict.fromkeys((resolve or _resolve)(host, port)))
    if not addresses:
        raise OSError(f"{host} has no address")
    if not is_allowed(host, port, allowed_hosts):
        for address in addresses:
            if not is_public(ipaddress.ip_address(address.partition("%")[0])):
                raise RefusedTargetError(
                    f"{host} has an address that is not public. An operator can allow the host by "
                    "HOLDFAST_WEBHOOK_ALLOWED_HOSTS."
                )
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(parts.scheme == "https", host, port, path, addresses)


def is_allowed(host: str, port: int, allowed_hosts: Collection[str]) -> bool:
    """By name and port, or by name for all its ports; a name means itself and not what lies below it."""
    name = host.lower().rstrip(".")
    shown = f"[{name}]" if ":" in name else name
    return shown in allowed_hosts or f"{shown}:{port}" in allowed_hosts


def is_public(address: Address) -> bool:
    """Whether it is outside: no address of this machine, of its network, or of its cloud."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if address.sixtofour is not None or address.teredo is not None:
            return False
        if any(address in network for network in _EMBEDS_IPV4):
            return False
    if any(address.version == network.version and address in network for network in _REFUSED):
        return False
    return address.is_global and not (
        address.is_private
        or address.is_loopback
        or address.is_link_local
        or address.is_multicast
        or address.is_reserved
        or address.is_unspecified
    )


def _resolve(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(sockaddr[0]) for *_, sockaddr in found]
