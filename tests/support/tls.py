"""Certificates for servers and clients of the tests."""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

_NOW = datetime.datetime.now(datetime.UTC)


def self_signed(path: Path, host: str) -> Path:
    """For the name or address `host`; the key is in the same file."""
    key = ec.generate_private_key(ec.SECP256R1())
    signed = (
        _begun(key, host, _name(host), days=1)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path.write_bytes(_pem(key) + _pem(signed))
    return path


class Authority:
    """Signs certificates. `file` has its own, which is to be trusted."""

    def __init__(self, file: Path, name: str = "authority") -> None:
        self.file = file
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        own = (
            _begun(self._key, name, self._name, days=365)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(_use(key_cert_sign=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        file.write_bytes(_pem(own))

    def sign(self, certificate: Path, key: Path, *, host: str = "127.0.0.1", days: float = 30) -> int:
        """Leaves a certificate and its key in these files, each put in place whole. Returns its serial number."""
        private = ec.generate_private_key(ec.SECP256R1())
        signed = (
            _begun(private, host, self._name, days=days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_use(digital_signature=True), critical=True)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        for path, content in ((key, _pem(private)), (certificate, _pem(signed))):
            fresh = path.with_name(f"{path.name}.fresh")
            fresh.write_bytes(content)
            os.replace(fresh, path)
        return signed.serial_number


def _begun(key: ec.EllipticCurvePrivateKey, host: str, issuer: x509.Name, *, days: float) -> x509.CertificateBuilder:
    """For the name or address `host`, from yesterday on."""
    address = re.fullmatch(r"[\d.]+", host)
    alternative = x509.IPAddress(ipaddress.ip_address(host)) if address else x509.DNSName(host)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(host))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_NOW - datetime.timedelta(days=1))
        .not_valid_after(_NOW + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([alternative]), critical=False)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _use(*, key_cert_sign: bool = False, digital_signature: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=key_cert_sign,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(what: ec.EllipticCurvePrivateKey | x509.Certificate) -> bytes:
    if isinstance(what, x509.Certificate):
        return what.public_bytes(serialization.Encoding.PEM)
    return what.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
