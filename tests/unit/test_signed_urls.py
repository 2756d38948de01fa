"""The service's own signed URLs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_service.stores.base import ObjectKey
from holdfast_service.stores.posix.signed_urls import Grant, SignatureInvalid, TicketExpired, UrlSigner

_GRANT = Grant("PUT", ObjectKey("p1", "ab" * 32, "0" * 32), 12, "cd" * 32)


class _Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def _parts(url: str) -> tuple[str, str]:
    payload, _, signature = url.removeprefix("/v1/objects/").partition("?signature=")
    return payload, signature


@pytest.mark.parametrize("grant", [_GRANT, Grant("GET", _GRANT.key, None, None)])
def test_a_url_says_what_was_granted_until_it_expires(grant):
    clock = _Clock()
    signer = UrlSigner(b"k" * 32, now=clock)
    payload, signature = _parts(signer.sign(grant, expires_in_seconds=60))
    clock.seconds += 59
    assert signer.verify(grant.method, payload, signature) == grant
    clock.seconds += 1
    with pytest.raises(TicketExpired):
        signer.verify(grant.method, payload, signature)


def test_a_url_is_for_one_method():
    signer = UrlSigner(b"k" * 32)
    payload, signature = _parts(signer.sign(_GRANT, expires_in_seconds=60))
    with pytest.raises(SignatureInvalid):
        signer.verify("GET", payload, signature)


@given(st.text(max_size=60), st.text(max_size=60))
def test_no_other_payload_or_signature_passes(payload, signature):
    signer = UrlSigner(b"k" * 32)
    good_payload, good_signature = _parts(signer.sign(_GRANT, expires_in_seconds=60))
    for forged in ((payload, signature), (good_payload, signature), (payload, good_signature)):
        with pytest.raises(SignatureInvalid):
            signer.verify("PUT", *forged)
