"""The hash tree's three levels, against digests computed by hand and against each other."""

import hashlib

import pytest

from holdfast_protocol.digests import checkpoint_digest, chunk_digest, shard_digest

A = hashlib.sha256(b"a").hexdigest()
B = hashlib.sha256(b"b").hexdigest()


def test_chunk_digest_is_plain_sha256_of_any_buffer():
    assert chunk_digest(b"a") == chunk_digest(bytearray(b"a")) == chunk_digest(memoryview(b"xa")[1:]) == A


def test_shard_digest_is_the_documented_text():
    text = f"holdfast-shard-1\n{A}\n{B}\n".encode()
    assert shard_digest([A, B]) == hashlib.sha256(text).hexdigest()


def test_checkpoint_digest_is_the_documented_text():
    text = f"holdfast-checkpoint-1\n{A}\n{B}\n".encode()
    assert checkpoint_digest([A, B]) == hashlib.sha256(text).hexdigest()


def test_order_level_and_length_all_change_the_digest():
    shards = {shard_digest(digests) for digests in ([A, B], [B, A], [A], [])}
    assert len(shards | {checkpoint_digest([A, B])}) == 5


@pytest.mark.parametrize("entry", ["", A.upper(), A[:-1], A + "\n", A + "\n" + B, "g" * 64])
def test_an_entry_that_is_no_digest_cannot_forge_another_list(entry):
    with pytest.raises(ValueError, match="entry 1 is not a SHA-256 digest"):
        shard_digest([A, entry])
    with pytest.raises(ValueError, match="entry 1 is not a SHA-256 digest"):
        checkpoint_digest([A, entry])
