"""What an identity provider sends: its discovery document and its keys. A provider that was taken over, or whatever
answers at its address, must not end a fetch in another way than by ProviderError."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from holdfast_service.identity import keys
from holdfast_service.identity.rules import ProviderRules
from tests.fuzz.mutations import JSON, altered, damaged

often = settings(max_examples=1000, suppress_health_check=list(HealthCheck))

ISSUER = "https://sso.example.org"
PROVIDER = ProviderRules.model_validate({"name": "people", "issuer": ISSUER, "client_id": "page"})
DISCOVERY = {
    "issuer": ISSUER,
    "jwks_uri": f"{ISSUER}/keys",
    "authorization_endpoint": f"{ISSUER}/authorize",
    "token_endpoint": f"{ISSUER}/token",
}
KEYS = {
    "keys": [
        {"kid": "rsa", "use": "sig", "alg": "RS256"}
        | RSAAlgorithm.to_jwk(rsa.generate_private_key(65537, 2048).public_key(), as_dict=True),
        {"kid": "ec"} | ECAlgorithm.to_jwk(ec.generate_private_key(ec.SECP256R1()).public_key(), as_dict=True),
        {"kid": "ed"} | OKPAlgorithm.to_jwk(ed25519.Ed25519PrivateKey.generate().public_key(), as_dict=True),
    ]
}
SENT = [json.dumps(document).encode() for document in (DISCOVERY, KEYS)]
BODIES = (
    st.sampled_from([DISCOVERY, KEYS]).flatmap(altered).map(lambda document: json.dumps(document).encode())
    | JSON.map(lambda document: json.dumps(document).encode())
    | damaged(SENT)
    | st.binary(max_size=200)
)
DEEP = b"[" * 100_000


def key_of(number: int, **values: Any) -> bytes:
    return json.dumps({"keys": [KEYS["keys"][number] | values]}).encode()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The answers, discovery document first."""
    answers: list[bytes] = []
    reply = httpx.MockTransport(
        lambda asked: httpx.Response(200, stream=httpx.ByteStream(answers["openid" not in asked.url.path]))
    )
    monkeypatch.setattr(keys, "_http_of", lambda *_: httpx.Client(transport=reply, trust_env=False))
    return answers


@often
@given(BODIES | st.just(SENT[0]), BODIES | st.just(SENT[1]), st.booleans())
@example(DEEP, SENT[1], False)
@example(SENT[0], DEEP, False)
@example(SENT[0], b" " * (keys.MOST_BYTES + 1), False)
@example(SENT[0], key_of(0, n="_" * 200_001), True)
@example(SENT[0], key_of(0, e="_" * 300), True)
@example(SENT[0], key_of(0, n=7), True)
@example(SENT[0], key_of(1, x=None), True)
@example(SENT[0], key_of(2, x=[1]), True)
@example(SENT[0], key_of(2, d={}), True)
def test_what_a_provider_sends_is_read_or_refused(
    sent: list[bytes], discovery: bytes, listed: bytes, is_whole: bool
) -> None:
    """A token verifies or not with each key. `is_whole`: the discovery document is a good one."""
    sent[:] = [SENT[0] if is_whole else discovery, listed]
    with suppress(keys.ProviderError):
        fetched = keys._fetch(PROVIDER)
        for algorithm, key in ((each, key) for one in fetched.keys for each, key in one.by_algorithm.items()):
            token = jwt.encode({"sub": "x"}, "k" * 64, "HS256").split(".")
            head = jwt.utils.base64url_encode(json.dumps({"alg": algorithm}).encode()).decode()
            with pytest.raises(jwt.PyJWTError):
                jwt.decode(".".join([head, *token[1:]]), key, algorithms=[algorithm])


URLS = [
    f"{ISSUER}/\ud800",
    f"https://{'a' * 70}.example.org/",
    "https://a..b/",
    "https://xn--a/",
    "https://[::1/",
    "https://h:99999/",
    f"{ISSUER}/\r\nX: y",
]


@often
@given(st.sampled_from(URLS) | damaged([ISSUER.encode()]).map(lambda data: data.decode("utf-8", "replace")) | st.text())
def test_a_url_of_a_provider_can_be_sent_or_is_refused(sent: list[bytes], url: str) -> None:
    """To the provider, or to a browser in a header."""
    sent[:] = SENT
    with suppress(keys.ProviderError):
        found = keys.url_in({"token_endpoint": url}, "token_endpoint")
        found.encode()
        keys.call_provider(PROVIDER, "GET", found, headers={})


@pytest.mark.parametrize("host", ["a" * 70 + ".localhost", "a..localhost", "xn--a"])
def test_a_host_that_no_name_can_be_is_no_bug(host: str) -> None:
    """Found by the resolver, which a call reaches only without the fixture."""
    with pytest.raises(keys.ProviderError, match="cannot be reached"):
        keys.call_provider(PROVIDER, "GET", f"https://{host}/", headers={})
