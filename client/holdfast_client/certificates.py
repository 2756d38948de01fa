"""The TLS of both planes: whom a client trusts, and the certificate that it shows if it is asked for one.

It trusts certifi's authorities (in their place those of SSL_CERT_FILE or SSL_CERT_DIR) and those of HOLDFAST_CA_FILE.
"""

from __future__ import annotations

import functools
import logging
import os
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx

from holdfast_client.errors import ConfigurationError
from holdfast_client.settings import ClientSettings

_LOOK_AGAIN_SECONDS = 5.0

log = logging.getLogger("holdfast.client")


@dataclass(frozen=True)
class CertificateFiles:
    """`key`: None if it stands in the certificate's file."""

    authorities: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    @property
    def stamp(self) -> tuple[object, ...]:
        """Another one after each change of a file."""
        return tuple(map(_stamp, (self.authorities, self.certificate, self.key)))


def tls_of(settings: ClientSettings) -> ssl.SSLContext:
    """One for all transports: to read certifi's authorities takes 40 ms. Raises ConfigurationError, which names the
    setting whose file cannot be used."""
    if settings.client_key is not None and settings.client_certificate is None:
        raise ConfigurationError(
            "HOLDFAST_CLIENT_KEY is set without HOLDFAST_CLIENT_CERTIFICATE. Set both, or neither."
        )
    files = CertificateFiles(settings.ca_file, settings.client_certificate, settings.client_key)
    return _shared(files, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


@functools.cache
def _shared(files: CertificateFiles, *_named: str | None) -> ssl.SSLContext:
    """httpx reads the variables that the caller names here, so that a change of one is heard."""
    return httpx.create_ssl_context() if files == CertificateFiles() else RenewedContext(files)


class RenewedContext(ssl.SSLContext):
    """For a job that runs for longer than its certificate is good: a new connection is made with the files as they are
    then, or as they were when they could last be used. The HTTP libraries see one context all the time."""

    def __new__(cls, _files: CertificateFiles) -> Self:
        return super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)

    def __init__(self, files: CertificateFiles) -> None:
        """Raises ConfigurationError."""
        self._files = files
        self._lock = threading.Lock()
        self._stamp = files.stamp
        self._refused: tuple[object, ...] | None = None
        self._newest = _load(files)
        self._look_at = time.monotonic() + _LOOK_AGAIN_SECONDS

    def wrap_socket(self, *given: Any, **named: Any) -> ssl.SSLSocket:
        return self._now().wrap_socket(*given, **named)

    def wrap_bio(self, *given: Any, **named: Any) -> ssl.SSLObject:
        return self._now().wrap_bio(*given, **named)

    def _now(self) -> ssl.SSLContext:
        with self._lock:
            if time.monotonic() >= self._look_at:
                self._look_at = time.monotonic() + _LOOK_AGAIN_SECONDS
                self._look()
            return self._newest

    def _look(self) -> None:
        stamp = self._files.stamp
        if stamp == self._stamp:
            return
        try:
            self._newest = _load(self._files)
            self._stamp = stamp
        except ConfigurationError as error:  # half of a pair is soon whole: tried again, and said once
            if stamp != self._refused:
                log.warning("The certificate is not renewed, and the one before is used on: %s", error)
            self._refused = stamp


def _load(files: CertificateFiles) -> ssl.SSLContext:
    context = httpx.create_ssl_context()
    if files.authorities is not None:
        with _loading("HOLDFAST_CA_FILE", files.authorities, "certificate"):
            context.load_verify_locations(cafile=files.authorities)
    if files.certificate is not None:
        setting = "HOLDFAST_CLIENT_CERTIFICATE" if files.key is None else "HOLDFAST_CLIENT_KEY"
        key = files.key or files.certificate
        with (
            _loading("HOLDFAST_CLIENT_CERTIFICATE", files.certificate, "certificate"),
            _loading(setting, key, f"key without a passphrase that is the one of {files.certificate}"),
        ):
            context.load_cert_chain(files.certificate, key, password=_refuse_passphrase)
    return context


@contextmanager
def _loading(setting: str, path: Path, wanted: str) -> Iterator[None]:
    """Raises ConfigurationError for a file that cannot be read or is something else."""
    try:
        path.read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"{setting}: {path} cannot be read ({error.strerror}). Correct its path or its mode."
        ) from None
    try:
        yield
    except (OSError, _NeedsPassphraseError):  # an SSLError is an OSError
        raise ConfigurationError(f"{setting}: {path} holds no {wanted}, in PEM. Name another file.") from None


class _NeedsPassphraseError(Exception):
    pass


def _refuse_passphrase() -> str:
    """Else OpenSSL would ask on the terminal, in the middle of a job."""
    raise _NeedsPassphraseError


def _stamp(path: Path | None) -> tuple[int, ...] | None:
    try:
        stat = None if path is None else path.stat()
    except OSError:
        return None
    return None if stat is None else (stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size)
