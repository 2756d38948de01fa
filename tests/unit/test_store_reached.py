"""How the service reaches a bucket: whom it trusts, by which proxy, and what it says of each thing in the way."""

from __future__ import annotations

import json
import ssl

import pytest
import requests
from google.oauth2.credentials import Credentials as Login

from holdfast_service.stores.base import Credentials, ObjectKey, StoreRefused, StoreUnavailable
from holdfast_service.stores.gcs.calls import GcsCalls
from holdfast_service.stores.gcs.gcs_location import parse_gcs_url
from holdfast_service.stores.gcs.gcs_store import GcsStore
from holdfast_service.stores.gcs.identity import GoogleIdentity, GoogleSession
from holdfast_service.stores.gcs.signer import signer_for
from holdfast_service.stores.registry import open_store
from tests.support.scripted_http import Reply, ScriptedServer, as_json, scripted
from tests.support.tls import self_signed

_LISTING = Reply(body=b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>")


@pytest.fixture(autouse=True)
def _an_environment_of_its_own(monkeypatch):
    for name in ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def _store(endpoint):
    return open_store(
        f"s3://bucket/prefix?endpoint={endpoint}&region=us-east-1", b"k" * 32, Credentials("key", "secret")
    )


def _refusal(code, status, more="", **headers):
    return Reply(status, f"<Error><Code>{code}</Code>{more}</Error>".encode(), headers)


@pytest.fixture
def private(tmp_path):
    """A store whose certificate is signed by nobody that this machine knows: its URL, and the file of its authority."""
    file = self_signed(tmp_path / "store.pem", "127.0.0.1")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(file)
    server = ScriptedServer(lambda seen: _LISTING, tls)
    yield server.url, file
    server.close()


def test_a_certificate_that_is_not_trusted_has_its_own_sentence(private):
    with pytest.raises(StoreRefused, match=r"certificate that is not trusted \(self.signed.*AWS_CA_BUNDLE"):
        _store(private[0]).ping()


@pytest.mark.parametrize("variable", ["AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"])
def test_an_authority_that_the_environment_names_is_trusted(private, monkeypatch, variable):
    monkeypatch.setenv(variable, str(private[1]))
    _store(private[0]).ping()


def test_an_authority_that_is_not_there_is_refused_at_the_start(private, monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "none.pem"))
    with pytest.raises(StoreRefused, match=r"AWS_CA_BUNDLE names .*none\.pem, which is not there"):
        _store(private[0])


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        (_refusal("NoSuchBucket", 404), r"bucket bucket, is not there; make the bucket"),
        (_refusal("PermanentRedirect", 301, **{"x-amz-bucket-region": "eu-west-3"}), r"write region=eu-west-3"),
        (_refusal("AuthorizationHeaderMalformed", 400, "<Region>eu-west-3</Region>"), r"write region=eu-west-3"),
        (_refusal("AuthorizationHeaderMalformed", 400), r"AuthorizationHeaderMalformed, status 400.*region"),
        (_refusal("NotImplemented", 501), r"lacks an operation that the service needs, ListObjectsV2"),
    ],
)
def test_what_is_wrong_with_the_bucket_has_its_own_sentence(reply, sentence):
    with scripted(lambda seen: reply) as server, pytest.raises(StoreRefused, match=sentence):
        _store(server.url).ping()
    assert len(server.seen) == 1, "to ask again helps nothing"


@pytest.mark.parametrize(
    "code", ["Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests", "IncompleteBody"]
)
def test_a_store_that_cannot_now_is_asked_again_also_where_its_reply_to_a_head_does_not_say_so(code, monkeypatch):
    monkeypatch.setattr("holdfast_service.stores.retry._FIRST_PAUSE_SECONDS", 0)
    with scripted(lambda seen: Reply(400) if seen.method == "HEAD" else _refusal(code, 400)) as server:
        store = _store(server.url)
        for call in (store.ping, lambda: store.head(ObjectKey("p1", "ab" * 32, "0" * 32))):
            with pytest.raises(StoreUnavailable, match=rf"come back later \({code}, status 400\)"):
                call()


_CHUNK = f"<Key>prefix/p1/chunks/ab/{'ab' * 32}/{'0123456789abcdef' * 2}</Key>"
_DATED = "<LastModified>2026-03-01T00:00:00.000Z</LastModified>"


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ("<ListBucketResult></ListBucketResult>", "listing lacks IsTruncated"),
        ("<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>", "listing lacks NextContinuationToken"),
        (f"<ListBucketResult><Contents>{_CHUNK}{_DATED}</Contents></ListBucketResult>", "listing lacks a size"),
        (f"<ListBucketResult><Contents>{_CHUNK}<Size>1</Size></Contents></ListBucketResult>", "listing lacks a date"),
        (f"<ListBucketResult><Contents>{_DATED}<Size>1</Size></Contents></ListBucketResult>", "listing lacks a name"),
        ("<ListBucketResult><IsTruncated>false</IsTr", "status 500"),
        ("<html><body>Please log in.</body></html>", "listing lacks IsTruncated"),
        ("Please log in.", "status 500"),
        ("", "listing lacks IsTruncated"),
    ],
)
def test_a_listing_that_lacks_something_never_passes_for_a_short_one(document, sentence, monkeypatch):
    monkeypatch.setattr("holdfast_service.stores.retry._FIRST_PAUSE_SECONDS", 0)
    with (
        scripted(lambda seen: Reply(body=document.encode())) as server,
        pytest.raises(StoreUnavailable, match=sentence),
    ):
        list(_store(server.url).list_objects("p1"))


def test_https_to_a_port_that_speaks_http_has_its_own_sentence():
    with scripted(lambda seen: _LISTING) as server, pytest.raises(StoreRefused, match=r"does not speak TLS.*http://"):
        _store(server.url.replace("http://", "https://")).ping()


def test_requests_go_by_the_proxy_that_the_environment_names_and_not_to_what_it_leaves_out(monkeypatch):
    with scripted(lambda seen: _LISTING) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url.replace("http://", "http://user:p%40ss@"))
        _store("http://store.invalid").ping()
        (seen,) = proxy.seen
        assert (seen.headers["host"], seen.headers["proxy-authorization"]) == ("store.invalid", "Basic dXNlcjpwQHNz")
        monkeypatch.setenv("NO_PROXY", ".invalid")
        with pytest.raises(StoreUnavailable):
            _store("http://store.invalid").ping()
        with scripted(lambda seen: _LISTING) as here:
            _store(here.url).ping()
        assert len(proxy.seen) == 1


def test_a_proxy_that_lets_nobody_through_is_named(monkeypatch):
    with scripted(lambda seen: _LISTING) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        with pytest.raises(StoreUnavailable, match="the proxy on the way"):
            _store("https://store.invalid").ping()


def test_what_goes_to_google_trusts_and_goes_by_the_same_variables(private, monkeypatch):
    with pytest.raises(requests.exceptions.SSLError):
        GoogleSession().get(private[0])
    monkeypatch.setenv("SSL_CERT_FILE", str(private[1]))
    assert GoogleSession().get(private[0]).ok
    with scripted(lambda seen: _LISTING) as proxy:
        monkeypatch.setenv("ALL_PROXY", proxy.url.replace("http://", "http://user:p%40ss@"))
        assert GoogleSession().get("http://store.invalid").ok
        (seen,) = proxy.seen
        assert (seen.headers["host"], seen.headers["proxy-authorization"]) == ("store.invalid", "Basic dXNlcjpwQHNz")
        assert GoogleSession().get(private[0]).ok
        assert len(proxy.seen) == 1, "this machine is reached directly"


def _google(endpoint):
    location = parse_gcs_url(f"gs://bucket/prefix?endpoint={endpoint}")
    identity = GoogleIdentity(Login("token"))
    return GcsStore(location, GcsCalls(location, identity), signer_for(location, identity))


_NAMED = {"name": f"prefix/p1/chunks/ab/{'ab' * 32}/0123456789abcdef0123456789abcdef"}


@pytest.mark.parametrize(
    "document",
    [
        {"items": [{"size": "1", "timeCreated": "2026-03-01T00:00:00Z"}]},
        {"items": [{**_NAMED, "timeCreated": "2026-03-01T00:00:00Z"}]},
        {"items": [{**_NAMED, "size": "1"}]},
        {"items": [{**_NAMED, "size": "one", "timeCreated": "2026-03-01T00:00:00Z"}]},
        {"items": [{**_NAMED, "size": "1", "timeCreated": "yesterday"}]},
        ["Please log in."],
        "Please log in.",
    ],
)
def test_a_listing_of_googles_that_lacks_something_never_passes_for_a_short_one(document, monkeypatch):
    monkeypatch.setattr("holdfast_service.stores.retry._FIRST_PAUSE_SECONDS", 0)
    reply = Reply(body=json.dumps(document).encode())
    with scripted(lambda seen: reply) as server:
        store, key = _google(server.url), ObjectKey.from_path(_NAMED["name"].removeprefix("prefix/"))
        for call in (lambda: list(store.list_objects("p1")), lambda: store.delete(key), lambda: store.head(key)):
            with pytest.raises(StoreUnavailable):
                call()


@pytest.mark.parametrize("sent", [5, 0])
def test_a_read_from_google_that_ends_early_raises(sent, monkeypatch):
    monkeypatch.setattr("holdfast_service.stores.retry._FIRST_PAUSE_SECONDS", 0)

    def answer(seen):
        if seen.query.get("alt") == "media":
            return Reply(206, b"x" * sent)  # whole, by its own account
        return as_json({**_NAMED, "size": "10", "generation": "7"})

    with scripted(answer) as server, pytest.raises(StoreUnavailable, match=f"sent {sent} bytes of 10"):
        list(_google(server.url).open_read(ObjectKey("p1", "ab" * 32, "0" * 32)))
