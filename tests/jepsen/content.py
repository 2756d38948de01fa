"""What a shard consists of. Its own chunks begin with a line that says who saved them: run, launch, attempt, step and
rank. So whoever reads a checkpoint knows without any list what its bytes must be, and whose shards it is made of.

Beside its own chunks a shard has one that is the same at every step, and one from a pool that all runs share: saves of
many jobs deduplicate onto them, while retention takes the last reference away.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

RANKS = 2
_POOL = 8
_OWN = 2
_SMALLEST, _LARGEST = 1_000, 20_000


class MixedError(Exception):
    """Shards of several launches in one checkpoint."""


class WrongError(Exception):
    """Bytes that are not those that the job saved."""


@dataclass(frozen=True)
class Saved:
    """One rank's save of one step."""

    run: str
    launch: str
    attempt: int
    step: int
    rank: int

    def chunks(self) -> list[bytes]:
        frozen = _chunk({"run": self.run, "rank": self.rank})
        pool = _chunk({"pool": random.Random(f"{self.run} {self.step} {self.rank}").randrange(_POOL)})
        return [frozen, pool, *(_chunk({**asdict(self), "chunk": number}) for number in range(_OWN))]


def _chunk(says: Mapping[str, object]) -> bytes:
    line = json.dumps(says, sort_keys=True)
    numbers = random.Random(line)
    return line.encode() + b"\n" + numbers.randbytes(numbers.randint(_SMALLEST, _LARGEST))


def said_by(chunks: Sequence[bytes]) -> Saved | None:
    """Whose shard this is, by its last chunk; None if that does not say it."""
    try:
        says = json.loads(chunks[-1].split(b"\n", 1)[0])
        return Saved(**{name: says[name] for name in Saved.__dataclass_fields__})
    except (IndexError, ValueError, KeyError, TypeError):
        return None


def check_content(run: str, attempt: int, step: int, shards: Mapping[int, Sequence[bytes]]) -> str:
    """The launch whose shards these are, of all ranks. Raises MixedError and WrongError."""
    told = {rank: said_by(chunks) for rank, chunks in shards.items()}
    launches = sorted({saved.launch for saved in told.values() if saved is not None})
    if len(launches) > 1:
        whose = ", ".join(f"rank {rank} of launch {saved.launch}" for rank, saved in told.items() if saved is not None)
        raise MixedError(f"{run} step {step} of attempt {attempt} has {whose}")
    if sorted(shards) != list(range(RANKS)):
        raise WrongError(f"{run} step {step} of attempt {attempt} has the ranks {sorted(shards)}")
    for rank, chunks in shards.items():
        saved = told[rank]
        if saved is None:
            raise WrongError(f"rank {rank} of {run} step {step} holds what no job saved")
        wanted = Saved(run, saved.launch, attempt, step, rank)
        if saved != wanted or list(chunks) != wanted.chunks():
            raise WrongError(f"rank {rank} of {run} step {step} of attempt {attempt} holds the bytes of {saved}")
    return launches[0]
