"""One call of a webhook: signed, to the address that was looked at, and tried again later when it failed."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import random
import secrets
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from holdfast_service.webhooks.target import Target

SECRET_BYTES = 32
_PREFIX = "whsec_"


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


def shown(secret: bytes) -> str:
    """As libraries of the specification take it."""
    return _PREFIX + base64.b64encode(secret).decode()


def signature(secret: bytes, message_id: str, timestamp: int, body: bytes) -> str:
    """The `webhook-signature` header, as the Standard Webhooks specification has it. Pure. `timestamp` in seconds since
    1970; it is signed, and an old call cannot be played again."""
    signed = b".".join((message_id.encode(), str(timestamp).encode(), body))
    return "v1," + base64.b64encode(hmac.new(secret, signed, hashlib.sha256).digest()).decode()


MOST_TRIES = 12
_FIRST_SECONDS = 5.0
_FACTOR = 4.0
_LONGEST_SECONDS = 4 * 3600.0
_JITTER = 0.2
LONGEST_PAUSE_SECONDS = _LONGEST_SECONDS * (1 + _JITTER)


def pause_seconds(tries: int, jitter: float | None = None) -> float | None:
    """The pause before a failed call is made again, after so many tries; None: it is given up, a day after the first.
    Pure. Each waits up to a fifth longer, or less: what failed together should not come back together. `jitter`: from
    -1 to 1."""
    if tries >= MOST_TRIES:
        return None
    if jitter is None:
        jitter = random.uniform(-1, 1)  # noqa: S311
    return min(_LONGEST_SECONDS, _FIRST_SECONDS * _FACTOR ** (tries - 1)) * (1 + jitter * _JITTER)


CONNECT_SECONDS = 5.0
WHOLE_SECONDS = 15.0
"""For all of it once connected: a receiver that sends a byte now and then delays no other call."""
_MOST_ANSWER_BYTES = 4096
_MOST_ADDRESSES = 3


@dataclass(frozen=True)
class Answer:
    """`status` as it came; `error` if none came, in words that hold nothing of the URL or the answer."""

    status: int | None
    error: str | None = None

    @property
    def taken(self) -> bool:
        return self.status is not None and 200 <= self.status < 300


def call(target: Target, body: bytes, headers: dict[str, str], tls: ssl.SSLContext) -> Answer:
    """One call, to the address that was checked, under the name that was given. No proxy, no redirect, no long answer.
    One of the addresses: if nothing listens at the first, the next one is tried. Never raises."""
    error: OSError | None = None
    for address in target.addresses[:_MOST_ADDRESSES]:
        try:
            connected = socket.create_connection((address, target.port), timeout=CONNECT_SECONDS)
        except OSError as failed:
            error = failed
            continue
        return _post(_Pinned(target, connected), target, body, headers, tls)
    return Answer(None, f"{target.host} cannot be reached ({type(error).__name__})")


class _Pinned(http.client.HTTPConnection):
    """A connection that is there already, so that no name is looked up, now or later."""

    auto_open = 0

    def __init__(self, target: Target, connected: socket.socket) -> None:
        super().__init__(target.host, target.port, timeout=WHOLE_SECONDS)
        self.default_port = 443 if target.tls else 80  # how the Host header is written
        self.sock = connected


def _post(connection: _Pinned, target: Target, body: bytes, headers: dict[str, str], tls: ssl.SSLContext) -> Answer:
    try:
        connection.sock.settimeout(WHOLE_SECONDS)
        if target.tls:
            connection.sock = tls.wrap_socket(
                connection.sock, server_hostname=target.host, do_handshake_on_connect=False
            )
        with _cut_off_in_time(connection.sock):
            if isinstance(connection.sock, ssl.SSLSocket):
                connection.sock.do_handshake()
            connection.request("POST", target.path, body=body, headers=headers)
            response = connection.getresponse()
            response.read(_MOST_ANSWER_BYTES)
    except ssl.SSLCertVerificationError as failed:
        return Answer(None, f"the certificate of {target.host} is not trusted ({failed.verify_message})")
    except (OSError, http.client.HTTPException, ValueError) as failed:
        return Answer(None, f"{target.host} gave no answer ({type(failed).__name__})")
    finally:
        connection.close()
    return Answer(response.status)


@contextmanager
def _cut_off_in_time(connected: socket.socket) -> Iterator[None]:
    """The socket that all is read from, and not its connection: that one lets go of it before the answer's body."""
    timer = threading.Timer(WHOLE_SECONDS, _shut, args=(connected,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _shut(connected: socket.socket) -> None:
    # Not the TLS socket's own: that one lets go of its keys first, and what is sent meanwhile goes out as it is.
    try:
        socket.socket.shutdown(connected, socket.SHUT_RDWR)
    except OSError:  # it is over already
        return
