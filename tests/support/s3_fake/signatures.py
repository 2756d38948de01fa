"""AWS Signature Version 4, verified as Amazon documents it, in headers and in URLs.

Stricter than it need be where Amazon leaves room: every `x-amz-` header that is sent must be signed, nothing may stand
twice, and path and query must be spelt canonically, so that a sloppy signer is found out.
Source: https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-auth-using-authorization-header.html
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from urllib.parse import quote, unquote

from tests.support.s3_fake.replies import Refusal

_ALGORITHM = "AWS4-HMAC-SHA256"
_TERMS = {"X-Amz-Algorithm", "X-Amz-Credential", "X-Amz-Date", "X-Amz-Expires", "X-Amz-SignedHeaders"}
_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=(?P<credential>[^,]+), ?SignedHeaders=(?P<names>[^,]+), ?"
    r"Signature=(?P<mac>[0-9a-f]{64})"
)
_LONGEST_SECONDS = 7 * 24 * 3600
_SKEW = timedelta(minutes=15)


@dataclass(frozen=True)
class Keys:
    access_key: str
    secret_key: str
    region: str
    service: str = "s3"


def parsed_query(raw_query: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in raw_query.split("&") if raw_query else ():
        name, _, value = (unquote(each) for each in part.partition("="))
        if name in found or part not in (f"{_quoted(name)}={_quoted(value)}", _quoted(name)):
            raise Refusal(400, "InvalidArgument", f"The parameter {name!r} is malformed or stands twice.")
        found[name] = value
    return found


def verify(
    keys: Keys,
    method: str,
    raw_path: str,
    query: Mapping[str, str],
    headers: Mapping[str, str],
    now: datetime,
    *,
    payload: str | None = None,
) -> str:
    """The payload's SHA-256 that was signed, or UNSIGNED-PAYLOAD. `payload`: for the services of Amazon whose calls
    have no header that says it. Raises Refusal."""
    if "X-Amz-Signature" in query:
        return _verify_url(keys, method, raw_path, dict(query), headers, now)
    return _verify_headers(keys, method, raw_path, query, headers, now, payload or headers.get("x-amz-content-sha256"))


def _verify_url(
    keys: Keys, method: str, raw_path: str, query: dict[str, str], headers: Mapping[str, str], now: datetime
) -> str:
    if _TERMS - query.keys() or query["X-Amz-Algorithm"] != _ALGORITHM:
        raise Refusal(400, "AuthorizationQueryParametersError")
    expires = query["X-Amz-Expires"]
    if not expires.isdecimal() or not 1 <= int(expires) <= _LONGEST_SECONDS:
        raise Refusal(400, "AuthorizationQueryParametersError", "X-Amz-Expires is out of bounds.")
    signed_at = _moment(query["X-Amz-Date"])
    if now >= signed_at + timedelta(seconds=int(expires)):
        raise Refusal(403, "AccessDenied", "Request has expired")
    if signed_at > now + _SKEW:
        raise Refusal(403, "AccessDenied", "Request is not valid yet")
    mac = query.pop("X-Amz-Signature")
    _check(
        keys, method, raw_path, query, headers, query["X-Amz-SignedHeaders"], query["X-Amz-Credential"],
        query["X-Amz-Date"], "UNSIGNED-PAYLOAD", mac,
    )  # fmt: skip
    return "UNSIGNED-PAYLOAD"


def _verify_headers(
    keys: Keys,
    method: str,
    raw_path: str,
    query: Mapping[str, str],
    headers: Mapping[str, str],
    now: datetime,
    payload: str | None,
) -> str:
    match = _AUTHORIZATION.fullmatch(headers.get("authorization", ""))
    if match is None:
        raise Refusal(403, "AccessDenied", "Anonymous requests are not allowed.")
    date = headers.get("x-amz-date")
    if payload is None or date is None:
        raise Refusal(400, "InvalidRequest", "x-amz-content-sha256 and x-amz-date are needed.")
    if abs(now - _moment(date)) > _SKEW:
        raise Refusal(403, "RequestTimeTooSkewed")
    _check(
        keys, method, raw_path, query, headers, match["names"], match["credential"], date, payload, match["mac"]
    )  # fmt: skip
    return payload


def _check(
    keys: Keys,
    method: str,
    raw_path: str,
    query: Mapping[str, str],
    headers: Mapping[str, str],
    signed: str,
    credential: str,
    date: str,
    payload: str,
    mac: str,
) -> None:
    names = signed.split(";")
    if names != sorted(set(names)) or "host" not in names or set(names) - headers.keys():
        raise Refusal(403, "SignatureDoesNotMatch", "SignedHeaders is malformed or names what was not sent.")
    unsigned = {name for name in headers if name.startswith("x-amz-") and name not in names}
    if unsigned:
        raise Refusal(403, "AccessDenied", f"There were headers present which were not signed: {sorted(unsigned)}")
    if "/".join(_quoted(unquote(part)) for part in raw_path.split("/")) != raw_path:
        raise Refusal(400, "InvalidURI", "The path is not spelt canonically.")
    scope = f"{date[:8]}/{keys.region}/{keys.service}/aws4_request"
    if credential != f"{keys.access_key}/{scope}":
        raise Refusal(403, "InvalidAccessKeyId", "The key is unknown, or its scope is another one.")
    pairs = sorted((_quoted(name), _quoted(value)) for name, value in query.items())
    lines = "".join(f"{name}:{' '.join(headers[name].split())}\n" for name in names)
    canonical = "\n".join(
        [method, raw_path, "&".join(f"{name}={value}" for name, value in pairs), lines, signed, payload]
    )
    text = "\n".join([_ALGORITHM, date, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    key = b"AWS4" + keys.secret_key.encode()
    for part in scope.split("/"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    if not hmac.compare_digest(hmac.new(key, text.encode(), hashlib.sha256).hexdigest(), mac):
        raise Refusal(403, "SignatureDoesNotMatch")


def _moment(date: str) -> datetime:
    try:
        return datetime.strptime(date, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        raise Refusal(403, "AccessDenied", "The date is malformed.") from None


def _quoted(text: str) -> str:
    return quote(text, safe="-_.~")
