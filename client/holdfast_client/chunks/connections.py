"""The connections to stores: how many transfers may use them at once and how fast, how long a ticket for them may be
used, and the meaning of a store's refusal.

One RateLimit per store, shared by all uploads and downloads of a client. TransferWindow and ByteRate decide, and are
pure; RateLimit has the lock, the clock and the waiting. Without a limit it costs nothing.
"""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urljoin, urlsplit

import urllib3
from pydantic import ValidationError
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import HTTPError

from holdfast_client.chunks.workers import CoreLimit, usable_cores
from holdfast_client.errors import (
    ChecksumMismatch,
    ChunkNotFound,
    ConfigurationError,
    HoldfastError,
    ServiceUnavailable,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
    TicketExpired,
    TicketProblem,
    certificate_refused,
    from_problem,
)
from holdfast_client.settings import ClientSettings
from holdfast_client.transport import (
    Backoff,
    check_stop,
    jittered_seconds,
    keep_queries_out_of_logs,
    may_pass,
    retry_after_seconds,
)
from holdfast_protocol.checkpoints import StoreAnswer
from holdfast_protocol.problems import Problem
from holdfast_protocol.states import StoreRole
from holdfast_protocol.stores import proxy_for, split_login

# How many transfers at once, and how many bytes per second.

BURST_SECONDS = 0.25
"""Unused bytes are kept this long: a pause must not be followed by a flood."""

SLICES_PER_SECOND = 64
"""A slice is at most this part of a second's bytes, so that none of many transfers is silent until the store hangs
up."""
SMALLEST_SLICE_BYTES = 4096


class ByteRate:
    def __init__(self, bytes_per_second: int, now: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._free_at = now
        self.slice_bytes = max(SMALLEST_SLICE_BYTES, bytes_per_second // SLICES_PER_SECOND)

    def acquire(self, count_bytes: int, now: float) -> float:
        """Seconds from `now` until the bytes may move; in the order of the calls."""
        begin = max(self._free_at, now - BURST_SECONDS)
        self._free_at = begin + count_bytes / self._bytes_per_second
        return max(0.0, begin - now)


LONGEST_HOLD_SECONDS = 60.0
PROBE_STRETCHES = 8
"""Stretches of successes until the last refused number is reached again: a store's capacity seldom changes."""


class TransferWindow:
    """How many transfers may run at once. No limit until the store asks for one; never below one.

    A refusal that asks to slow down halves the number, a stretch of successes adds one (AIMD, as in TCP: users of one
    store reach fair shares without knowing each other)."""

    def __init__(self, jittered_seconds: Callable[[int], float]) -> None:
        """`jittered_seconds(n)`: a random pause after n refusals in a row."""
        self.limit: int | None = None
        self.cuts = 0
        """How often the limit was halved. A transfer keeps the count at which it began."""
        self._jittered_seconds = jittered_seconds
        self._hold_until = 0.0
        self._refused_at: int | None = None
        self._in_a_row = 0
        self._successes = 0

    def wait_seconds(self, running: int, now: float) -> float | None:
        """Seconds until one more may begin: 0 is now, None once a running one has ended."""
        if self.limit is not None and running >= self.limit:
            return None
        return max(0.0, self._hold_until - now)

    def refused(self, began_at_cut: int, running: int, now: float, retry_after_seconds: float) -> None:
        """The store asks to slow down. `running` includes the refused transfer.

        One cut per round trip: a transfer that began before the last cut tells nothing new.
        """
        self._hold_until = max(self._hold_until, now + min(retry_after_seconds, LONGEST_HOLD_SECONDS))
        if began_at_cut != self.cuts:
            return
        self._refused_at = running if self.limit is None else min(running, self.limit)
        self.limit = max(1, self._refused_at // 2)
        self.cuts += 1
        self._in_a_row += 1
        self._successes = 0
        self._hold_until = max(self._hold_until, now + self._jittered_seconds(self._in_a_row))

    def succeeded(self, began_at_cut: int, waiting: int) -> None:
        """One transfer has arrived. `waiting`: transfers that wait for a permit; without any a higher limit serves
        none."""
        if self.limit is None or began_at_cut != self.cuts:
            return
        self._in_a_row = 0
        if not waiting:
            return
        self._successes += 1
        stretches = PROBE_STRETCHES if self.limit + 1 == self._refused_at else 1
        if self._successes >= self.limit * stretches:
            self.limit += 1
            self._successes = 0


_LOOK_SECONDS = 0.1
"""How often a waiter polls its stop event, which cannot wake a condition."""

SLOW_DOWN_STATUSES = frozenset({429, 503})


@dataclass
class Permit:
    """One transfer's try, and the store's answer; without a status the connection broke before it answered."""

    status: int | None = None
    retry_after_seconds: float = 0.0
    ended: bool = False
    """The transfer has read the answer to its end."""
    timed_out: bool = False
    """The connection stood, but no answer came: the store is overloaded and does not say so."""


class RateLimit:
    def __init__(self, bytes_per_second: int | None = None) -> None:
        self._window = TransferWindow(jittered_seconds)
        self._rate = None if bytes_per_second is None else ByteRate(bytes_per_second, time.monotonic())
        self._rate_lock = threading.Lock()
        self._changed = threading.Condition()
        self._running = self._waiting = self._successes = 0

    def beside(self) -> RateLimit:
        """For another store: its own permits, under the same limit on bytes."""
        other = RateLimit()
        other._rate, other._rate_lock = self._rate, self._rate_lock
        return other

    @property
    def limit(self) -> int | None:
        """How many transfers may run at once now; None: the store has not asked for a limit."""
        return self._window.limit

    @contextmanager
    def permit(self, stop: threading.Event | None, backoff: Backoff | None) -> Iterator[Permit]:
        """Waits for a permit, then counts how it ended. `backoff` is not charged for a wait in which other transfers
        succeeded. Raises TransferStopped."""
        began_at_cut = self._enter(stop, backoff)
        permit = Permit()
        try:
            yield permit
            permit.ended = True
        finally:
            self._leave(began_at_cut, permit)

    def slice_bytes(self, most: int) -> int:
        """How many bytes to move at once: `most`, or fewer at a low rate."""
        return most if self._rate is None else min(most, self._rate.slice_bytes)

    def acquire(self, count_bytes: int, stop: threading.Event | None) -> None:
        """Waits until so many bytes may move. Raises TransferStopped."""
        if self._rate is None:
            return
        with self._rate_lock:
            seconds = self._rate.acquire(count_bytes, time.monotonic())
        if seconds > 0:
            (stop.wait if stop is not None else time.sleep)(seconds)
            check_stop(stop)

    def _enter(self, stop: threading.Event | None, backoff: Backoff | None) -> int:
        with self._changed:
            began, successes = time.monotonic(), self._successes
            self._waiting += 1
            try:
                while (seconds := self._window.wait_seconds(self._running, time.monotonic())) != 0:
                    check_stop(stop)
                    self._changed.wait(_LOOK_SECONDS if seconds is None else min(seconds, _LOOK_SECONDS))
            finally:
                self._waiting -= 1
            self._running += 1
            if backoff is not None and self._successes != successes:
                backoff.leave_out(time.monotonic() - began)
            return self._window.cuts

    def _leave(self, began_at_cut: int, permit: Permit) -> None:
        with self._changed:
            if permit.timed_out or permit.status in SLOW_DOWN_STATUSES:
                self._window.refused(began_at_cut, self._running, time.monotonic(), permit.retry_after_seconds)
            elif permit.ended and permit.status is not None and (200 <= permit.status < 300 or permit.status == 412):
                self._successes += 1
                self._window.succeeded(began_at_cut, self._waiting)
            self._running -= 1
            # The ended transfer makes room, and the limit may have grown.
            self._changed.notify(2)


# The connections, and what a store answers on them.


class LiveConnections:
    """The open connections of PoolManagers, which are made through this from here on, so that they can be cut.

    A thread that sends to a stalled store sees no stop event before the time-out, and closing a pool closes only its
    idle connections."""

    def __init__(self) -> None:
        live: weakref.WeakSet[HTTPConnection] = weakref.WeakSet()
        lock = threading.Lock()
        self._live, self._lock = live, lock

        class Plain(HTTPConnection):
            def connect(self) -> None:
                super().connect()
                with lock:
                    live.add(self)

        class Secure(HTTPSConnection):
            def connect(self) -> None:
                super().connect()
                with lock:
                    live.add(self)

        class PlainPool(HTTPConnectionPool):
            ConnectionCls = Plain

        class SecurePool(HTTPSConnectionPool):
            ConnectionCls = Secure

        self._pools = {"http": PlainPool, "https": SecurePool}

    def watch(self, manager: urllib3.PoolManager) -> None:
        manager.pool_classes_by_scheme = self._pools

    def cut(self) -> None:
        """Threads that wait in a connection get an error at once. Idle connections are found dead on their next use,
        and made again. From any thread."""
        with self._lock:
            open_sockets = [connection.sock for connection in self._live if connection.sock is not None]
        for each in open_sockets:
            # Not a TLS socket's own shutdown: it drops its keys first, and later sends would leave unencrypted.
            # In a tunnel through a proxy with TLS, it is the socket to the proxy.
            with contextlib.suppress(OSError):
                socket.socket.shutdown(getattr(each, "socket", each), socket.SHUT_RDWR)


USED_PART = 0.9
"""A transfer that begins in the last tenth of a ticket's life could end after it."""

WAITS_PER_CHUNK = 20
"""How often a chunk may miss its turn. After more, the tickets expire before they are used."""


class TicketWaitedTooLong(TicketExpired):
    """Its turn came too late. No store has refused anything, so this is no reason to give up."""


class TicketLife:
    """Counts on this machine's monotonic clock (rule database-clock)."""

    def __init__(self, expires_in_seconds: int) -> None:
        self._ends = time.monotonic() + expires_in_seconds * USED_PART

    @contextmanager
    def used(self) -> Iterator[None]:
        """Around a transfer. Raises TicketWaitedTooLong if it begins or is refused after the ticket's time; with a slow
        or unavailable store a ticket expires between two tries, which says nothing against the next one."""
        self._check()
        try:
            yield
        except TicketProblem:
            self._check()
            raise

    def _check(self) -> None:
        if time.monotonic() >= self._ends:
            raise TicketWaitedTooLong("The ticket's time was over before its turn came")


LONGEST_BODY_BYTES = 64 * 1024
_CODE = re.compile(rb"<Code>\s*([A-Za-z0-9._-]{1,100})\s*</Code>")

_EXPIRED_CODES = {"ExpiredToken", "TokenRefreshRequired", "RequestExpired", "RequestTimeTooSkewed"}
_CHECKSUM_CODES = {"BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"}
_TRANSIENT_CODES = {
    "SlowDown",
    "RequestTimeout",
    "IncompleteBody",  # something in between has cut the body off
    "ServiceUnavailable",
    "InternalError",
    "OperationAborted",
    "ConditionalRequestConflict",
    "Throttling",
    "ThrottlingException",
    "RequestLimitExceeded",
    "TooManyRequests",
}
_ARCHIVED_CODES = {"InvalidObjectState"}
"""Not to be read before a thaw. The client reports it, and the service says that the checkpoint is cold."""
_FULL_CODES = {"XMinioStorageFull", "QuotaExceeded", "InsufficientStorage"}


def error_code(body: bytes) -> str:
    """The code in a store's error document; empty if there is none."""
    match = _CODE.search(body)
    return match[1].decode() if match else ""


def refusal(status: int, body: bytes, answers: Mapping[str, StoreAnswer]) -> HoldfastError:
    """ServiceUnavailable: retry. TicketProblem: ask for a new ticket. The others are final. Pure.

    The body is S3's XML, or problem+json if the ticket leads to the service itself. `answers`: the ticket's meanings of
    this store's own codes, so that a store of another vendor needs no newer client."""
    try:
        return _of_the_service(from_problem(Problem.model_validate_json(body)))
    except ValidationError:
        pass
    code = error_code(body)
    answer = answers.get(code)
    said = f"{status} {code}".strip()
    if answer is StoreAnswer.MISMATCH or code in _CHECKSUM_CODES:
        return ChecksumMismatch(f"The store received other bytes than were announced ({said})")
    if answer is StoreAnswer.FULL or status == 507 or code in _FULL_CODES:
        return StoreFull(f"The store has no room left ({said})")
    if answer is StoreAnswer.LATER:
        return StoreUnavailable(f"The store asks to try later ({said})", context={"said": said})
    if code in _ARCHIVED_CODES:
        return ChunkNotFound("The store has archived this chunk")
    if answer is StoreAnswer.EXPIRED or code in _EXPIRED_CODES or status in (401, 403):
        return TicketExpired(f"The store does not accept this ticket ({said})", context={"said": said})
    if answer is StoreAnswer.MISSING:
        return ChunkNotFound("The store does not have this chunk")
    if code in _TRANSIENT_CODES or status == 409 or may_pass(status):
        return StoreUnavailable(f"The store asks to try later ({said})", context={"said": said})
    if status == 404 and code in ("", "NoSuchKey", "NoSuchVersion", "NotFound"):
        return ChunkNotFound("The store does not have this chunk")
    return StoreRefused(f"The store refuses the transfer ({said})", context={"said": said})


def _of_the_service(error: HoldfastError) -> HoldfastError:
    """A restarting service may answer with a bug's 500 once, so a transfer is retried."""
    if error.code == "internal":
        return ServiceUnavailable(error.detail, request_id=error.request_id)
    return error


KEPT_CONNECTIONS = 32


class SharedConnections:
    """Shared by all transfers of a client. `rate_limits`: one for each store."""

    def __init__(self, settings: ClientSettings, tls: ssl.SSLContext) -> None:
        keep_queries_out_of_logs()
        self.cores = CoreLimit(usable_cores())
        self.rate_limits = {StoreRole.PRIMARY: RateLimit(settings.max_bytes_per_second)}
        self.service_url = settings.url + "/"
        self.live = LiveConnections()
        self._tls = tls
        # urllib3 also applies the connect time-out to each send. Bodies are sent in slices, so it bounds one slice.
        self._timeout = urllib3.Timeout(connect=settings.timeout_seconds, read=settings.timeout_seconds)
        self._by_origin: dict[str, urllib3.PoolManager] = {}

    def to(self, url: str) -> urllib3.PoolManager:
        """The connections to the server of `url`, through the proxy that the environment names for it. Raises
        ConfigurationError if that is no URL."""
        parts = urlsplit(url)
        origin = f"{parts.scheme}://{parts.netloc}"
        if (known := self._by_origin.get(origin)) is not None:
            return known
        try:
            proxy = proxy_for(origin)
        except ValueError as error:
            raise ConfigurationError(f"{error}.") from None
        options: dict[str, Any] = {
            "maxsize": KEPT_CONNECTIONS,
            "retries": False,
            "ssl_context": self._tls,
            "timeout": self._timeout,
        }
        if proxy is None:
            made = urllib3.PoolManager(**options)
        else:
            address, login = split_login(proxy)
            headers = urllib3.make_headers(proxy_basic_auth=login)
            made = urllib3.ProxyManager(address, proxy_headers=headers, proxy_ssl_context=self._tls, **options)
        self.live.watch(made)
        return self._by_origin.setdefault(origin, made)  # two threads that come together get the same

    def close(self) -> None:
        for each in self._by_origin.values():
            each.clear()


class TransferPool:
    """Kept-alive connections, shared by all transfers of a client. It holds no token, because a ticket carries its own
    proof and a store must never see ours. urllib3, not httpx: it sends a memoryview without a copy, at a tenth of the
    CPU."""

    def __init__(self, shared: SharedConnections, retry_seconds: float, rate_limit: RateLimit) -> None:
        self.retry_seconds = retry_seconds
        self.rate_limit = rate_limit
        self.cores = shared.cores
        self._shared = shared

    @classmethod
    def of(cls, settings: ClientSettings, tls: ssl.SSLContext) -> TransferPool:
        """With connections of its own. None is opened yet."""
        shared = SharedConnections(settings, tls)
        return cls(shared, settings.retry_seconds, shared.rate_limits[StoreRole.PRIMARY])

    def with_retry_deadline(self, retry_seconds: float) -> TransferPool:
        """The same connections and the same rate limit, with another retry deadline. Only the first is closed."""
        return TransferPool(self._shared, retry_seconds, self.rate_limit)

    def towards(self, store: StoreRole) -> TransferPool:
        """The same connections, at this store's own rate: a store that asks to slow down slows no other."""
        limits = self._shared.rate_limits
        # Atomic in a dict: two threads that come together get the same limit.
        limit = limits.setdefault(store, limits[StoreRole.PRIMARY].beside())
        return TransferPool(self._shared, self.retry_seconds, limit)

    @contextmanager
    def request(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: Iterator[memoryview] | None = None,
        *,
        stop: threading.Event | None = None,
        backoff: Backoff | None = None,
    ) -> Iterator[urllib3.BaseHTTPResponse]:
        """One try, once it has a permit (`rate_limit`). The response's body is not read yet. The connection is kept if
        the body was read to its end. Raises StoreUnavailable for any failure of the connection, here or while the body
        is read; TransferStopped while it waits for its permit."""
        with (
            self.rate_limit.permit(stop, backoff) as permit,
            self._send(method, url, headers, body, permit) as response,
        ):
            permit.status = response.status
            permit.retry_after_seconds = retry_after_seconds(response.headers)
            yield response

    @contextmanager
    def _send(
        self, method: str, url: str, headers: Mapping[str, str], body: Iterator[memoryview] | None, permit: Permit
    ) -> Iterator[urllib3.BaseHTTPResponse]:
        response: urllib3.BaseHTTPResponse | None = None
        try:
            target = urljoin(self._shared.service_url, url)
            response = self._shared.to(target).request(
                method,
                target,
                headers=dict(headers),
                body=cast("Iterable[bytes] | None", body),  # the stubs lack that a socket takes any buffer
                preload_content=False,
                decode_content=False,
                redirect=False,
            )
            yield response
        except urllib3.exceptions.LocationValueError:
            raise StoreRefused("The service gave a ticket whose URL is not usable") from None
        except (HTTPError, OSError) as error:
            if certificate_refused(error):
                raise StoreRefused(
                    "The store has a certificate that is not trusted. Set HOLDFAST_CA_FILE or SSL_CERT_FILE to your "
                    "authority's"
                ) from None
            # urllib3 calls many a failure behind a proxy the proxy's.
            cause: Exception = error
            way = remedy = ""
            if isinstance(error, urllib3.exceptions.ProxyError):
                cause, way = error.original_error, "by the proxy "
                remedy = ". Check HTTPS_PROXY, HTTP_PROXY and NO_PROXY"
            permit.timed_out = isinstance(cause, urllib3.exceptions.ReadTimeoutError)
            # The error's text may hold the URL, and the URL is a secret.
            raise StoreUnavailable(f"The connection {way}to the store broke ({type(cause).__name__}){remedy}") from None
        finally:
            if response is not None:
                if response.length_remaining == 0:
                    response.release_conn()
                else:
                    response.close()

    def cut(self) -> None:
        """Breaks all transfers in progress, however long the store would let them wait. Later ones connect again. From
        any thread."""
        self._shared.live.cut()

    def close(self) -> None:
        self._shared.close()
