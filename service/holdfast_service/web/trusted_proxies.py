"""Who calls, where a reverse proxy stands in front: what a trusted proxy says of it counts, and no other's word.

The address decides whose failures are counted and what the log says, so a caller must not choose it. A proxy appends to
X-Forwarded-For the address that it sees. So it is read from the right: over each address that is itself a trusted
proxy, up to the first that is not. What stands to the left of that one was sent by the caller and means nothing.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast_service.settings import ServiceSettings, SettingsError

_BY_SOCKET = "unix"


@dataclass(frozen=True)
class TrustedProxies:
    """Whose word about the caller counts: `networks`, and with `unix` who calls by the service's Unix socket."""

    networks: tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...] = ()
    unix: bool = False

    @classmethod
    def of(cls, settings: ServiceSettings) -> TrustedProxies:
        """Raises SettingsError."""
        try:
            proxies = cls.parse(settings.trusted_proxies)
        except ValueError as error:
            raise SettingsError(f"HOLDFAST_TRUSTED_PROXIES is not usable: {error}.") from None
        if proxies.unix and settings.socket is None:
            raise SettingsError("HOLDFAST_TRUSTED_PROXIES names `unix`, and HOLDFAST_SOCKET is not set. Set both.")
        return proxies

    @classmethod
    def parse(cls, text: str) -> TrustedProxies:
        """ValueError says what is wrong."""
        names = [name for part in text.split(",") if (name := part.strip())]
        try:
            networks = tuple(ipaddress.ip_network(name) for name in names if name != _BY_SOCKET)
        except ValueError as error:
            raise ValueError(f"{error}; name addresses, networks such as 10.1.0.0/24, or `{_BY_SOCKET}`") from None
        if any(network.prefixlen == 0 for network in networks):
            raise ValueError("it holds every address, so each caller could choose its own; name those of the proxies")
        return cls(networks, _BY_SOCKET in names)

    def has(self, address: str | None) -> bool:
        """None: it came by the Unix socket."""
        if address is None:
            return self.unix
        known = _address(address) if self.networks else None
        return known is not None and any(known in network for network in self.networks)


class CallerBehindProxy:
    """Puts the caller's address and scheme in place of the proxy's. Pure ASGI; it comes before all that asks for
    them."""

    def __init__(self, app: ASGIApp, trusted: TrustedProxies) -> None:
        self._app = app
        self._trusted = trusted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._trusted.has(_peer(scope)):
            address = caller_address(_values(scope, b"x-forwarded-for"), self._trusted)
            if address is not None:
                scope["client"] = (address, 0)
            scheme = caller_scheme(_values(scope, b"x-forwarded-proto"))
            if scheme is not None:
                scope["scheme"] = scheme
        await self._app(scope, receive, send)


def caller_address(hops: Sequence[str], trusted: TrustedProxies) -> str | None:
    """`hops`: X-Forwarded-For of a trusted proxy, from left to right. None: it names nobody. If all of them are trusted
    proxies, the first of these is the caller. What is no address ends the list: a proxy that does not know who called
    says `unknown`, and then the caller is that proxy."""
    address: str | None = None
    for hop in reversed(hops):
        found = _address(hop)
        if found is None:
            return address
        address = str(found)
        if not trusted.has(address):
            return address
    return address


def caller_scheme(said: Sequence[str]) -> str | None:
    """`said`: X-Forwarded-Proto of each hop. https only if every hop says so: a cookie for https alone must not be
    given away because the caller has written one of them. None: nothing that can be used."""
    schemes = {each.lower() for each in said}
    if not schemes or not schemes <= {"http", "https"}:
        return None
    return "https" if schemes == {"https"} else "http"


def _peer(scope: Scope) -> str | None:
    return None if scope.get("client") is None else scope["client"][0]


def _values(scope: Scope, name: bytes) -> list[str]:
    """Of a header that is a list, whether in one line or in several."""
    lines = [value.decode("latin-1") for each, value in scope["headers"] if each == name]
    return [value.strip() for line in lines for value in line.split(",")]


def _address(hop: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Without its port, which some proxies add. An IPv4 address stays one if it is written as one of IPv6."""
    host = hop
    if hop.startswith("["):
        host = hop[1:].partition("]")[0]
    elif hop.count(":") == 1:
        host = hop.partition(":")[0]
    try:
        known = ipaddress.ip_address(host)
    except ValueError:
        return None
    return (known.ipv4_mapped if isinstance(known, ipaddress.IPv6Address) else None) or known
