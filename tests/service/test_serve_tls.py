"""`holdfast serve` with a certificate: https alone, renewed while it runs, and callers that must show one too."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from prometheus_client.parser import text_string_to_metric_families

from tests.support.databases import PostgresCatalogs
from tests.support.ports import free_ports
from tests.support.rank import Job, answer
from tests.support.serve import ServedHoldfast, holdfast_serve, run_holdfast
from tests.support.several_processes import served_by_several
from tests.support.tls import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority.pem")


@pytest.fixture
def tls(tmp_path: Path, authority: Authority) -> dict[str, str]:
    """The settings of a certificate that is there."""
    files = {"HOLDFAST_TLS_CERTIFICATE": tmp_path / "server.pem", "HOLDFAST_TLS_KEY": tmp_path / "server.key"}
    authority.sign(*files.values())
    return {name: str(path) for name, path in files.items()}


@pytest.fixture
def served(tmp_path: Path, authority: Authority, tls: dict[str, str]) -> Iterator[ServedHoldfast]:
    with holdfast_serve(tmp_path, other_settings=tls, authority=authority.file, forked=False) as started:
        yield started


def renew(authority: Authority, tls: dict[str, str], days: float = 30) -> int:
    return authority.sign(Path(tls["HOLDFAST_TLS_CERTIFICATE"]), Path(tls["HOLDFAST_TLS_KEY"]), days=days)


def http_of(served: ServedHoldfast, certificate: Path | None = None, key: Path | None = None) -> httpx.Client:
    """A client that trusts the service's authority, and has the first token."""
    trusted = ssl.create_default_context(cafile=served.environment["HOLDFAST_CA_FILE"])
    if certificate is not None:
        trusted.load_cert_chain(certificate, key)
    token = (Path(served.environment["HOLDFAST_DATA_DIR"]) / "token").read_text().strip()
    return httpx.Client(base_url=served.url, verify=trusted, timeout=60, headers={"Authorization": f"Bearer {token}"})


def shown(url: str) -> int:
    """The serial number of the certificate that a new connection is shown."""
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    pem = ssl.get_server_certificate((address.hostname, address.port), timeout=60)
    return x509.load_pem_x509_certificate(pem.encode()).serial_number


def days_left(http: httpx.Client) -> float:
    families = text_string_to_metric_families(http.get("/metrics").raise_for_status().text)
    (family,) = (each for each in families if each.name == "holdfast_certificate_expires_days")
    return family.samples[0].value


def test_it_speaks_https_alone(served: ServedHoldfast) -> None:
    assert f"listens on {served.url}" in served.process.log_text
    with pytest.raises(httpx.TransportError):
        httpx.get(served.url.replace("https:", "http:") + "/healthz", timeout=60)
    old = ssl.create_default_context(cafile=served.environment["HOLDFAST_CA_FILE"])
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{served.url}/healthz", verify=old, timeout=60)
    with http_of(served) as http:
        assert http.get("/healthz").status_code == 200


def test_sign_ins_streams_and_long_polls_go_over_it(served: ServedHoldfast) -> None:
    with http_of(served) as http, ThreadPoolExecutor(1) as threads:
        cookie = http.post("/v1/sessions").raise_for_status().headers["set-cookie"]
        assert cookie.startswith("__Host-")
        assert "secure" in cookie.lower()
        http.cookies.clear()
        job = Job(http, create=True)
        save = job.begin(1)
        waits = threads.submit(save.now, 60)
        with http.stream("GET", "/v1/events/stream", params={"type": "checkpoint.committed"}) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("retry:")
            save.write(0, [b"content" * 100_000, b"index"])
            assert any("checkpoint.committed" in line for line in lines)
        assert waits.result()["state"] == "committed"
    served.process.stop()
    assert "Traceback" not in served.process.log_text


def test_a_renewed_certificate_is_shown_and_open_connections_go_on(
    served: ServedHoldfast, authority: Authority, tls: dict[str, str]
) -> None:
    with http_of(served) as http:
        assert 29 < days_left(http) < 31
        serial = renew(authority, tls, days=90)
        while shown(served.url) != serial:
            assert served.process.runs, served.process.log_text
        assert 89 < days_left(http) < 91, "asked over the connection from before"
    assert "certificate_renewed" in served.process.log_text


def test_files_that_cannot_be_used_change_nothing_until_they_can(
    served: ServedHoldfast, authority: Authority, tls: dict[str, str], tmp_path: Path
) -> None:
    serial = shown(served.url)
    authority.sign(tmp_path / "other.pem", Path(tls["HOLDFAST_TLS_KEY"]))  # the key alone is another one now
    while "certificate_not_renewed" not in served.process.log_text:
        assert shown(served.url) == serial
    assert "is not that of the first certificate" in served.process.log_text
    with http_of(served) as http:
        assert 29 < days_left(http) < 31
    whole = renew(authority, tls)
    while shown(served.url) != whole:
        assert served.process.runs, served.process.log_text
    assert served.process.log_text.count("certificate_not_renewed") <= 2, "each state of the files is said once"


def test_every_process_shows_the_renewed_one(
    postgres_catalogs: PostgresCatalogs, tmp_path: Path, authority: Authority, tls: dict[str, str]
) -> None:
    url = postgres_catalogs.new()
    with served_by_several(tmp_path, url, other_settings=tls, authority=authority.file) as served:
        with served.http() as http:
            assert Job(http, create=True).save(1)["state"] == "committed"
        serial = renew(authority, tls)
        said = "certificate_renewed"
        served.until(lambda: shown(served.service.url) == serial and served.service.process.log_text.count(said) == 2)
        assert {shown(served.service.url) for _ in range(20)} == {serial}
        served.service.process.stop()
        assert "Traceback" not in served.service.process.log_text
    postgres_catalogs.give_back(url)


def test_a_caller_without_a_certificate_is_refused_and_told_why(
    tmp_path: Path, authority: Authority, tls: dict[str, str]
) -> None:
    mine, key = tmp_path / "client.pem", tmp_path / "client.key"
    authority.sign(mine, key, host="trainer")
    stranger, strangers_key = tmp_path / "stranger.pem", tmp_path / "stranger.key"
    Authority(tmp_path / "another.pem").sign(stranger, strangers_key)
    settings = tls | {"HOLDFAST_TLS_CLIENT_CA": str(authority.file)}
    with holdfast_serve(tmp_path, other_settings=settings, authority=authority.file, forked=False) as served:
        with http_of(served) as http:
            assert http.get("/readyz").status_code == 200, "a kubelet has no certificate"
            for path in ("/v1/service", "/metrics", "/ui/", "/openapi.json", "/v1/objects/x", "/healthz/../v1/service"):
                refused = http.get(path)
                assert (refused.status_code, refused.json()["code"]) == (403, "client_certificate_required"), path
        with http_of(served, mine, key) as http:
            assert answer(http.get("/v1/service"))["store_kind"] == "posix"
        with http_of(served, stranger, strangers_key) as http, pytest.raises(httpx.TransportError):
            http.get("/v1/service")
        client = served.environment | {"HOLDFAST_DIRECT_FILES": "false", "HOLDFAST_RETRY_SECONDS": "0"}
        told = run_holdfast("doctor", **client)
        assert "HOLDFAST_CLIENT_CERTIFICATE" in told.stdout + told.stderr
        shows = client | {"HOLDFAST_CLIENT_CERTIFICATE": str(mine), "HOLDFAST_CLIENT_KEY": str(key)}
        checked = run_holdfast("doctor", **shows)
        assert checked.returncode == 0, checked.stdout + checked.stderr
        link = run_holdfast("ui", "--no-browser", **shows)
        assert link.stdout.startswith(f"{served.url}/ui/#code=") or "prepare-web" in link.stderr, link.stderr


def test_doctor_says_that_the_certificate_is_not_trusted(served: ServedHoldfast) -> None:
    strange = {name: text for name, text in served.environment.items() if name != "HOLDFAST_CA_FILE"}
    told = run_holdfast("doctor", **strange)
    assert told.returncode != 0
    assert "HOLDFAST_CA_FILE" in told.stdout + told.stderr


def test_a_certificate_is_optional_where_the_operator_says_so(
    tmp_path: Path, authority: Authority, tls: dict[str, str]
) -> None:
    settings = tls | {"HOLDFAST_TLS_CLIENT_CA": str(authority.file), "HOLDFAST_TLS_CLIENTS": "optional"}
    with holdfast_serve(tmp_path, other_settings=settings, authority=authority.file, forked=False) as served:
        with http_of(served) as http:
            assert http.get("/v1/service").status_code == 200


@pytest.mark.parametrize(
    "broken", ["no certificate", "no key", "garbage", "another key", "passphrase", "no authority", "key alone"]
)
def test_what_is_wrong_with_the_files_stops_the_start_with_one_line(
    tmp_path: Path, authority: Authority, tls: dict[str, str], broken: str
) -> None:
    certificate, key = Path(tls["HOLDFAST_TLS_CERTIFICATE"]), Path(tls["HOLDFAST_TLS_KEY"])
    named = "HOLDFAST_TLS_KEY"
    match broken:
        case "no certificate":
            certificate.unlink()
            named = "HOLDFAST_TLS_CERTIFICATE"
        case "no key":
            key.unlink()
        case "garbage":
            key.write_text("no key")
        case "another key":
            authority.sign(tmp_path / "other.pem", key)
        case "passphrase":
            locked = serialization.BestAvailableEncryption(b"a passphrase")
            private = serialization.load_pem_private_key(key.read_bytes(), None)
            key.write_bytes(
                private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)
            )
        case "no authority":
            tls["HOLDFAST_TLS_CLIENT_CA"] = str(key)
            named = "HOLDFAST_TLS_CLIENT_CA"
        case "key alone":
            del tls["HOLDFAST_TLS_CERTIFICATE"]
    data = tmp_path / "data"
    done = run_holdfast("serve", HOLDFAST_DATA_DIR=str(data), HOLDFAST_PORT=str(free_ports()), **tls)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"holdfast: {named}")
    assert "Traceback" not in done.stderr
    assert not data.exists(), "a start that fails must not touch anything"
