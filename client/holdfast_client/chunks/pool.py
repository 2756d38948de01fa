"""The connections to stores. urllib3 and not httpx: it sends a memoryview as it is, at a tenth of the CPU."""

from __future__ import annotations

import copy
import ssl
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Self, cast
from urllib.parse import urljoin

import urllib3
from urllib3.exceptions import HTTPError

from holdfast_client.backoff import Backoff, retry_after_seconds
from holdfast_client.certificates import certificate_refused
from holdfast_client.chunks.core_limit import CoreLimit, usable_cores
from holdfast_client.chunks.live_connections import LiveConnections
from holdfast_client.chunks.pace import Pace, Turn
from holdfast_client.errors import StoreRefused, StoreUnavailable
from holdfast_client.redaction import keep_queries_out_of_logs
from holdfast_client.settings import ClientSettings
from holdfast_protocol.states import StoreRole

KEPT_CONNECTIONS = 32


class TransferPool:
    """Kept-alive connections, shared by all transfers of a client. It knows no token: a ticket carries its own proof,
    and a store must never see ours."""

    def __init__(self, settings: ClientSettings, tls: ssl.SSLContext) -> None:
        keep_queries_out_of_logs()
        self.retry_seconds = settings.retry_seconds
        self.pace = Pace(settings.max_bytes_per_second)
        self.cores = CoreLimit(usable_cores())
        self._paces = {StoreRole.PRIMARY: self.pace}
        self._service_url = settings.url + "/"
        self._http = urllib3.PoolManager(
            num_pools=8,
            maxsize=KEPT_CONNECTIONS,
            retries=False,
            ssl_context=tls,
            # urllib3 also applies the connect time-out to each send. Bodies go out in slices, so it is one slice's.
            timeout=urllib3.Timeout(connect=settings.timeout_seconds, read=settings.timeout_seconds),
        )
        self._live = LiveConnections(self._http)

    def with_patience(self, retry_seconds: float) -> Self:
        """The same connections and the same pace, with another time for retries. Only the first is closed."""
        other = copy.copy(self)
        other.retry_seconds = retry_seconds
        return other

    def towards(self, store: StoreRole) -> Self:
        """The same connections, at the pace that this store bears: one that asks to slow down slows no other."""
        other = copy.copy(self)
        # A dict's own step: two threads that come at once get the same one.
        other.pace = self._paces.setdefault(store, self._paces[StoreRole.PRIMARY].beside())
        return other

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
        """One try, when its turn has come (`pace`). The response's body is not read yet. The connection is kept if the
        body was read to its end. Raises StoreUnavailable for whatever happens to the connection, here or while the body
        is read; TransferStopped while it waits for its turn."""
        with self.pace.turn(stop, backoff) as turn, self._send(method, url, headers, body, turn) as response:
            turn.status = response.status
            turn.retry_after_seconds = retry_after_seconds(response.headers)
            yield response

    @contextmanager
    def _send(
        self, method: str, url: str, headers: Mapping[str, str], body: Iterator[memoryview] | None, turn: Turn
    ) -> Iterator[urllib3.BaseHTTPResponse]:
        response: urllib3.BaseHTTPResponse | None = None
        try:
            response = self._http.request(
                method,
                urljoin(self._service_url, url),
                headers=dict(headers),
                body=cast("Iterable[bytes] | None", body),  # its types forget that a socket takes any buffer
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
                    "The store has a certificate that is not trusted. Set SSL_CERT_FILE to your authority's"
                ) from None
            turn.timed_out = isinstance(error, urllib3.exceptions.ReadTimeoutError)
            # Its text may hold the URL, and the URL is a secret.
            raise StoreUnavailable(f"The connection to the store broke ({type(error).__name__})") from None
        finally:
            if response is not None:
                if response.length_remaining == 0:
                    response.release_conn()
                else:
                    response.close()

    def cut(self) -> None:
        """Breaks all that is under way, however long the store would let it wait. What comes after it connects anew.
        From any thread."""
        self._live.cut()

    def close(self) -> None:
        self._http.clear()
