"""The certificate that `holdfast serve` shows, and those that it wants to see: read from files, and read again.

Each process looks for itself, when a connection comes or metrics are read: at most once in LOOK_AGAIN_SECONDS, without
a thread or a signal. Files that cannot be used change nothing: what was read before goes on.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import structlog
from cryptography import x509
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast_protocol.problems import ProblemCode
from holdfast_service.errors import ProblemError
from holdfast_service.settings import ServiceSettings, SettingsError
from holdfast_service.web.connections import CONNECTION
from holdfast_service.web.problem_reply import problem_response

LOOK_AGAIN_SECONDS = 1.0

_log = structlog.get_logger("holdfast.certificate")

_CERTIFICATE, _KEY, _CLIENT_CA = "HOLDFAST_TLS_CERTIFICATE", "HOLDFAST_TLS_KEY", "HOLDFAST_TLS_CLIENT_CA"
# OpenSSL's reasons for a key that is not the certificate's: another one of its kind, or one of another kind.
_OF_ANOTHER = frozenset({"KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED"})


@dataclass(frozen=True)
class CertificateFiles:
    """`key` may be the certificate's own file. `client_ca`: whose certificates callers show; None: nobody's."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    @property
    def stamp(self) -> tuple[object, ...]:
        """Another one after each change of a file. Following links: Kubernetes renews a secret by changing one."""
        return tuple(_stamp(path) for path in (self.certificate, self.key, self.client_ca) if path is not None)


@dataclass(frozen=True)
class _Loaded:
    context: ssl.SSLContext
    expires_at: datetime
    stamp: tuple[object, ...]


class ServedCertificate:
    """Thread-safe. Can be sent to another process, which reads the files itself."""

    def __init__(self, files: CertificateFiles) -> None:
        """Reads nothing yet."""
        self._files = files
        self._lock = threading.Lock()
        self._loaded: _Loaded | None = None
        self._look_at = float("-inf")
        self._refused: tuple[object, ...] | None = None

    def __reduce__(self) -> tuple[type[ServedCertificate], tuple[CertificateFiles]]:
        return ServedCertificate, (self._files,)

    def context(self) -> ssl.SSLContext:
        """For the next connection. Raises SettingsError at the first call alone."""
        return self._newest().context

    def days_left(self) -> float:
        """Until it, or one of its chain, expires; negative afterwards. Raises as `context`."""
        return (self._newest().expires_at - datetime.now(UTC)).total_seconds() / 86400

    def _newest(self) -> _Loaded:
        with self._lock:
            if self._loaded is None:
                self._loaded = _load(self._files)
            if time.monotonic() >= self._look_at:
                self._look_at = time.monotonic() + LOOK_AGAIN_SECONDS
                self._loaded = self._renewed(self._loaded)
            return self._loaded

    def _renewed(self, loaded: _Loaded) -> _Loaded:
        stamp = self._files.stamp
        if stamp == loaded.stamp:
            self._refused = None
            return loaded
        try:
            renewed = _load(self._files)
        except SettingsError as error:
            # Tried again at each look: half of a pair is soon whole. Said once for each state of the files.
            if stamp != self._refused:
                _log.warning("certificate_not_renewed", reason=str(error), goes_on_until=loaded.expires_at.isoformat())
            self._refused = stamp
            return loaded
        self._refused = None
        _log.info("certificate_renewed", expires_at=renewed.expires_at.isoformat())
        return renewed


def certificate_of(settings: ServiceSettings) -> ServedCertificate | None:
    """None if the service speaks plain HTTP. Raises SettingsError for settings that do not go together."""
    certificate, key, client_ca = settings.tls_certificate, settings.tls_key, settings.tls_client_ca
    if certificate is None:
        for setting, given in ((_KEY, key), (_CLIENT_CA, client_ca)):
            if given is not None:
                raise SettingsError(f"{setting} is set without {_CERTIFICATE}. Set both for TLS, or neither.")
        return None
    return ServedCertificate(CertificateFiles(certificate, key or certificate, client_ca))


class CertificateNumbers(Collector):
    """Registered once per application."""

    def __init__(self, certificate: ServedCertificate) -> None:
        self._certificate = certificate

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "holdfast_certificate_expires_days",
            "Days until the certificate that this process shows expires, or the first one of its chain.",
            value=self._certificate.days_left(),
        )

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not read files."""
        return iter(())


# What asks whether the process lives has no certificate: a kubelet, a container's health check.
_OPEN_PATHS = frozenset({"/healthz", "/readyz"})


class ClientCertificateCheck:
    """Refuses a call over a connection that has shown no certificate for itself. TLS has verified one
    that was shown. Refused here and not in the handshake: the caller then reads why."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS or _has_shown_one(scope):
            await self._app(scope, receive, send)
            return
        refusal = ProblemError(
            ProblemCode.CLIENT_CERTIFICATE_REQUIRED,
            "This service answers only callers that show a certificate, and this connection has shown none. Set "
            "HOLDFAST_CLIENT_CERTIFICATE and HOLDFAST_CLIENT_KEY to files of an authority that the service trusts.",
        )
        await problem_response(refusal, scope["state"]["request_id"])(scope, receive, send)


def _has_shown_one(scope: Scope) -> bool:
    connection = scope.get(CONNECTION)
    return connection is not None and connection.has_shown_certificate is True


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size


def _load(files: CertificateFiles) -> _Loaded:
    """Raises SettingsError, which names the setting, the file and what to do."""
    stamp = files.stamp  # before the files are read: what changes meanwhile is seen at the next look
    try:
        chain = x509.load_pem_x509_certificates(_read(_CERTIFICATE, files.certificate))
    except ValueError:
        raise SettingsError(
            f"{_CERTIFICATE}: {files.certificate} holds no certificate in PEM. Name the file with the service's "
            "certificate, followed by those of the authorities in between."
        ) from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    _add_key(context, files, _read(_KEY, files.key))
    if files.client_ca is not None:
        _add_authorities(context, files.client_ca)
    return _Loaded(context, min(each.not_valid_after_utc for each in chain), stamp)


def _add_key(context: ssl.SSLContext, files: CertificateFiles, key: bytes) -> None:
    try:
        context.load_cert_chain(files.certificate, files.key, password=_refuse_passphrase)
    except _NeedsPassphraseError:
        raise SettingsError(
            f"{_KEY}: the key in {files.key} needs a passphrase, and the service cannot ask for one. Store it without, "
            "readable for the service's user alone."
        ) from None
    except ssl.SSLError as error:
        if b"PRIVATE KEY-----" not in key:
            why = f"{files.key} holds no private key in PEM. Name the file with the key of {files.certificate}."
        elif error.reason in _OF_ANOTHER:
            why = (
                f"the key in {files.key} is not that of the first certificate in {files.certificate}. Name the files "
                "that belong together; the service's own certificate comes first."
            )
        else:
            why = f"{files.key} and {files.certificate} cannot be used ({error.reason}). Have both made anew."
        raise SettingsError(f"{_KEY}: {why}") from None
    except OSError as error:
        raise SettingsError(
            f"{_KEY}: {files.key} cannot be read ({error.strerror}). Correct its path or mode."
        ) from None


def _add_authorities(context: ssl.SSLContext, client_ca: Path) -> None:
    _read(_CLIENT_CA, client_ca)
    try:
        context.load_verify_locations(cafile=client_ca)
    except (ssl.SSLError, OSError):
        raise SettingsError(
            f"{_CLIENT_CA}: {client_ca} holds no certificate in PEM. Name the file with the certificates of the "
            "authorities that callers' certificates are of."
        ) from None
    context.verify_mode = ssl.CERT_OPTIONAL
    # A resumed session would be good for longer than the certificate that it was begun with.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0


def _read(setting: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(
            f"{setting}: {path} cannot be read ({error.strerror}). Correct the path, or let the service's user read it."
        ) from None


class _NeedsPassphraseError(Exception):
    pass


def _refuse_passphrase() -> str:
    """Else OpenSSL would ask on the terminal."""
    raise _NeedsPassphraseError
