"""V4 signed URLs, verified as Google documents it and with nothing of the service's own signer.

Stricter than it need be where Google leaves room: a parameter that stands twice, a path or a query in another spelling,
and a signature that is not lower-case hex of the right length are refused, so that a sloppy signer is found out.
Source: https://cloud.google.com/storage/docs/authentication/canonical-requests
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from urllib.parse import quote, unquote

from tests.support.gcs_fake.accounts import Account, Accounts
from tests.support.gcs_fake.replies import Refusal

_ALGORITHM = "GOOG4-RSA-SHA256"
_TERMS = {"X-Goog-Algorithm", "X-Goog-Credential", "X-Goog-Date", "X-Goog-Expires", "X-Goog-SignedHeaders"}
_SIGNATURE = re.compile(r"[0-9a-f]{512}")
_EXPIRES = re.compile(r"[1-9][0-9]{0,5}")
_LONGEST_SECONDS = 7 * 24 * 3600
_SKEW = timedelta(minutes=15)


def is_signed(raw_query: str) -> bool:
    return "X-Goog-Signature=" in raw_query or "X-Goog-Algorithm=" in raw_query


def verify(
    accounts: Accounts, method: str, raw_path: str, raw_query: str, headers: Mapping[str, list[str]], *, now: datetime
) -> Account:
    """The account that signed the URL. Raises Refusal. `headers` by lower-case name, in the order of their coming."""
    query = _parsed(raw_query)
    missing = (_TERMS | {"X-Goog-Signature"}) - query.keys()
    if missing:
        raise Refusal(400, "InvalidQueryParameterValue", f"Missing {sorted(missing)}.")
    if query["X-Goog-Algorithm"] != _ALGORITHM:
        raise Refusal(400, "InvalidQueryParameterValue", "The algorithm is not supported.")
    email, scope = _credential(query["X-Goog-Credential"], query["X-Goog-Date"])
    _check_time(query["X-Goog-Date"], query["X-Goog-Expires"], now)
    signed_names = query["X-Goog-SignedHeaders"].split(";")
    header_lines = _canonical_headers(signed_names, headers)
    signature = query.pop("X-Goog-Signature")
    pairs = sorted((_quoted(name), _quoted(value)) for name, value in query.items())
    canonical = "\n".join(
        [
            method,
            _canonical_path(raw_path),
            "&".join(f"{name}={value}" for name, value in pairs),
            header_lines,
            ";".join(signed_names),
            headers.get("x-goog-content-sha256", ["UNSIGNED-PAYLOAD"])[0],
        ]
    )
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    message = "\n".join([_ALGORITHM, query["X-Goog-Date"], scope, digest]).encode()
    account = accounts.find(email)
    if account is None or not _SIGNATURE.fullmatch(signature):
        raise _no_match()
    if not account.has_signed(message, bytes.fromhex(signature)):
        raise _no_match()
    return account


def _no_match() -> Refusal:
    return Refusal(403, "SignatureDoesNotMatch", "The request signature we calculated does not match the one provided.")


def _parsed(raw_query: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in raw_query.split("&"):
        name, _, value = part.partition("=")
        decoded = unquote(name)
        if decoded in found or f"{_quoted(decoded)}={_quoted(unquote(value))}" != part:
            raise Refusal(400, "InvalidQueryParameterValue", f"The parameter {decoded!r} is malformed or stands twice.")
        found[decoded] = unquote(value)
    return found


def _credential(credential: str, timestamp: str) -> tuple[str, str]:
    email, _, scope = credential.partition("/")
    if scope.split("/")[:1] != [timestamp[:8]] or scope.split("/")[2:] != ["storage", "goog4_request"]:
        raise Refusal(400, "InvalidQueryParameterValue", "The credential scope is malformed.")
    return email, scope


def _check_time(timestamp: str, expires: str, now: datetime) -> None:
    try:
        signed_at = datetime.strptime(timestamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        raise Refusal(400, "InvalidQueryParameterValue", "X-Goog-Date is malformed.") from None
    if not _EXPIRES.fullmatch(expires) or int(expires) > _LONGEST_SECONDS:
        raise Refusal(400, "InvalidQueryParameterValue", "X-Goog-Expires must be 1 to 604800 seconds.")
    ends_at = signed_at + timedelta(seconds=int(expires))
    if now >= ends_at:
        raise Refusal(400, "ExpiredToken", f"Request signature expired at: {ends_at.isoformat()}")
    if signed_at > now + _SKEW:
        raise Refusal(403, "RequestTimeTooSkewed", "The request is not valid yet.")


def _canonical_headers(signed_names: list[str], headers: Mapping[str, list[str]]) -> str:
    if "host" not in signed_names or signed_names != sorted(set(signed_names)):
        raise Refusal(400, "InvalidQueryParameterValue", "X-Goog-SignedHeaders is malformed.")
    for name in signed_names:
        if name not in headers:
            details = f"Header was included in signedheaders, but not in the request. ParameterName: {name}"
            raise Refusal(400, "MalformedSecurityHeader", details)
    for name in headers:
        # Else whoever holds a URL could add metadata, an encryption key or a precondition to what it allows.
        if name.startswith(("x-goog-", "x-amz-")) and name not in signed_names:
            raise Refusal(403, "SignatureDoesNotMatch", f"The header {name} is in the request and is not signed.")
    return "".join(f"{name}:{' '.join(','.join(headers[name]).split())}\n" for name in signed_names)


def _canonical_path(raw_path: str) -> str:
    if quote(unquote(raw_path), safe="/-_.~") != raw_path:
        raise Refusal(400, "InvalidURI", "The path is not in its canonical spelling.")
    return raw_path


def _quoted(text: str) -> str:
    return quote(text, safe="-_.~")
