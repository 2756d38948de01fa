"""The connections of `holdfast serve`: who is turned away at the door, how many there are, how long each may take to
say what it wants, TLS, the strict reading of a request's head, and the caller's address behind a reverse proxy.

`bounded_connections` is for `uvicorn.Config(http=…)`. uvicorn makes one protocol object for each connection that it
accepts.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import os
import re
import socket
import ssl
import time
from asyncio.sslproto import SSLProtocol
from collections import Counter as Counts
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import structlog
from h11 import Connection, LocalProtocolError
from h11._receivebuffer import ReceiveBuffer, blank_line_regex
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from holdfast_protocol.problems import ProblemCode
from holdfast_service.auth.principal import keep_newest, network_of
from holdfast_service.errors import ProblemError
from holdfast_service.settings import ServiceSettings, SettingsError
from holdfast_service.web.fair_queue import WrongTokens
from holdfast_service.web.problem_reply import problem_response

CONNECTION = "holdfast_connection"
"""Under this name a request's scope holds its BoundedConnection, where there is a connection."""
STREAMS = "holdfast_streams"
"""Under this name it says that the reply goes on for as long as somebody reads."""

UNREAD_SECONDS = 300.0
"""Who takes so little of a reply in this time has gone. The slowest client that is allowed takes 64 KiB a second."""

_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_TURNED_AWAY = problem_response(
    ProblemError(
        ProblemCode.TOO_MANY_FAILURES,
        "Too many calls from this address had a token that is not valid, so most of its connections are not served. "
        "Correct HOLDFAST_TOKEN there.",
        retry_after_seconds=5,
    ),
    request_id="none",
)
# Clients that keep connections for later do not read that the service closes one, and do not answer.
_TLS_CLOSES_WITHIN_SECONDS = 5.0

LET_IN_AT_ONCE = 64
"""In one round of the loop: each takes an open file, and the calls of others wait meanwhile."""

_LOGGED_AGAIN_SECONDS = 3600.0
_SERVED_AGAIN_SECONDS = 60.0

_log = structlog.get_logger("holdfast.connections")


class ServingLoop(asyncio.SelectorEventLoop):
    """asyncio's own, with a door before each listening socket that it is given. `by_tls`: who is turned away is told
    nothing, as it has not shaken hands."""

    def __init__(self, wrong_tokens: WrongTokens, *, by_tls: bool) -> None:
        super().__init__()
        self._wrong_tokens = wrong_tokens
        self._told = b"" if by_tls else _whole(_TURNED_AWAY)

    async def create_server(self, *given: Any, sock: socket.socket | None = None, **more: Any) -> asyncio.Server:
        if sock is None:
            raise ValueError("this loop serves a socket that it is given")
        door = _Door(sock, self._wrong_tokens, self._told)
        try:
            return await super().create_server(*given, sock=door, **more)
        except BaseException:
            door.close()
            raise


class _Door(socket.socket):
    """A listening socket, beside the one that was given. A connection that asyncio has accepted costs 0.2 ms before its
    first byte is read, and is closed two rounds of the loop after it was cut off. So one that is turned away never gets
    that far."""

    def __init__(self, listening: socket.socket, wrong_tokens: WrongTokens, told: bytes) -> None:
        super().__init__(listening.family, listening.type, listening.proto, fileno=os.dup(listening.fileno()))
        self._wrong_tokens = wrong_tokens
        self._told = told
        self._left = LET_IN_AT_ONCE
        self._logged: OrderedDict[str, float] = OrderedDict()

    def accept(self) -> tuple[socket.socket, Any]:
        """Raises BlockingIOError where nobody waits, and after so many: asyncio asks again in the next round."""
        try:
            while self._left:
                self._left -= 1
                connection, address = super().accept()
                # Who calls by a Unix socket has no address.
                if not isinstance(address, tuple) or not self._turns_away(network_of(address[0])):
                    return connection, address
                with suppress(OSError), connection:
                    connection.setblocking(False)
                    connection.send(self._told)
        except BlockingIOError:
            pass
        except OSError:
            self._left = 0  # without a file left asyncio would try the whole backlog, and log each
            raise
        self._left = LET_IN_AT_ONCE
        raise BlockingIOError

    def _turns_away(self, address: str) -> bool:
        now = time.monotonic()
        if not self._wrong_tokens.turns_away(address, now):
            return False
        if now - self._logged.get(address, -math.inf) > _LOGGED_AGAIN_SECONDS:
            keep_newest(self._logged, address, now)
            _log.warning(
                "connections_turned_away",
                address=address,
                reason="Calls from there go on with tokens that are not valid. Correct HOLDFAST_TOKEN there, or keep "
                "that address out.",
            )
        return True


def _whole(reply: Response) -> bytes:
    head = [b"HTTP/1.1 429 Too Many Requests", b"connection: close", *(b": ".join(each) for each in reply.raw_headers)]
    return b"\r\n".join([*head, b"", bytes(reply.body)])


def bounded_connections(
    header_seconds: float,
    most: int,
    proxies: TrustedProxies,
    wrong_tokens: WrongTokens,
    tls: Callable[[], ssl.SSLContext] | None = None,
) -> Callable[..., asyncio.BaseProtocol]:
    """One for each server. Connections that do not say what they want cost little and not for long (rule
    limits-before-work). `tls` is asked for each new connection, so a renewed certificate is that of the next one.

    uvicorn waits for the head of a request for ever, and refuses new callers while idle ones fill its limit. Here a
    head has `header_seconds`, and so has a TLS handshake before it, and what is left of a body that was refused; a
    reply that waits to be read has UNREAD_SECONDS. For a connection too many see `_Places`. `wrong_tokens`
    are told what came of each, and the door asks them.
    """
    places = _Places(most, proxies)

    class BoundedConnection(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None
        _unread: asyncio.TimerHandle | None = None
        _refused: object = None
        """The cycle of the request that is refused already."""
        ending: asyncio.Event
        """Set when the server or the connection ends."""
        has_shown_certificate: bool
        """One that TLS has verified."""
        ends_with_reply = False
        """It is closed behind the reply to the request in hand, which says so."""
        _served_at = -math.inf

        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            read_strictly(self.conn)

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.client = _caller_of(transport)
            self.ending = asyncio.Event()
            self.has_shown_certificate = bool(transport.get_extra_info("peercert"))
            if not places.take(self, transport):
                self.transport.write(_FULL)
                self.transport.close()
            self._look()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self.ending.set()
            self._cancel_deadline()
            self._is_read()
            places.leave(self)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._unread = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._is_read()

        def _is_read(self) -> None:
            if self._unread is not None:
                self._unread.cancel()
                self._unread = None

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._name_itself()
            self._look()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._name_itself()  # a next request that came with the first one
            # uvicorn's own time for idle connections runs now, until the next byte comes.
            if not self._busy() and not self.transport.is_closing():
                places.waits(self)

        def makes_room(self) -> None:
            """Though it has a request in hand: for one that is refused already. What else comes of that changes
            nothing."""
            self._refused = self.cycle
            places.waits(self)

        def was_served(self) -> None:
            now = time.monotonic()
            if self.client is not None and now - self._served_at > _SERVED_AGAIN_SECONDS:
                self._served_at = now
                wrong_tokens.was_served(network_of(self.client[0]), now)

        def had_wrong_token(self) -> None:
            """Its request is refused because too many before it had one. Behind a trusted proxy they are of many."""
            if self.client is not None and not proxies.has(self.client[0]):
                wrong_tokens.was_refused(network_of(self.client[0]), time.monotonic())
                self.ends_with_reply = True

        def shutdown(self) -> None:
            self.ending.set()
            if self._busy() and self.scope.get(STREAMS) and self.flow.write_paused:
                self.transport.abort()  # nobody reads what is to be sent before the end
            super().shutdown()

        def _name_itself(self) -> None:
            """Before the application has the request."""
            scope: dict[str, Any] | None = self.scope  # type: ignore[assignment]
            if scope is not None:
                scope.setdefault(CONNECTION, self)

        def _busy(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _look(self) -> None:
            if self._busy() and self.cycle is self._refused:
                return
            if self._busy() or self.transport.is_closing():
                self._cancel_deadline()
                sends = self._busy() and self.cycle.more_body and not self.transport.is_closing()
                places.has_request(self, sends=sends)
                return
            places.waits(self)
            if self._deadline is None:
                self._deadline = self.loop.call_later(header_seconds, self.transport.abort)

        def _cancel_deadline(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    if tls is None:
        return BoundedConnection
    newest_context = tls

    class SecuredConnection(SSLProtocol):
        """asyncio's own TLS around a BoundedConnection. `loop.create_server(ssl=…)` would keep one context for ever,
        and would not count what has not ended its handshake."""

        def __init__(self, connection: BoundedConnection) -> None:
            super().__init__(
                connection.loop,
                connection,
                newest_context(),
                None,  # type: ignore[arg-type]  # nobody waits for the handshake
                server_side=True,
                ssl_handshake_timeout=header_seconds,  # type: ignore[arg-type]  # asyncio takes fractions
                ssl_shutdown_timeout=_TLS_CLOSES_WITHIN_SECONDS,
            )
            self._inside = connection

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            assert isinstance(transport, asyncio.Transport)
            if not places.take(self._inside, transport):
                transport.abort()

        def connection_lost(self, exc: BaseException | None) -> None:
            super().connection_lost(exc)
            places.leave(self._inside)  # the one inside hears of it only if it was told that it is connected

    def secured(**given: Any) -> SecuredConnection:
        return SecuredConnection(BoundedConnection(**given))

    return secured


def _caller_of(transport: asyncio.BaseTransport) -> tuple[str, int] | None:
    """None: by a Unix socket. As it was when the connection came: a caller that has reset it since has no address any
    more, but its call is read all the same."""
    name = transport.get_extra_info("peername")
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None


class _Places:
    """The connections of one server, by address. One too many takes the place of one without a request: the longest of
    the address that has the most of them. If there is none, it takes the place of one in the middle of its body, but
    only of an address with more of these than its own has connections. Else the new one is refused. So an address that
    floods the service with halves of requests takes places from itself. A trusted proxy's connections are those of
    many callers, and it hands on whole heads: they make room when no other is left.
    """

    def __init__(self, most: int, proxies: TrustedProxies) -> None:
        self._most = most
        self._proxies = proxies
        self._of_proxies: set[str] = set()  # addresses of theirs that have called
        self._taken: dict[H11Protocol, tuple[str, asyncio.Transport]] = {}
        self._open_of: Counts[str] = Counts()
        self._waiting: _ByAddress = {}  # without a request in hand
        self._sending: _ByAddress = {}  # in the middle of a body

    def take(self, connection: H11Protocol, transport: asyncio.Transport) -> bool:
        """Whether there is room for it. Of TLS it is asked twice: what is beneath comes first."""
        caller = _caller_of(transport)
        peer = "" if caller is None else caller[0]
        address = network_of(peer)
        is_new = connection not in self._taken
        self._taken[connection] = address, transport
        if is_new:
            self._open_of[address] += 1
            if self._proxies.has(peer or None):
                self._of_proxies.add(address)
            if len(self._taken) > self._most and not self._make_room(address):
                return False
        self.waits(connection)
        return True

    def leave(self, connection: H11Protocol) -> None:
        """Again, it changes nothing."""
        if connection not in self._taken:
            return
        self.has_request(connection, sends=False)
        address, _ = self._taken.pop(connection)
        self._open_of[address] -= 1
        if not self._open_of[address]:
            del self._open_of[address]

    def waits(self, connection: H11Protocol) -> None:
        self._put(self._waiting, connection)
        self._drop(self._sending, connection)

    def has_request(self, connection: H11Protocol, *, sends: bool) -> None:
        """`sends`: its body has not ended."""
        self._drop(self._waiting, connection)
        if sends:
            self._put(self._sending, connection)
        else:
            self._drop(self._sending, connection)

    def _make_room(self, address: str) -> bool:
        idle = next(iter(self._most_of_one(self._waiting)), None)
        if idle is not None:
            self._cut_off(idle)
            return True
        halves = self._most_of_one(self._sending)
        # A body that the service itself does not read on waits for its turn, and is not late.
        half = next((each for each in halves if not each.flow.read_paused), None)
        if half is None or len(halves) <= self._open_of[address]:
            return False
        self._cut_off(half)
        return True

    def _most_of_one(self, kept: _ByAddress) -> dict[H11Protocol, None]:
        """Those of the address that has the most, of a proxy only if all are of proxies."""
        strangers = [each for address, each in kept.items() if address not in self._of_proxies]
        return max(strangers or kept.values(), key=len, default={})

    def _cut_off(self, connection: H11Protocol) -> None:
        self._taken[connection][1].abort()
        self.has_request(connection, sends=False)

    def _put(self, kept: _ByAddress, connection: H11Protocol) -> None:
        if connection in self._taken:
            kept.setdefault(self._taken[connection][0], {}).setdefault(connection)

    def _drop(self, kept: _ByAddress, connection: H11Protocol) -> None:
        address = self._taken[connection][0] if connection in self._taken else ""
        of_address = kept.get(address, {})
        of_address.pop(connection, None)
        if not of_address:
            kept.pop(address, None)


_ByAddress = dict[str, dict[H11Protocol, None]]
"""Connections, those that came first before the others."""


# A line that ends without CR, a CR within a line, or a line that goes on in the next one.
_LOOSE = re.compile(rb"(?<!\r)\n|\r(?!\n)|\n[ \t]")
_LENGTH, _CHUNKED = b"content-length", b"transfer-encoding"
_MAY_SAY = {b"HTTP/1.1": {_LENGTH, _CHUNKED}, b"HTTP/1.0": {_LENGTH}}
"""How a head may say where the body ends, by its version. What follows a chunked body says nothing of it."""


def read_strictly(connection: Connection) -> None:
    """Before its first byte. uvicorn then answers such a request with 400, and closes."""
    connection._receive_buffer = _StrictBuffer()


class _StrictBuffer(ReceiveBuffer):
    """Refuses a request whose end two programs could see in different places. A proxy in front and the service would
    not agree, and what one takes for a body the other answers as a request: of whoever comes next on that connection.

    h11 takes what HTTP lets a server take. It has no setting for less, so its buffer is changed, which cuts out heads.
    """

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """Raises LocalProtocolError, which h11 makes the sender's."""
        if self._data[:1] == b"\n":
            raise LocalProtocolError("a line ends without CR")
        end = blank_line_regex.search(self._data, self._multiple_lines_search)
        raw = b"" if end is None else bytes(self._data[: end.end()])
        lines = super().maybe_extract_lines()
        if lines:
            _refuse_ambiguous(raw, lines)
        return lines


def _refuse_ambiguous(raw: bytes, lines: list[bytearray]) -> None:
    if _LOOSE.search(raw):
        raise LocalProtocolError("a line ends without CRLF, or goes on in the next one")
    names = (bytes(line.partition(b":")[0]).lower() for line in lines)
    said = [name for name in names if name in (_LENGTH, _CHUNKED)]
    if len(said) > 1 or not set(said) <= _MAY_SAY.get(bytes(lines[0][-8:]), set()):
        raise LocalProtocolError("where the body ends is said twice, or as this version of HTTP does not say it")


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
    """Puts the caller's address and scheme in place of the proxy's: what a trusted proxy says of them counts, and no
    other's word. Pure ASGI; it comes before all that asks for them.

    The address decides whose failures are counted and what the log says, so a caller must not choose it. A proxy
    appends to X-Forwarded-For the address that it sees. So it is read from the right: over each address that is itself
    a trusted proxy, up to the first that is not. What stands to the left of that one was sent by the caller and means
    nothing.
    """

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
