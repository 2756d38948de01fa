"""A provider's keys: fetched when they are needed and no more often, gone when the provider has taken them back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import holdfast_service.identity.keys
from holdfast_protocol.problems import ProblemCode
from holdfast_service.errors import ProblemError
from holdfast_service.identity.keys import (
    FAILED_SECONDS,
    KEPT_SECONDS,
    MOST_BYTES,
    UNKNOWN_KEY_SECONDS,
    ProviderKeys,
)
from holdfast_service.identity.rules import ProviderRules
from tests.support.tls import self_signed
from tests.support.workload_issuer import WorkloadIssuer, ec_key, public_jwk, rsa_key, workload_issuer

DISCOVERY, JWKS = "/.well-known/openid-configuration", "/openid/v1/jwks"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The issuer answers as slowly as the machine is crowded."""
    for name in ("CALL_SECONDS", "WHOLE_SECONDS"):
        monkeypatch.setattr(holdfast_service.identity.keys, name, 60.0)


@pytest.fixture
def issuer() -> Iterator[WorkloadIssuer]:
    with workload_issuer() as running:
        yield running


@pytest.fixture
def clock() -> Clock:
    return Clock()


def keys_of(issuer: WorkloadIssuer, clock: Clock | None = None, **more: Any) -> ProviderKeys:
    document = {"name": "cluster", "issuer": issuer.url, "audiences": ["holdfast"]} | more
    return ProviderKeys(ProviderRules.model_validate(document), clock or Clock())


def waited(fetch: Future[None] | None) -> None:
    if fetch is not None:
        fetch.result(60)


def outcome(keys: ProviderKeys, kid: str | None = "first", algorithm: str = "ES256") -> str:
    """`known`, or the code of the refusal."""
    waited(keys.needs(kid, algorithm))
    try:
        keys.key(kid, algorithm)
    except ProblemError as error:
        refused = error
    else:
        return "known"
    assert 1 <= refused.context["retry_after_seconds"] <= UNKNOWN_KEY_SECONDS
    return refused.code.value


UNKNOWN, UNAVAILABLE = ProblemCode.IDENTITY_KEY_UNKNOWN.value, ProblemCode.IDENTITY_PROVIDER_UNAVAILABLE.value


def test_they_are_fetched_once_and_again_after_a_while(issuer: WorkloadIssuer, clock: Clock) -> None:
    keys = keys_of(issuer, clock)
    assert issuer.calls == [], "none is asked for before it is needed"
    assert [outcome(keys) for _ in range(3)] == ["known"] * 3
    assert issuer.calls == [DISCOVERY, JWKS]
    clock.now += KEPT_SECONDS - 1
    assert outcome(keys) == "known"
    assert len(issuer.calls) == 2
    clock.now += 1
    assert outcome(keys) == "known"
    assert len(issuer.calls) == 4


def test_a_new_key_is_found_and_an_old_one_ends(issuer: WorkloadIssuer, clock: Clock) -> None:
    keys = keys_of(issuer, clock)
    assert outcome(keys) == "known"
    issuer.keys = {"second": ec_key()}
    clock.now += UNKNOWN_KEY_SECONDS
    assert outcome(keys, "second") == "known", "a kid that is not known is asked for"
    assert outcome(keys, "first") == UNKNOWN, "and what is not listed any more is gone with the same call"
    issuer.keys = {"third": ec_key()}
    clock.now += KEPT_SECONDS
    assert outcome(keys, "second") == UNKNOWN, "without a new one too, after a while"


def test_a_flood_of_unknown_keys_makes_few_calls(issuer: WorkloadIssuer, clock: Clock) -> None:
    keys = keys_of(issuer, clock)
    for second in range(30):
        for number in range(20):
            assert outcome(keys, f"made up {second} {number}") == UNKNOWN
        assert outcome(keys) == "known", "the others go on"
        clock.now += 1
    assert len(issuer.calls) == 2 * 30 / UNKNOWN_KEY_SECONDS


def test_many_who_ask_at_once_share_one_call(issuer: WorkloadIssuer) -> None:
    keys = keys_of(issuer)
    issuer.proceed.clear()
    fetches = [keys.needs("first", "ES256") for _ in range(50)]
    issuer.proceed.set()
    for fetch in fetches:
        assert fetch is not None
        fetch.result(60)
    assert outcome(keys) == "known"
    assert issuer.calls == [DISCOVERY, JWKS]


def test_while_a_call_is_under_way_known_keys_are_used(issuer: WorkloadIssuer, clock: Clock) -> None:
    keys = keys_of(issuer, clock)
    assert outcome(keys) == "known"
    clock.now += UNKNOWN_KEY_SECONDS
    issuer.proceed.clear()
    fetch = keys.needs("other", "ES256")
    assert fetch is not None
    assert keys.needs("first", "ES256") is None
    keys.key("first", "ES256")
    issuer.proceed.set()
    fetch.result(60)


def test_a_provider_that_is_away_is_left_alone_for_a_moment_and_comes_back(
    issuer: WorkloadIssuer, clock: Clock
) -> None:
    keys = keys_of(issuer, clock)
    issuer.status = 500
    assert [outcome(keys) for _ in range(20)] == [UNAVAILABLE] * 20
    assert issuer.calls == [DISCOVERY]
    assert keys.failure is not None
    issuer.status = 200
    clock.now += FAILED_SECONDS
    assert outcome(keys) == "known"
    assert keys.failure is None


def test_while_it_is_away_its_keys_are_used_no_longer_than_otherwise(issuer: WorkloadIssuer, clock: Clock) -> None:
    keys = keys_of(issuer, clock)
    assert outcome(keys) == "known"
    issuer.status = 503
    clock.now += UNKNOWN_KEY_SECONDS
    assert outcome(keys, "other") == UNKNOWN
    assert outcome(keys) == "known"
    clock.now += KEPT_SECONDS
    assert outcome(keys) == UNAVAILABLE


def test_what_is_no_providers_answer_is_told_and_not_repeated(issuer: WorkloadIssuer) -> None:
    secret = b"what stands in the reply"
    answers: dict[str, dict[str, Any]] = {
        "is of another issuer": {"issuer_told": "https://cluster.example.org"},
        "answered with something that is no JSON object": {"reply": secret},
        "is no JSON object": {"reply": b"[" * 100_000},
        f"more than {MOST_BYTES} bytes": {"reply": b" " * (MOST_BYTES + 1) + secret},
        "answered 302": {"status": 302, "location": f"{issuer.url}/elsewhere"},
        "lists no key that can verify a token": {"keys": {}},
    }
    usual = {name: getattr(issuer, name) for name in ("issuer_told", "reply", "status", "location", "keys")}
    for told, changes in answers.items():
        vars(issuer).update(usual | changes)
        keys = keys_of(issuer)
        assert outcome(keys) == UNAVAILABLE
        assert keys.failure is not None
        assert told in keys.failure
        assert secret.decode() not in keys.failure
    assert "/elsewhere" not in issuer.calls, "a redirect is not followed"


def test_a_document_that_leads_to_plain_http_is_not_followed(
    issuer: WorkloadIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = {"issuer": issuer.url, "jwks_uri": "http://cluster.example.org/keys"}
    monkeypatch.setattr(issuer, "documents", lambda: {DISCOVERY: document})
    keys = keys_of(issuer)
    assert outcome(keys) == UNAVAILABLE
    assert keys.failure == "its discovery document names no usable jwks_uri"


def test_a_provider_that_answers_for_ever_is_given_up(issuer: WorkloadIssuer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdfast_service.identity.keys, "WHOLE_SECONDS", -1.0)
    keys = keys_of(issuer)
    assert outcome(keys) == UNAVAILABLE
    assert "s to answer" in (keys.failure or "")


@pytest.mark.parametrize(
    ("jwk", "algorithm", "known"),
    [
        (public_jwk("k", rsa_key()), "RS256", True),
        (public_jwk("k", rsa_key()), "PS512", True),
        (public_jwk("k", rsa_key()), "ES256", False),
        (public_jwk("k", rsa_key()), "HS256", False),
        (public_jwk("k", rsa_key(), alg="RS256"), "RS256", True),
        (public_jwk("k", rsa_key(), alg="RS256"), "RS384", False),
        (public_jwk("k", rsa_key(), use="enc"), "RS256", False),
        (public_jwk("k", rsa_key(1024)), "RS256", False),
        (public_jwk("k", ec_key()), "ES256", True),
        (public_jwk("k", ec_key()), "ES384", False),
        (public_jwk("k", ec_key(), crv="P-384"), "ES384", False),
        (public_jwk("k", ec_key(), x="!"), "ES256", False),
        ({"kty": "oct", "kid": "k", "k": "c2VjcmV0"}, "HS256", False),
        ({"kty": "oct", "kid": "k", "k": "c2VjcmV0", "alg": "HS256"}, "HS256", False),
        ({"kty": ["RSA"], "kid": "k"}, "RS256", False),
        ({"kid": "k"}, "RS256", False),
        ("k", "RS256", False),
    ],
)
def test_a_key_verifies_what_its_kind_is_for(issuer: WorkloadIssuer, jwk: Any, algorithm: str, known: bool) -> None:
    issuer.more_jwks = [jwk]
    assert outcome(keys_of(issuer), "k", algorithm) == ("known" if known else UNKNOWN)


def test_without_a_keys_id_there_must_be_one_key_of_the_kind(issuer: WorkloadIssuer) -> None:
    assert outcome(keys_of(issuer), None) == "known"
    issuer.keys["second"] = ec_key()
    assert outcome(keys_of(issuer), None) == UNKNOWN
    issuer.keys["third"] = rsa_key()
    assert outcome(keys_of(issuer), None, "RS256") == "known"


def test_the_file_can_name_the_keys_and_a_token_for_them(issuer: WorkloadIssuer, tmp_path: Path) -> None:
    own = tmp_path / "own-token"
    own.write_text("of-the-service\n")
    keys = keys_of(issuer, jwks_url=issuer.url + JWKS, bearer_token_file=str(own))
    assert outcome(keys) == "known"
    assert issuer.calls == [JWKS]
    assert issuer.authorizations == ["Bearer of-the-service"]
    own.unlink()
    keys = keys_of(issuer, jwks_url=issuer.url + JWKS, bearer_token_file=str(own))
    assert outcome(keys) == UNAVAILABLE


def test_the_services_own_token_does_not_go_where_a_document_leads(issuer: WorkloadIssuer, tmp_path: Path) -> None:
    own = tmp_path / "own-token"
    own.write_text("of-the-service")
    with workload_issuer() as elsewhere:
        issuer_documents = issuer.documents()
        issuer_documents[DISCOVERY]["jwks_uri"] = elsewhere.url + JWKS
        issuer.reply = json.dumps(issuer_documents[DISCOVERY]).encode()
        assert outcome(keys_of(issuer, bearer_token_file=str(own))) == "known"
    assert issuer.authorizations == ["Bearer of-the-service"]
    assert elsewhere.authorizations == [None]


def test_its_certificate_must_be_of_the_authority_that_the_file_names(tmp_path: Path) -> None:
    certificate = self_signed(tmp_path / "issuer.pem", "127.0.0.1")
    with workload_issuer(certificate) as issuer:
        assert outcome(keys_of(issuer, ca_file=str(certificate))) == "known"
        stranger = keys_of(issuer)
        assert outcome(stranger) == UNAVAILABLE
        assert "cannot be reached (ConnectError)" in (stranger.failure or "")
        empty = tmp_path / "empty.pem"
        empty.write_text("")
        broken = keys_of(issuer, ca_file=str(empty))
        assert outcome(broken) == UNAVAILABLE
        assert "holds no certificates" in (broken.failure or "")
