"""Whose token it is: what an issuer has signed for this service now, and nothing else."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jwt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast_service.identity.identities
from holdfast_protocol.problems import ProblemCode
from holdfast_service.errors import ProblemError
from holdfast_service.identity.identities import LONGEST_TOKEN, Identities
from holdfast_service.settings import SettingsError
from tests.support.workload_issuer import WorkloadIssuer, ec_key, public_pem, rsa_key, workload_issuer

CLIENT = "holdfast-page"
INVALID, EXPIRED, EARLY, AUDIENCE, ISSUER = (
    ProblemCode.IDENTITY_TOKEN_INVALID,
    ProblemCode.IDENTITY_TOKEN_EXPIRED,
    ProblemCode.IDENTITY_TOKEN_EARLY,
    ProblemCode.IDENTITY_AUDIENCE_WRONG,
    ProblemCode.IDENTITY_ISSUER_UNKNOWN,
)
SKEW = 30


@pytest.fixture(scope="module")
def issuer() -> Iterator[WorkloadIssuer]:
    with workload_issuer() as running:
        running.keys["rsa"] = rsa_key()
        yield running


def write(path: Path, of: WorkloadIssuer, **changes: Any) -> None:
    provider = {"name": "cluster", "issuer": of.url, "audiences": ["holdfast", "holdfast-2"], "client_id": CLIENT}
    provider |= {"clock_skew_seconds": SKEW} | changes
    fresh = path.with_suffix(".fresh")
    fresh.write_text(json.dumps({"providers": [provider]}))
    os.replace(fresh, path)


@pytest.fixture(scope="module")
def identities(issuer: WorkloadIssuer, tmp_path_factory: pytest.TempPathFactory) -> Identities:
    path = tmp_path_factory.mktemp("identity") / "identity.yaml"
    write(path, issuer)
    return Identities(path)


def refusal(identities: Identities, token: str, **expected: Any) -> ProblemError:
    with pytest.raises(ProblemError) as caught:
        identities.verify(token, **expected)
    whole = f"{caught.value.detail} {caught.value.context}"
    assert token not in whole
    assert not any(len(part) > 8 and part in whole for part in token.split(".")), "no part of the token is repeated"
    assert caught.value.detail.count(".") >= 2, "what is wrong, and what to do"
    return caught.value


def test_a_job_and_a_person_are_told_apart(identities: Identities, issuer: WorkloadIssuer) -> None:
    job = identities.verify(issuer.signed())
    assert (job.provider.name, job.subject, job.is_person) == (
        "cluster",
        "system:serviceaccount:team-a:trainer",
        False,
    )
    person = identities.verify(issuer.signed(kid="rsa", sub="ann", aud=CLIENT, azp=CLIENT, nonce="n"), nonce="n")
    assert (person.subject, person.is_person) == ("ann", True)


LONG_AGO, LATER = 1_000_000_000, 4_102_444_800  # fixed, so that each test process collects the same tests


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"iss": "https://elsewhere.example.org"}, ISSUER),
        ({"iss": None}, ISSUER),
        ({"aud": "another"}, AUDIENCE),
        ({"aud": ["another", "more"]}, AUDIENCE),
        ({"aud": []}, INVALID),
        ({"aud": None}, INVALID),
        ({"aud": {"holdfast": 1}}, AUDIENCE),
        # For several services: each of them could have brought it.
        ({"aud": ["holdfast", "another"]}, AUDIENCE),
        ({"aud": ["holdfast", "another"], "azp": "another"}, AUDIENCE),
        ({"aud": ["holdfast", "another"], "azp": "holdfast"}, None),
        ({"aud": ["holdfast", "holdfast-2"]}, None),
        ({"aud": [CLIENT, "another"], "azp": CLIENT}, None),
        ({"aud": CLIENT, "azp": "another"}, AUDIENCE),
        ({"aud": "holdfast", "azp": "1234567"}, None),  # Google's own tokens say their account there
        ({"exp": LONG_AGO}, EXPIRED),
        ({"exp": LONG_AGO, "nbf": None, "iat": LONG_AGO - 3600}, EXPIRED),
        ({"exp": None}, INVALID),
        ({"exp": "soon"}, INVALID),
        ({"exp": 10**400}, None),
        ({"nbf": LATER}, EARLY),
        ({"iat": LATER}, EARLY),
        ({"iat": None}, INVALID),
        ({"sub": None}, INVALID),
        ({"sub": ""}, INVALID),
        ({"sub": 7}, INVALID),
        ({"sub": "x" * 1001}, INVALID),
        ({"events": {"http://schemas.openid.net/event/backchannel-logout": {}}, "aud": CLIENT}, INVALID),
    ],
    ids=str,
)
def test_a_claim_that_does_not_fit_is_refused(
    identities: Identities, issuer: WorkloadIssuer, changes: dict[str, Any], code: ProblemCode | None
) -> None:
    token = issuer.signed(**changes)
    if code is None:
        identities.verify(token)
    else:
        assert refusal(identities, token).code is code


@pytest.mark.parametrize(
    ("headers", "refused"),
    [
        ({"typ": "at+jwt"}, True),
        ({"typ": "logout+jwt"}, True),
        ({"typ": "secevent+jwt"}, True),
        ({"typ": "jwt"}, False),
        ({"typ": None}, False),
        ({"crit": ["x"], "x": 1}, True),
        ({"kid": 7}, True),
        ({"jku": "https://elsewhere.example.org/keys"}, False),  # and nobody goes there
    ],
    ids=str,
)
def test_a_header_decides_nothing_but_which_known_key_it_is(
    identities: Identities, issuer: WorkloadIssuer, headers: dict[str, Any], refused: bool
) -> None:
    said = {"alg": "ES256", "kid": "first"} | headers
    unsigned = issuer.forged(said).rpartition(".")[0]
    signature = jwt.get_algorithm_by_name("ES256").sign(unsigned.encode(), issuer.keys["first"])
    token = f"{unsigned}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"
    if refused:
        assert refusal(identities, token).code is INVALID
    else:
        identities.verify(token)


def test_clocks_may_be_apart_by_the_skew_and_no_more(identities: Identities, issuer: WorkloadIssuer) -> None:
    now = int(time.time())
    far = 600  # a busy machine does not come so far between two statements
    identities.verify(issuer.signed(iat=now, nbf=now, exp=now + far))
    identities.verify(issuer.signed(iat=now + SKEW - 5, nbf=now + SKEW - 5, exp=now + far))
    assert refusal(identities, issuer.signed(nbf=now + SKEW + far)).code is EARLY
    assert refusal(identities, issuer.signed(exp=now - SKEW)).code is EXPIRED


def test_a_signature_by_none_or_by_a_public_key_as_a_secret_is_none(
    identities: Identities, issuer: WorkloadIssuer
) -> None:
    assert refusal(identities, issuer.forged({"alg": "none"})).code is INVALID
    assert refusal(identities, issuer.forged({"alg": "None", "kid": "first"})).code is INVALID
    assert refusal(identities, issuer.forged({"kid": "first"})).code is INVALID
    assert refusal(identities, issuer.forged({"alg": "ES256", "kid": "first"}, iss=7)).code is ISSUER
    assert refusal(identities, issuer.forged({"alg": ["ES256"], "kid": "first"})).code is INVALID
    for kid in ("first", "rsa"):
        for secret in (public_pem(issuer.keys[kid]), json.dumps(issuer.documents()["/openid/v1/jwks"]).encode()):
            unsigned = issuer.forged({"alg": "HS256", "typ": "JWT", "kid": kid}).rpartition(".")[0]
            signature = jwt.get_algorithm_by_name("HS256").sign(unsigned.encode(), secret)
            token = f"{unsigned}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"
            assert refusal(identities, token).code is INVALID


def test_a_signature_of_another_key_is_refused(identities: Identities, issuer: WorkloadIssuer) -> None:
    assert refusal(identities, issuer.signed(key=ec_key())).code is INVALID
    assert refusal(identities, issuer.signed(kid="rsa", key=rsa_key(3072))).code is INVALID
    # By a key of the issuer, with the name of its other one.
    assert refusal(identities, issuer.signed(kid="first", key=rsa_key())).code is ProblemCode.IDENTITY_KEY_UNKNOWN


def test_what_was_signed_cannot_be_changed(identities: Identities, issuer: WorkloadIssuer) -> None:
    header, _, signature = issuer.signed().split(".")
    other = issuer.signed(sub="system:serviceaccount:kube-system:admin").split(".")[1]
    assert refusal(identities, f"{header}.{other}.{signature}").code is INVALID


@pytest.mark.parametrize(
    "text", ["", "x", "a.b", "a.b.c", "a.b.c.d", "e30.e30.", "W10.W10.", "ä.b.c", "x" * (LONGEST_TOKEN + 1)], ids=repr
)
def test_what_is_no_jwt_is_refused(identities: Identities, text: str) -> None:
    with pytest.raises(ProblemError) as caught:
        identities.verify(text)
    assert caught.value.code in (INVALID, ISSUER)


@given(st.data())
def test_whatever_is_made_of_a_token_is_refused_and_breaks_nothing(
    identities: Identities, issuer: WorkloadIssuer, data: st.DataObject
) -> None:
    token = issuer.signed()
    begin = data.draw(st.integers(0, len(token) - 1))
    end = data.draw(st.integers(begin, min(begin + 20, len(token))))
    changed = token[:begin] + data.draw(st.text(max_size=20)) + token[end:]
    try:
        identity = identities.verify(changed)
    except ProblemError:
        return
    assert identity.claims == jwt.decode(token, options={"verify_signature": False}), "it says what was signed"


def test_a_nonce_and_a_provider_that_are_expected_must_be_there(identities: Identities, issuer: WorkloadIssuer) -> None:
    for said in ({}, {"nonce": "other"}, {"nonce": ["n"]}, {"nonce": "ñ"}):
        assert refusal(identities, issuer.signed(aud=CLIENT, **said), nonce="n").code is INVALID
    assert refusal(identities, issuer.signed(), provider="another").code is INVALID
    identities.verify(issuer.signed(), provider="cluster")


def test_each_copy_of_a_token_has_one_mark(identities: Identities, issuer: WorkloadIssuer) -> None:
    token = issuer.signed(jti="1")
    assert identities.verify(token).mark == identities.verify(token).mark
    assert identities.verify(token).mark == identities.verify(issuer.signed(jti="1", nonce="x")).mark
    assert identities.verify(token).mark != identities.verify(issuer.signed(jti="2")).mark
    # An ECDSA signature has a twin (r, -s) that is as good: the mark is of what was signed.
    unsigned, _, signature = issuer.signed().rpartition(".")
    raw = base64.urlsafe_b64decode(signature + "==")
    order = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
    twin = raw[:32] + (order - int.from_bytes(raw[32:])).to_bytes(32)
    other = f"{unsigned}.{base64.urlsafe_b64encode(twin).rstrip(b'=').decode()}"
    assert identities.verify(other).mark == identities.verify(f"{unsigned}.{signature}").mark


class TestTheFile:
    @pytest.fixture
    def path(self, issuer: WorkloadIssuer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(holdfast_service.identity.identities, "LOOK_AGAIN_SECONDS", 0.0)
        path = tmp_path / "identity.yaml"
        write(path, issuer)
        return path

    def test_an_edit_is_taken_without_a_restart(self, path: Path, issuer: WorkloadIssuer) -> None:
        identities = Identities(path)
        identities.verify(issuer.signed())
        write(path, issuer, audiences=["new"])
        assert refusal(identities, issuer.signed()).code is AUDIENCE
        identities.verify(issuer.signed(aud="new"))
        write(path, issuer, issuer="https://elsewhere.example.org")
        assert refusal(identities, issuer.signed()).code is ISSUER
        assert identities.failure is None

    def test_an_edit_that_cannot_be_used_changes_nothing(self, path: Path, issuer: WorkloadIssuer) -> None:
        identities = Identities(path)
        path.write_text("providers: [")
        identities.verify(issuer.signed())
        assert "line 1" in (identities.failure or "")
        path.unlink()
        identities.verify(issuer.signed())
        assert "cannot be read" in (identities.failure or "")
        write(path, issuer, audiences=["new"])
        assert identities.failure is None
        identities.verify(issuer.signed(aud="new"))

    def test_a_start_with_a_file_that_cannot_be_used_is_refused(self, path: Path) -> None:
        path.write_text("providers: []")
        with pytest.raises(SettingsError, match=r"HOLDFAST_IDENTITY_FILE: providers: .*Correct it"):
            Identities(path)
