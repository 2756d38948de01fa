"""The exchange against a real OpenID provider: oidc-provider from npm, its discovery, its keys and its rotation."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import RSAAlgorithm

import holdfast_service.identity.keys
from holdfast_service.settings import ServiceSettings
from tests.support.oidc_provider import (
    OTHER_CLIENT,
    PUBLIC_CLIENT,
    RESOURCE,
    SERVICE_CLIENT,
    OidcProvider,
    oidc_provider,
)
from tests.support.prepare import NotHereError
from tests.support.rank import answer
from tests.support.service import RunningService, running_service

ACCOUNT = "system:serviceaccount:team-a:trainer"
RULES = [
    {"name": "jobs", "claims": {"sub": "system:serviceaccount:team-a:*"}, "role": "trainer", "projects": ["demo"]},
    {"name": "robots", "claims": {"sub": SERVICE_CLIENT}, "role": "reader", "projects": ["demo"]},
    {"name": "people", "groups": ["ml-*"], "role": "operator", "projects": ["demo"]},
]


@pytest.fixture
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """What is asked here is the provider: one database is enough."""
    return str(request.getfixturevalue("sqlite_catalogs").new(tmp_path))


@pytest.fixture
def provider(oidc: OidcProvider) -> OidcProvider:
    return oidc


@pytest.fixture
def service(settings: ServiceSettings, provider: OidcProvider, tmp_path: Path) -> Iterator[RunningService]:
    told = {"name": "real", "issuer": provider.issuer, "audiences": ["holdfast-jobs", RESOURCE]}
    told |= {"client_id": PUBLIC_CLIENT, "clock_skew_seconds": 30}
    path = tmp_path / "identity.yaml"
    path.write_text(json.dumps({"providers": [told], "rules": [{"provider": "real"} | each for each in RULES]}))
    with running_service(settings.model_copy(update={"identity_file": path})) as running:
        running.make_project("demo")
        yield running


def exchange(service: RunningService, token: str, **asked: Any) -> httpx.Response:
    return service.http(token=None).post("/v1/tokens/exchange", json={"subject_token": token} | asked)


def code_of(reply: httpx.Response) -> str:
    return str(reply.json()["code"])


def a_jobs(provider: OidcProvider, **changes: Any) -> str:
    return provider.token(ACCOUNT, **{"audience": "holdfast-jobs"} | changes)


def test_the_tokens_of_a_job_a_robot_and_a_person_are_exchanged(
    service: RunningService, provider: OidcProvider
) -> None:
    assert answer(exchange(service, a_jobs(provider)))["roles"] == ["trainer"]
    provider.account("ann", "ml-team", "other")
    person = provider.id_token("ann")
    made = answer(exchange(service, person))
    assert (made["subject"], made["issuer"], made["roles"]) == ("ann", provider.issuer, ["operator"])
    assert service.http(token=made["access_token"]).get("/v1/projects/demo/runs").status_code == 200
    assert code_of(exchange(service, person)) == "identity_token_used"
    provider.account("bob", "sales")
    assert code_of(exchange(service, provider.id_token("bob"))) == "identity_not_granted"


def test_an_access_token_is_no_proof_of_who_somebody_is(service: RunningService, provider: OidcProvider) -> None:
    """RFC 9068: its header says `at+jwt`. It is made for a resource, and whoever holds it may call that one."""
    token = provider.client_credentials()
    assert jwt.get_unverified_header(token)["typ"] == "at+jwt"
    assert code_of(exchange(service, token)) == "identity_token_invalid"


def test_what_is_for_another_from_another_too_old_or_too_new_is_refused(
    service: RunningService, provider: OidcProvider
) -> None:
    now = int(jwt.decode(a_jobs(provider), options={"verify_signature": False})["iat"])
    refused = {
        "identity_audience_wrong": [
            a_jobs(provider, audience="another"),
            a_jobs(provider, audience=["holdfast-jobs", "another"]),
            provider.id_token("ann", client=OTHER_CLIENT),
        ],
        "identity_issuer_unknown": [a_jobs(provider, iss="https://elsewhere.example.org")],
        "identity_token_expired": [a_jobs(provider, seconds=-31)],
        "identity_token_early": [a_jobs(provider, nbf=now + 3600), a_jobs(provider, iat=now + 3600)],
        "identity_token_invalid": [
            a_jobs(provider, exp=None),
            a_jobs(provider, by="stranger"),
            a_jobs(provider, header={"typ": "logout+jwt"}),
        ],
    }
    for code, tokens in refused.items():
        assert [code_of(exchange(service, token)) for token in tokens] == [code] * len(tokens), code
    answer(exchange(service, a_jobs(provider, iat=now + 5, nbf=now + 5)))  # within the skew


def test_neither_none_nor_the_public_key_as_a_secret_signs(service: RunningService, provider: OidcProvider) -> None:
    with provider.http() as http:
        (jwk, *_) = http.get(provider.discovery()["jwks_uri"]).raise_for_status().json()["keys"]
    token = a_jobs(provider)
    claims = token.split(".")[1]
    public: Any = RSAAlgorithm.from_jwk(jwk)
    pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    for header in ({"alg": "none"}, {"alg": "HS256", "kid": jwk["kid"]}):
        head = base64.urlsafe_b64encode(json.dumps(header).encode()).rstrip(b"=").decode()
        secret = jwt.get_algorithm_by_name("HS256").sign(f"{head}.{claims}".encode(), pem)
        for signature in ("", base64.urlsafe_b64encode(secret).rstrip(b"=").decode()):
            assert code_of(exchange(service, f"{head}.{claims}.{signature}")) == "identity_token_invalid"
    answer(exchange(service, token))


def test_keys_are_rotated_and_old_ones_end(
    service: RunningService, provider: OidcProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holdfast_service.identity.keys, "UNKNOWN_KEY_SECONDS", 0.0)
    before = a_jobs(provider)
    answer(exchange(service, before))
    provider.rotate()
    answer(exchange(service, a_jobs(provider)))  # by the new key, which is asked for
    answer(exchange(service, before))  # by the one before, which is listed yet
    provider.rotate(keep=False)
    answer(exchange(service, a_jobs(provider)))
    assert code_of(exchange(service, before)) == "identity_key_unknown"
    assert code_of(exchange(service, a_jobs(provider, by="retired"))) == "identity_key_unknown"


def test_a_flood_of_unknown_keys_does_not_reach_the_provider(service: RunningService, provider: OidcProvider) -> None:
    answer(exchange(service, a_jobs(provider)))
    identities = service.context.identities
    assert identities is not None
    keys = identities.keys_of(identities.rules.providers[0])
    asked_at = keys._tried_at
    replies = [exchange(service, a_jobs(provider, header={"kid": f"made up {number}"})) for number in range(15)]
    assert {code_of(reply) for reply in replies} == {"identity_key_unknown"}
    tried_at = keys._tried_at
    assert asked_at is not None
    assert tried_at is not None
    seconds = tried_at - asked_at
    assert seconds == 0 or seconds >= holdfast_service.identity.keys.UNKNOWN_KEY_SECONDS
    answer(exchange(service, a_jobs(provider)))


class TestAway:
    @pytest.fixture
    def provider(self) -> Iterator[OidcProvider]:
        try:
            with oidc_provider() as own:
                yield own
        except NotHereError as reason:
            # pip cannot install Node.js, and no other part of Holdfast needs it.
            pytest.skip(str(reason))

    def test_a_provider_that_stops_and_comes_back_with_other_keys(
        self, service: RunningService, provider: OidcProvider, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(holdfast_service.identity.keys, "KEPT_SECONDS", 0.0)
        monkeypatch.setattr(holdfast_service.identity.keys, "FAILED_SECONDS", 0.0)
        token = a_jobs(provider)
        provider.stop()
        reply = exchange(service, token)
        assert (reply.status_code, code_of(reply)) == (503, "identity_provider_unavailable")
        monkeypatch.setattr(holdfast_service.identity.keys, "KEPT_SECONDS", 300.0)
        provider.start()
        made = answer(exchange(service, a_jobs(provider)))
        assert code_of(exchange(service, token)) in ("identity_key_unknown", "identity_token_invalid")
        provider.stop()
        assert service.http(token=made["access_token"]).get("/v1/projects/demo/runs").status_code == 200
