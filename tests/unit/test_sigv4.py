"""Our SigV4 signer against botocore's, byte for byte."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from urllib.parse import quote, urlencode

import botocore.auth
import botocore.credentials
import pytest
from botocore.auth import S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast_service.stores.s3.s3_location import S3Credentials, parse_s3_url
from holdfast_service.stores.s3.s3_store import S3Store
from holdfast_service.stores.s3.signer import Credentials, SigV4Signer
from tests.support.stores import chunk_key

_TEXT = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF), max_size=12)
_KEY_SET = st.text("abcXYZ019-_.~ +=/&%é", min_size=1, max_size=20)
_HEADERS = st.dictionaries(
    st.sampled_from(["content-length", "content-md5", "if-none-match", "x-amz-checksum-sha256", "x-amz-checksum-mode"]),
    st.text("abcXYZ019+/=* ", min_size=1, max_size=24).filter(lambda value: value == value.strip()),
)
_CASES = given(
    region=st.sampled_from(["us-east-1", "eu-central-1", "cn-north-1"]),
    origin=st.sampled_from(["http://127.0.0.1:8333", "https://bucket.s3.eu-central-1.amazonaws.com", "http://s3"]),
    method=st.sampled_from(["GET", "PUT", "HEAD", "DELETE"]),
    path=st.lists(_KEY_SET, min_size=1, max_size=4).map(lambda parts: "/" + "/".join(quote(part) for part in parts)),
    query=st.dictionaries(_TEXT.filter(bool), _TEXT, max_size=3).map(lambda pairs: list(pairs.items())),
    headers=_HEADERS,
    at=st.datetimes(datetime(2020, 1, 1), datetime(2040, 1, 1)).map(lambda at: at.replace(tzinfo=UTC)),
    token=st.none() | st.text("abc019+/=", min_size=1, max_size=40),
    secret=st.text("abcXYZ019+/", min_size=1, max_size=40),
    seconds=st.integers(1, 604800),
)
# "a0=" sorts before "a=" as text, and after it by name.
_NAME_WITHIN_A_NAME = example(
    region="us-east-1",
    origin="http://s3",
    method="GET",
    path="/b",
    query=[("a", ""), ("a0", "")],
    headers={},
    at=datetime(2026, 1, 1, tzinfo=UTC),
    token=None,
    secret="secret",
    seconds=60,
)


def _botocore_request(origin, method, path, query, headers, at, monkeypatch) -> AWSRequest:
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda: at)
    url = origin + path + (f"?{urlencode(query, quote_via=quote, safe='~')}" if query else "")
    return AWSRequest(method, url, headers=dict(headers))


@pytest.mark.rule("verify-while-uploading")
@settings(max_examples=300, deadline=None)
@_CASES
@_NAME_WITHIN_A_NAME
def test_presigned_urls_equal_botocores(region, origin, method, path, query, headers, at, token, secret, seconds):
    with pytest.MonkeyPatch.context() as monkeypatch:
        theirs = _botocore_request(origin, method, path, query, headers, at, monkeypatch)
        keys = botocore.credentials.Credentials("AKIDEXAMPLE", secret, token)
        S3SigV4QueryAuth(keys, "s3", region, expires=seconds).add_auth(theirs)
    ours = SigV4Signer(region).presign(
        Credentials("AKIDEXAMPLE", secret, token),
        method,
        origin,
        path,
        headers=headers,
        expires_in_seconds=seconds,
        at=at,
        query=query,
    )
    assert ours == theirs.url


def test_a_cached_key_is_not_used_for_another_day_or_secret():
    at = datetime(2026, 3, 1, 23, 59, 59, tzinfo=UTC)
    moments = [("first", at), ("first", at + timedelta(seconds=1)), ("second", at), ("first", at)]
    reused = SigV4Signer("us-east-1")
    for secret, moment in moments:
        terms = {"headers": {}, "expires_in_seconds": 60, "at": moment}
        keys = Credentials("AKIDEXAMPLE", secret)
        fresh = SigV4Signer("us-east-1").presign(keys, "GET", "http://s3", "/b/k", **terms)
        assert reused.presign(keys, "GET", "http://s3", "/b/k", **terms) == fresh


class _EndingCredentials(S3Credentials):
    def __init__(self, ends_at: datetime) -> None:
        super().__init__(Credentials("AKIDEXAMPLE", "secret", "token"))
        self._ends_at = ends_at

    def current(self):
        return super().current()[0], self._ends_at


@pytest.mark.parametrize(("credentials_end_after", "at_most"), [(100, 100), (10_000, 900)])
def test_a_ticket_ends_with_the_earlier_of_url_and_credentials(credentials_end_after, at_most):
    location, now = parse_s3_url("s3://bucket/prefix?region=eu-central-1"), datetime.now(UTC)
    credentials = _EndingCredentials(now + timedelta(seconds=credentials_end_after))
    ticket = S3Store(location, credentials, now=lambda: now).presign_get(chunk_key(b""), expires_in_seconds=900)
    assert ticket.expires_in_seconds == at_most
    assert f"X-Amz-Expires={ticket.expires_in_seconds}&" in ticket.url


def test_secrets_do_not_show_in_representations():
    keys = Credentials("AKIDEXAMPLE", "the-secret", "the-token")
    ticket = S3Store(parse_s3_url("s3://bucket?region=x"), S3Credentials(keys)).presign_get(
        chunk_key(b""), expires_in_seconds=60
    )
    assert "the-" not in repr(keys)
    assert "Signature" not in repr(ticket)
