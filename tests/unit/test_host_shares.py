"""Who fetches which chunk: each that ranks of a host share has one fetcher, each that hosts share has one owner, and
all agree on it."""

from __future__ import annotations

from collections import Counter

import pytest

from holdfast.layout.reshard import Wants, share_out, wanted_bits


def shares(universe, wants, transfers=2, *, hosts=None, first=None, serving=(), room=10**6):
    """`hosts`: each rank's; without it the ranks of `wants` share one, and each other rank has its own."""

    def bits(of, rank):
        return wanted_bits(universe, set(of.get(rank, ())))

    offers = [Wants(bits(wants, rank), bits(first or wants, rank), rank in serving) for rank in range(max(wants) + 1)]
    hosts = hosts or [min(wants) if rank in wants else rank for rank in range(len(offers))]
    return {
        rank: share_out(universe, offers, hosts, rank, wanted, transfers=transfers, room=room)
        for rank, wanted in wants.items()
    }


@pytest.mark.parametrize("ranks", [[0, 1], [4, 5, 6], [3, 9, 11, 12, 13]])
@pytest.mark.parametrize("count", [0, 1, 7, 100])
def test_what_all_want_is_dealt_out_evenly_in_windows(ranks, count):
    universe = [f"chunk{at}" for at in range(count)]
    size = 30
    dealt = shares(universe, {rank: list(universe) for rank in ranks}, size // len(ranks))
    for start in range(0, count, size):
        window = set(universe[start : start + size])
        firsts = []
        for rank in ranks:
            assert set(dealt[rank].order[start : start + size]) == window, "all are in the same window"
            position = [dealt[rank].order.index(digest) for digest in window]
            assert min(position) == start
            firsts.append(dealt[rank].order[start])
        if len(window) == size:
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
    dealt = shares(universe, wants, 1000)
    fetchers = {}
    for rank, share in dealt.items():
        assert set(share.order) == set(wants[rank])
        positions = [universe.index(digest) for digest in share.order]
        mine = next((at for at in range(1, len(positions)) if positions[at] < positions[at - 1]), len(positions))
        for digest in share.order[:mine]:
            fetchers.setdefault(digest, []).append(rank)
    assert fetchers.keys() == set(universe)
    assert all(len(ranks) == 1 for ranks in fetchers.values())


def of_all_hosts(universe, hosts, wants=None, **more):
    """Each rank wants all, or what `wants` says, and passes on what it has."""
    wants = wants or {rank: list(universe) for rank in range(len(hosts))}
    return shares(universe, wants, hosts=hosts, serving=range(len(hosts)), **more)


def from_the_store(dealt):
    """Digest -> the hosts' ranks that fetch it from the store, if each finds what it waits for."""
    fetchers = {}
    for rank, share in dealt.items():
        for digest in share.order:
            if digest in share.owned or digest not in share.shared | share.owners.keys():
                fetchers.setdefault(digest, []).append(rank)
    return fetchers


@pytest.mark.parametrize("ranks_of_a_host", [1, 2, 3])
def test_what_all_hosts_want_has_one_owner_each_and_they_have_equal_parts(ranks_of_a_host):
    universe = [f"chunk{at}" for at in range(48)]
    hosts = [rank // ranks_of_a_host * ranks_of_a_host for rank in range(8 * ranks_of_a_host)]
    dealt = of_all_hosts(universe, hosts)
    owner = {digest: rank for rank, share in dealt.items() for digest in share.owned}
    assert sorted(owner) == sorted(universe)
    assert {len(share.owned) for share in dealt.values()} == {48 // len(hosts)}
    for rank, share in dealt.items():
        elsewhere = {digest: of for digest, of in owner.items() if hosts[of] != hosts[rank]}
        assert share.owners == elsewhere
        assert sorted(share.order) == sorted(universe)
        assert share.owned <= share.shared, "what it passes on lies in the folder"


def test_each_host_begins_with_its_own_part_and_goes_on_at_another_owner():
    universe = [f"chunk{at}" for at in range(64)]
    dealt = of_all_hosts(universe, list(range(8)), transfers=8)
    assert all(frozenset(share.order[:8]) == share.owned for share in dealt.values())
    for turn in range(8, 64):
        assert len({share.owners[share.order[turn]] for share in dealt.values()}) == 8


@pytest.mark.parametrize(("room", "size"), [(1000, 32), (12, 12), (0, 8)])
def test_a_window_has_no_more_chunks_than_the_folder_of_a_host_has_room_for(room, size):
    """Else the ranks of a host would find those of others gone: a job of many hosts has large windows."""
    universe = [f"chunk{at}" for at in range(96)]
    for share in of_all_hosts(universe, [0, 0, 2, 2, 4, 4, 6, 6], transfers=4, room=room).values():
        for start in range(0, 96, size):
            assert set(share.order[start : start + size]) == set(universe[start : start + size])


def test_what_one_host_wants_alone_costs_other_hosts_nothing():
    universe = ["a", "b", "c", "d"]
    dealt = of_all_hosts(universe, [0, 1, 2], {0: ["a", "b"], 1: ["b", "c"], 2: ["d"]})
    assert from_the_store(dealt) == {"a": [0], "b": [0], "c": [1], "d": [2]}
    assert (dealt[0].shared, dealt[1].shared, dealt[2].shared) == ({"b"}, frozenset(), frozenset())
    assert (dealt[0].owners, dealt[1].owners, dealt[2].owners) == ({}, {"b": 0}, {})
    assert dealt[2].order == ("d",)


def test_replicas_of_shards_share_among_each_other():
    """HSDP: ranks 0 to 3 hold the shards on two hosts, and ranks 4 to 7 the same on two others."""
    universe = [f"{shard} {at}" for shard in range(4) for at in range(6)]
    wants = {rank: [digest for digest in universe if digest.startswith(f"{rank % 4} ")] for rank in range(8)}
    dealt = of_all_hosts(universe, [0, 0, 2, 2, 4, 4, 6, 6], wants)
    assert all(len(ranks) == 1 for ranks in from_the_store(dealt).values())
    assert Counter(rank for [rank] in from_the_store(dealt).values()) == dict.fromkeys(range(8), 3)


def test_a_rank_that_reads_it_late_owns_nothing_that_another_waits_for():
    universe = [f"chunk{at}" for at in range(12)]
    dealt = of_all_hosts(universe, [0, 1, 2], first={0: universe, 1: universe[:6], 2: universe[:6]})
    assert {digest for digest in universe[6:] if digest in dealt[0].owned} == set(universe[6:])


def test_ranks_that_take_no_part_read_for_themselves():
    universe = [f"chunk{at}" for at in range(6)]
    wants = dict.fromkeys(range(3), universe)
    dealt = shares(universe, wants, hosts=[0, 1, 2], serving=(0, 2))
    assert (dealt[1].owned, dealt[1].owners, dealt[1].shared) == (frozenset(), {}, frozenset())
    assert dealt[0].owned | dealt[2].owned == set(universe)
    assert set(dealt[0].owners.values()) == {2}
