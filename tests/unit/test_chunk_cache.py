"""The cache of verified chunks: bounded, one fetch for threads that want the same chunk, and no thread left waiting."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast_client.filesystem.chunk_cache import ChunkCache

CHUNKS = {name: name.encode() * 10 for name in "abcdef"}


class Fetches:
    def __init__(self) -> None:
        self.digests: list[str] = []

    def __call__(self, digests, receive) -> None:
        self.digests += digests
        for digest in digests:
            receive(digest, memoryview(CHUNKS[digest]))


def read(cache: ChunkCache, digests, fetch) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    cache.read(digests, lambda digest, view: found.__setitem__(digest, bytes(view)), fetch)
    return found


def test_what_was_unused_for_longest_goes_first_and_the_bound_holds():
    cache, fetches = ChunkCache(20), Fetches()
    assert read(cache, ["a", "b"], fetches) == {"a": CHUNKS["a"], "b": CHUNKS["b"]}
    read(cache, ["a"], fetches)
    read(cache, ["c"], fetches)
    assert cache.kept_bytes == 20
    assert (cache.has("a"), cache.has("b"), cache.has("c")) == (True, False, True)
    assert sorted(fetches.digests) == ["a", "b", "c"]
    assert read(cache, list("abcdef"), fetches) == CHUNKS, "more than it keeps"
    assert cache.kept_bytes == 20
    cache.clear()
    assert cache.kept_bytes == 0


def test_a_cache_of_nothing_keeps_nothing():
    cache, fetches = ChunkCache(0), Fetches()
    for _ in range(2):
        assert read(cache, ["a"], fetches) == {"a": CHUNKS["a"]}
    assert fetches.digests == ["a", "a"]


def test_threads_that_want_the_same_chunk_fetch_it_once():
    cache, fetches, begun, go_on = ChunkCache(100), Fetches(), threading.Event(), threading.Event()

    def slow(digests, receive) -> None:
        begun.set()
        assert go_on.wait(60)
        fetches(digests, receive)

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(read, cache, ["a"], slow)
        assert begun.wait(60)
        second = threads.submit(read, cache, ["a", "b"], fetches)
        go_on.set()
        assert first.result(60) == {"a": CHUNKS["a"]}
        assert second.result(60) == {"a": CHUNKS["a"], "b": CHUNKS["b"]}
    assert sorted(fetches.digests) == ["a", "b"]


def test_a_thread_that_waited_for_a_failed_fetch_fetches_itself():
    cache, fetches, begun, go_on = ChunkCache(100), Fetches(), threading.Event(), threading.Event()

    def failing(digests, receive) -> None:
        begun.set()
        assert go_on.wait(60)
        raise OSError("the store is away")

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(read, cache, ["a"], failing)
        assert begun.wait(60)
        second = threads.submit(read, cache, ["a"], fetches)
        go_on.set()
        with pytest.raises(OSError, match="away"):
            first.result(60)
        assert second.result(60) == {"a": CHUNKS["a"]}


def test_nothing_is_kept_of_a_chunk_that_did_not_arrive():
    cache = ChunkCache(100)

    def half(digests, receive) -> None:
        receive("a", memoryview(CHUNKS["a"]))
        raise OSError("wrong bytes")

    with pytest.raises(OSError, match="wrong bytes"):
        read(cache, ["a", "b"], half)
    assert (cache.has("a"), cache.has("b")) == (True, False)


def test_an_interrupted_read_leaves_no_chunk_that_others_wait_for():
    """As in a notebook, where the next cell reads on."""
    cache, fetches = ChunkCache(100), Fetches()
    read(cache, ["a"], fetches)

    def interrupted(digest, view) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.read(["a", "b"], interrupted, fetches)
    assert not cache.has("b")
    assert read(cache, ["b"], fetches) == {"b": CHUNKS["b"]}
