"""One chunk from the store: the right bytes, or an exception that says what is wrong with them."""

from __future__ import annotations

import hashlib
import os

import pytest

from holdfast_client import Client, ClientSettings, errors
from holdfast_client.chunks.transfer import get_chunk
from holdfast_protocol.restores import ReadTicket
from tests.support.scripted_http import DROP, Reply, in_turn, problem, scripted

BODY = os.urandom(3 * 1024 * 1024 + 17)
DIGEST = hashlib.sha256(BODY).hexdigest()


def flipped(at: int) -> bytes:
    return BODY[:at] + bytes([BODY[at] ^ 1]) + BODY[at + 1 :]


def get(url: str, *, kind="http", path="", into=None, body=BODY, retry_seconds=60.0) -> memoryview:
    digest = hashlib.sha256(body).hexdigest()
    ticket = ReadTicket(
        digest=digest,
        bytes=len(body),
        stored_bytes=len(body),
        kind=kind,
        url="/bucket/key?sig=s3cret",
        headers={"x-extra": "1"},
        path=str(path),
        expires_in_seconds=60,
    )
    with Client(ClientSettings(url=url, token="hold_id_secret", timeout_seconds=60)) as client:
        return get_chunk(ticket, into, digest, len(body), client.transfers, retry_seconds=retry_seconds)


def test_the_bytes_arrive_in_the_given_buffer_and_the_token_stays_here():
    buffer = bytearray(len(BODY))
    with scripted(in_turn(Reply(200, BODY))) as server:
        get(server.url, into=memoryview(buffer))
    assert buffer == BODY
    assert server.seen[0].headers["x-extra"] == "1"
    assert "authorization" not in server.seen[0].headers


def test_without_a_buffer_a_new_one_is_made():
    with scripted(in_turn(Reply(200, BODY))) as server:
        assert bytes(get(server.url)) == BODY


def test_an_empty_chunk_is_a_chunk():
    with scripted(in_turn(Reply(200, b""))) as server:
        assert get(server.url, body=b"").nbytes == 0


@pytest.mark.parametrize(
    ("reply", "problem_name"),
    [
        (Reply(200, flipped(0)), "mismatch"),
        (Reply(200, flipped(len(BODY) - 1)), "mismatch"),
        (Reply(200, BODY[:-1]), "truncated"),
        (Reply(200, b""), "truncated"),
        (Reply(200, BODY + b"x"), "mismatch"),
        (Reply(404, b"<Error><Code>NoSuchKey</Code></Error>"), "missing"),
        (Reply(404, b"<Error><Code>NoSuchVersion</Code></Error>"), "missing"),
        (Reply(403, b"<Error><Code>InvalidObjectState</Code></Error>"), "missing"),
        (problem("chunk_not_found"), "missing"),
        (problem("chunk_gone"), "missing"),
    ],
)
def test_wrong_bytes_are_never_returned_and_named_by_kind(reply, problem_name):
    with scripted(in_turn(reply)) as server, pytest.raises(errors.ChunkCorrupt) as caught:
        get(server.url)
    assert caught.value.problem == problem_name
    assert caught.value.digest == DIGEST
    assert len(server.seen) == 1, "reading the same copy again gives the same"


@pytest.mark.parametrize(
    "fault", [DROP, Reply(200, BODY, sent_bytes=2_000_000), Reply(503, b"<Code>SlowDown</Code>"), problem("internal")]
)
def test_a_passing_fault_is_tried_again_from_the_start(fault):
    with scripted(in_turn(fault, Reply(200, BODY))) as server:
        assert bytes(get(server.url)) == BODY
    assert len(server.seen) == 2


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (Reply(403, b"<Error><Code>AccessDenied</Code></Error>"), errors.TicketExpired),
        (problem("ticket_expired"), errors.TicketExpired),
        (Reply(404, b"<Error><Code>NoSuchBucket</Code></Error>"), errors.StoreRefused),
        (Reply(206, BODY[:10]), errors.StoreRefused),
    ],
)
def test_what_no_retry_mends_is_raised_by_its_kind(reply, error):
    with scripted(in_turn(reply)) as server, pytest.raises(error):
        get(server.url)


def test_a_store_that_stays_unavailable_is_given_up_in_bounded_time():
    with scripted(in_turn(DROP)) as server, pytest.raises(errors.StoreUnavailable) as caught:
        get(server.url, retry_seconds=0.3)
    assert "s3cret" not in str(caught.value)


def test_a_file_ticket_is_read_and_proven_like_any_other(tmp_path):
    path = tmp_path / "chunk"
    path.write_bytes(BODY)
    assert bytes(get("http://127.0.0.1:1", kind="file", path=path)) == BODY
    for content, problem_name in ((flipped(9), "mismatch"), (BODY[:-1], "truncated"), (BODY + b"x", "mismatch")):
        path.write_bytes(content)
        with pytest.raises(errors.ChunkCorrupt) as caught:
            get("http://127.0.0.1:1", kind="file", path=path)
        assert caught.value.problem == problem_name
    path.unlink()
    with pytest.raises(errors.ChunkCorrupt) as caught:
        get("http://127.0.0.1:1", kind="file", path=path)
    assert caught.value.problem == "missing"


def test_a_chunk_that_the_service_calls_gone_is_missing():
    with pytest.raises(errors.ChunkCorrupt) as caught:
        get("http://127.0.0.1:1", kind="gone")
    assert caught.value.problem == "missing"


def test_a_buffer_of_another_size_is_the_callers_mistake():
    with pytest.raises(ValueError, match="buffer has 5 bytes"):
        get("http://127.0.0.1:1", into=memoryview(bytearray(5)))
