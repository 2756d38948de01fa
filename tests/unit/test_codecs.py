"""Codecs: what was encoded comes back bit for bit, and what is damaged or made to hurt is refused in bounded memory."""

from __future__ import annotations

import math
import random
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast_protocol.codecs import (
    MAX_WINDOW_BYTES,
    PLANE_BYTES,
    Codec,
    DecodeError,
    codecs_of_minor,
    decode,
    encode,
    zstd_codec,
)

ENCODED = [codec for codec in Codec if codec is not Codec.RAW]
NO_LIMIT = 2**40


def decoded(codec: Codec, size: int, stored: bytes | bytearray, piece_bytes: int = 70_000) -> bytes:
    pieces = (stored[start : start + piece_bytes] for start in range(0, len(stored), piece_bytes))
    return b"".join(bytes(block) for block in decode(codec, size, pieces))


def stored_form(codec: Codec, raw: bytes) -> bytearray:
    stored = encode(memoryview(raw), codec, most_bytes=NO_LIMIT)
    assert stored is not None
    return stored


def weights(count: int, item: str = "f") -> bytes:
    draw = random.Random(count)
    return struct.pack(f"<{count}{item}", *(draw.gauss(0, 0.02) for _ in range(count)))


FILLS = {
    "random": lambda size: random.Random(size).randbytes(size),
    "constant": bytes,
    "nan": lambda size: (struct.pack("<f", math.nan) * (size // 4 + 1))[:size],
    "nan with payloads": lambda size: b"".join(
        (0x7FC00000 | (at * 2654435761) % 2**22).to_bytes(4, "little") for at in range(size // 4 + 1)
    )[:size],
    "text": lambda size: (b"the quick brown fox " * (size // 20 + 1))[:size],
}


@settings(deadline=None, max_examples=60)
@given(
    codec=st.sampled_from(ENCODED),
    size=st.one_of(
        st.integers(0, 70),
        st.builds(lambda blocks, more: max(0, blocks * PLANE_BYTES + more), st.integers(0, 9), st.integers(-9, 9)),
    ),
    fill=st.sampled_from(sorted(FILLS)),
    piece_bytes=st.integers(1, 300_000),
)
def test_what_is_encoded_comes_back_bit_for_bit(codec: Codec, size: int, fill: str, piece_bytes: int) -> None:
    raw = FILLS[fill](size)
    stored = stored_form(codec, raw)
    assert decoded(codec, size, stored, max(piece_bytes, len(stored) // 1000 + 1)) == raw


@pytest.mark.parametrize(("item", "codec"), [("e", Codec.ZSTD_SHUFFLE2), ("f", Codec.ZSTD_SHUFFLE4)])
def test_planes_make_weights_smaller_than_bytes_in_their_order(item: str, codec: Codec) -> None:
    raw = weights(300_000, item)
    assert len(stored_form(codec, raw)) < 0.9 * len(raw)
    assert len(stored_form(codec, raw)) < 0.95 * len(stored_form(Codec.ZSTD, raw))


def test_the_order_of_a_block_is_the_documented_one() -> None:
    raw = bytes(range(11))
    content = zstandard.ZstdDecompressor().decompress(stored_form(Codec.ZSTD_SHUFFLE4, raw))
    assert content == bytes([0, 4, 1, 5, 2, 6, 3, 7, 8, 9, 10])
    assert zstandard.ZstdDecompressor().decompress(stored_form(Codec.ZSTD, raw)) == raw


def test_encoding_ends_as_soon_as_it_does_not_pay() -> None:
    raw = random.Random(1).randbytes(8 * 4 * PLANE_BYTES)
    blocks = []
    assert (
        encode(memoryview(raw), Codec.ZSTD_SHUFFLE4, most_bytes=PLANE_BYTES, on_block=lambda: blocks.append(1)) is None
    )
    assert len(blocks) < 4
    exactly = len(stored_form(Codec.ZSTD, b"a" * 1000))
    assert encode(memoryview(b"a" * 1000), Codec.ZSTD, most_bytes=exactly) is not None
    assert encode(memoryview(b"a" * 1000), Codec.ZSTD, most_bytes=exactly - 1) is None


def test_encoding_can_be_stopped_between_blocks() -> None:
    def stop() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        encode(memoryview(bytes(10)), Codec.ZSTD, most_bytes=NO_LIMIT, on_block=stop)


@pytest.mark.parametrize("codec", ENCODED)
@pytest.mark.parametrize(
    "damage",
    [
        lambda stored: b"",
        lambda stored: stored[: len(stored) // 2],
        lambda stored: stored[:-1],
        lambda stored: b"not a frame at all" * 1000,
        lambda stored: bytes(4) + stored[4:],
        lambda stored: zstandard.ZstdCompressor(dict_data=_DICTIONARY).compress(b"trained on something else" * 99),
    ],
    ids=["empty", "half", "one byte less", "garbage", "another magic number", "needs a dictionary"],
)
def test_a_damaged_frame_is_refused(codec: Codec, damage) -> None:
    raw = weights(200_000)
    with pytest.raises(DecodeError):
        decoded(codec, len(raw), damage(bytes(stored_form(codec, raw))))


_DICTIONARY = zstandard.ZstdCompressionDict(b"trained on something " * 50, dict_type=zstandard.DICT_TYPE_RAWCONTENT)


@pytest.mark.parametrize("codec", ENCODED)
@pytest.mark.parametrize("other", [-1, 1])
def test_a_frame_of_another_size_is_refused(codec: Codec, other: int) -> None:
    raw = weights(100_000)
    with pytest.raises(DecodeError):
        decoded(codec, len(raw) + other, stored_form(codec, raw))


@pytest.mark.parametrize("codec", ENCODED)
def test_a_flipped_bit_gives_other_bytes_or_an_error_and_never_more_bytes(codec: Codec) -> None:
    raw = weights(20_000)
    stored = stored_form(codec, raw)
    for at in range(0, len(stored) * 8, 1009):
        flipped = bytearray(stored)
        flipped[at // 8] ^= 1 << at % 8
        try:
            assert len(decoded(codec, len(raw), flipped)) == len(raw)
        except DecodeError:
            continue


@pytest.mark.parametrize("codec", ENCODED)
def test_a_bomb_yields_no_more_than_the_chunk_and_takes_no_memory(codec: Codec) -> None:
    bomb = zstandard.ZstdCompressor(level=3).compress(bytes(512 * 1024**2))
    assert len(bomb) < 100_000

    def yielded() -> Iterator[int]:
        for block in decode(codec, 1000, iter([bomb])):
            yield len(block)

    tracemalloc.start()
    try:
        sizes = yielded()
        assert next(sizes) == 1000
        with pytest.raises(DecodeError, match="more than its 1000 bytes"):
            next(sizes)
        assert tracemalloc.get_traced_memory()[1] < 8 * 1024**2
    finally:
        tracemalloc.stop()


def test_a_frame_that_asks_for_much_memory_is_refused() -> None:
    wide = zstandard.ZstdCompressionParameters(window_log=MAX_WINDOW_BYTES.bit_length(), enable_ldm=False)
    compressor = zstandard.ZstdCompressor(compression_params=wide).compressobj(size=4 * MAX_WINDOW_BYTES)
    frame = compressor.compress(bytes(4 * MAX_WINDOW_BYTES)) + compressor.flush()
    with pytest.raises(DecodeError, match="memory"):
        decoded(Codec.ZSTD, 4 * MAX_WINDOW_BYTES, frame)


def test_what_a_piece_raises_comes_through() -> None:
    def broken() -> Iterator[bytes]:
        yield bytes(stored_form(Codec.ZSTD, weights(100_000)))[:100]
        raise ConnectionError

    with pytest.raises(ConnectionError):
        list(decode(Codec.ZSTD, 400_000, broken()))


def test_the_codec_follows_the_size_of_an_item() -> None:
    assert [zstd_codec(size) for size in (1, 2, 4, 8, 16, 3)] == [
        Codec.ZSTD,
        Codec.ZSTD_SHUFFLE2,
        Codec.ZSTD_SHUFFLE4,
        Codec.ZSTD_SHUFFLE8,
        Codec.ZSTD,
        Codec.ZSTD,
    ]


@pytest.mark.rule("protocol-version")
def test_a_client_from_before_the_codecs_decodes_only_raw() -> None:
    assert codecs_of_minor(0) == {Codec.RAW}
    assert codecs_of_minor(1) == set(Codec)


def test_the_stored_form_is_readable_by_the_reference_tool_where_it_has_no_planes() -> None:
    """The documented recipe for a stranger, run as it stands in docs/codecs.md."""
    raw = weights(3 * PLANE_BYTES + 7)[:-3]
    for codec in ENCODED:
        script = "import sys; exec(open('docs/codecs.md').read().split('```python')[1].split('```')[0]); "
        script += f"sys.stdout.buffer.write(raw_bytes('{codec.value}', sys.stdin.buffer.read()))"
        done = subprocess.run(
            [sys.executable, "-c", script], input=stored_form(codec, raw), capture_output=True, check=True
        )
        assert done.stdout == raw
