"""One chunk to the store, through every fault that a store can have."""

from __future__ import annotations

import logging
import os
import resource
import signal
import threading

import pytest

from holdfast_client import Client, ClientSettings, errors
from holdfast_client.chunks import transfer
from holdfast_client.chunks.transfer import put_chunk
from holdfast_protocol.checkpoints import UploadTicket
from holdfast_protocol.stores import proxy_for
from tests.support.scripted_http import DROP, Reply, in_turn, problem, scripted

BODY = os.urandom(3 * 1024 * 1024 + 17)


def s3_error(status: int, code: str, **headers: str) -> Reply:
    return Reply(status, f"<Error><Code>{code}</Code><Message>m</Message></Error>".encode(), headers, protocol=None)


def put(server, *, body=BODY, stop=None, retry_seconds=60.0, url=None, **headers):
    with Client(ClientSettings(url=server.url, token="hold_id_secret", timeout_seconds=60)) as client:
        ticket = UploadTicket(
            kind="http", url=url or "/bucket/key?X-Amz-Signature=s3cret", headers=headers, expires_in_seconds=60
        )
        put_chunk(ticket, memoryview(body), client.transfers, stop=stop, retry_seconds=retry_seconds)


def test_the_store_gets_exactly_the_bytes_and_the_tickets_headers_and_never_the_token():
    with scripted(in_turn(Reply(200))) as server:
        put(server, **{"x-amz-checksum-sha256": "abc=", "If-None-Match": "*", "content-length": str(len(BODY))})
    seen = server.seen[0]
    assert seen.method == "PUT"
    assert seen.path == "/bucket/key"
    assert seen.query == {"X-Amz-Signature": "s3cret"}
    assert seen.body == BODY
    assert seen.headers["x-amz-checksum-sha256"] == "abc="
    assert seen.headers["if-none-match"] == "*"
    assert "authorization" not in seen.headers
    assert "hold_id_secret" not in repr(seen)


def test_an_absolute_url_goes_where_it_says():
    with scripted(in_turn(Reply(200))) as store, scripted(in_turn(Reply(500))) as service:
        put(service, url=f"{store.url}/bucket/key?sig=1")
    assert len(store.seen) == 1
    assert not service.seen


def test_a_chunk_goes_by_the_proxy_that_the_environment_names_and_not_to_what_it_leaves_out(monkeypatch):
    for name in ("HTTP_PROXY", "ALL_PROXY", "NO_PROXY", "REQUEST_METHOD"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    with scripted(in_turn(Reply(200))) as proxy, scripted(in_turn(Reply(200))) as here:
        monkeypatch.setenv("HTTP_PROXY", proxy.url.replace("http://", "http://user:p%40ss@"))
        put(here, url="http://store.invalid/bucket/key?sig=1")
        put(here)
        (seen,) = proxy.seen
        assert (seen.headers["host"], seen.headers["proxy-authorization"]) == ("store.invalid", "Basic dXNlcjpwQHNz")
        assert seen.body == BODY
        assert len(here.seen) == 1, "this machine is reached directly"
        monkeypatch.setenv("NO_PROXY", ".invalid")
        with pytest.raises(errors.StoreUnavailable):
            put(here, url="http://store.invalid/bucket/key?sig=1", retry_seconds=0)
        assert len(proxy.seen) == 1


@pytest.mark.parametrize(
    ("host", "goes_directly"),
    [("10.1.2.3", True), ("11.1.2.3", False), ("minio.lan", True), ("a.localhost", True), ("127.example.com", False)],
)
def test_a_store_in_a_network_that_no_proxy_names_is_reached_directly(monkeypatch, host, goes_directly):
    for name in ("http_proxy", "no_proxy", "REQUEST_METHOD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.lan:3128")
    monkeypatch.setenv("NO_PROXY", "minio.lan, 10.0.0.0/8")
    assert (proxy_for(f"http://{host}:9000/bucket/key") is None) is goes_directly


def test_a_proxy_that_lets_nobody_through_is_named(monkeypatch):
    for name in ("NO_PROXY", "no_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    with scripted(in_turn(Reply(403))) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        with pytest.raises(errors.StoreUnavailable, match=r"by the proxy to the store broke .* Check HTTPS_PROXY"):
            put(proxy, url="https://store.invalid/bucket/key?sig=1", retry_seconds=0)
        monkeypatch.setenv("HTTPS_PROXY", "socks5://127.0.0.1:9")
        with pytest.raises(errors.ConfigurationError, match="HTTPS_PROXY"):
            put(proxy, url="https://store.invalid/bucket/key?sig=1", retry_seconds=0)


def test_an_empty_chunk_is_a_chunk():
    with scripted(in_turn(Reply(200))) as server:
        put(server, body=b"")
    assert server.seen[0].headers["content-length"] == "0"


@pytest.mark.parametrize(("form", "shape"), [("I", (262144,)), ("B", (1024, 1024))])
def test_any_contiguous_buffer_is_sent_as_its_bytes(form, shape):
    view = memoryview(BODY[: 1024 * 1024]).cast(form, shape)
    with scripted(in_turn(Reply(200))) as server:
        put(server, body=view)
    assert server.seen[0].body == BODY[: 1024 * 1024]


@pytest.mark.rule("random-generation")
def test_412_means_that_an_earlier_try_has_arrived():
    with scripted(in_turn(DROP, Reply(412))) as server:
        put(server)
    assert len(server.seen) == 2


@pytest.mark.parametrize(
    "fault",
    [
        DROP,
        s3_error(503, "SlowDown"),
        s3_error(500, "InternalError"),
        s3_error(400, "RequestTimeout"),
        s3_error(409, "ConditionalRequestConflict"),
        Reply(429),
        Reply(502, b"<html>"),
        Reply(408),
        Reply(520, b"<html>"),
        s3_error(400, "IncompleteBody"),
        s3_error(400, "Throttling"),
        problem("store_unavailable"),
        problem("internal"),
        s3_error(400, "BadDigest"),
    ],
    ids=lambda fault: str(fault.status) + fault.body[12:24].decode(),
)
def test_a_passing_fault_is_tried_again(fault):
    with scripted(in_turn(fault, Reply(200))) as server:
        put(server)
    assert [seen.body == BODY for seen in server.seen] == [True, True]


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (s3_error(403, "AccessDenied"), errors.TicketExpired),
        (s3_error(400, "ExpiredToken"), errors.TicketExpired),
        (problem("ticket_expired"), errors.TicketExpired),
        (problem("signature_invalid"), errors.SignatureInvalid),
        (s3_error(400, "BadDigest"), errors.ChecksumMismatch),
        (problem("checksum_mismatch"), errors.ChecksumMismatch),
        (Reply(507), errors.StoreFull),
        (problem("store_full"), errors.StoreFull),
        (s3_error(404, "NoSuchBucket"), errors.StoreRefused),
        (s3_error(400, "InvalidRequest"), errors.StoreRefused),
        (Reply(301, b"", {"Location": "http://127.0.0.1:1/"}), errors.StoreRefused),
        (Reply(413, b"too large"), errors.StoreRefused),
        (Reply(501), errors.StoreRefused),
    ],
)
def test_what_no_retry_mends_is_raised_by_its_kind(reply, error):
    with scripted(in_turn(reply)) as server, pytest.raises(error) as caught:
        put(server)
    assert len(server.seen) <= 2
    assert "s3cret" not in str(caught.value)


def test_a_store_that_stays_unavailable_is_given_up_in_bounded_time():
    with scripted(in_turn(s3_error(503, "SlowDown", **{"Retry-After": "1"}))) as server:
        with pytest.raises(errors.StoreUnavailable, match="SlowDown"):
            put(server, retry_seconds=0.5)
    assert len(server.seen) == 1, "a Retry-After beyond the total time is not sat out"


def test_a_stopped_upload_ends_in_its_pause():
    stop = threading.Event()

    def answer(seen):
        stop.set()
        return s3_error(503, "SlowDown", **{"Retry-After": "50"})

    with scripted(answer) as server, pytest.raises(errors.TransferStopped):
        put(server, stop=stop, retry_seconds=60)


def test_signatures_stay_out_of_the_logs(caplog):
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, logger="urllib3")  # whatever an earlier test has set it to
    with scripted(in_turn(DROP, Reply(200))) as server:
        put(server)
    assert "/bucket/key" in caplog.text
    assert "s3cret" not in caplog.text


def put_file(path, body=BODY, **options) -> None:
    with Client(ClientSettings(token="t")) as client:
        put_chunk(
            UploadTicket(kind="file", path=str(path), expires_in_seconds=60),
            memoryview(body),
            client.transfers,
            retry_seconds=0,
            **options,
        )


@pytest.mark.rule("drop-box")
def test_a_file_ticket_is_written_whole_and_never_into_what_is_there(tmp_path):
    path = tmp_path / "ticket"
    path.write_bytes(b"x" * 5_000_000)
    other_name = tmp_path / "other"
    os.link(path, other_name)
    put_file(path)
    assert path.read_bytes() == BODY
    assert other_name.read_bytes() == b"x" * 5_000_000


def test_a_full_disk_is_said_clearly_and_leaves_nothing_behind():
    with pytest.raises(errors.StoreFull, match=r"no room left \(ENOSPC\).*prune"):
        with transfer._file_errors("written"), open("/dev/full", "wb", buffering=0) as full:
            full.write(b"x")


def test_a_full_disk_in_the_middle_removes_the_part(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024 * 1024, hard))
    try:
        with pytest.raises(errors.StoreFull):
            put_file(tmp_path / "ticket")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_means_go_over_http(tmp_path):
    with pytest.raises(errors.DirectFileRefused):
        put_file(tmp_path / "absent" / "ticket")


def test_a_stopped_file_write_leaves_nothing_behind(tmp_path):
    stop = threading.Event()
    stop.set()
    with pytest.raises(errors.TransferStopped):
        put_file(tmp_path / "ticket", stop=stop)
    assert list(tmp_path.iterdir()) == []
