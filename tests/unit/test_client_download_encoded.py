"""One chunk that is stored encoded: its raw bytes are decoded while they arrive and are proven as ever."""

from __future__ import annotations

import hashlib
import os
import random
import threading

import pytest
import zstandard

from holdfast_client import Client, ClientSettings, errors
from holdfast_client.chunks.transfer import get_chunk
from holdfast_protocol.codecs import Codec, encode
from holdfast_protocol.restores import ReadTicket
from tests.support.scripted_http import DROP, Reply, in_turn, scripted

BODY = bytes(random.Random(1).choices(range(20), k=3 * 1024 * 1024 + 17))
DIGEST = hashlib.sha256(BODY).hexdigest()
ENCODED = [codec for codec in Codec if codec is not Codec.RAW]


def stored_form(codec: Codec, body: bytes = BODY) -> bytes:
    stored = encode(memoryview(body), codec, most_bytes=len(body))
    assert stored is not None
    return bytes(stored)


def get(url: str, codec: Codec, *, kind="http", path="", into=None, stored_bytes=None, stop=None) -> memoryview:
    ticket = ReadTicket(
        digest=DIGEST,
        bytes=len(BODY),
        stored_bytes=len(stored_form(codec)) if stored_bytes is None else stored_bytes,
        codec=codec,
        kind=kind,
        url="/bucket/key",
        path=str(path),
        expires_in_seconds=60,
    )
    with Client(ClientSettings(url=url, token="hold_id_secret", timeout_seconds=60)) as client:
        return get_chunk(ticket, into, DIGEST, len(BODY), client.transfers, stop=stop, retry_seconds=60.0)


@pytest.mark.parametrize("codec", ENCODED)
def test_the_raw_bytes_arrive_in_the_given_buffer(codec: Codec) -> None:
    buffer = bytearray(len(BODY))
    with scripted(in_turn(Reply(200, stored_form(codec)))) as server:
        get(server.url, codec, into=memoryview(buffer))
    assert buffer == BODY


@pytest.mark.parametrize("codec", ENCODED)
def test_a_file_ticket_is_decoded_and_proven_like_any_other(codec: Codec, tmp_path) -> None:
    path = tmp_path / "chunk"
    path.write_bytes(stored_form(codec))
    assert bytes(get("http://127.0.0.1:1", codec, kind="file", path=path)) == BODY
    path.write_bytes(stored_form(codec)[:-1])
    with pytest.raises(errors.ChunkCorrupt) as caught:
        get("http://127.0.0.1:1", codec, kind="file", path=path)
    assert caught.value.problem == "truncated"


def other_content(codec: Codec) -> bytes:
    return stored_form(codec, BODY[:-1] + bytes([BODY[-1] ^ 1]))


@pytest.mark.parametrize("codec", ENCODED)
@pytest.mark.parametrize(
    ("arriving", "problem"),
    [
        (lambda codec: stored_form(codec)[:-1], "truncated"),
        (lambda codec: b"", "truncated"),
        (lambda codec: stored_form(codec) + b"x", "mismatch"),
        (lambda codec: os.urandom(len(stored_form(codec))), "mismatch"),
        (lambda codec: stored_form(codec, BODY[:-1]), "any"),
        (lambda codec: stored_form(codec, BODY + b"x"), "any"),
        (other_content, "any"),
    ],
    ids=["cut", "nothing", "one byte more", "garbage", "of a shorter chunk", "of a longer chunk", "of another chunk"],
)
def test_wrong_bytes_are_never_returned(codec: Codec, arriving, problem: str) -> None:
    with scripted(in_turn(Reply(200, arriving(codec)))) as server, pytest.raises(errors.ChunkCorrupt) as caught:
        get(server.url, codec)
    assert problem in (caught.value.problem, "any")
    assert caught.value.digest == DIGEST
    assert len(server.seen) == 1, "reading the same copy again gives the same"


@pytest.mark.parametrize("codec", ENCODED)
def test_a_well_formed_frame_with_another_chunks_bytes_is_a_mismatch(codec: Codec) -> None:
    other = other_content(codec)
    with scripted(in_turn(Reply(200, other))) as server, pytest.raises(errors.ChunkCorrupt, match="hash to") as caught:
        get(server.url, codec, stored_bytes=len(other))
    assert caught.value.problem == "mismatch"


def test_a_frame_that_grows_beyond_the_chunk_is_a_mismatch_and_ends_there() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1024**3))
    with scripted(in_turn(Reply(200, bomb))) as server, pytest.raises(errors.ChunkCorrupt) as caught:
        get(server.url, Codec.ZSTD, stored_bytes=len(bomb))
    assert caught.value.problem == "mismatch"


@pytest.mark.parametrize("fault", [DROP, Reply(200, stored_form(Codec.ZSTD), sent_bytes=100_000)])
def test_a_passing_fault_is_tried_again_from_the_start(fault: Reply) -> None:
    with scripted(in_turn(fault, Reply(200, stored_form(Codec.ZSTD)))) as server:
        assert bytes(get(server.url, Codec.ZSTD)) == BODY
    assert len(server.seen) == 2


def test_it_can_be_stopped() -> None:
    stop = threading.Event()
    stop.set()
    with scripted(in_turn(Reply(200, stored_form(Codec.ZSTD)))) as server, pytest.raises(errors.TransferStopped):
        get(server.url, Codec.ZSTD, stop=stop)
