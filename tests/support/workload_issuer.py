"""An issuer of workload identities as a Kubernetes API server is one: a discovery document, a key set, signed tokens.

A real HTTP server with real keys. `signed` makes what such an issuer hands to a pod; its attributes are for tests to
change while it runs.
"""

from __future__ import annotations

import base64
import json
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

PrivateKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey


_ES = {"secp256r1": "ES256", "secp384r1": "ES384"}


def ec_key(curve: ec.EllipticCurve | None = None) -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(curve or ec.SECP256R1())


@cache
def rsa_key(bits: int = 2048) -> rsa.RSAPrivateKey:
    """The same for all tests of a process: to make one takes a while."""
    return rsa.generate_private_key(public_exponent=65537, key_size=bits)


def public_jwk(kid: str | None, key: PrivateKey, **more: Any) -> dict[str, Any]:
    algorithm: Any = RSAAlgorithm if isinstance(key, rsa.RSAPrivateKey) else ECAlgorithm
    document = json.loads(algorithm.to_jwk(key.public_key()))
    return {**document, "use": "sig", **({} if kid is None else {"kid": kid}), **more}


def public_pem(key: PrivateKey) -> bytes:
    return key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


class WorkloadIssuer:
    """`calls`: the paths that were asked for."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.keys: dict[str, PrivateKey] = {"first": ec_key()}
        self.more_jwks: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.authorizations: list[str | None] = []
        self.status = 200
        self.issuer_told = url
        self.reply: bytes | None = None
        self.location: str | None = None
        self.proceed = threading.Event()
        self.proceed.set()

    def claims(self, **changes: Any) -> dict[str, Any]:
        now = int(time.time())
        claims = {
            "iss": self.url,
            "sub": "system:serviceaccount:team-a:trainer",
            "aud": ["holdfast"],
            "iat": now,
            "nbf": now,
            "exp": now + 600,
        } | changes
        return {name: value for name, value in claims.items() if value is not None}

    def signed(
        self, *, kid: str | None = "first", key: Any = None, headers: dict[str, Any] | None = None, **changes: Any
    ) -> str:
        """A token; a claim that is given as None is left out."""
        private = key or self.keys[kid or "first"]
        algorithm = "RS256" if isinstance(private, rsa.RSAPrivateKey) else _ES[private.curve.name]
        said = ({} if kid is None else {"kid": kid}) | (headers or {})
        return jwt.encode(self.claims(**changes), private, algorithm=algorithm, headers=said)

    def forged(self, header: dict[str, Any], *, signature: bytes = b"", **changes: Any) -> str:
        """With whatever header and signature."""
        parts = [json.dumps(header).encode(), json.dumps(self.claims(**changes)).encode(), signature]
        return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)

    def documents(self) -> dict[str, Any]:
        jwks = [public_jwk(kid, key) for kid, key in self.keys.items()]
        return {
            "/.well-known/openid-configuration": {"issuer": self.issuer_told, "jwks_uri": f"{self.url}/openid/v1/jwks"},
            "/openid/v1/jwks": {"keys": [*jwks, *self.more_jwks]},
        }


@contextmanager
def workload_issuer(certificate: Path | None = None) -> Iterator[WorkloadIssuer]:
    """`certificate`: a PEM file with certificate and key (tests/support/tls.py `self_signed`); with it it is https."""
    issuer: WorkloadIssuer

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            issuer.calls.append(self.path)
            issuer.authorizations.append(self.headers.get("Authorization"))
            issuer.proceed.wait(60)
            document = issuer.documents().get(self.path)
            body = issuer.reply if issuer.reply is not None else json.dumps(document).encode()
            self.send_response(404 if document is None else issuer.status)
            self.send_header("Content-Type", "application/json")
            if issuer.location is not None:
                self.send_header("Location", issuer.location)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if certificate is not None:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificate)
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    issuer = WorkloadIssuer(f"http{'' if certificate is None else 's'}://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield issuer
    finally:
        issuer.proceed.set()
        server.shutdown()
        server.server_close()
        thread.join(30)
