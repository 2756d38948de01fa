"""The public keys of a provider: from its discovery document, kept for some minutes, fetched again for a new one.

Strangers choose what their tokens say, so they must not choose how often the service calls: a fetch is made for one
caller at a time, and at most one in UNKNOWN_KEY_SECONDS for keys that are not known. Calls go to the URLs of the file
and of the issuer's own document alone, follow no redirect, and are bounded in bytes and in time.
"""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from math import ceil
from typing import Any, NoReturn
from urllib.parse import urlsplit

import httpx
import structlog
from jwt import PyJWK
from jwt.exceptions import PyJWTError

from holdfast_protocol.problems import ProblemCode
from holdfast_service.errors import ProblemError
from holdfast_service.identity.rules import ProviderRules, on_loopback, url_of_provider

KEPT_SECONDS = 300.0
"""Keys are asked for again after so long: one that the provider has taken back verifies nothing afterwards."""
UNKNOWN_KEY_SECONDS = 10.0
FAILED_SECONDS = 5.0
"""A provider that did not answer is left alone for so long."""
CALL_SECONDS = 5.0
WHOLE_SECONDS = 10.0
MOST_BYTES = 512 * 1024
_MOST_KEYS = 100
_LEAST_RSA_BITS = 2048
_DISCOVERY = "/.well-known/openid-configuration"

_RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
_ALGORITHMS_OF_CURVE = {"P-256": ("ES256",), "P-384": ("ES384",), "P-521": ("ES512",), "Ed25519": ("EdDSA",)}

_log = structlog.get_logger("holdfast.identity")


@dataclass(frozen=True)
class PublicKey:
    """`by_algorithm`: ready to verify, for each algorithm that goes with its kind."""

    kid: str | None
    by_algorithm: Mapping[str, PyJWK]


class ProviderError(Exception):
    """The provider does not answer, or not as a provider does. The message says what and never repeats a reply."""


class ProviderKeys:
    """Thread-safe; one per provider and process."""

    def __init__(self, provider: ProviderRules, clock: Callable[[], float] = time.monotonic) -> None:
        """Makes no call."""
        self.provider = provider
        self._clock = clock
        self._lock = threading.Lock()
        self._keys: tuple[PublicKey, ...] = ()
        self._document: Mapping[str, Any] = {}
        self._read_at: float | None = None
        self._tried_at: float | None = None
        self._failure: str | None = None
        self._fetch: Future[None] | None = None

    @property
    def failure(self) -> str | None:
        """Why the last fetch failed; None: it did not."""
        return self._failure

    def document(self) -> Mapping[str, Any]:
        """The discovery document of a provider with a `client_id`, as it was fetched with the keys: `needs` first.
        Raises `identity_provider_unavailable`."""
        with self._lock:
            if not self._is_fresh():
                self._raise_unavailable()
            return self._document

    def needs(self, kid: str | None = None, algorithm: str | None = None) -> Future[None] | None:
        """The fetch to wait for before `key` is asked for this one, begun now if need be; None: there is none to make.
        Without a key: before `document`. Does not wait. The future raises nothing."""
        with self._lock:
            if self._fetch is not None:
                return None if self._is_here(kid, algorithm) else self._fetch
            if not self._may_fetch(kid, algorithm):
                return None
            self._tried_at = self._clock()
            fetch: Future[None] = Future()
            self._fetch = fetch
        try:
            threading.Thread(target=self._work, args=(fetch,), name="holdfast-identity-keys", daemon=True).start()
        except RuntimeError as error:  # no thread can be started
            self._done(fetch, None, f"no thread could be started ({error})")
        return fetch

    def key(self, kid: str | None, algorithm: str) -> PyJWK:
        """Of what is known now. Raises `identity_provider_unavailable`, `identity_key_unknown` while another look is to
        come, and `identity_token_invalid` if the provider was just asked."""
        with self._lock:
            if not self._is_fresh():
                self._raise_unavailable()
            if (found := self._found(kid, algorithm)) is not None:
                return found
            wait = self._next_look_in()
        if wait <= 0:  # the fetch failed before it began: ask again
            wait = FAILED_SECONDS
        raise ProblemError(
            ProblemCode.IDENTITY_KEY_UNKNOWN,
            f"The provider {self.provider.name} did not list the key of this token when it was last asked. It is asked "
            f"again in {ceil(wait)} s; try again then, or bring a token of that provider.",
            retry_after_seconds=ceil(wait),
        )

    def _raise_unavailable(self) -> NoReturn:
        seconds = ceil(max(1.0, FAILED_SECONDS - (self._clock() - (self._tried_at or 0.0))))
        raise ProblemError(
            ProblemCode.IDENTITY_PROVIDER_UNAVAILABLE,
            f"The provider {self.provider.name} gave no keys: {self._failure or 'it has not answered yet'}. What was "
            "exchanged before stays good. Try again; see whether the service reaches the provider if this stays.",
            retry_after_seconds=seconds,
        )

    def _is_fresh(self) -> bool:
        return self._read_at is not None and self._clock() - self._read_at < KEPT_SECONDS

    def _is_here(self, kid: str | None, algorithm: str | None) -> bool:
        return self._is_fresh() and (algorithm is None or self._found(kid, algorithm) is not None)

    def _may_fetch(self, kid: str | None, algorithm: str | None) -> bool:
        return not self._is_here(kid, algorithm) and self._next_look_in() <= 0

    def _next_look_in(self) -> float:
        """Seconds. A failure is short, and keys that are old are asked for at once."""
        if self._tried_at is None:
            return 0.0
        pause = FAILED_SECONDS if self._failure is not None else UNKNOWN_KEY_SECONDS if self._is_fresh() else 0.0
        return self._tried_at + pause - self._clock()

    def _found(self, kid: str | None, algorithm: str) -> PyJWK | None:
        """A token without a key's id is good where there is one key of its kind."""
        fitting = [
            key.by_algorithm[algorithm]
            for key in self._keys
            if algorithm in key.by_algorithm and (kid is None or key.kid == kid)
        ]
        return fitting[0] if len(fitting) == 1 else None

    def _work(self, fetch: Future[None]) -> None:
        fetched: _Fetched | None = None
        failure: str | None = None
        try:
            fetched = _fetch(self.provider)
        except ProviderError as error:
            failure = str(error)
        except Exception:  # a bug must not leave a fetch that never ends
            _log.exception("bug", provider=self.provider.name)
            failure = "the service met a bug"
        self._done(fetch, fetched, failure)

    def _done(self, fetch: Future[None], fetched: _Fetched | None, failure: str | None) -> None:
        with self._lock:
            if fetched is not None:
                before, self._keys, self._read_at = self._keys, fetched.keys, self._clock()
                self._document = fetched.document
                if {key.kid for key in before} != {key.kid for key in fetched.keys}:
                    _log.info("identity_keys", provider=self.provider.name, keys=len(fetched.keys))
            elif failure != self._failure:
                _log.warning("identity_provider_unavailable", provider=self.provider.name, reason=failure)
            if failure is not None:
                self._tried_at = self._clock()  # it is left alone from now on: to fail took its time
            self._failure = failure
            self._fetch = None
        fetch.set_result(None)


@dataclass(frozen=True)
class _Fetched:
    """`document`: that of the discovery; empty if nothing of it was needed."""

    keys: tuple[PublicKey, ...]
    document: Mapping[str, Any]


def _fetch(provider: ProviderRules) -> _Fetched:
    discovered: Mapping[str, Any] = {}
    if provider.jwks_url is None or provider.client_id is not None:
        discovered = _discover(provider)
    url = provider.jwks_url or url_in(discovered, "jwks_uri")
    document = _get_json(provider, url)
    listed = document.get("keys")
    if not isinstance(listed, list) or len(listed) > _MOST_KEYS:
        raise ProviderError(f"{_shown(url)} has no list of at most {_MOST_KEYS} keys")
    keys = tuple(key for each in listed if (key := _public_key(each, provider)) is not None)
    if not keys:
        raise ProviderError(f"{_shown(url)} lists no key that can verify a token")
    return _Fetched(keys, discovered)


def _discover(provider: ProviderRules) -> Mapping[str, Any]:
    url = provider.issuer.rstrip("/") + _DISCOVERY
    document = _get_json(provider, url)
    if document.get("issuer") != provider.issuer:
        raise ProviderError(f"{_shown(url)} is of another issuer; write `issuer` exactly as it says it")
    return document


def url_in(document: Mapping[str, Any], name: str) -> str:
    """A URL of the discovery document, by the same rules as those of the file. Raises ProviderError."""
    url = document.get(name)
    try:
        return url_of_provider(url if isinstance(url, str) else "")
    except ValueError:
        raise ProviderError(f"its discovery document names no usable {name}") from None


def _public_key(document: object, provider: ProviderRules) -> PublicKey | None:
    """None for a key that is not for signatures, is too short, or that this service cannot use."""
    if not isinstance(document, dict) or document.get("use", "sig") != "sig":
        return None
    kind, curve, told, kid = (document.get(name) for name in ("kty", "crv", "alg", "kid"))
    fits: tuple[str, ...] = ()
    if kind == "RSA":
        fits = _RSA
    elif kind in ("EC", "OKP") and isinstance(curve, str):
        fits = _ALGORITHMS_OF_CURVE.get(curve, ())
    by_algorithm: dict[str, PyJWK] = {}
    public = {name: value for name, value in document.items() if name != "d"}
    for algorithm in fits:
        if algorithm not in provider.algorithms or told not in (None, algorithm):
            continue
        try:
            key = PyJWK(public, algorithm)
        except (PyJWTError, ValueError, TypeError, KeyError):
            return None
        if kind == "RSA" and key.key.key_size < _LEAST_RSA_BITS:
            return None
        by_algorithm[algorithm] = key
    return PublicKey(kid if isinstance(kid, str) else None, by_algorithm) if by_algorithm else None


def _get_json(provider: ProviderRules, url: str) -> Mapping[str, Any]:
    """Raises ProviderError."""
    status, body = call_provider(provider, "GET", url, headers=_authorization(provider, url))
    if status != 200:
        raise ProviderError(f"{_shown(url)} answered {status}")
    return json_object_of(url, body)


def call_provider(
    provider: ProviderRules,
    method: str,
    url: str,
    *,
    headers: Mapping[str, str],
    form: Mapping[str, str] | None = None,
) -> tuple[int, bytes]:
    """Status and body of the answer, which is bounded in size and time. Raises ProviderError."""
    body = bytearray()
    ends = time.monotonic() + WHOLE_SECONDS
    try:
        with _http_of(provider, url) as http, http.stream(method, url, headers=headers, data=form) as reply:
            for part in reply.iter_raw():
                body += part
                if len(body) > MOST_BYTES:
                    raise ProviderError(f"{_shown(url)} answered with more than {MOST_BYTES} bytes")
                if time.monotonic() > ends:
                    raise ProviderError(f"{_shown(url)} took more than {WHOLE_SECONDS:.0f} s to answer")
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:  # UnicodeError: no host can be called so
        raise ProviderError(f"{_shown(url)} cannot be reached ({type(error).__name__})") from None
    return reply.status_code, bytes(body)


def json_object_of(url: str, body: bytes) -> Mapping[str, Any]:
    """Raises ProviderError for what is none."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise ProviderError(f"{_shown(url)} answered with something that is no JSON object")
    return document


def _http_of(provider: ProviderRules, url: str) -> httpx.Client:
    """For calls of a provider: its certificate is verified, no redirect is followed, and each pause is bounded. Raises
    ProviderError for a CA file that cannot be used."""
    try:
        tls = ssl.create_default_context(cafile=None if provider.ca_file is None else str(provider.ca_file))
    except (OSError, ValueError):
        raise ProviderError(f"the file {provider.ca_file} holds no certificates in PEM") from None
    return httpx.Client(
        verify=tls,
        timeout=CALL_SECONDS,
        follow_redirects=False,
        trust_env=not on_loopback(url),
        headers={"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "holdfast"},
    )


def _authorization(provider: ProviderRules, url: str) -> dict[str, str]:
    """The service's own token, for the issuer itself and for what the file names: not for where a document leads."""
    if provider.bearer_token_file is None or not (url == provider.jwks_url or _origin(url) == _origin(provider.issuer)):
        return {}
    try:
        token = provider.bearer_token_file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        raise ProviderError(f"the file {provider.bearer_token_file} cannot be read") from None
    return {"Authorization": f"Bearer {token}"}


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


def _shown(url: str) -> str:
    return url[:200]
