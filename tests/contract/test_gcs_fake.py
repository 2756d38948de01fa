"""The fake that the gcs store is tested on: what Google's own library signs goes through, and nothing else does.

A fake that lets a wrong request pass proves nothing. So each check is made to fail here once, alone.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from urllib.parse import quote, urlencode

import google_crc32c
import pytest
import urllib3
from google.api_core.exceptions import NotFound, PreconditionFailed
from google.auth import jwt
from google.cloud import storage
from google.cloud.storage._signing import generate_signed_url_v4
from google.oauth2 import service_account

_SCOPE = "https://www.googleapis.com/auth/cloud-platform"


@dataclass(frozen=True)
class Signed:
    """A request as it would be sent, with a URL that Google's library has signed."""

    method: str
    url: str
    headers: dict[str, str]
    body: bytes = b""

    def send(self, **changes) -> tuple[int, str]:
        """The status and Google's code for it."""
        wanted = replace(self, **changes)
        answer = urllib3.request(
            wanted.method, wanted.url, headers=wanted.headers, body=wanted.body, retries=False, timeout=30
        )
        code = answer.data.partition(b"<Code>")[2].partition(b"</Code>")[0].decode() if answer.status >= 400 else ""
        return answer.status, code


class _NothingButTheFake(service_account.Credentials):
    """google-auth asks Google's own IAM in the background where an account may be used; no test goes out to it."""

    def _is_regional_access_boundary_lookup_required(self):
        return False


@pytest.fixture(scope="module")
def key(gcs):
    return _NothingButTheFake.from_service_account_file(str(gcs.key_file), scopes=[_SCOPE])


@pytest.fixture(scope="module")
def bucket(gcs, key):
    """Google's library, talking to the fake."""
    client = storage.Client(project="tests", credentials=key, client_options={"api_endpoint": gcs.endpoint})
    yield client.bucket(gcs.bucket)
    client.close()


@pytest.fixture
def name():
    return f"fake/{secrets.token_hex(8)}"


def _md5(body: bytes) -> str:
    return base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()


def _signed_put(gcs, key, name, body, *, signed_at=None, seconds=300, more=None) -> Signed:
    """With everything signed in that a ticket has."""
    headers = {
        "content-length": str(len(body)),
        "x-goog-hash": f"md5={_md5(body)}",
        "x-goog-if-generation-match": "0",
        **(more or {}),
    }
    url = generate_signed_url_v4(
        key,
        f"/{gcs.bucket}/{name}",
        seconds,
        api_access_endpoint=gcs.endpoint,
        method="PUT",
        headers=dict(headers),
        _request_timestamp=(signed_at or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ"),
    )
    return Signed("PUT", url, headers, body)


def _is_absent(bucket, name) -> bool:
    return bucket.get_blob(name) is None and name not in [blob.name for blob in bucket.list_blobs(prefix=name)]


def test_what_googles_library_signs_goes_through(gcs, key, bucket, name):
    body = secrets.token_bytes(5000)
    put = _signed_put(gcs, key, name, body)
    assert put.send() == (200, "")
    get = bucket.blob(name).generate_signed_url(version="v4", expiration=60, api_access_endpoint=gcs.endpoint)
    assert urllib3.request("GET", get).data == body
    blob = bucket.get_blob(name)
    assert (blob.size, blob.md5_hash) == (5000, _md5(body))
    assert blob.crc32c == base64.b64encode(google_crc32c.Checksum(body).digest()).decode()
    assert abs(blob.time_created - datetime.now(UTC)) < timedelta(minutes=5)


def test_googles_library_uploads_lists_reads_and_deletes(bucket, name):
    for number in range(7):
        bucket.blob(f"{name}/{number}").upload_from_string(b"%d" % number, if_generation_match=0)
    pages = bucket.list_blobs(prefix=f"{name}/", page_size=3).pages
    assert [[blob.name[-1] for blob in page] for page in pages] == [["0", "1", "2"], ["3", "4", "5"], ["6"]]
    blob = bucket.get_blob(f"{name}/3")
    assert blob.download_as_bytes() == b"3"
    with pytest.raises(PreconditionFailed):
        bucket.blob(f"{name}/3").upload_from_string(b"again", if_generation_match=0)
    with pytest.raises(PreconditionFailed):
        blob.delete(if_generation_match=blob.generation - 1)
    bucket.blob(f"{name}/3").upload_from_string(b"newer")
    with pytest.raises(NotFound):
        blob.delete()  # it names the generation that is gone
    assert bucket.get_blob(f"{name}/3").download_as_bytes() == b"newer"
    bucket.blob(f"{name}/3").delete()
    assert _is_absent(bucket, f"{name}/3")


def test_other_bytes_are_refused(gcs, key, bucket, name):
    body = secrets.token_bytes(100)
    put = _signed_put(gcs, key, name, body)
    assert put.send(body=body[::-1]) == (400, "BadDigest")
    wrong_crc = base64.b64encode(google_crc32c.Checksum(b"other").digest()).decode()
    crc = _signed_put(gcs, key, name, body, more={"x-goog-hash": f"crc32c={wrong_crc},md5={_md5(body)}"})
    assert crc.send() == (400, "BadDigest")
    assert _signed_put(gcs, key, name, body, more={"x-goog-hash": "sha256=abc"}).send() == (400, "InvalidDigest")
    assert _is_absent(bucket, name)


def test_another_length_is_refused_also_where_the_header_agrees_with_it(gcs, key, bucket, name):
    put = _signed_put(gcs, key, name, b"twelve bytes")
    assert put.send(body=b"twelve bytes!", headers={**put.headers, "content-length": "13"})[0] == 403
    without = {name: value for name, value in put.headers.items() if name != "content-length"}
    assert put.send(body=iter([b"twelve bytes"]), headers=without) == (400, "MalformedSecurityHeader")
    for limits, code in (("13,20", "EntityTooSmall"), ("0,11", "EntityTooLarge")):
        ranged = _signed_put(gcs, key, name, b"twelve bytes", more={"x-goog-content-length-range": limits})
        assert ranged.send() == (400, code)
    assert _is_absent(bucket, name)


def test_a_url_is_good_for_its_time_only(gcs, key, bucket, name):
    now = datetime.now(UTC)
    assert _signed_put(gcs, key, name, b"x", signed_at=now - timedelta(seconds=301)).send() == (400, "ExpiredToken")
    assert _signed_put(gcs, key, name, b"x", signed_at=now + timedelta(hours=1)).send() == (403, "RequestTimeTooSkewed")
    assert _is_absent(bucket, name)
    put = _signed_put(gcs, key, name, b"x")
    assert put.send(url=put.url.replace("X-Goog-Expires=300", "X-Goog-Expires=604801"))[0] == 400
    assert put.send(url=put.url.replace("X-Goog-Expires=300", "X-Goog-Expires=3000")) == (403, "SignatureDoesNotMatch")
    assert _signed_put(gcs, key, name, b"x", signed_at=now - timedelta(seconds=200)).send() == (200, "")


@pytest.mark.parametrize("header", ["x-goog-hash", "x-goog-if-generation-match"])
def test_a_header_that_is_altered_or_left_out_is_refused(gcs, key, bucket, name, header):
    put = _signed_put(gcs, key, name, b"x")
    altered = {"x-goog-hash": f"md5={_md5(b'y')}", "x-goog-if-generation-match": "1"}[header]
    assert put.send(headers={**put.headers, header: altered}) == (403, "SignatureDoesNotMatch")
    less = {name: value for name, value in put.headers.items() if name != header}
    assert put.send(headers=less) == (400, "MalformedSecurityHeader")
    # Left out of the list of signed headers as well: then it is another request than was signed.
    names = quote(";".join(sorted({*put.headers, "host"})), safe="")
    fewer = quote(";".join(sorted({*less, "host"})), safe="")
    assert names in put.url
    assert put.send(headers=less, url=put.url.replace(names, fewer)) == (403, "SignatureDoesNotMatch")
    assert _is_absent(bucket, name)


def test_a_header_of_googles_that_is_not_signed_is_refused(gcs, key, bucket, name):
    put = _signed_put(gcs, key, name, b"x")
    for added in ("x-goog-meta-sha256", "x-goog-acl", "x-amz-meta-x"):
        assert put.send(headers={**put.headers, added: "abc"}) == (403, "SignatureDoesNotMatch")
    assert put.send(headers={**put.headers, "host": "elsewhere"}) == (403, "SignatureDoesNotMatch")
    assert _is_absent(bucket, name)


def test_a_url_that_is_altered_anywhere_is_refused(gcs, key, bucket, name):
    put = _signed_put(gcs, key, name, b"x")
    for position in range(len(gcs.endpoint) + 1, len(put.url), 3):
        letter = put.url[position]
        if letter in "/?&=%:-" or put.url[position - 1] == "%" or put.url[position - 2] == "%":
            continue
        other = put.url[:position] + ("B" if letter == "A" else "A") + put.url[position + 1 :]
        status, _ = put.send(url=other)
        assert 400 <= status < 500, other
    for other in (put.url[:-2], put.url + "00", put.url + "&generation=1", put.url + "&X-Goog-Expires=300"):
        assert 400 <= put.send(url=other)[0] < 500
    assert put.send(url=put.url.replace(name, f"{name[:-1]}%{ord(name[-1]):02X}"))[0] == 400
    assert put.send(method="GET")[0] == 403
    assert put.send(method="DELETE")[0] == 403
    assert _is_absent(bucket, name)
    assert put.send() == (200, "")


def test_a_replay_overwrites_nothing(gcs, key, bucket, name):
    put = _signed_put(gcs, key, name, b"first")
    assert put.send() == (200, "")
    generation = bucket.get_blob(name).generation
    assert put.send() == (412, "PreconditionFailed")
    assert _signed_put(gcs, key, name, b"other").send() == (412, "PreconditionFailed")
    assert bucket.get_blob(name).generation == generation
    assert bucket.blob(name).download_as_bytes() == b"first"


def test_a_signature_of_somebody_else_is_refused(gcs, key, bucket, name):
    stranger = service_account.Credentials.from_service_account_file(str(gcs.strangers_key_file))
    assert _signed_put(gcs, stranger, name, b"x").send() == (403, "AccessDenied")
    posing = _signed_put(gcs, stranger, name, b"x")
    url = posing.url.replace(quote(gcs.stranger, safe=""), quote(gcs.service_account, safe=""))
    assert posing.send(url=url) == (403, "SignatureDoesNotMatch")
    put = _signed_put(gcs, key, name, b"x")
    for scheme in ("GOOG4-HMAC-SHA256", "AWS4-HMAC-SHA256"):
        assert put.send(url=put.url.replace("GOOG4-RSA-SHA256", scheme))[0] == 400
    unsigned = put.url.partition("?")[0]
    assert put.send(url=unsigned) == (403, "AccessDenied")
    assert _is_absent(bucket, name)


@pytest.mark.parametrize(("wanted", "expected"), [("0-0", b"0"), ("3-5", b"345"), ("7-", b"789"), ("-2", b"89")])
def test_a_range_is_that_range(gcs, bucket, name, wanted, expected):
    bucket.blob(name).upload_from_string(b"0123456789")
    url = bucket.blob(name).generate_signed_url(version="v4", expiration=60, api_access_endpoint=gcs.endpoint)
    answer = urllib3.request("GET", url, headers={"range": f"bytes={wanted}"})
    assert (answer.status, answer.data) == (206, expected)
    assert urllib3.request("GET", url, headers={"range": "bytes=10-"}).status == 416


def _answer(gcs, method, path, *, token=None, **sent) -> urllib3.BaseHTTPResponse:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return urllib3.request(method, gcs.endpoint + path, headers=headers, retries=False, timeout=30, **sent)


def _new_token(gcs, signer, **claims) -> urllib3.BaseHTTPResponse:
    now = int(time.time())
    whole = {
        "iss": gcs.service_account,
        "aud": "https://oauth2.googleapis.com/token",
        "scope": _SCOPE,
        "iat": now,
        "exp": now + 3600,
    } | claims
    form = {
        "grant_type": "urn:ietf:params:oauth:grant-type:jwt-bearer",
        "assertion": jwt.encode(signer, whole).decode(),
    }
    return _answer(gcs, "POST", "/token", body=urlencode(form))


def test_a_token_is_given_for_the_accounts_own_signature_only(gcs, key):
    stranger = service_account.Credentials.from_service_account_file(str(gcs.strangers_key_file))
    assert _new_token(gcs, key.signer).status == 200
    assert _new_token(gcs, stranger.signer).status == 400
    assert _new_token(gcs, key.signer, aud="https://elsewhere").status == 400
    assert _new_token(gcs, key.signer, iat=1000, exp=4600).status == 400
    assert _new_token(gcs, key.signer, iss="nobody@tests").status == 400


def test_a_request_without_a_good_token_is_refused(gcs, key, bucket, name):
    bucket.blob(name).upload_from_string(b"x")
    listing, one = f"/storage/v1/b/{gcs.bucket}/o", f"/{gcs.bucket}/{name}"
    token = json.loads(_new_token(gcs, key.signer).data)["access_token"]
    narrow = json.loads(_new_token(gcs, key.signer, scope="https://www.googleapis.com/auth/iam").data)["access_token"]
    for method, path in (("GET", listing), ("GET", one), ("HEAD", one), ("DELETE", one)):
        assert _answer(gcs, method, path).status in {401, 403}
        assert _answer(gcs, method, path, token=token[:-1] + ("A" if token[-1] != "A" else "B")).status == 401
        assert _answer(gcs, method, path, token=narrow).status == 403
    assert _answer(gcs, "GET", one, token=token).data == b"x"


def test_google_signs_only_for_those_who_may_ask(gcs, key):
    path = f"/v1/projects/-/serviceAccounts/{quote(gcs.machine)}:signBlob"
    token = json.loads(_new_token(gcs, key.signer).data)["access_token"]
    assert _answer(gcs, "POST", path, token=token, json={"payload": "eA=="}).status == 403
    assert _answer(gcs, "POST", path, json={"payload": "eA=="}).status == 401


def test_the_metadata_server_answers_only_who_asks_as_google_wants_it(gcs):
    path = "/computeMetadata/v1/instance/service-accounts/default/token"
    assert _answer(gcs, "GET", path).status == 403
