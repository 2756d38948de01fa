"""Who a token of another issuer stands for: verified by the keys of a provider that the reviewed file names.

Each process reads the file again when it has changed, at most once in LOOK_AGAIN_SECONDS, without a thread or a signal.
A file that cannot be used changes nothing: what it said before goes on, and the log, `/readyz` and a metric say so.
"""

from __future__ import annotations

import hashlib
import hmac
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jwt
import structlog
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from holdfast_protocol.problems import ProblemCode
from holdfast_service.errors import ProblemError
from holdfast_service.identity.keys import ProviderKeys
from holdfast_service.identity.rules import IdentityFileError, IdentityRules, ProviderRules, grants_of, read_rules
from holdfast_service.settings import ServiceSettings, SettingsError

LOOK_AGAIN_SECONDS = 1.0
LONGEST_TOKEN = 16 * 1024
_WAITED_SECONDS = 30.0
_LONGEST_SUBJECT = 1000
_LAST_MOMENT = 2**33
_REQUIRED = ["iss", "sub", "aud", "exp", "iat"]

_log = structlog.get_logger("holdfast.identity")


@dataclass(frozen=True)
class VerifiedIdentity:
    """`claims` are those of the issuer, word for word. `mark` is the same for every copy of this token. `is_person`: it
    is an ID token for the provider's `client_id`. Nothing of it is a secret, but `claims` tell about a person: they
    stay out of logs and replies."""

    provider: ProviderRules
    subject: str
    claims: Mapping[str, Any] = field(repr=False)
    expires_at: datetime
    mark: str
    is_person: bool

    @property
    def shown(self) -> str:
        """To the person alone, who should know the account again. A name may be one of the person's own choice."""
        names = (self.claims.get(claim) for claim in ("email", "preferred_username", "name"))
        name = next((each for each in names if isinstance(each, str) and each), None)
        return self.subject if name in (None, self.subject) else f"{name} ({self.subject})"


@dataclass(frozen=True)
class _Peeked:
    """What a token says, before it is believed."""

    provider: ProviderRules
    kid: str | None
    algorithm: str


class Identities:
    """Thread-safe; one per process."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises SettingsError for a file that cannot be used."""
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._stamp = _stamp(path)  # before it is read: what changes meanwhile is seen at the next look
        try:
            self._rules = read_rules(path)
        except IdentityFileError as error:
            raise SettingsError(f"HOLDFAST_IDENTITY_FILE: {error} Correct it, or leave the setting out.") from None
        self._look_at = float("-inf")
        self._failure: str | None = None
        self._keys: dict[str, ProviderKeys] = {}

    @property
    def rules(self) -> IdentityRules:
        """As the file says now, or said before it could not be used."""
        with self._lock:
            if self._clock() >= self._look_at:
                self._look_at = self._clock() + LOOK_AGAIN_SECONDS
                self._read_again()
            return self._rules

    @property
    def failure(self) -> str | None:
        """Why the file's last edit is not used; None: what it says is."""
        _ = self.rules
        return self._failure

    def keys_of(self, provider: ProviderRules) -> ProviderKeys:
        """Kept until the file says something else of this provider."""
        with self._lock:
            known = self._keys.get(provider.name)
            if known is None or known.provider != provider:
                known = self._keys[provider.name] = ProviderKeys(provider, self._clock)
            return known

    def needs(self, text: str) -> Future[None] | None:
        """The call of the provider to wait for before `verify`, for who waits without a thread; None: there is none to
        make. Raises what `verify` raises."""
        peeked = self._peek(text)
        return self.keys_of(peeked.provider).needs(peeked.kid, peeked.algorithm)

    def is_proven(self, text: str) -> bool:
        """Whether a key that is known now has signed it, for this service and for somebody who gets something here:
        anybody can have a platform for everybody sign one. Asks nobody."""
        try:
            peeked = self._peek(text)
            key = self.keys_of(peeked.provider).key(peeked.kid, peeked.algorithm)
            identity = _identity(text, peeked.provider, _believed(text, peeked, key), None)
        except ProblemError:
            return False
        return bool(grants_of(self.rules, identity.provider, identity.claims))

    def verify(
        self, text: str, *, provider: str | None = None, nonce: str | None = None, waits: bool = True
    ) -> VerifiedIdentity:
        """Who has this token. `waits`: for a call of the provider if need be; else the caller has waited for what
        `needs` gave. `provider`: the name of the only one that will do. `nonce`: what an ID token must say.

        Raises `identity_issuer_unknown`, `identity_token_invalid`, `identity_token_expired`, `identity_token_early`,
        `identity_audience_wrong`, `identity_provider_unavailable` and `identity_key_unknown`. No error repeats the
        token."""
        peeked = self._peek(text)
        if provider is not None and peeked.provider.name != provider:
            raise _invalid("it is of another provider than the one that was asked")
        keys = self.keys_of(peeked.provider)
        if waits and (fetch := keys.needs(peeked.kid, peeked.algorithm)) is not None:
            with suppress(FutureTimeoutError):
                fetch.result(_WAITED_SECONDS)
        key = keys.key(peeked.kid, peeked.algorithm)
        claims = _believed(text, peeked, key)
        return _identity(text, peeked.provider, claims, nonce)

    def _peek(self, text: str) -> _Peeked:
        if len(text) > LONGEST_TOKEN or not text.isascii():
            raise _invalid(f"it is no JWT of at most {LONGEST_TOKEN} characters")
        try:
            header = jwt.get_unverified_header(text)
            said = jwt.decode(text, options={"verify_signature": False})
        except (jwt.PyJWTError, ValueError, RecursionError):
            raise _invalid("it is no JWT: three parts of base64url, with dots between them") from None
        issuer = said.get("iss")
        provider = self.rules.provider_of_issuer(issuer) if isinstance(issuer, str) else None
        if provider is None:
            raise ProblemError(
                ProblemCode.IDENTITY_ISSUER_UNKNOWN,
                "The service does not take tokens of this issuer. Bring one of an issuer that its identity file names, "
                "or ask an administrator to add the provider (HOLDFAST_IDENTITY_FILE).",
            )
        algorithm, kid, kind = header.get("alg"), header.get("kid"), header.get("typ")
        if algorithm not in provider.algorithms:
            raise _invalid(f"it is not signed with an algorithm that the provider {provider.name} may use")
        if "crit" in header or "b64" in header:
            raise _invalid("its header asks for an extension that this service does not know")
        if kind is not None and (not isinstance(kind, str) or kind.lower() != "jwt"):
            raise _invalid("its header says that it is for another purpose than to tell who somebody is")
        return _Peeked(provider, kid, algorithm)

    def _read_again(self) -> None:
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._rules = read_rules(self._path)
        except IdentityFileError as error:
            self._failure = str(error)
            _log.error("identity_file_not_used", reason=str(error), goes_on_with="what it said before")
            return
        self._failure = None
        _log.info("identity_file_read", providers=len(self._rules.providers), rules=len(self._rules.rules))


def identities_of(settings: ServiceSettings) -> Identities | None:
    """None if the settings name no file. Raises SettingsError."""
    return None if settings.identity_file is None else Identities(settings.identity_file)


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Following links: Kubernetes renews a ConfigMap by changing one."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size


def _believed(text: str, peeked: _Peeked, key: jwt.PyJWK) -> Mapping[str, Any]:
    provider = peeked.provider
    try:
        return jwt.decode(
            text,
            key,
            algorithms=[peeked.algorithm],
            audience=provider.all_audiences,
            issuer=provider.issuer,
            leeway=timedelta(seconds=provider.clock_skew_seconds),
            options={"require": _REQUIRED},
        )
    except jwt.ExpiredSignatureError:
        raise ProblemError(
            ProblemCode.IDENTITY_TOKEN_EXPIRED,
            "The token of the identity has expired. Get a fresh one: read the file again that the platform renews, or "
            "sign in again. If it is fresh, compare the clocks.",
        ) from None
    except jwt.ImmatureSignatureError:
        raise ProblemError(
            ProblemCode.IDENTITY_TOKEN_EARLY,
            "The token of the identity is not valid yet. Compare the clocks of the service and of the provider; "
            "`clock_skew_seconds` says how far they may be apart.",
        ) from None
    except jwt.InvalidAudienceError:
        raise ProblemError(
            ProblemCode.IDENTITY_AUDIENCE_WRONG,
            f"The token is for another service. Ask the provider {provider.name} for one with the audience "
            f"{' or '.join(provider.all_audiences[:3])}.",
        ) from None
    except jwt.MissingRequiredClaimError as error:
        raise _invalid(f"it lacks the claim {error.claim}") from None
    except jwt.InvalidSignatureError:
        raise _invalid("its signature is wrong") from None
    except (jwt.PyJWTError, ValueError, TypeError, OverflowError):
        raise _invalid("its claims are not those of a token that tells who somebody is") from None


def _identity(text: str, provider: ProviderRules, claims: Mapping[str, Any], nonce: str | None) -> VerifiedIdentity:
    subject, audiences, azp = claims["sub"], claims["aud"], claims.get("azp")
    if not isinstance(subject, str) or not 0 < len(subject) <= _LONGEST_SUBJECT:
        raise _invalid("its `sub` is no text of a usable length")
    if "events" in claims:  # RFC 8417: a notice about somebody, such as that they signed out
        raise _invalid("it is a notice, and not a token that tells who somebody is")
    audiences = [audiences] if isinstance(audiences, str) else audiences
    is_person = any(client in audiences for client in provider.clients)
    ours = set(provider.all_audiences)
    if not ours.issuperset(audiences) and azp not in ours:
        raise ProblemError(
            ProblemCode.IDENTITY_AUDIENCE_WRONG,
            "The token is for other services too, and each of them could have brought it. Ask for one with this "
            "service's audience alone.",
        )
    if is_person and azp is not None and azp not in provider.clients:
        raise ProblemError(
            ProblemCode.IDENTITY_AUDIENCE_WRONG,
            "The ID token was issued to another client (`azp`). Sign in by this service's own.",
        )
    said = claims.get("nonce")
    if nonce is not None and not (isinstance(said, str) and hmac.compare_digest(said.encode(), nonce.encode())):
        raise _invalid("it does not belong to this sign-in (`nonce`)")
    jti = claims.get("jti")
    # Not the whole text: there may be a second signature of the same claims that is as good.
    one = f"{provider.issuer}\n{jti}" if isinstance(jti, str) and jti else text.rpartition(".")[0]
    return VerifiedIdentity(
        provider=provider,
        subject=subject,
        claims=claims,
        expires_at=datetime.fromtimestamp(min(int(claims["exp"]), _LAST_MOMENT), UTC)
        + timedelta(seconds=provider.clock_skew_seconds),
        mark=hashlib.sha256(one.encode()).hexdigest(),
        is_person=is_person,
    )


def _invalid(why: str) -> ProblemError:
    return ProblemError(
        ProblemCode.IDENTITY_TOKEN_INVALID,
        f"The token of the identity is not taken: {why}. Bring the token as the provider issued it.",
    )


class IdentityNumbers(Collector):
    """Registered once per application that takes identities."""

    def __init__(self, identities: Identities) -> None:
        self._identities = identities

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "holdfast_identity_file_current",
            "1: the identity file is used as it stands; 0: its last edit cannot be used.",
            value=float(self._identities.failure is None),
        )
        available = GaugeMetricFamily(
            "holdfast_identity_provider_available",
            "Whether the last call of the provider gave its keys; 1 before the first one.",
            labels=["provider"],
        )
        for provider in self._identities.rules.providers:
            available.add_metric([provider.name], float(self._identities.keys_of(provider).failure is None))
        yield available

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not read files."""
        return iter(())
