"""Who of a host's ranks fetches which chunk: each shared one has one fetcher, and all agree on it."""

from __future__ import annotations

import pytest

from holdfast.layout.reshard import share_out, wanted_bits


def shares(universe, wants, window=4):
    bits = {rank: wanted_bits(universe, set(wanted)) for rank, wanted in wants.items()}
    return {rank: share_out(universe, bits, rank, wanted, window=window) for rank, wanted in wants.items()}


@pytest.mark.parametrize("ranks", [[0, 1], [4, 5, 6], [3, 9, 11, 12, 13]])
@pytest.mark.parametrize("count", [0, 1, 7, 100])
def test_what_all_want_is_dealt_out_evenly_in_windows(ranks, count):
    universe = [f"chunk{at}" for at in range(count)]
    dealt = shares(universe, {rank: list(universe) for rank in ranks}, window=10)
    for start in range(0, count, 10):
        window = set(universe[start : start + 10])
        firsts = []
        for rank in ranks:
            assert set(dealt[rank].order[start : start + 10]) == window, "all are in the same window"
            position = [dealt[rank].order.index(digest) for digest in window]
            assert min(position) == start
            firsts.append(dealt[rank].order[start])
        if len(window) == 10:
            assert len(set(firsts)) == len(ranks), "each begins with another chunk"
    assert all(share.shared == frozenset(universe) for share in dealt.values())


def test_what_one_rank_wants_alone_is_not_shared_and_comes_last():
    universe = ["a", "b", "c", "d"]
    dealt = shares(universe, {0: ["a", "b", "c"], 1: ["b", "c", "d"]})
    assert dealt[0].shared == dealt[1].shared == {"b", "c"}
    assert (dealt[0].order, dealt[1].order) == (("b", "c", "a"), ("c", "b", "d"))


def test_one_rank_alone_shares_nothing():
    dealt = shares(["a", "b"], {7: ["b", "a"]})
    assert dealt[7].shared == frozenset()
    assert dealt[7].order == ("b", "a")


def test_several_readers_of_different_chunks_each_have_one_fetcher():
    universe = [f"chunk{at}" for at in range(30)]
    wants = {rank: [d for at, d in enumerate(universe) if at % 4 != rank] for rank in range(4)}
    dealt = shares(universe, wants, window=1000)
    fetchers = {}
    for rank, share in dealt.items():
        assert set(share.order) == set(wants[rank])
        positions = [universe.index(digest) for digest in share.order]
        mine = next((at for at in range(1, len(positions)) if positions[at] < positions[at - 1]), len(positions))
        for digest in share.order[:mine]:
            fetchers.setdefault(digest, []).append(rank)
    assert fetchers.keys() == set(universe)
    assert all(len(ranks) == 1 for ranks in fetchers.values())
