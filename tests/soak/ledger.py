"""What the processes of a soak write down, one line each: a line is in the file before the process can be killed behind
it, and half a line at the end of a file is what a kill left.

    shard    the content of one rank's shard, before it can be sealed
    handed   the agent of the node has taken one rank's shard
    over     a save that was not committed while its job lived
    count    something that was done, for the table
    fault    something that must not happen: the soak has failed
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.soak.content import Piece

COMMITTED = "checkpoints committed"
BY_AGENT = "shards sealed by the agent"


class Save(NamedTuple):
    """An attempt saves each step once."""

    run: str
    attempt: int
    step: int


class Ledger:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = (folder / f"ledger-{os.getpid()}-{threading.get_ident()}.jsonl").open("ab", buffering=0)
        self._lock = threading.Lock()

    def shard(self, save: Save, rank: int, pieces: list[Piece]) -> None:
        self.write(kind="shard", save=save, rank=rank, pieces=[[p.seed, p.size] for p in pieces])

    def handed(self, save: Save, rank: int, agent: int) -> None:
        """`agent`: its process."""
        self.write(kind="handed", save=save, rank=rank, agent=agent)

    def over(self, save: Save) -> None:
        self.write(kind="over", save=save)

    def count(self, what: str, times: int = 1) -> None:
        self.write(kind="count", what=what, times=times)

    def fault(self, what: str) -> None:
        self.write(kind="fault", what=what)

    def write(self, **line: Any) -> None:
        with self._lock:
            self._file.write(json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        self._file.close()

    # Reading what all have written.

    def content_of(self, save: Save) -> dict[int, list[list[Piece]]]:
        """By rank, everything that it recorded for this save."""
        found: dict[int, list[list[Piece]]] = {}
        for line in self.lines("shard"):
            if Save(*line["save"]) == save:
                found.setdefault(line["rank"], []).append([Piece(*each) for each in line["pieces"]])
        return found

    def last_handed(self, run: str, agent: int, ranks: int) -> Save | None:
        """The newest save of the run that all of its ranks have handed over, if this agent has it, and the job did not
        live to see that it is not committed."""
        taken: dict[Save, set[int]] = {}
        for line in self.lines("handed"):
            if line["save"][0] == run and line["agent"] == agent:
                taken.setdefault(Save(*line["save"]), set()).add(line["rank"])
        over = {Save(*line["save"]) for line in self.lines("over")}
        return max((save for save, by in taken.items() if len(by) == ranks and save not in over), default=None)

    def counts(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for line in self.lines("count"):
            counts[line["what"]] += line["times"]
        return counts

    def faults(self) -> list[str]:
        return [line["what"] for line in self.lines("fault")]

    def lines(self, kind: str) -> Iterator[dict[str, Any]]:
        for path in sorted(self._folder.glob("ledger-*.jsonl")):
            for text in path.read_bytes().splitlines(keepends=True):
                if text.endswith(b"\n"):
                    line = json.loads(text)
                    if line["kind"] == kind:
                        yield line
