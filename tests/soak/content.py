"""What a shard consists of. Bytes are made from a seed, so that whoever reads them back can make them again.

Of each shard some chunks are frozen (the same at every step of the run), some come from a pool that all runs of the
project share, and the rest is new: so saves deduplicate, share, and leave garbage behind.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

_POOL = 12
_SMALLEST, _LARGEST = 1_000, 40_000


@dataclass(frozen=True)
class Piece:
    seed: int
    size: int

    @property
    def data(self) -> bytes:
        return random.Random(self.seed).randbytes(self.size)


def shard_content(run: str, rank: int, fresh: random.Random) -> list[Piece]:
    """Without doubles: a client offers each chunk once."""
    frozen = random.Random(f"frozen {run} {rank}")
    pieces = [_piece(frozen) for _ in range(2)]
    pieces += [_piece(random.Random(f"pool {fresh.randrange(_POOL)}")) for _ in range(2)]
    pieces += [_piece(fresh) for _ in range(fresh.randint(2, 4))]
    return list(dict.fromkeys(pieces))


def _piece(numbers: random.Random) -> Piece:
    return Piece(numbers.getrandbits(48), numbers.randint(_SMALLEST, _LARGEST))
