"""The ranks of a job as processes of their own, joined by gloo: a test speaks with them, and kills them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.forked import ForkedProgram
from tests.support.ports import free_ports

ROOT = Path(__file__).parents[2]


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What a launcher sets for one rank of one host."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
    }


@contextmanager
def launched(
    module: str, *arguments: object, world_size: int = 1, settings: Sequence[Mapping[str, str]] = ()
) -> Iterator[list[ForkedProgram]]:
    """`python -m module arguments…` once for each rank, in rank order; who still runs at the end is killed. `settings`:
    variables of each rank's own."""
    port = free_ports()
    ranks = [
        ForkedProgram(
            module,
            [str(argument) for argument in arguments],
            environment={
                **os.environ,
                **rank_environment(rank, world_size, port),
                **(settings[rank] if settings else {}),
            },
            folder=ROOT,
        )
        for rank in range(world_size)
    ]
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()


def read_until(process: ForkedProgram, word: str) -> list[str]:
    """The lines that it says, up to the one that begins with this word."""
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line.strip())
        if line.startswith(word):
            return lines
    raise AssertionError(f"the rank ended before it said {word!r}: {lines}")
