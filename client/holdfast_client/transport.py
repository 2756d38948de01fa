"""The control plane's wire: one JSON call, retried as long as that can help. Every operation goes through `call`.

Every call of the protocol may be repeated, so a call with a lost reply is repeated. The error says whether an earlier
try was sent and never answered, because that matters for opening an attempt. Foreign exceptions end here. Thread-safe.
Neither tokens nor query strings reach a log line or a message.
"""

from __future__ import annotations

import functools
import logging
import random
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from holdfast_client.certificates import tls_of
from holdfast_client.errors import (
    Busy,
    ConfigurationError,
    HoldfastError,
    InvalidRequest,
    RouteNotFound,
    ServiceFault,
    ServiceUnavailable,
    TransferStopped,
    Unauthenticated,
    UnexpectedReply,
    UnsupportedProtocol,
    certificate_refused,
    from_problem,
)
from holdfast_client.identity import IdentityTokens
from holdfast_client.settings import ClientSettings
from holdfast_protocol.base import PROTOCOL_HEADER, PROTOCOL_MINOR, PROTOCOL_VERSION, body_for, minor_of, speaks_with
from holdfast_protocol.events import LAST_EVENT_ID_HEADER
from holdfast_protocol.problems import Problem
from holdfast_protocol.service import ExchangedToken, ExchangeToken

FIRST_SECONDS = 0.2
LONGEST_SECONDS = 10.0
_LATER_THAN_ASKED = 0.1
"""A pause that the other side asks for is longer by up to this share of it."""

# Not the module's own generator: a training job draws from that one, and a retry must not change its numbers.
_jitter = random.Random()  # noqa: S311  (spreads load, guards nothing)


def jittered_seconds(failures: int) -> float:
    """A pause after so many failures in a row: between 0 and a ceiling that doubles each time. Full jitter, because 64
    ranks that fail together must not come back together."""
    return _jitter.uniform(0, min(LONGEST_SECONDS, FIRST_SECONDS * 2 ** min(max(failures - 1, 0), 16)))


class Backoff:
    """One call's retry deadline, for control and data plane. `sleep` may be an Event's `wait`, so that a stopped
    transfer does not finish its pause.

    `from_failure`: the deadline counts from the first failure. For background calls, which delay no caller, and for
    transfers, because a slow one may take longer than the deadline.
    """

    def __init__(
        self, total_seconds: float, sleep: Callable[[float], object] = time.sleep, *, from_failure: bool = False
    ) -> None:
        self._total_seconds = total_seconds
        self._ends = None if from_failure else time.monotonic() + total_seconds
        self._sleep = sleep
        self.tries = 1

    def leave_out(self, seconds: float) -> None:
        """Excludes time from the deadline in which nothing was tried, unless the other side was silent."""
        if self._ends is not None:
            self._ends += seconds

    def pause(self, at_least_seconds: float = 0.0, before: Callable[[], object] | None = None) -> bool:
        """Sleeps before the next try; calls `before` just before the sleep. Returns False, without either, if that try
        would begin after the deadline. Those who are told to wait equally long come back one after the other, but none
        comes after its deadline for that."""
        now = time.monotonic()
        if self._ends is None:
            self._ends = now + self._total_seconds
        seconds = max(at_least_seconds, jittered_seconds(self.tries))
        if now + seconds > self._ends:
            return False
        spread = at_least_seconds * _jitter.uniform(1, 1 + _LATER_THAN_ASKED)
        seconds = max(seconds, min(spread, self._ends - now))
        if before is not None:
            before()
        self._sleep(seconds)
        self.tries += 1
        return True


def retry_after_seconds(headers: Mapping[str, str]) -> float:
    """The seconds that the other side asks for in `Retry-After`; 0 if it does not ask."""
    text = headers.get("retry-after", "")
    return float(text) if text.isdecimal() and len(text) < 6 else 0.0


class _WithoutQuery(logging.Filter):
    """Keeps query strings out of the logs of the HTTP libraries: a presigned URL's query is a secret while it is
    valid."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(
                str(value).partition("?")[0] if isinstance(value, str | httpx.URL) else value for value in record.args
            )
        return True


_FILTER = _WithoutQuery("holdfast-without-query")


def keep_queries_out_of_logs() -> None:
    """Both libraries log each URL, urllib3 at DEBUG and httpx at INFO. Idempotent: a filter is kept once."""
    for name in ("httpx", "urllib3.connectionpool"):
        logging.getLogger(name).addFilter(_FILTER)


_TRANSIENT_STATUSES = frozenset({408, 425, 429})
_FINAL_SERVER_STATUSES = frozenset({501, 505, 511})


def may_pass(status: int) -> bool:
    """Whether a proxy's or a store's status is worth another try. Not the server's final failures; but any other status
    of its range, even a gateway's own (520 to 530)."""
    return status in _TRANSIENT_STATUSES or (status >= 500 and status not in _FINAL_SERVER_STATUSES)


def check_stop(stop: threading.Event | None) -> None:
    """Raises TransferStopped if `stop` is set. A transfer calls it between two blocks and while it waits."""
    if stop is not None and stop.is_set():
        raise TransferStopped("The transfer was told to stop")


log = logging.getLogger("holdfast.client")

REQUEST_ID_HEADER = "X-Request-Id"
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError)
_FAULT_TRIES = 3
"""A bug's reply of the service may be momentary; a lasting bug must be reported soon."""

ReplyT = TypeVar("ReplyT", bound=BaseModel)
Params = Mapping[str, str | int | Sequence[str] | None]


def path(*segments: str | int) -> str:
    """`path("projects", "demo")` -> "/v1/projects/demo", with each segment quoted: no name can reach another route."""
    return "/v1/" + "/".join(quote(str(segment), safe="") for segment in segments)


@dataclass(frozen=True)
class _Call:
    method: str
    route: str
    body: BaseModel | None = None
    params: Params = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    waits_seconds: float = 0.0
    retry_seconds: float | None = None
    also_good: Collection[int] = ()
    authorized: bool = True


@dataclass(frozen=True)
class _Failed:
    """One try without a reply. `maybe_done`: it was sent, and the service may have carried it out. `renewed`: the
    token was not taken, and another one can be had."""

    failure: HoldfastError
    retryable: bool
    maybe_done: bool
    wait_seconds: float = 0.0
    renewed: bool = False


def _authorization(token: str | None) -> dict[str, str]:
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def _not_exchanged(failure: ServiceUnavailable) -> _Failed:
    """The call itself was not sent."""
    asked = failure.context.get("retry_after_seconds", 0)
    return _Failed(failure, retryable=True, maybe_done=False, wait_seconds=float(asked))


@dataclass
class _Service:
    """Knowledge of the service; one for all copies of a transport. An older service refuses fields that it does not
    know, and during a rolling upgrade any reply may come from an older one."""

    minor: int = PROTOCOL_MINOR


def _say_nothing(failure: HoldfastError) -> None:
    """The default, because a trainer's log has its own line for each retry."""


def _connections(settings: ClientSettings, tls: ssl.SSLContext) -> httpx.Client:
    """Opens no connection yet."""
    keep_queries_out_of_logs()
    return httpx.Client(
        base_url=settings.url,
        timeout=httpx.Timeout(settings.timeout_seconds),
        limits=httpx.Limits(max_connections=64, max_keepalive_connections=16, keepalive_expiry=30.0),
        verify=tls,
        # A proxy for outside connections must not get calls to 127.0.0.1.
        trust_env=not settings.on_loopback,
        headers={PROTOCOL_HEADER: PROTOCOL_VERSION, "User-Agent": "holdfast-client", "Accept": "application/json"},
    )


@dataclass(frozen=True)
class ServerSentEvent:
    """`data` is empty in a message that says only how far the stream has come."""

    id: str | None
    data: str


@dataclass
class _Tried:
    """One connection of a stream."""

    heard: bool = False
    failed: _Failed | None = None


_SILENT_SECONDS = 30.0
"""A stream sends something twice in this time."""
_STREAMED_SECONDS = 60.0
"""A stream that went on for so long was not one of several failures in a row."""
_RECONNECT_SECONDS = 2.0


def _server_sent(pieces: Iterable[str]) -> Iterator[ServerSentEvent]:
    """The id and the data of each whole message; lines end with "\\n" and with nothing else that could end one."""
    begun = ""
    for piece in pieces:
        *messages, begun = (begun + piece).split("\n\n")
        for message in messages:
            fields = [line.partition(": ") for line in message.split("\n")]
            ids = [value for name, _, value in fields if name == "id"]
            data = "\n".join(value for name, _, value in fields if name == "data")
            yield ServerSentEvent(ids[-1] if ids else None, data)


class Transport:
    """Calls of the service. `stop` ends the retries: calls then raise TransferStopped."""

    def __init__(
        self, settings: ClientSettings, *, stop: threading.Event | None = None, shares: Transport | None = None
    ) -> None:
        """Makes no call. `shares`: the transport whose connections this one uses; only that one is closed. Raises
        ConfigurationError for a certificate that cannot be used."""
        self.settings = settings
        self._stop = stop
        self.on_retry: Callable[[HoldfastError], object] = _say_nothing if shares is None else shares.on_retry
        """Called with each failure that is retried, before the pause."""
        self._service: _Service = _Service() if shares is None else shares._service
        self.tls = tls_of(settings)
        """For both planes: a posix store's chunks come from the service itself."""
        self._http: httpx.Client = _connections(settings, self.tls) if shares is None else shares._http
        self._identity: IdentityTokens | None = None
        if settings.has_identity:
            self._identity = IdentityTokens(settings, self._exchange, self.tls) if shares is None else shares._identity

    def with_retry_deadline(self, retry_seconds: float, stop: threading.Event) -> Transport:
        """The same connections with another retry deadline; retries end when `stop` is set."""
        settings = self.settings.model_copy(update={"retry_seconds": retry_seconds})
        return Transport(settings, stop=stop, shares=self)

    def close(self) -> None:
        self._http.close()

    def call(
        self,
        method: str,
        route: str,
        reply: type[ReplyT],
        *,
        body: BaseModel | None = None,
        params: Params | None = None,
        headers: Mapping[str, str] | None = None,
        waits_seconds: float = 0.0,
        retry_seconds: float | None = None,
        also_good: Collection[int] = (),
        authorized: bool = True,
    ) -> ReplyT:
        """Sends one request and reads its reply. `waits_seconds`: the service may hold the answer back that long.
        `also_good`: failure statuses whose body is a `reply` too. `authorized` False: without a token. Raises
        HoldfastError, and nothing else."""
        call = _Call(
            method, route, body, params or {}, headers or {}, waits_seconds, retry_seconds, also_good, authorized
        )
        response = self._send(call)
        try:
            return reply.model_validate_json(response.content, extra="ignore")
        except ValidationError as error:
            raise UnexpectedReply(
                f"{self._name(call)} was answered with a reply that is not a {reply.__name__} "
                f"({error.error_count()} fields do not fit)",
                request_id=response.headers.get(REQUEST_ID_HEADER),
            ) from None

    def send(self, method: str, route: str, *, body: BaseModel | None = None) -> None:
        """Like `call`, for a reply without a body."""
        self._send(_Call(method, route, body))

    def follow(self, route: str, *, params: Params, after: str | None) -> Generator[ServerSentEvent, None, None]:
        """The messages of a stream of server-sent events, without an end: it goes on after the last id when it ends or
        breaks, as long as that can help. `after`: from this id on, in place of from now. Raises HoldfastError, and
        nothing else."""
        call = _Call("GET", route)
        backoff = Backoff(self.settings.retry_seconds, from_failure=True)
        last_id: str | None = None
        renewed = False
        while True:
            check_stop(self._stop)
            began = time.monotonic()
            tried = _Tried()
            # Without a position an event that comes while the first connection breaks would be missed.
            first = {"after": after} if after is not None else {"seconds": "0"} if last_id is None else {}
            for message in self._stream_once(call, {**params, **first}, last_id, tried):
                last_id, tried.heard = message.id or last_id, True
                yield message
            after = None if last_id is not None else after
            renewed = renewed and not tried.heard
            if tried.heard:  # the service was there: the deadline counts anew, and the pauses go on growing
                tries = 1 if time.monotonic() - began > _STREAMED_SECONDS else backoff.tries
                backoff = Backoff(self.settings.retry_seconds, from_failure=True)
                backoff.tries = tries
            failed = tried.failed
            if failed is None:
                if "seconds" not in first:
                    time.sleep(_jitter.uniform(0, _RECONNECT_SECONDS))  # other followers reconnect too
                continue
            if failed.renewed and not renewed:
                renewed = True
                continue
            if not (failed.retryable or (isinstance(failed.failure, ServiceFault) and backoff.tries < _FAULT_TRIES)):
                raise failed.failure
            if not backoff.pause(failed.wait_seconds, before=functools.partial(self.on_retry, failed.failure)):
                raise failed.failure

    def _stream_once(
        self, call: _Call, params: Params, last_id: str | None, tried: _Tried
    ) -> Iterator[ServerSentEvent]:
        """One connection. Leaves in `tried` why it ended, if not in order."""
        request_id = uuid.uuid4().hex
        try:
            token = self._token()
        except ServiceUnavailable as error:
            tried.failed = _not_exchanged(error)
            return
        headers = {REQUEST_ID_HEADER: request_id, "Accept": "text/event-stream", **_authorization(token)}
        if last_id is not None:
            headers[LAST_EVENT_ID_HEADER] = last_id
        wanted = {name: value for name, value in params.items() if value is not None}
        seconds = self.settings.timeout_seconds
        timeout = httpx.Timeout(seconds, read=seconds + _SILENT_SECONDS)
        try:
            with self._http.stream(call.method, call.route, params=wanted, headers=headers, timeout=timeout) as reply:
                if not reply.is_success:
                    reply.read()
                failure = self._read_failure(reply, call, request_id)
                if failure is None:
                    yield from _server_sent(reply.iter_text())
                else:
                    tried.failed = self._failed(failure, reply, token)
        except httpx.TransportError as error:
            tried.failed = self._not_answered(error, call)
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            raise UnexpectedReply(f"{self._name(call)} failed ({type(error).__name__})") from None

    def reachable(self, route: str) -> bool:
        """Whether a probe answers 200 within one try."""
        try:
            return self._http.get(route).status_code == 200
        except httpx.HTTPError:
            return False

    def _send(self, call: _Call) -> httpx.Response:
        request_id = uuid.uuid4().hex
        retry_deadline_seconds = self.settings.retry_seconds if call.retry_seconds is None else call.retry_seconds
        if retry_deadline_seconds:
            # The service may take this long to answer. If the deadline did not grow, a long wait that a network cut off
            # would use it up with its first try.
            retry_deadline_seconds += call.waits_seconds
        backoff = Backoff(
            retry_deadline_seconds,
            time.sleep if self._stop is None else self._stop.wait,
            # A background call may take any time; only time without an answer counts against the deadline.
            from_failure=self._stop is not None,
        )
        ambiguous = renewed = False
        while True:
            check_stop(self._stop)
            minor = self._service.minor
            tried = self._try_once(call, request_id)
            if isinstance(tried, httpx.Response):
                return tried
            if isinstance(tried.failure, InvalidRequest) and self._service.minor < minor:
                continue  # repeated with the fields that an older service knows
            if tried.renewed and not renewed:
                renewed = True
                continue  # the token was revoked, or has ended meanwhile
            failure = tried.failure
            failure.earlier_try_ambiguous = ambiguous
            if not (tried.retryable or (isinstance(failure, ServiceFault) and backoff.tries < _FAULT_TRIES)):
                raise failure
            ambiguous = ambiguous or tried.maybe_done
            if not backoff.pause(tried.wait_seconds, before=functools.partial(self.on_retry, failure)):
                failure.earlier_try_ambiguous = ambiguous
                raise failure
            log.info("%s is tried again (try %d): %s", self._name(call), backoff.tries, failure.code)

    def _try_once(self, call: _Call, request_id: str) -> httpx.Response | _Failed:
        try:
            token = self._token() if call.authorized else None
        except ServiceUnavailable as error:
            return _not_exchanged(error)
        headers = {REQUEST_ID_HEADER: request_id, **_authorization(token), **call.headers}
        if call.body is not None:
            headers["Content-Type"] = "application/json"
        seconds = self.settings.timeout_seconds
        try:
            response = self._http.request(
                call.method,
                call.route,
                content=None if call.body is None else body_for(self._service.minor, call.body),
                params={name: value for name, value in call.params.items() if value is not None} or None,
                headers=headers,
                timeout=httpx.Timeout(seconds, read=seconds + call.waits_seconds),
            )
        except httpx.TransportError as error:
            return self._not_answered(error, call)
        except httpx.DecodingError as error:
            return _Failed(self._unreachable(error, call), retryable=True, maybe_done=True)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UnexpectedReply(f"{self._name(call)} failed ({type(error).__name__})") from None
        failure = self._read_failure(response, call, request_id)
        return response if failure is None else self._failed(failure, response, token)

    def _exchange(self, body: ExchangeToken) -> ExchangedToken:
        """One try: the call that needs the token has the retries."""
        call = _Call("POST", path("tokens", "exchange"), body, authorized=False)
        tried = self._try_once(call, uuid.uuid4().hex)
        if isinstance(tried, _Failed):
            raise tried.failure
        try:
            return ExchangedToken.model_validate_json(tried.content, extra="ignore")
        except ValidationError:  # its own sentence would repeat the token
            raise UnexpectedReply(f"{self._name(call)} was answered with a reply that is no token") from None

    def _not_answered(self, error: httpx.TransportError, call: _Call) -> _Failed:
        retryable = not isinstance(error, httpx.UnsupportedProtocol) and not certificate_refused(error)
        return _Failed(self._unreachable(error, call), retryable, not isinstance(error, _NOT_SENT))

    def _failed(self, failure: HoldfastError, response: httpx.Response, token: str | None) -> _Failed:
        # Only "busy" promises that nothing was done: a database may have lost a commit's reply.
        maybe_done = response.status_code >= 500 and not isinstance(failure, Busy)
        retryable = isinstance(failure, ServiceUnavailable)
        # Without a token it is the exchange itself, within the identity's lock.
        renewed = (
            token is not None
            and isinstance(failure, Unauthenticated)
            and self._identity is not None
            and self._identity.refused(token)
        )
        return _Failed(failure, retryable, maybe_done, retry_after_seconds(response.headers), renewed)

    def _token(self) -> str | None:
        """Raises HoldfastError if one is to be exchanged, and cannot be."""
        if self._identity is not None:
            return self._identity.token()
        found = self.settings.token or self.settings.find_token()
        return None if found is None else found.get_secret_value()

    def _name(self, call: _Call) -> str:
        return f"{call.method} {self.settings.url}{call.route}"

    def _unreachable(self, error: httpx.RequestError, call: _Call) -> ServiceUnavailable | ConfigurationError:
        if isinstance(error, httpx.UnsupportedProtocol):
            return ConfigurationError("HOLDFAST_URL is not usable: it must begin with http:// or https://.")
        if certificate_refused(error):
            what = "has a certificate that is not trusted"
            remedy = "Set HOLDFAST_CA_FILE or SSL_CERT_FILE to your authority's."
        elif isinstance(error, httpx.TimeoutException):
            what, remedy = "does not answer in time", "See whether it runs, or raise HOLDFAST_TIMEOUT_SECONDS."
        elif isinstance(error, httpx.ConnectError):
            what, remedy = "cannot be reached", "Start it with `holdfast serve`, or set HOLDFAST_URL."
        else:
            what, remedy = "broke the connection", f"See whether it runs{self._doubt()}."
        return ServiceUnavailable(
            f"The Holdfast service at {self.settings.url} {what} ({type(error).__name__} at {call.method} "
            f"{call.route}). {remedy}"
        )

    def _doubt(self) -> str:
        """A handshake that fails at the other side looks like a connection that broke."""
        if self.settings.url.startswith("http:"):
            return ", and whether it speaks https"
        return "" if self.settings.client_certificate is None else ", and whether it trusts HOLDFAST_CLIENT_CERTIFICATE"

    def _read_failure(self, response: httpx.Response, call: _Call, request_id: str) -> HoldfastError | None:
        spoken = response.headers.get(PROTOCOL_HEADER)
        if spoken is not None and not speaks_with(spoken):
            return UnsupportedProtocol(
                f"This client speaks protocol {PROTOCOL_VERSION}, the service at {self.settings.url} speaks {spoken}",
                request_id=request_id,
            )
        if spoken is not None:
            self._service.minor = min(minor_of(spoken), PROTOCOL_MINOR)
        if response.is_success or response.status_code in call.also_good:
            if spoken is None and call.route.startswith("/v1/"):
                return UnexpectedReply(f"The server at {self.settings.url} is not a Holdfast service")
            return None
        try:
            problem = Problem.model_validate_json(response.content)
        except ValidationError:
            return self._not_a_problem(response, call, request_id)
        failure = from_problem(problem)
        if isinstance(failure, Unauthenticated) and self._identity is None and call.authorized:
            return self._of_this_token(failure)
        return failure

    def _of_this_token(self, failure: Unauthenticated) -> Unauthenticated:
        """What to do about it depends on where the token came from."""
        if self.settings.find_token() is None:
            return Unauthenticated(
                "No token is set"
                + (f", and there is none in {self.settings.token_file}" if self.settings.on_loopback else ""),
                request_id=failure.request_id,
            )
        if (login := self.settings.find_login()) is not None:
            return Unauthenticated(
                f"The sign-in of {login.name} at {login.url} is over",
                request_id=failure.request_id,
                context={"login": login.token_id},
            )
        return failure

    def _not_a_problem(self, response: httpx.Response, call: _Call, request_id: str) -> HoldfastError:
        """A proxy, a load balancer or another program has answered instead of the service."""
        status, name = response.status_code, self._name(call)
        if may_pass(status):
            return ServiceUnavailable(f"{name} was answered with {status} by a proxy before the service")
        if status == 404:
            return RouteNotFound(f"{name} is not known there", request_id=request_id)
        return UnexpectedReply(f"{name} was answered with {status} by a server that is not Holdfast's")
