"""Store URLs: where requests go, and what a wrong one is told."""

from __future__ import annotations

import sys

import pytest

from holdfast_service.stores.azure.azure_location import parse_azure_url
from holdfast_service.stores.base import Credentials, StoreRefused, StoreUrlError
from holdfast_service.stores.gcs.gcs_location import parse_gcs_url
from holdfast_service.stores.posix.posix_store import PosixStore
from holdfast_service.stores.registry import open_store
from holdfast_service.stores.s3.s3_location import parse_s3_url
from holdfast_service.stores.s3.s3_store import S3Store

_KEY = b"k" * 32


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://bucket/a/b?region=eu-central-1", "https://bucket.s3.eu-central-1.amazonaws.com/a/b/key"),
        ("s3://bucket?region=cn-north-1", "https://bucket.s3.cn-north-1.amazonaws.com.cn/key"),
        ("s3://a.dotted.bucket/?region=eu-central-1", "https://s3.eu-central-1.amazonaws.com/a.dotted.bucket/key"),
        ("s3://bucket/p?endpoint=http://127.0.0.1:8333", "http://127.0.0.1:8333/bucket/p/key"),
        ("s3://bucket/p?endpoint=https://s3.example.org:443/", "https://s3.example.org/bucket/p/key"),
        ("s3://bucket/p?endpoint=https://s3.example.org&path_style=false", "https://bucket.s3.example.org/p/key"),
        (
            "s3://bucket/p?endpoint=https://s3.example.org&public_endpoint=http://localhost:1",
            "http://localhost:1/bucket/p/key",
        ),
    ],
)
def test_where_a_key_goes(url, expected):
    location = parse_s3_url(url)
    assert location.public_origin + location.path_of("key") == expected


@pytest.mark.parametrize(
    ("url", "names"),
    [
        ("gopher://bucket", "gopher"),
        ("/var/lib/store", "''"),
        ("posix://var/lib/store", "three slashes"),
        ("posix:relative", "absolute"),
        ("posix:///", "absolute"),
        ("posix:///data?x=1", "nothing more"),
        ("s3://", "bucket"),
        ("s3://UPPER?region=x", "UPPER"),
        ("s3://bucket/pre fix?region=x", "pre fix"),
        ("s3://bucket/../other?region=x", "prefix"),
        ("s3://bucket", "region"),
        ("s3://bucket?regoin=x", "regoin"),
        ("s3://bucket?endpoint=localhost:8333", "endpoint"),
        ("s3://bucket?endpoint=http://host/path", "endpoint"),
        ("s3://bucket?endpoint=http://host&public_endpoint=ftp://x", "public_endpoint"),
        ("s3://bucket?region=x&path_style=maybe", "maybe"),
        ("s3://bucket?region", "region"),
        ("s3://AKID:hidden@bucket?region=x", "AWS_ACCESS_KEY_ID"),
        ("gcs://bucket", "gs://"),
        ("gs://", "bucket"),
        ("gs://bucket/pre fix", "pre fix"),
        ("gs://bucket?region=europe-west4", "region"),
        ("gs://bucket?endpoint=localhost:4443", "endpoint"),
        ("gs://bucket?service_account=somebody", "somebody"),
        ("gs://me:hidden@bucket", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("azure://container", "az://"),
        ("az://container", "AZURE_STORAGE_ACCOUNT"),
        ("az://Container?account=myaccount", "Container"),
        ("az://con--tainer?account=myaccount", "con--tainer"),
        ("az://container?account=My_Account", "My_Account"),
        ("az://container?account=myaccount&path_style=yes", "yes"),
        ("az://container?account=myaccount&region=westeurope", "region"),
        ("az://me:hidden@container?account=myaccount", "AZURE_STORAGE_KEY"),
    ],
)
def test_a_wrong_url_is_told_what_is_wrong_and_how_one_looks(url, names, monkeypatch):
    for variable in ("AWS_REGION", "AWS_DEFAULT_REGION", "AZURE_STORAGE_ACCOUNT"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(StoreUrlError) as wrong:
        open_store(url, _KEY, Credentials("a", "b"))
    assert names in str(wrong.value)
    assert "Example: " in str(wrong.value)
    assert "hidden" not in str(wrong.value)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("gs://bucket", "https://storage.googleapis.com/bucket/key"),
        ("gs://a_dotted.bucket/a/b/", "https://storage.googleapis.com/a_dotted.bucket/a/b/key"),
        ("gs://bucket/p?endpoint=http://127.0.0.1:4443", "http://127.0.0.1:4443/bucket/p/key"),
        ("gs://bucket/p?public_endpoint=https://storage.example.org", "https://storage.example.org/bucket/p/key"),
    ],
)
def test_where_a_key_goes_at_google(url, expected):
    location = parse_gcs_url(url)
    assert location.public_origin + location.path_of("key") == expected
    assert location.iam_origin == "https://iamcredentials.googleapis.com"


def test_without_google_credentials_the_message_names_the_variable(monkeypatch, tmp_path):
    for content in (None, "{}", "no json"):
        key_file = tmp_path / "key.json"
        if content is not None:
            key_file.write_text(content)
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(key_file))
        with pytest.raises(StoreRefused, match="GOOGLE_APPLICATION_CREDENTIALS"):
            open_store("gs://bucket", _KEY)


def test_without_google_cloud_storage_the_message_names_the_extra(monkeypatch):
    for name in [each for each in sys.modules if each.startswith("holdfast_service.stores.gcs.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "google.cloud.storage", None)
    with pytest.raises(StoreRefused, match=r"google\.cloud\.storage; install holdfast\[gcs\]"):
        open_store("gs://bucket", _KEY)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("az://container/p?account=acme", "https://acme.blob.core.windows.net/container/p/key"),
        (
            "az://container?account=acme&endpoint=https://acme.blob.core.chinacloudapi.cn",
            "https://acme.blob.core.chinacloudapi.cn/container/key",
        ),
        ("az://container?account=acme&endpoint=http://127.0.0.1:10000", "http://127.0.0.1:10000/acme/container/key"),
        (
            "az://container?account=acme&endpoint=https://blobs.example.org&path_style=false",
            "https://blobs.example.org/container/key",
        ),
    ],
)
def test_where_a_key_goes_at_azure(url, expected):
    location = parse_azure_url(url)
    assert location.public_origin + location.path_of("key") == expected
    assert expected.startswith(location.account_url)


def test_the_account_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "acme")
    assert parse_azure_url("az://container").account == "acme"


def test_without_azure_storage_blob_the_message_names_the_extra(monkeypatch):
    for name in [each for each in sys.modules if each.startswith("holdfast_service.stores.azure.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "azure.storage.blob", None)
    with pytest.raises(StoreRefused, match=r"azure\.storage\.blob; install holdfast\[azure\]"):
        open_store("az://container?account=acme", _KEY, Credentials("acme", "a2V5"))


@pytest.mark.parametrize(
    ("credentials", "names"),
    [
        (None, "pip install azure-identity"),
        (Credentials("c2VjcmV0", "a2V5"), "is not acme, the account that the store's URL names"),
        (Credentials("acme", "no base64!"), "no key of a storage account"),
    ],
)
def test_without_a_key_for_azure_the_message_says_what_to_set(credentials, names, monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_KEY", raising=False)
    monkeypatch.setitem(sys.modules, "azure.identity", None)
    with pytest.raises(StoreRefused, match=names) as refused:
        open_store("az://container?account=acme", _KEY, credentials)
    assert not any(secret in str(refused.value) for secret in ("no base64!", "c2VjcmV0", "a2V5"))


def test_the_region_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("AWS_REGION", "eu-west-3")
    assert parse_s3_url("s3://bucket").region == "eu-west-3"


def test_without_any_credentials_the_message_names_the_variables(monkeypatch, tmp_path):
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(StoreRefused, match="AWS_ACCESS_KEY_ID"):
        open_store("s3://bucket?region=x", _KEY)


def test_a_short_signing_key_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at least 32"):
        open_store(f"posix://{tmp_path}/store", b"short")


def test_each_scheme_opens_its_store(tmp_path):
    assert isinstance(open_store(f"posix://{tmp_path}/a%20store", _KEY), PosixStore)
    assert (tmp_path / "a store" / "incoming").is_dir()
    assert isinstance(open_store("s3://bucket?region=x", _KEY, Credentials("a", "b")), S3Store)


@pytest.mark.rule("store-outage-degrades")
def test_an_empty_mount_point_is_not_made_a_store_by_a_start(tmp_path):
    """Where the mount is absent at start-up, folders made there would hide every object that the catalog knows."""
    open_store(f"posix://{tmp_path}", _KEY)
    assert list(tmp_path.iterdir()) == []
