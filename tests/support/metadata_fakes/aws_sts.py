"""AWS STS, as far as outbound identity federation goes: `GetWebIdentityToken` for the role that signs the call.

As strict as the API reference: the signature, the session token, each parameter and its bounds. The tokens are those of
an issuer that really signs, with the claims that AWS documents.
Source: https://docs.aws.amazon.com/STS/latest/APIReference/API_GetWebIdentityToken.html
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta
from urllib.parse import parse_qsl

from tests.support.s3_fake.replies import Refusal
from tests.support.s3_fake.signatures import Keys, verify
from tests.support.scripted_http import Reply, Seen
from tests.support.workload_issuer import WorkloadIssuer

_NAMESPACE = "https://sts.amazonaws.com/doc/2011-06-15/"
_FORM = "application/x-www-form-urlencoded; charset=utf-8"
ACCOUNT = "123456789012"
ROLE = f"arn:aws:iam::{ACCOUNT}:role/training"


class FakeSts:
    """`issuer`: of the account; its key "first" must be one on P-384. `refusal`: status and code, in place of a
    token."""

    def __init__(self, issuer: WorkloadIssuer) -> None:
        self.issuer = issuer
        self.keys = Keys("ASIAEXAMPLE", "of the role", "eu-central-1", "sts")
        self.session_token = "of the session"
        self.refusal: tuple[int, str] | None = None
        self.calls = 0

    def environment(self, url: str) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": self.keys.access_key,
            "AWS_SECRET_ACCESS_KEY": self.keys.secret_key,
            "AWS_SESSION_TOKEN": self.session_token,
            "AWS_REGION": self.keys.region,
            "AWS_ENDPOINT_URL_STS": url,
        }

    def answer(self, seen: Seen) -> Reply:
        self.calls += 1
        try:
            return _xml(200, f"<GetWebIdentityTokenResult>{self._result(seen)}</GetWebIdentityTokenResult>")
        except Refusal as refusal:
            return _xml(refusal.status, f"<Error><Type>Sender</Type><Code>{refusal.code}</Code></Error>")

    def _result(self, seen: Seen) -> str:
        if (seen.method, seen.path, seen.headers.get("content-type")) != ("POST", "/", _FORM):
            raise Refusal(400, "MalformedInput")
        body = hashlib.sha256(seen.body).hexdigest()
        verify(self.keys, "POST", "/", seen.query, seen.headers, datetime.now(UTC), payload=body)
        if seen.headers.get("x-amz-security-token") != self.session_token:
            raise Refusal(403, "InvalidClientTokenId")
        asked = dict(parse_qsl(seen.body.decode(), strict_parsing=True))
        if (asked.pop("Action"), asked.pop("Version")) != ("GetWebIdentityToken", "2011-06-15"):
            raise Refusal(400, "InvalidAction")
        audience, seconds = asked.pop("Audience.member.1"), int(asked.pop("DurationSeconds"))
        if asked != {"SigningAlgorithm": "ES384"} or not 1 <= len(audience) <= 1000 or not 60 <= seconds <= 3600:
            raise Refusal(400, "ValidationError")
        if self.refusal is not None:
            raise Refusal(*self.refusal)
        now = datetime.now(UTC)
        ends = now + timedelta(seconds=seconds)
        about = {"aws_account": ACCOUNT, "source_region": self.keys.region, "principal_id": ROLE}
        token = self.issuer.signed(
            sub=ROLE,
            aud=audience,
            nbf=None,
            exp=int(ends.timestamp()),
            jti=f"call-{self.calls}",
            **{"https://sts.amazonaws.com/": about},
        )
        return f"<WebIdentityToken>{token}</WebIdentityToken><Expiration>{ends:%Y-%m-%dT%H:%M:%SZ}</Expiration>"


def _xml(status: int, inner: str) -> Reply:
    kind = "GetWebIdentityTokenResponse" if status == 200 else "ErrorResponse"
    more = "<ResponseMetadata><RequestId>request</RequestId></ResponseMetadata>" if status == 200 else ""
    text = f'<{kind} xmlns="{_NAMESPACE}">{inner}{more}</{kind}>'
    return Reply(status, text.encode(), {"Content-Type": "text/xml"}, protocol=None)
