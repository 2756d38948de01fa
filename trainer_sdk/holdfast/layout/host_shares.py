"""Which chunks several ranks of one host want, and in which order each of them reads, so that one fetches each. Pure.

    wanted by this rank -> bits, one per chunk of the checkpoint -> [gathered] -> shared, and this rank's order

The shared chunks are taken in windows. Within a window each rank begins with those that it is to fetch, while the
others fetch theirs; then it reads what they have left. So all fetch at once, nobody waits for long, and what lies on
the host's disk at a time is about one window.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np


class HostShare(NamedTuple):
    """One rank's part."""

    shared: frozenset[str]
    """Digests that another rank of the host wants too."""
    order: tuple[str, ...]
    """All that this rank wants, in the order in which to fetch it: the shared ones first."""


def wanted_bits(universe: Sequence[str], wanted: Collection[str]) -> bytes:
    """One bit for each digest of `universe`, which is the same list on every rank: a few kB, however large the job."""
    return np.packbits(
        np.fromiter((digest in wanted for digest in universe), dtype=bool, count=len(universe))
    ).tobytes()


def share_out(
    universe: Sequence[str], bits: Mapping[int, bytes], rank: int, wanted: Iterable[str], *, window: int
) -> HostShare:
    """`bits`: of each rank of the host, this one among them. `window`: in chunks. Every rank of the host comes to the
    same answer on who fetches what. Should one not keep to it, another fetches in its place."""
    ranks = sorted(bits)
    wants = np.stack([np.unpackbits(np.frombuffer(bits[r], np.uint8), count=len(universe)) for r in ranks]).astype(bool)
    readers = wants.sum(axis=0)
    places = np.flatnonzero(readers > 1)
    wants, readers = wants[:, places], readers[places]
    turn = np.arange(len(places))
    own = ranks.index(rank)
    # The n-th of a chunk's readers fetches it, n going round.
    is_fetcher = wants[own] & (np.cumsum(wants, axis=0)[own] - 1 == turn % np.maximum(readers, 1))
    order = np.lexsort((turn, ~is_fetcher, turn // window))
    shared = [universe[places[at]] for at in order[wants[own][order]]]
    found = frozenset(shared)
    return HostShare(found, (*shared, *(digest for digest in wanted if digest not in found)))
